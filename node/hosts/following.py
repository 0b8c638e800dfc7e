"""The follower's side: its ranks do what the leader's do, for as long as the leader is there.

`run_follower` is a follower from the outside: what starts it, and that nothing of it stays. Importing this
takes seconds: torch comes with it.
"""

import asyncio
import json
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from node.disk.round_folder import DiskBudget
from node.heavy import cancelled
from node.hosts.wire import (
    Adopt,
    End,
    Evaluate,
    Hold,
    HostToken,
    KeepPart,
    OpenShelf,
    Order,
    Part,
    Publish,
    Shelved,
    Start,
    Started,
    Stop,
    TakeOver,
    Train,
    Wire,
    answer_to_wire,
    connect,
    from_wire,
    interface_of,
)
from node.island.checkpoints.folder import Checkpoint, CheckpointFolder
from node.island.data.places import DataPlaces
from node.island.island import InnerReport, InnerWork, Progress
from node.island.models.code import check_functions
from node.island.ranks.commands import Keep, MeetingPoint
from node.island.ranks.devices import usable_devices
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver, rank_output
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors, Vector, tell_leftovers
from node.stopping import StopSignals
from protocol.errors import (
    AtollError,
    ExitCode,
    NotPermittedError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.files.durable import OURS_ALONE, FolderLock, make_folder
from protocol.run.models import Layout, layout_of
from protocol.run.run_files import run_from_json
from protocol.wire.rounds import Digest
from protocol.wire.versions import release

log = structlog.get_logger()

_RETRY_SECONDS = 2.0


class Shelf:
    """Where a follower keeps its parts, for as long as its process lives, whatever leader it has."""

    def __init__(self, path: Path) -> None:
        """Takes the folder for this process. Raises SystemRefusedError, CannotCreateError."""
        make_folder(path, mode=OURS_ALONE)
        self._lock = FolderLock.take(
            path,
            holder="follower",
            next_step="give this one another --name, or a folder of its own with --checkpoints",
        )
        self._path = path.absolute()  # ranks need not be where we are
        self._folder: CheckpointFolder | None = None
        self._checkpoints: dict[str, Checkpoint] = {}

    def open(self, order: OpenShelf) -> list[Part]:
        """What lies there of this run. No rank may run. Raises SystemRefusedError."""
        self._folder = CheckpointFolder(
            path=self._path,
            run_digest=Digest(bytes.fromhex(order.run_digest)),
            layout_digest=Digest(bytes.fromhex(order.layout_digest)),
            every_rounds=order.every_rounds,
            num_hosts=order.num_hosts,
        )
        DiskBudget().require([self._folder.need(order.num_elements, order.num_parts)])
        self._folder.remove_unfinished()
        self._checkpoints = {}
        for checkpoint in self._folder.whole():
            if checkpoint.about.num_hosts == 1:  # and so no set, but a node's that was alone
                log.warning(
                    "checkpoint left out",
                    path=str(checkpoint.path),
                    why="one host wrote it alone: where it leads, it can be read",
                )
            else:
                self._checkpoints[checkpoint.about.set_id] = checkpoint
        return [Part.of(checkpoint.about) for checkpoint in self._checkpoints.values()]

    @property
    def folder(self) -> CheckpointFolder:
        """Where ranks write."""
        assert self._folder is not None, "the shelf is opened before anything is kept"
        return self._folder

    def part_of(self, set_id: str) -> Path | None:
        """Where our part of a set lies, if `open` found one."""
        checkpoint = self._checkpoints.get(set_id)
        return None if checkpoint is None else checkpoint.path

    def close(self) -> None:
        """Lets another process have the folder; safe to repeat."""
        self._lock.release()


async def follow(
    token: HostToken, *, name: str, device: str, version: str, data: DataPlaces, shelf: Shelf
) -> str:
    """Follows until the leader says that it is over; returns why it ended.

    While the leader is away, it is asked again every two seconds. The data is read in `data`, and
    parts of checkpoints lie on the shelf. Raises AtollError.
    """
    usable = await usable_devices(device, 1)
    kind = usable.names[0].partition(":")[0]
    has_waited = False
    while True:
        try:
            wire = await connect(token)
        except UnavailableError as error:
            if not has_waited:
                log.info("waiting for the leader", why=error.what)
            has_waited = True
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        has_waited = False
        following = _Following(wire, device=device, data=data, shelf=shelf)
        try:
            await wire.send({"name": name, "version": version, "device_kind": kind})
            answer = await wire.receive()
            if "refused" in answer:
                raise NotPermittedError(
                    f"the leader refuses this host: {answer['refused']}",
                    next_step="install the leader's version, or choose --device",
                )
            log.info("following", leader=f"{token.host}:{token.port}")
            await following.serve()
            return "the leader has ended"
        except (OSError, EOFError):
            log.warning("the leader is gone: waiting for it", leader=f"{token.host}:{token.port}")
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            await following.close()


class _Following:
    """One connection's ranks."""

    def __init__(self, wire: Wire, *, device: str, data: DataPlaces, shelf: Shelf) -> None:
        self._wire = wire
        self._shelf = shelf
        self._device = device
        self._data = data
        self._layout: Layout | None = None
        self._shared: SharedVectors | None = None
        self._island: ProcessIsland | None = None
        self._orders: asyncio.Queue[tuple[int, Order[Any]]] = asyncio.Queue()
        self._stopping: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Carries out the leader's orders in turn until the last. Raises EOFError, OSError."""
        listening = asyncio.create_task(self._listen())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({listening, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            else:
                await listening
        finally:
            await cancelled((listening, working))

    async def close(self) -> None:
        """Ends the ranks and gives the memory back."""
        if self._island is not None:
            await self._island.stop()
        if self._shared is not None:
            self._shared.close()
        self._wire.close()

    async def _listen(self) -> None:
        while True:
            message = await self._wire.receive()
            order = from_wire(message)
            if isinstance(order, Hold | Adopt | Evaluate):
                await self._wire.receive_vector(message, self._place_of(order))
            if isinstance(order, Stop) and self._island is not None:
                # At once: what it is to end may hang, as a rank of another host has died.
                self._stopping.append(asyncio.create_task(self._island.stop()))
            self._orders.put_nowait((int(message.get("number", 0)), order))

    def _place_of(self, order: Hold | Adopt | Evaluate) -> Vector:
        """Where an order's values belong: parameters, or what all hosts published of a fragment."""
        if self._shared is None or self._layout is None:
            raise ProtocolMismatchError("the leader sends values before it has started the ranks")
        whole = self._shared.parameters
        fragment = None if isinstance(order, Evaluate) else order.fragment
        if fragment is not None and not 0 <= fragment < len(self._layout.fragments):
            raise ProtocolMismatchError(
                f"the leader names fragment {fragment}, which the run has not"
            )
        if isinstance(order, Hold):
            return self._shared.published[: self._layout.fragments[order.fragment].num_elements]
        return whole if fragment is None else whole[self._layout.fragments[fragment].span]

    async def _work(self) -> None:
        while True:
            number, order = await self._orders.get()
            if isinstance(order, End):
                with suppress(OSError):
                    await self._wire.send({"number": number, "answer": None})
                return
            try:
                answer, vector = await self._carry_out(number, order)
                told = {"number": number, "answer": answer_to_wire(order, answer)}
                await self._wire.send(told, vector)
            except AtollError as error:
                if error.exit_code == ExitCode.INTERNAL:
                    log.error("a rank failed", error=str(error))
                await self._wire.send(
                    {
                        "number": number,
                        "fault": type(error).__name__,
                        "what": error.what,
                        "next_step": error.next_step,
                    }
                )

    async def _carry_out(self, number: int, order: Order[Any]) -> tuple[Any, Vector | None]:
        """What it is answered with, and the values that go with the answer."""
        if isinstance(order, Start):
            return await self._start(order), None
        if isinstance(order, OpenShelf):
            parts = await asyncio.to_thread(self._shelf.open, order)
            return Shelved(parts=tuple(parts)), None
        if self._island is None or self._shared is None or self._layout is None:
            if isinstance(order, Stop):
                return None, None  # nothing was ever started
            raise ProtocolMismatchError(f"{type(order).__name__} comes before the start")
        island = self._island
        match order:
            case Hold():
                return None, None  # its values are in their place
            case Adopt():
                await island.adopt(order.fragment, is_taken=order.is_taken)
                return None, None
            case Train():
                return await self._train(island, number, order.work), None
            case Publish():
                size = self._layout.fragments[order.fragment].num_elements
                published = self._shared.published[:size]
                published[:] = 0  # what other hosts publish
                await island.publish(order.fragment)
                return None, published
            case TakeOver(about=about):
                loaded = await island.load(about, self._shelf.part_of(about.set_id))
                if not loaded.failure:
                    island.resuming.goes_on_from(about, loaded)
                return loaded, None
            case KeepPart():
                keep = Keep(self._shelf.folder, order.round, order.is_waited, order.set_id)
                return await island.set_aside(keep), None
            case Evaluate():
                return await island.evaluate(), None
            case Stop():
                await island.stop()
                return None, None
        raise AssertionError(f"{order} is carried out elsewhere")

    async def _train(self, island: ProcessIsland, number: int, work: InnerWork) -> InnerReport:
        telling: set[asyncio.Future[None]] = set()

        def tell(progress: Progress) -> None:
            told = {"number": number, "progress": asdict(progress)}
            telling.add(asyncio.ensure_future(self._wire.send(told)))

        report = await island.train(work, tell)
        await asyncio.gather(*telling)
        return report

    async def _start(self, order: Start) -> Started:  # its ranks were stopped, or never started
        run = run_from_json(json.dumps(order.spec))
        # The leader's owner does not speak for this machine's.
        check_functions(run, allowed=(), code=None)
        if self._shared is None:
            self._layout = layout_of(run)
            self._shared = SharedVectors.create(
                self._layout.num_elements, self._layout.largest_fragment
            )
        usable = await usable_devices(self._device, order.num_ranks)
        self._island = ProcessIsland(
            ranks=RanksHere(
                devices=usable.names,
                shape=order.shape,
                ranks=range(order.first_rank, order.first_rank + order.num_ranks),
            ),
            spec=run,
            names=self._shared.names,
            data=self._data,
            local=order.local,
        )
        interface = interface_of(self._wire.own_host)
        self._island.meet_at(
            MeetingPoint(
                host=order.host,
                port=order.port,
                interface=interface,
                num_hosts=order.num_hosts,
            )
        )
        summary = await self._island.bring_up()
        return Started(corpus=summary.digest.hex())


async def run_follower(
    token: HostToken, *, name: str, device: str, checkpoints: Path, data: str
) -> str:
    """Follows until the leader ends or its owner stops it; returns why.

    The last thing that its process does: signals are ignored from then on.
    """
    shelf = Shelf(checkpoints)
    tell_leftovers()
    with StopSignals(), closing(rank_output(checkpoints, name)) as output:
        prepare_forkserver(standard_error=output.descriptor)
        try:
            return await follow(
                token,
                name=name,
                device=device,
                version=release(),
                data=DataPlaces(
                    folder=Path.cwd(),
                    own=data,
                    cache=checkpoints.with_name(f"{checkpoints.name}-data"),
                ),
                shelf=shelf,
            )
        except asyncio.CancelledError:
            return "stopped by its owner"
        finally:
            end_forkserver()
            shelf.close()
