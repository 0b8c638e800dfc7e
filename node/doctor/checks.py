"""What the doctor looks at besides the kernel, with the checks that the node itself makes.

Each returns findings and raises nothing that a person can act on: one thing that is wrong must not
hide the next.
"""

import asyncio
import contextlib
import platform
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.request import getproxies

from node.app import OPEN_FILES_PER_RANK, OWN_OPEN_FILES, WRITTEN
from node.config import RULINGS_FILE, NodeSettings, is_loopback
from node.disk.history import History, KeptRulings
from node.doctor.network import ABOUT_ADDRESSES, Finding, Network, address_finding, wrong
from node.kept import RUN_FILE, kept_run
from node.link.calls import run_in_force
from node.machine.addresses import has_ipv6, interface_addresses, own_addresses, sources_to
from node.machine.hardware import Hardware, congestion_control, likely_devices, look_around
from node.machine.notices import NoAnswerError, cloud_here, service_of
from node.machine.placement import num_ranks_of
from node.outer_state import require_shared_memory
from protocol.errors import AtollError, SystemRefusedError
from protocol.files.durable import FolderLock, require_ours
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.service.limits import require_open_files
from protocol.terminal import console
from protocol.terminal.console import printable
from protocol.terminal.node_words import NARROW, NARROW_STEP, is_present, ways_of
from protocol.terminal.query import StatusLink
from protocol.trust.credentials import LINK_FILE, Credentials
from protocol.trust.handshake import proxy_in_words
from protocol.trust.identity import Identity
from protocol.trust.pki import Role
from protocol.trust.proxy import Proxy
from protocol.v1.status_pb2 import NodeStatus

PROGRAMS = ("atoll", "torch", "hivemind", "grpcio")

HELPERS = ("atoll", "numba", "hivemind", "grpcio")

MOST_SKEW_SECONDS = 30.0
"""Logs of two machines can be laid side by side up to about this."""

ROUTER_SECONDS = 8.0
"""libp2p looks for a router for five, and asks it."""


def is_helpers(folder: Path) -> bool:
    """Whether the folder is of a helper, as far as can be read."""
    try:
        return Credentials.load(folder).principal.role is Role.HELPER
    except AtollError:
        return False


def version_findings(programs: Sequence[str] = PROGRAMS) -> list[Finding]:
    """Which software this is, told without loading it."""
    found, missing = [f"Python {platform.python_version()}"], []
    for program in programs:
        try:
            found.append(f"{program} {metadata.version(program)}")
        except metadata.PackageNotFoundError:
            missing.append(program)
    findings = [Finding(about="versions", verdict="fine", what=", ".join(found))]
    if missing:
        error = SystemRefusedError(
            f"{', '.join(missing)} not installed for {platform.python_implementation()} here",
            next_step="pip install 'atoll[node]'"
            if "torch" in programs
            else "pip install 'atoll[helper]' && pip install --no-deps hivemind",
        )
        findings.append(wrong("versions", error))
    return findings


def device_findings(
    settings: NodeSettings, look: Callable[[str], Hardware] = look_around
) -> list[Finding]:
    """What there is to train with, and whether it is what was chosen."""
    try:
        hardware = look(settings.device)
        devices = likely_devices(settings.device, num_ranks_of(settings), hardware)
    except AtollError as error:
        return [wrong("devices", error)]
    memory = f"{console.bytes_in_words(hardware.memory_bytes)} of memory free"
    if devices is None:
        what = f"GPUs that only torch can tell of, {memory}; 'atoll node start' will say"
        return [Finding(about="devices", verdict="note", what=what)]
    names = [
        f"{gpu.name} ({console.bytes_in_words(gpu.free_bytes)} free)" for gpu in hardware.gpus or ()
    ]
    what = f"{len(devices)} × {devices[0]}" if len(set(devices)) == 1 else ", ".join(devices)
    return [Finding(about="devices", verdict="fine", what="; ".join([what, *names, memory]))]


def open_files_findings(num_ranks: int) -> list[Finding]:
    """Whether a node may open as many files as it needs."""
    try:
        allowed = require_open_files(OWN_OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks, of="a node")
    except AtollError as error:
        return [wrong("open files", error)]
    return [Finding(about="open files", verdict="fine", what=f"{allowed} are allowed")]


def disk_findings(
    folder: Path,
    settings: NodeSettings,
    num_ranks: int = 1,
    *,
    ask: Callable[[Path], Coroutine[Any, Any, RunSpec]] = run_in_force,
) -> list[Finding]:
    """Whether what the node keeps of its run fits on its disk, and how fast it is written.

    A node that has joined and never started has no run file yet: its coordinator is asked.
    """
    pace = (
        f"written at {console.bytes_in_words(settings.disk_budget.bytes_per_second)}/s on average"
    )
    try:
        require_ours(folder, WRITTEN)
        if (folder / RUN_FILE).is_file():
            spec = kept_run(folder)
            rules = KeptRulings(spec, path=folder / RULINGS_FILE).in_force
        elif (folder / LINK_FILE).is_file():
            try:
                spec = rules = asyncio.run(ask(folder))
            except AtollError as error:
                return [_need_not_known(folder, f"is not known: {error.what}")]
        else:
            return [_need_not_known(folder, "shows once this node has joined one")]
        from node.records import BESIDE_BYTES, Records

        records = Records.of(
            folder, settings, spec, rules=rules, history=History(None), num_ranks=num_ranks
        )
        records.require_room()
        require_shared_memory(layout_of(spec))
    except AtollError as error:
        return [wrong("disk", error)]
    kinds = ", ".join(
        f"{console.bytes_in_words(need.num_bytes)} for {need.what}" for need in records.needs
    )
    held = console.bytes_in_words(sum(need.held_bytes for need in records.needs))
    beside = console.bytes_in_words(BESIDE_BYTES)
    what = f"at most {kinds}; {held} of it is there, {pace}; in time {beside} more for commits and logs"
    return [Finding(about="disk", verdict="fine", what=what)]


def _need_not_known(folder: Path, why: str) -> Finding:
    free = console.bytes_in_words(shutil.disk_usage(folder if folder.is_dir() else ".").free)
    return Finding(about="disk", verdict="note", what=f"{free} free; what a run needs {why}")


def coordinator_findings(
    folder: Path, wall_clock: Callable[[], float] = time.time, *, network: Network | None = None
) -> list[Finding]:
    """Whether the coordinator answers, how far its clock is from ours, and who reaches whom."""
    if not (folder / LINK_FILE).is_file():
        what = f"no swarm joined in {folder}, so none was asked"
        return [Finding(about="coordinator", verdict="note", what=what)]
    try:
        with StatusLink(folder) as link:
            link.status()  # the connection is made, which takes several round trips
            asked_at = wall_clock()
            status = link.status()
            answered_at = wall_clock()
        credentials = Credentials.load(folder)
    except AtollError as error:
        return [wrong("coordinator", error)]
    round_trip = f"{1e3 * (answered_at - asked_at):.0f} ms"
    node_id = credentials.principal.node_id or ""
    if network is not None:
        network.ways = _ways_of(status.nodes, node_id)
    what = f"{credentials.endpoint} answers within {round_trip}"
    if status.run.relay:
        what += f", {printable(status.run.relay, most=200)}"
    return [
        Finding(about="coordinator", verdict="fine", what=what),
        *skew_findings(status.unix_seconds, (asked_at + answered_at) / 2),
        *reach_findings(status.nodes, node_id),
    ]


def _ways_of(nodes: Sequence[NodeStatus], node_id: str) -> list[tuple[str, str]]:
    """How a running node reaches the others, by name."""
    own = next((node for node in nodes if node.node_id == node_id), None)
    return [] if own is None else ways_of(own, nodes)


def _proxy_of(folder: Path) -> Proxy | None:
    try:
        return Credentials.load(folder).proxy
    except AtollError:
        return None


def proxy_findings(folder: Path) -> list[Finding]:
    """Whether this network lets connections out by an HTTP proxy, and whether it is used."""
    proxy = _proxy_of(folder)
    named = getproxies().get("https", "")
    if proxy is not None:
        what = (
            f"the coordinator, and members that cannot be dialled, are reached through {proxy.endpoint}; "
            "most proxies lead to port 443 alone, so these have to serve there"
        )
        return [Finding(about="proxy", verdict="note", what=what)]
    if not named:
        return []
    return [
        Finding(
            about="proxy",
            verdict="note",
            what=f"https_proxy names {proxy_in_words(named)}, and nothing here goes through it",
            next_step="where nothing else gets out of this network, write into link.toml, before its first "
            f'[table]: proxy = "http://{proxy_in_words(named)}"',
        )
    ]


def reach_findings(nodes: Sequence[NodeStatus], node_id: str) -> list[Finding]:
    """Whether the other members reach this one and it them, as the running nodes tell the coordinator."""
    own = next((node for node in nodes if node.node_id == node_id), None)
    if own is None or not is_present(own):
        return []  # it does not run, so nobody has tried
    ways = ways_of(own, nodes)
    if narrow := [name for name, way in ways if NARROW in way]:
        what = f"{NARROW} to {', '.join(narrow[:8])}: larger ones get lost on the way"
        return [Finding(about="reach", verdict="advice", what=what, next_step=NARROW_STEP)]
    cut = [name for name, way in ways if way not in ("direct", "punched", "by proxy")]
    if not cut:
        what = f"all {len(ways)} other members" if ways else "nobody else is here"
        return [Finding(about="reach", verdict="fine", what=what)]
    what = f"no connection with {', '.join(cut[:8])}" + (" and others" if cut[8:] else "")
    if own.has_symmetric_router:
        what += "; this machine's router is symmetric, so few others can punch a hole to it"
    if all(way != "not reached" for _, way in ways):
        between = sorted({way for _, way in ways if way.startswith("through ")})
        return [Finding(about="reach", verdict="note", what=f"{what}, but {', '.join(between)}")]
    return [
        Finding(
            about="reach",
            verdict="advice",
            what=f"{what}, and there is no helper that reduces for you",
            next_step="open this node's port (--port, --announce), or ask the run owner for a helper: "
            "'atoll invite create --role helper'",
        )
    ]


def skew_findings(theirs: float, ours: float) -> list[Finding]:
    """What two clocks, looked at in the same moment, say of each other."""
    if not theirs:
        return []  # an older coordinator does not tell
    ahead = ours - theirs
    if abs(ahead) <= MOST_SKEW_SECONDS:
        return [Finding(about="clock", verdict="fine", what="as the coordinator's")]
    return [
        Finding(
            about="clock",
            verdict="advice",
            what=f"this machine's clock is {console.seconds_in_words(abs(ahead))} "
            f"{'ahead of' if ahead > 0 else 'behind'} the coordinator's: their logs do not fit "
            "together; nothing else depends on it",
            next_step="set it: 'sudo timedatectl set-ntp true'",
        )
    ]


def notices_findings(settings: NodeSettings) -> list[Finding]:
    """Whether the cloud that may take this machine away can be asked; nothing where there is none."""
    cloud = cloud_here(settings.cloud)
    if cloud is None:
        return []
    try:
        notice = service_of(cloud).notice()
    except NoAnswerError as error:
        return [
            Finding(
                about="notices",
                verdict="advice",
                what=f"the metadata service of {cloud} does not answer ({error}): the node cannot leave "
                "with its work when its machine is taken away",
                next_step="in a container allow the service one more hop; else set cloud in node.toml",
            )
        ]
    what = f"{notice.what} in {notice.seconds_left:.0f} s" if notice else "this machine stays"
    return [Finding(about="notices", verdict="fine", what=f"{cloud} answers: {what}")]


def port_findings(folder: Path, settings: NodeSettings) -> list[Finding]:
    """Whether the port that peers connect to is free."""
    if (running := FolderLock.holder_of(folder)) is not None:
        what = f"the node runs (process {running}) and has its port"
        return [Finding(about="port", verdict="note", what=what)]
    host, ports = _coordinator_place(folder)
    try:
        settings.require_port(host, ports)
    except SystemRefusedError as refused:
        return [wrong("port", refused)]
    where = " and ".join(settings.listen_addresses(host, has_ipv6=has_ipv6()))
    what = (
        f"TCP port {settings.port} of {where} is free"
        if settings.port
        else f"a free one of {where} at each start; behind a router, set one and forward it"
    )
    return [Finding(about="port", verdict="fine", what=what)]


def address_findings(folder: Path, settings: NodeSettings) -> list[Finding]:
    """Which addresses peers are told; nothing of a swarm on this machine alone."""
    host, _ = _coordinator_place(folder)
    if is_loopback(host) and not settings.interface:
        return []
    is_chosen = bool(settings.listen or settings.announce)
    if settings.interface and is_chosen:
        try:
            settings.require_interface()
        except AtollError as error:
            return [wrong(ABOUT_ADDRESSES, error)]
    finding = address_finding(
        interface_addresses(),
        route=sources_to(host) if host else (),
        interface=settings.interface,
        is_chosen=is_chosen,
    )
    return [finding]


def _coordinator_place(folder: Path) -> tuple[str, tuple[int, ...]]:
    try:
        credentials = Credentials.load(folder)
    except AtollError:
        return "", ()
    return credentials.host, credentials.ports


def libp2p_findings(
    folder: Path, settings: NodeSettings, *, network: Network | None = None
) -> list[Finding]:
    """Whether the libp2p daemon starts, and a router forwards its port. Loading hivemind takes seconds."""
    from node.exchange.transport.p2pd import P2pd
    from node.machine.addresses import forwarded_among

    host, _ = _coordinator_place(folder)  # none: it is not known yet from where peers come
    # IPv6 of one's own helps those who have it, and many a router closes it.
    of_ipv4 = [own for own in own_addresses() if ":" not in own]
    is_behind = bool(of_ipv4) and not any(ip_address(own).is_global for own in of_ipv4)
    asks_router = host != "" and settings.asks_router(host) and is_behind

    async def nobody(
        _peer: str, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.close()

    async def start_and_stop() -> tuple[str, tuple[str, ...]]:
        daemon = await P2pd.start(
            Identity.generate(),
            listen_multiaddrs=(f"/ip4/{'0.0.0.0' if asks_router else '127.0.0.1'}/tcp/0",),
            on_streams={"atoll/doctor": nobody},
            asks_router=asks_router,
        )
        before, own = await daemon.multiaddrs(), own_addresses()
        forwarded: tuple[str, ...] = ()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUTER_SECONDS if asks_router else 0):
                while not forwarded:
                    await asyncio.sleep(0.2)
                    found = await daemon.multiaddrs()
                    forwarded = forwarded_among(found, before=before, own=own)
        await daemon.stop()
        return daemon.tcp_pacing.why_not, forwarded

    try:
        why_not, forwarded = asyncio.run(start_and_stop())
    except AtollError as error:
        return [wrong("libp2p", error)]
    if network is not None:
        network.why_no_holes = why_not or _why_no_holes(settings, host)
        network.forwarded = forwarded[0].split("/")[2] if forwarded else ""
        network.is_forwarded_wide = bool(forwarded) and ip_address(network.forwarded).is_global
    starts = Finding(about="libp2p", verdict="fine", what="its daemon starts")
    pacing = pacing_finding(why_not, congestion_control())
    return [starts, pacing, *([router_finding(forwarded)] if asks_router else [])]


def _why_no_holes(settings: NodeSettings, coordinator_host: str) -> str:
    return "" if settings.punches(coordinator_host) else "node.toml names one address in listen"


def network_here(folder: Path, settings: NodeSettings) -> Network:
    """What is known of this machine's network before anything is asked."""
    host, _ = _coordinator_place(folder)
    is_wide = not host or settings.punches(host)
    own = own_addresses()
    public = sorted((one for one in own if ip_address(one).is_global), key=lambda one: ":" in one)
    is_ipv6 = bool(public) and ":" in public[0]
    proxy = _proxy_of(folder)
    return Network(
        proxy="" if proxy is None else proxy.endpoint,
        has_joined=(folder / LINK_FILE).is_file(),
        is_local=is_loopback(host),
        own_address=public[0] if public and is_wide else "",
        has_ipv6_only=is_ipv6 and any(":" not in one for one in own),
        announce=settings.announce,
        port=settings.port,
    )


def router_finding(forwarded: Sequence[str]) -> Finding:
    """Whether peers reach this machine, which has no address of its own, through its router."""
    if forwarded:
        host = forwarded[0].split("/")[2]
        if not ip_address(host).is_global:
            return Finding(
                about="router",
                verdict="note",
                what=f"it forwards a node's port when it is asked, but of {host}: it is itself behind "
                "another router, so peers beyond that one do not dial this machine",
                next_step="ask the provider for a public IPv4 address, or forward the port in the other "
                "router too; or have a helper",
            )
        what = f"it forwards a node's port when it is asked: peers dial this machine at {host}"
        return Finding(about="router", verdict="fine", what=what)
    return Finding(
        about="router",
        verdict="note",
        what="it forwards no port by UPnP or NAT-PMP, and this machine has no IPv4 address of its own: "
        "it dials others, and a peer that cannot be dialled either needs a helper",
        next_step="forward a TCP port there, and set port and announce in node.toml; or have a helper",
    )


def pacing_finding(why_not: str, used: str | None) -> Finding:
    """Whether the kernel paces the daemon's connections, and what to do where it does not.

    `used` is TCP's congestion control: bbr always paces.
    """
    if not why_not or used == "bbr":
        return Finding(
            about="pacing", verdict="fine", what="the kernel paces TCP connections to peers"
        )
    return Finding(
        about="pacing",
        verdict="advice",
        what=f"TCP connections to peers are not paced ({why_not}): over cubic exchanges take longer",
        next_step="use Linux 5.6 or later, in a container with the capability SYS_PTRACE; or use bbr",
    )
