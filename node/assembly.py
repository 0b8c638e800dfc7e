"""Puts a node or a helper together from its folder: island, transport, outer state, daemon.

Importing it takes a second: the codecs' compiler comes with it, torch does not. node.app is what comes
before.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from node.config import HISTORY_FILE, RULINGS_FILE, NodeSettings
from node.daemon import Counterparts, Daemon, Holdings, NodeFacts, Tokens
from node.disk.history import History, KeptRulings
from node.exchange.codecs.codec import Tiles, remove_unused_kernels, threads_beside
from node.exchange.codecs.registry import measured_speed
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import outer_rules_of
from node.exchange.preparing import prepare_kernels
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.whereabouts import told_by
from node.heavy import ExchangeTime, Meters, cancelled, in_thread
from node.hosts.leading import HostDesk, HostsIsland
from node.hosts.wire import LeaderKey, interface_of
from node.installed import software_of
from node.island.checkpoints.folder import CheckpointFolder
from node.island.data.fetching import is_url
from node.island.data.held import TokensHere
from node.island.data.island import SuppliedIsland
from node.island.data.places import DataPlaces
from node.island.data.supply import TokenSupply
from node.island.island import Island, RanklessIsland
from node.island.loops.island import LoopIsland
from node.island.models.first_weights import initial_parameters
from node.island.parallel.auto_mesh import DeviceKind
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks.devices import UsableDevices, kind_of, usable_devices
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.kept import keep_corpus, keep_places, keep_run, kept_corpus
from node.link.calls import CoordinatorLink
from node.machine.addresses import ROUTER_LOOKS, Reachability, address_changes, has_ipv6
from node.machine.hardware import Hardware, congestion_control, has_compilers, likely_devices
from node.machine.limits import Usage
from node.machine.placement import local_training_of, mesh_for, num_ranks_of, parted_batch
from node.models.reading import read_first
from node.models.writing import TextWriter
from node.outer_state import SharedVectors, Vector
from node.own_metrics import own_metrics
from node.records import Records
from node.stopping import StopSignals, why_paused
from protocol.files.durable import expanded
from protocol.run.amendments import changes_codecs
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.service.limits import usable_cores
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.trust.pki import Role
from protocol.trust.rulings import Ruling, RulingVerifier
from protocol.wire.payload import WireCounts
from protocol.wire.rounds import OWN_LOOP
from protocol.wire.versions import release
from protocol.wire.vitals import ExchangeSpeed

log = structlog.get_logger()

NO_DEVICE = "helper"
"""The device of a helper, which has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """What a node is put together from."""

    folder: Path
    settings: NodeSettings
    credentials: Credentials
    identity: Identity
    spec: RunSpec
    rules: RunSpec  # the run's as amended when it was got, for estimates
    link: CoordinatorLink
    counts: WireCounts
    current_credentials: Callable[[], Credentials]
    """With where the coordinator is by now."""

    @property
    def is_helper(self) -> bool:
        """Whether it has no ranks: it reduces for others."""
        return self.credentials.principal.role is Role.HELPER

    @property
    def data(self) -> DataPlaces:
        """Where the run's data are on this machine."""
        return self.settings.data_places(home=self.folder, folder=Path.cwd())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """Where the ranks run."""

    devices: tuple[str, ...]  # on this machine; none of a helper
    shape: MeshShape
    local: LocalTraining = PLAIN
    desk: HostDesk | None = None  # for the hosts that follow


async def run_daemon(start: NodeStart, hardware: Hardware, signals: StopSignals) -> str:
    """Runs the node until the run is finished or its owner stops it; returns why."""
    folder, settings, spec = start.folder, start.settings, start.spec
    ranks = await _ranks_of(start, hardware)
    layout = layout_of(spec)
    history = await in_thread(lambda: History(folder / HISTORY_FILE))
    ours = start.credentials
    verifier = RulingVerifier.of_authority(ours.authority_pem, ours.certificate_pem)
    rulings = KeptRulings(spec, path=folder / RULINGS_FILE, verifier=verifier)
    records = Records.of(
        folder,
        settings,
        spec,
        rules=start.rules,
        history=history,
        num_ranks=len(ranks.devices),
    )
    records.require_room()
    await prepare_kernels(rulings.in_force)
    shared = SharedVectors.create(layout.num_elements, layout.largest_fragment)
    try:
        # What has views of the shared memory begins and ends in there.
        return await _run_in(shared, start, ranks, records, history, rulings, signals)
    finally:
        if ranks.desk is not None:
            await ranks.desk.close()
        shared.close()


def _transport_of(start: NodeStart, meters: Meters) -> Libp2pTransport:
    """What carries bodies between this node and its peers, by what its owner and its network let it."""
    settings, proxy = start.settings, start.credentials.proxy
    if proxy is not None:
        log.info(
            "whom this network does not let us dial is dialled through its proxy",
            proxy=proxy.endpoint,
        )
    # A network that has a proxy lets no datagrams out.
    punches = proxy is None and settings.punches(start.credentials.host)
    return Libp2pTransport(
        identity=start.identity,
        counts=start.counts,
        reachability=Reachability(
            listen_multiaddrs=_listen_multiaddrs(settings, start.credentials.host),
            announce_host=settings.announce or None,
            interface=settings.interface,
            coordinator_host=lambda: start.current_credentials().host,
            asks_router=settings.asks_router(start.credentials.host),
            punching_token=secrets.token_bytes(16) if punches else b"",
            proxy=proxy,
        ),
        carry_share=settings.carry,
        whereabouts=told_by(start.current_credentials),
        max_upload_bytes_per_second=settings.max_upload_bytes_per_second,
        while_moving=meters.exchange_time.exchanging,
    )


async def _run_in(
    shared: SharedVectors,
    start: NodeStart,
    ranks: _Ranks,
    records: Records,
    history: History,
    rulings: KeptRulings,
    signals: StopSignals,
) -> str:
    """Builds the daemon around the shared memory and runs it."""
    settings, spec = start.settings, start.spec
    keep_places(start.folder, start.data)
    outer = await in_thread(lambda: _outer_at_start(start, shared, records.state, ranks, rulings))
    meters = Meters(counts=start.counts, exchange_time=ExchangeTime())
    island, tokens = _island_and_tokens(start, shared, ranks, records)
    speed = await in_thread(partial(measured_speed, rulings.in_force, outer.uplink.tiles))
    facts = _facts_of(start, ranks, exchange_speed=speed)
    usage = Usage(settings.limits)
    has_ranks = not start.is_helper and not settings.loop
    draws_first_state = spec.first_digest is None and not settings.weights
    daemon = Daemon(
        facts=facts,
        spec=spec,
        holdings=Holdings(
            outer=outer,
            disk=records.state,
            history=history,
            tokens=tokens,
            rulings=rulings,
            corpus=kept_corpus(start.folder, spec.digest()) if has_ranks else None,
            keep_corpus=partial(keep_corpus, start.folder, spec.digest()),
            first_state=partial(initial_parameters, spec, num_threads=_threads_beside(ranks))
            if draws_first_state
            else None,
        ),
        counterparts=Counterparts(
            address_changes=partial(
                address_changes,
                ROUTER_LOOKS if settings.asks_router(start.credentials.host) else (),
            ),
            coordinator=start.link,
            transport=_transport_of(start, meters),
            island=island,
            why_paused=lambda: why_paused(start.folder) or usage.why_not,
            manager=signals.manager,
            writer=TextWriter(spec, shared.names, start.data, num_threads=_threads_beside(ranks)),
        ),
        heavy=in_thread,
        meters=meters,
        rng=random.Random(),
    )
    with signals.draining(daemon.drain, seconds=settings.drain_within):
        async with (
            usage.watched(),
            _kernels_follow(rulings),
            own_metrics(settings.metrics, facts, daemon.vitals, lambda: daemon.called),
        ):
            return await daemon.run()


def _facts_of(start: NodeStart, ranks: _Ranks, *, exchange_speed: ExchangeSpeed) -> NodeFacts:
    """What the coordinator is told of this node when it attaches."""
    has_own_ranks = ranks.devices not in ((), (OWN_LOOP,))
    return NodeFacts(
        node_id=start.identity.node_id,
        node_name=start.settings.name,
        public_key=start.identity.public_key,
        device=ranks.devices[0] if ranks.devices else NO_DEVICE,
        num_ranks=ranks.shape.num_ranks if ranks.devices else 0,
        version=release(),
        mesh=_mesh_in_words(ranks),
        congestion_control=congestion_control() or "",
        software=software_of(start.spec) if has_own_ranks else "",
        exchange_speed=exchange_speed,
    )


@asynccontextmanager
async def _kernels_follow(rulings: KeptRulings) -> AsyncIterator[None]:
    """Gets codecs ready when an amendment names them: their round comes after the one in flight."""
    preparing: set[asyncio.Task[None]] = set()

    def prepare(news: Sequence[Ruling]) -> None:
        if any(map(changes_codecs, news)):
            task = asyncio.create_task(prepare_kernels(rulings.in_force))
            preparing.add(task)
            task.add_done_callback(preparing.discard)

    rulings.on_taken = prepare
    try:
        yield
    finally:
        await cancelled(preparing)


def _outer_at_start(
    start: NodeStart,
    shared: SharedVectors,
    disk: StateOnDisk,
    ranks: _Ranks,
    rulings: KeptRulings,
) -> Outer:
    """The outer state that a node begins with: what its disk holds, or the run's initial one. Heavy.

    What was read from the disk is as large as the state, and gone when this returns. The initial
    weights are drawn only where nothing takes their place.
    """
    spec, settings = start.spec, start.settings
    layout = layout_of(spec)
    weights = expanded(settings.weights) if settings.weights else None
    tiles = Tiles(_threads_beside(ranks))
    if rounds := disk.snapshots.rounds():
        log.info("reading what this node has kept", round=rounds[0])
    kept = disk.snapshots.load_newest(spec.digest(), layout.summary().digest)
    keep_run(start.folder, spec)  # only now: what is there may be snapshots of another run
    momentum = None
    if kept is None:
        momentum = _fill_first_weights(spec, weights, shared.parameters, tiles.num_threads)
    outer = Outer.of_run(
        spec,
        layout=layout,
        parameters=shared.parameters,
        published=shared.published,
        tiles=tiles,
        node_id=start.identity.node_id,
        identity=start.identity,
        sent=disk.sent,
        momentum=momentum,
    )
    outer.go_by(rulings.made_in(partial(outer_rules_of, tiles=tiles)))
    outer.compile_kernels()
    log.info("codecs ready", uplink=outer.uplink.name, downlink=outer.downlink.name)
    remove_unused_kernels()
    if kept is None and weights is not None:
        log.info("writing the first weights into this node's folder", folder=str(disk.path))
        disk.save_whole(outer)  # the file may be gone when this node starts again
    if kept is not None:
        disk.resume(outer, kept)
        log.info(
            "resuming from disk",
            round=outer.round,
            digest=outer.digest.hex()[:12],
            snapshot=kept[0].round,
        )
    return outer


def _threads_beside(ranks: _Ranks) -> int:
    """How many threads the exchange's arithmetic may take."""
    return threads_beside(
        num_ranks=len(ranks.devices),
        num_cores=usable_cores(),
        ranks_compute_on_cores=ranks.devices == (OWN_LOOP,)
        or (ranks.devices != () and kind_of(ranks.devices) == "cpu"),
    )


def _mesh_in_words(ranks: _Ranks) -> str:
    if ranks.devices == (OWN_LOOP,):
        return OWN_LOOP
    return str(ranks.shape) if ranks.devices else ""


def _fill_first_weights(
    spec: RunSpec, weights: Path | None, parameters: Vector, num_threads: int
) -> Vector | None:
    """The weights of round 0: from the file, from the seed, or none yet, until a peer gives them.

    Returns the momentum that comes with them, in a fork that goes on with it.
    """
    if weights is not None:
        log.info("reading the first weights", file=str(weights))
        return read_first(weights, spec, parameters)
    if spec.first_digest is None:
        log.info("drawing the initial weights", elements=len(parameters))
        initial_parameters(spec, num_threads=num_threads, out=parameters)
    else:
        log.info(
            "the first weights come from a node that has them", digest=spec.first_digest.hex()[:12]
        )
    return None


async def _ranks_of(start: NodeStart, hardware: Hardware) -> _Ranks:
    """Where ranks run; listens for the hosts that are to follow. Raises AtollError."""
    settings, spec = start.settings, start.spec
    if start.is_helper:
        return _Ranks(devices=(), shape=MeshShape())
    if settings.loop:
        return _Ranks(devices=(OWN_LOOP,), shape=MeshShape())
    usable = await _devices_of(settings, hardware)
    shape, kind = _mesh_of(settings, start.rules, usable), kind_of(usable.names)

    def may_compile() -> bool:
        if found := has_compilers():
            log.info(
                "layers are compiled at the start; 'compile = false' in node.toml leaves it out"
            )
        else:
            log.warning(
                "layers are not compiled, which trains slower: install triton, gcc and python3-dev"
            )
        return found

    local = local_training_of(settings, spec, shape, kind=kind, has_compilers=may_compile)
    if why := parted_batch(spec, shape, local):
        log.warning(why)
    precision = usable.auto_precision if local.precision == "auto" else local.precision
    log.info("trains here", on=", ".join(usable.names), precision=precision)
    return _Ranks(
        devices=usable.names,
        shape=shape,
        local=local,
        desk=await _desk_of(start.folder, settings, kind),
    )


async def _devices_of(settings: NodeSettings, hardware: Hardware) -> UsableDevices:
    """The devices of the ranks; torch is asked only where there may be a GPU."""
    num_ranks = num_ranks_of(settings)
    likely = likely_devices(settings.device, num_ranks, hardware)
    is_on_cpu = likely is not None and kind_of(likely) == "cpu"
    return await usable_devices("cpu" if is_on_cpu else settings.device, num_ranks)


def _mesh_of(settings: NodeSettings, spec: RunSpec, usable: UsableDevices) -> MeshShape:
    """The mesh of the ranks; raises ConfigError when it does not fit their devices."""
    choice = mesh_for(settings, spec, devices=usable.names, bytes_per_rank=usable.bytes_per_rank)
    if settings.mesh == "auto":
        log.info("mesh chosen", mesh=str(choice.shape), reason=choice.reason)
    return choice.shape


def _tokens_of(spec: RunSpec, data: DataPlaces) -> TokensHere | None:
    """What this node has of tokens that go from node to node; None of private data, and of text.

    Raises NoInputError where the owner names a folder that is not there.
    """
    if spec.data.source != "tokens" or spec.data.private:
        return None
    return TokensHere(spec, data)


def _takes_tokens_of_peers(settings: NodeSettings, spec: RunSpec) -> bool:
    """Whether what is not here comes from peers: to the ranks of one machine, where no URL is named."""
    is_alone = settings.hosts == 1 and not settings.loop
    return is_alone and not any(is_url(path) for path in (settings.data, *spec.data.paths))


def _island_and_tokens(
    start: NodeStart, shared: SharedVectors, ranks: _Ranks, records: Records
) -> tuple[Island, Tokens | None]:
    """The island, and what this node has of tokens that go from node to node.

    Where those come from peers, the island waits for what is not here.
    """
    settings, spec = start.settings, start.spec
    if start.is_helper:
        return RanklessIsland(), None
    data = replace(start.data, leave_bytes=records.missing_bytes)
    held = _tokens_of(spec, data)
    is_supplied = held is not None and _takes_tokens_of_peers(settings, spec)
    data = replace(data, has_supply=is_supplied)
    island = _island_of(start, shared, ranks, records.checkpoints, data)
    if held is None:
        return island, None
    supplied: SuppliedIsland | None = None
    if is_supplied:
        supply = TokenSupply(spec=spec, places=data, held=held, heavy=in_thread)
        supplied = SuppliedIsland(
            island=island, supply=supply, spec=spec, compiles=ranks.local.compile
        )
    tokens = Tokens(held=held, is_given=settings.serve_data, supplied=supplied)
    return supplied or island, tokens


def _island_of(
    start: NodeStart,
    shared: SharedVectors,
    ranks: _Ranks,
    checkpoints: CheckpointFolder | None,
    data: DataPlaces,
) -> Island:
    """The contributor's own loop, or the ranks of this machine, and with a desk those that follow."""
    settings, spec = start.settings, start.spec
    if settings.loop:
        return LoopIsland(
            spec=spec,
            layout=layout_of(spec),
            names=shared.names,
            home=start.folder,
            data=data,
            hang_seconds=settings.hang_seconds,
        )
    here = range(len(ranks.devices))
    own = ProcessIsland(
        spec=spec,
        names=shared.names,
        ranks=RanksHere(devices=ranks.devices, shape=ranks.shape, ranks=here),
        data=data,
        local=ranks.local,
        checkpoints=checkpoints,
        hang_seconds=settings.hang_seconds,
    )
    if ranks.desk is None:
        return own
    return HostsIsland(
        own=own,
        desk=ranks.desk,
        num_hosts=settings.hosts,
        listen_host=settings.island_address[0],
        shared=shared,
    )


async def _desk_of(
    folder: Path, settings: NodeSettings, device_kind: DeviceKind
) -> HostDesk | None:
    """Listens for the hosts that are to follow, and writes what they need for it."""
    if settings.hosts == 1:
        return None
    key = LeaderKey.of_folder(folder)
    desk = HostDesk(key=key, version=release(), device_kind=device_kind)
    host, port = settings.island_address
    interface_of(host)
    port = await desk.open(host, port)
    token = key.write_token(folder, host, port)
    log.info(
        "hosts may follow: atoll node follow island.token",
        token=str(token),
        listening=f"{host}:{port}",
        hosts=settings.hosts,
    )
    return desk


def _listen_multiaddrs(settings: NodeSettings, coordinator_host: str) -> tuple[str, ...]:
    """Where to listen, for libp2p."""
    return tuple(
        f"/{'ip6' if ':' in address else 'ip4'}/{address}/tcp/{settings.port}"
        for address in settings.listen_addresses(coordinator_host, has_ipv6=has_ipv6())
    )
