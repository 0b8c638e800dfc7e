"""Puts a node together from its folder: island, transport, outer state, daemon.

Importing it takes a second: the codecs' compiler comes with it, torch does not. node.app is what comes
before.
"""

import os
import random
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import structlog

from node.config import HISTORY_FILE, NodeSettings
from node.daemon import Daemon, NodeFacts, Tokens
from node.duties.times import ExchangeTime
from node.exchange.arithmetic_speed import measured_speed
from node.exchange.codecs.compiled import remove_unused_kernels
from node.exchange.codecs.tiles import Tiles, threads_beside
from node.exchange.outer import Outer
from node.exchange.preparing import prepare_kernels
from node.exchange.state.on_disk import StateOnDisk
from node.exchange.transport.libp2p import Libp2pTransport
from node.heavy import in_thread
from node.history import History
from node.hosts.desk import HostDesk
from node.hosts.leading import HostsIsland
from node.hosts.rendezvous import interface_of
from node.hosts.token import LeaderKey
from node.island.checkpoints.folder import CheckpointFolder
from node.island.data.fetching import is_url
from node.island.data.held import TokensHere
from node.island.data.island import SuppliedIsland
from node.island.data.places import DataPlaces
from node.island.data.supply import TokenSupply
from node.island.island import Island
from node.island.loops.island import LoopIsland
from node.island.models.first_weights import initial_parameters
from node.island.parallel.auto_mesh import DeviceKind
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.devices import UsableDevices, kind_of, usable_devices
from node.island.ranks.launcher import ProcessIsland
from node.link.calls import CoordinatorLink
from node.machine.hardware import Hardware, likely_devices
from node.machine.kernel import congestion_control
from node.machine.placement import mesh_for, num_ranks_of
from node.models.reading import read_first
from node.newest import keep_places, keep_run
from node.outer_state import SharedVectors, Vector
from node.own_metrics import own_metrics
from node.records import Records
from node.stopping import StopSignals
from protocol.files.durable import expanded
from protocol.layout import Layout, layout_of
from protocol.run_spec import RunSpec
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.wire_count import WireCounts

log = structlog.get_logger()

OWN_LOOP: tuple[str, ...] = ("own loop",)
"""The device of a node whose training is its contributor's own program: only that knows."""


async def run_daemon(
    folder: Path,
    settings: NodeSettings,
    credentials: Credentials,
    identity: Identity,
    spec: RunSpec,
    hardware: Hardware,
    link: CoordinatorLink,
    counts: WireCounts,
    signals: StopSignals,
) -> str:
    """Runs the node until the run is finished or its owner stops it; returns why it ended."""
    devices, shape = OWN_LOOP, MeshShape()
    if not settings.loop:
        usable = await _devices_of(settings, hardware)
        devices, shape = usable.names, _mesh_of(settings, spec, usable)
    layout = layout_of(spec)
    desk = None if settings.loop else await _desk_of(folder, settings, spec, kind_of(devices))
    history = await in_thread(lambda: History(folder / HISTORY_FILE))
    records = Records.of(folder, settings, spec, layout, history=history, num_ranks=len(devices))
    records.require_room()
    tiles = Tiles(
        threads_beside(
            num_ranks=len(devices),
            num_cores=len(os.sched_getaffinity(0)),
            ranks_compute_on_cores=settings.loop or kind_of(devices) == "cpu",
        )
    )
    await prepare_kernels(spec)
    shared = SharedVectors.create(layout.num_elements, layout.largest_fragment)
    try:
        keep_places(folder, settings.data_places(home=folder, folder=Path.cwd()))
        outer = await in_thread(
            partial(
                _outer_at_start,
                folder,
                spec,
                layout,
                shared,
                records.state,
                tiles,
                identity,
                expanded(settings.weights) if settings.weights else None,
            )
        )
        exchange_time = ExchangeTime()
        data = settings.data_places(home=folder, folder=Path.cwd())
        held = _tokens_of(spec, data)
        is_supplied = held is not None and _takes_tokens_of_peers(settings, spec)
        data = replace(data, has_supply=is_supplied)
        island: Island
        if settings.loop:
            island = LoopIsland(
                spec=spec,
                layout=layout,
                names=shared.names,
                home=folder,
                data=data,
                hang_seconds=settings.hang_seconds,
            )
        else:
            island = _island_of(
                settings, spec, devices, shape, shared, desk, records.checkpoints, data
            )
        tokens: Tokens | None = None
        if held is not None:
            supplied: SuppliedIsland | None = None
            if is_supplied:
                supply = TokenSupply(spec=spec, places=data, held=held, heavy=in_thread)
                supplied = SuppliedIsland(
                    island=island, supply=supply, spec=spec, compiles=settings.compile
                )
                island = supplied
            tokens = Tokens(held=held, is_given=settings.serve_data, supplied=supplied)
        facts = NodeFacts(
            node_id=identity.node_id,
            node_name=settings.name,
            public_key=identity.public_key,
            device=devices[0],
            num_ranks=shape.num_ranks,
            version=metadata.version("atoll"),
            mesh=OWN_LOOP[0] if settings.loop else str(shape),
            congestion_control=congestion_control() or "",
            exchange_speed=await in_thread(partial(measured_speed, spec)),
        )
        daemon = Daemon(
            facts=facts,
            spec=spec,
            link=link,
            transport=Libp2pTransport(
                identity=identity,
                counts=counts,
                listen_multiaddrs=(_listen_multiaddr(settings, credentials.host),),
                announce_host=settings.announce or None,
                max_upload_bytes_per_second=settings.max_upload_bytes_per_second,
                while_moving=exchange_time.exchanging,
            ),
            island=island,
            outer=outer,
            disk=records.state,
            history=history,
            heavy=in_thread,
            counts=counts,
            rng=random.Random(),
            exchange_time=exchange_time,
            tokens=tokens,
            first_state=partial(initial_parameters, spec, num_threads=tiles.num_threads)
            if spec.first_digest is None and not settings.weights
            else None,
        )
        with signals.draining(daemon.drain, seconds=settings.drain_within):
            async with own_metrics(settings.metrics, facts, daemon.vitals, lambda: daemon.called):
                return await daemon.run()
    finally:
        if desk is not None:
            await desk.close()
        # Views of the shared memory must be gone before it can be given back.
        daemon = outer = None  # type: ignore[assignment]
        shared.close()


def _outer_at_start(
    folder: Path,
    spec: RunSpec,
    layout: Layout,
    shared: SharedVectors,
    disk: StateOnDisk,
    tiles: Tiles,
    identity: Identity,
    weights: Path | None = None,
) -> Outer:
    """The outer state that a node begins with: what its disk holds, or the run's initial one. Heavy.

    What was read from the disk is as large as the state, and gone when this returns. The initial
    weights are drawn only where nothing takes their place.
    """
    kept = disk.snapshots.load_newest(spec.digest(), layout.summary().digest)
    keep_run(folder, spec)  # only now: what is there may be snapshots of another run
    if kept is None:
        _fill_first_weights(spec, weights, shared.parameters, tiles.num_threads)
    outer = Outer.of_run(
        spec,
        layout=layout,
        parameters=shared.parameters,
        published=shared.published,
        tiles=tiles,
        node_id=identity.node_id,
        identity=identity,
        sent=disk.sent,
    )
    outer.compile_kernels()
    log.info("codecs ready", uplink=outer.uplink.name, downlink=outer.downlink.name)
    remove_unused_kernels()
    if kept is None and weights is not None:
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


def _fill_first_weights(
    spec: RunSpec, weights: Path | None, parameters: Vector, num_threads: int
) -> None:
    """The weights of round 0: from the file, from the seed, or none yet, until a peer gives them."""
    if weights is not None:
        log.info("reading the first weights", file=str(weights))
        read_first(weights, spec, parameters)
    elif spec.first_digest is None:
        log.info("drawing the initial weights", elements=len(parameters))
        initial_parameters(spec, num_threads=num_threads, out=parameters)
    else:
        log.info(
            "the first weights come from a node that has them", digest=spec.first_digest.hex()[:12]
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


def _island_of(
    settings: NodeSettings,
    spec: RunSpec,
    devices: tuple[str, ...],
    shape: MeshShape,
    shared: SharedVectors,
    desk: HostDesk | None,
    checkpoints: CheckpointFolder | None,
    data: DataPlaces,
) -> Island:
    """The ranks of this machine, and with a desk those of the hosts that follow."""
    own = ProcessIsland(
        spec=spec,
        names=shared.names,
        devices=devices,
        shape=shape,
        ranks=range(len(devices)),
        data=data,
        local=settings.local_training,
        checkpoints=checkpoints,
        hang_seconds=settings.hang_seconds,
    )
    if desk is None:
        return own
    return HostsIsland(
        own=own,
        desk=desk,
        num_hosts=settings.hosts,
        listen_host=settings.island_address[0],
        spec=spec,
        shape=shape,
        local=settings.local_training,
        shared=shared,
    )


async def _desk_of(
    folder: Path, settings: NodeSettings, spec: RunSpec, device_kind: DeviceKind
) -> HostDesk | None:
    """Listens for the hosts that are to follow, and writes what they need for it."""
    if settings.hosts == 1:
        return None
    key = LeaderKey.of_folder(folder)
    desk = HostDesk(key=key, version=metadata.version("atoll"), device_kind=device_kind)
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


def _listen_multiaddr(settings: NodeSettings, coordinator_host: str) -> str:
    """Where to listen, for libp2p."""
    address = settings.listen_address(coordinator_host)
    family = "ip6" if ":" in address else "ip4"
    return f"/{family}/{address}/tcp/{settings.port}"
