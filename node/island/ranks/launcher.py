"""The daemon's side of an island: one process for each rank, watched from the event loop.

They are forked elsewhere (node.island.ranks.forkserver). After any error the island is broken, since the
ranks may have parted ways: `stop` and `start` it again.

A rank that is stopped, or waits for ever in a collective or a driver, neither dies nor answers. How long work
may take is not known beforehand, so what was seen so far is the measure of when ranks hang.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from node.island.checkpoints.folder import About, CheckpointFolder, Kept, Loaded, Resuming
from node.island.data.places import DataPlaces
from node.island.island import Evaluation, InnerReport, InnerWork, Island, Progress
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape, check_mesh
from node.island.ranks.commands import (
    Adopt,
    Alive,
    Begin,
    Command,
    Evaluate,
    Failed,
    Halt,
    Keep,
    Measure,
    MeetingPoint,
    Order,
    Publish,
    RankSetup,
    Reply,
    Resume,
    Told,
    Train,
)
from node.island.ranks.devices import default_threads
from node.island.ranks.faults import RankDiedError, RankFailedError, RankHungError
from node.island.ranks.forkserver import fork_rank, prepare_forkserver
from node.outer_state import SHARED_MEMORY, SharedNames, SharedVectors, Vector
from protocol.errors import AtollError, SystemRefusedError
from protocol.files.leftovers import TemporaryFolder
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import CorpusSummary

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


LOOK_SECONDS = 1.0
MOST_COUNTED_SECONDS = 3.0
"""Of the time between two looks. If more has passed, this process has not run either: the machine
slept, or a container was frozen, and the ranks could not have said anything."""

FIRST_TIME_FACTOR = 10.0
"""Times the patience for what was never done before: the first step compiles, loads and connects."""

SLOWEST_FACTOR = 10.0
"""Times the longest silence that ended well, of the same kind of work."""


class Silence:
    """How long nothing has been heard of ranks that work, and whether that is too long. Pure."""

    def __init__(self, *, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._longest: dict[str, float] = {}  # kind of work -> silence that ended well
        self._kind: str | None = None
        self._seconds = 0.0
        self._at = 0.0

    def begin(self, kind: str, now: float) -> None:
        """The ranks were told to do something."""
        self._kind, self._seconds, self._at = kind, 0.0, now

    def heard(self, now: float) -> None:
        """Any of them gave a sign of life."""
        if self._kind is None:
            return
        self._pass(now)
        self._longest[self._kind] = max(self._seconds, self._longest.get(self._kind, 0.0))
        self._seconds = 0.0

    def end(self) -> None:
        """They have nothing to do, or it no longer matters."""
        self._kind = None

    def verdict(self, now: float) -> str | None:
        """Why the ranks hang, for people; None while they may still be at work."""
        if self._kind is None:
            return None
        self._pass(now)
        longest = self._longest.get(self._kind)
        if longest is None:
            limit = FIRST_TIME_FACTOR * self.patience_seconds
            reason = "the first time"
        else:
            limit = max(self.patience_seconds, SLOWEST_FACTOR * longest)
            reason = f"{longest:.1f} s was the longest until now"
        if self._seconds <= limit:
            return None
        return (
            f"gave no sign of life for {self._seconds:.0f} s in {self._kind} "
            f"({limit:.0f} s are given: {reason})"
        )

    def _pass(self, now: float) -> None:
        self._seconds += min(now - self._at, MOST_COUNTED_SECONDS)
        self._at = now


class HangWatch:
    """Looks every second while ranks work. With no patience at all it does not look."""

    def __init__(self, *, patience_seconds: float, on_hang: Callable[[str], None]) -> None:
        self.silence = Silence(patience_seconds=patience_seconds)
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def over(self, kind: str) -> Iterator[None]:
        """Watches while the ranks carry out one order."""
        loop = asyncio.get_running_loop()
        self.silence.begin(kind, loop.time())
        if self.silence.patience_seconds > 0:
            self._timer = loop.call_later(LOOK_SECONDS, self._look)
        try:
            yield
        finally:
            self.silence.end()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def heard(self) -> None:
        """A rank said something."""
        self.silence.heard(asyncio.get_running_loop().time())

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        why = self.silence.verdict(loop.time())
        if why is not None:
            self._timer = None
            self._on_hang(why)
        else:
            self._timer = loop.call_later(LOOK_SECONDS, self._look)


Answer = TypeVar("Answer")

_TERMINATE_SECONDS = 3.0
_KILL_SECONDS = 1.5
_GRACE_SECONDS = 0.3  # a rank fails because another died, and says so before the death shows
_FORKSERVER_GONE = 255  # Python's code for a process of a forkserver that has ended


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A rank as the daemon sees it."""

    rank: int
    device: str
    process: BaseProcess
    connection: "Connection[Order | Halt, Reply]"
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class _Pending:
    """The order that all ranks are carrying out."""

    number: int
    is_training: bool
    future: asyncio.Future[object]
    on_progress: Callable[[Progress], None] | None
    answers: dict[int, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksHere:
    """The ranks of an island's mesh that this host runs, and on what."""

    devices: tuple[str, ...]  # of each rank, in their order
    shape: MeshShape | None = None  # of the whole mesh; None: each rank has a replica
    ranks: range | None = None  # None: all of the mesh
    num_threads: int | None = None  # of each; None: the cores of this host, shared

    def __post_init__(self) -> None:
        """Raises ValueError unless each rank has a device."""
        if len(self.here) != len(self.devices):
            raise ValueError(
                f"a mesh of {self.mesh} takes {len(self.here)} devices: {self.devices}"
            )

    @property
    def mesh(self) -> MeshShape:
        """The shape of the whole mesh."""
        return self.shape or MeshShape(replicate=len(self.devices))

    @property
    def here(self) -> range:
        """The numbers of these ranks in it."""
        return range(self.mesh.num_ranks) if self.ranks is None else self.ranks


class ProcessIsland(Island):
    """Ranks in processes of their own; implements Island."""

    def __init__(
        self,
        *,
        spec: RunSpec,
        names: SharedNames,
        ranks: RanksHere,
        data: DataPlaces,
        local: LocalTraining = PLAIN,
        checkpoints: CheckpointFolder | None = None,
        hang_seconds: float = 0.0,
    ) -> None:
        self.spec = spec
        self.shape = ranks.mesh
        self.local = local
        self._ranks = ranks.here
        self._devices = ranks.devices
        self._num_threads = ranks.num_threads or default_threads(len(ranks.devices))
        self._names = names
        self._data = data
        self._meeting_point: MeetingPoint | None = None
        self._members: list[_Member] = []
        self._pending: _Pending | None = None
        self._number = 0
        self._broken: AtollError | None = None
        self._breaking: asyncio.TimerHandle | None = None
        self._meeting: TemporaryFolder | None = None
        self._spawning: asyncio.Future[None] | None = None
        self._stopping = asyncio.Lock()
        self.resuming = Resuming(checkpoints, spec)
        self._watch = HangWatch(patience_seconds=hang_seconds, on_hang=self._on_hang)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in their order."""
        return tuple(member.process.pid or 0 for member in self._members)

    def meet_at(self, point: MeetingPoint) -> None:
        """Where the ranks of several hosts meet when they are started next."""
        self._meeting_point = point

    async def start(self) -> CorpusSummary:
        """See Island. A mesh that does not fit the run is refused before any process starts."""
        summary = await self.bring_up()
        await self.resuming.resume(lambda one: self.load(one.about, one.path))
        return summary

    async def bring_up(self) -> CorpusSummary:
        """As start, but without a checkpoint: of several hosts, all have to agree on it."""
        if self._members or self._spawning:
            raise RuntimeError("the island is started already")
        check_mesh(self.shape, self.spec, self.local)
        self._broken = None
        self._number = 0
        self._meeting = TemporaryFolder("ranks")
        # In a thread: it waits for the forkserver, which may still be importing torch.
        self._spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn, self._meeting.path))
        try:
            await asyncio.shield(self._spawning)
        except EOFError as error:
            raise RankDiedError(
                "the process that ranks are forked from has ended",
                next_step="see the log; if the machine ran out of memory, free some",
            ) from error
        except OSError as error:
            raise SystemRefusedError(
                f"the ranks' processes cannot be started: {error}",
                next_step="free memory, or raise the limits on processes and open files",
            ) from error
        self._spawning = None
        self._listen()
        return await self._answer_of(Begin(), CorpusSummary)

    async def stop(self, why: str = "") -> None:
        """See Island. Takes at most five seconds."""
        async with self._stopping:
            if self._spawning is not None:
                await asyncio.wait([self._spawning])
                self._spawning.exception()  # whoever started us has it, or waits no more
                self._spawning = None
                self._listen()
            if self._breaking is not None:
                self._breaking.cancel()
                self._breaking = None
            self._break(RankDiedError("the island was stopped"))
            if not await self._all_ended(_TERMINATE_SECONDS):
                for member in self._members:
                    member.process.kill()
                await self._all_ended(_KILL_SECONDS)
            for member in self._members:
                self._forget(member)
            self._members = []
            if self._meeting is not None:
                self._meeting.remove()
                self._meeting = None

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island."""
        await self._answer_of(Adopt(fragment, is_taken), type(None))

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """See Island. When it is cancelled, the ranks leave off after their current inner step."""
        self.resuming.tell_of_training(work.token_clock)
        try:
            return await self._answer_of(Train(work), InnerReport, on_progress)
        except asyncio.CancelledError:
            self._send_halt()
            raise

    def halt(self) -> None:
        """See Island."""
        if self._pending is not None and self._pending.is_training:
            self._send_halt()

    def _send_halt(self) -> None:
        for member in self._members:
            self._send(member, Halt())

    async def publish(self, fragment: int) -> None:
        """See Island."""
        await self._answer_of(Publish(fragment), type(None))

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """See Island."""
        if (folder := self.resuming.folder_if_due(is_last=is_last)) is not None:
            kept = await self.set_aside(Keep(folder, round, is_waited=is_last))
            self.resuming.tell_of_keeping(round, kept)

    async def begin_anew(self, round: int) -> None:
        """See Island."""
        self.resuming.leave_out_after = round
        await self.stop()
        await self.start()

    async def set_aside(self, order: Keep) -> Kept:
        """Has the ranks write their part of a checkpoint, whether or not one is due."""
        return await self._answer_of(order, Kept)

    async def load(self, about: About, path: Path | None) -> Loaded:
        """Has the ranks take a checkpoint over; `path` is this host's part, if it has one."""
        return await self._answer_of(Resume(about, path), Loaded)

    async def evaluate(self) -> Evaluation:
        """See Island."""
        return await self._answer_of(Evaluate(), Evaluation)

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> Sequence[float]:
        """See Island."""
        beside = await asyncio.to_thread(_shared_copy, parameters)
        try:
            order = Measure(beside.names, tuple(places))
            return await self._answer_of(order, tuple)
        finally:
            beside.close()

    def _spawn(self, meeting: Path) -> None:
        prepare_forkserver()
        for rank, device in zip(self._ranks, self._devices, strict=True):
            setup = RankSetup(
                spec=self.spec,
                names=self._names,
                rank=rank,
                shape=self.shape,
                device=device,
                num_threads=self._num_threads,
                local=self.local,
                data=self._data,
                meeting=self._meeting_point or meeting / "store",
            )
            process, connection = fork_rank(setup)
            self._members.append(
                _Member(rank=rank, device=device, process=process, connection=connection)
            )

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for member in self._members:
            loop.add_reader(member.connection.fileno(), self._on_replies, member)
            loop.add_reader(member.process.sentinel, self._on_end, member)

    async def _answer_of(
        self,
        command: Command,
        kind: type[Answer],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        """Gives the order to all ranks and waits for all; returns rank 0's answer."""
        if self._broken is not None:
            raise self._broken
        if not self._members:
            raise RuntimeError("call start() first")
        if self._pending is not None:
            raise RuntimeError(f"{command} was asked for before the last order was answered")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._pending = _Pending(
            number=self._number,
            is_training=isinstance(command, Train),
            future=future,
            on_progress=on_progress,
        )
        if not isinstance(command, Begin):
            for member in self._members:
                self._send(member, Order(self._number, command))
        self._number += 1
        try:
            with self._watch.over(_kind_of(command)):
                answer = await future
        finally:
            self._pending = None
        assert isinstance(answer, kind)
        return answer

    def _send(self, member: _Member, message: Order | Halt) -> None:
        # A broken pipe means that the rank is ending; its sentinel tells how.
        with contextlib.suppress(OSError):
            member.connection.send(message)

    def _on_replies(self, member: _Member) -> None:
        try:
            while member.connection.poll():
                self._take(member, member.connection.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(member.connection.fileno())

    def _take(self, member: _Member, reply: Reply) -> None:
        self._watch.heard()
        if isinstance(reply, Failed):
            self._on_failure(reply.error)
            return
        if isinstance(reply, Alive):
            return
        pending = self._pending
        if pending is None or reply.number != pending.number or pending.future.done():
            return  # the order was cancelled
        if isinstance(reply, Told):
            if pending.on_progress is not None:
                pending.on_progress(reply.progress)
        else:
            pending.answers[member.rank] = reply.answer
            if len(pending.answers) == len(self._members):
                pending.future.set_result(pending.answers[self._ranks[0]])

    def _on_failure(self, error: AtollError) -> None:
        if len(self._members) > 1 and isinstance(error, RankFailedError):
            if self._breaking is None:
                loop = asyncio.get_running_loop()
                self._breaking = loop.call_later(_GRACE_SECONDS, self._break, error)
        else:
            self._break(error)

    def _on_end(self, member: _Member) -> None:
        self._on_replies(member)  # what it said last comes first
        self._unwatch(member)
        member.ended.set()
        exit_code = member.process.exitcode
        # A rank that reported an error ends with 0, and the error is what people should see.
        if exit_code != 0 or self._breaking is None:
            self._break(
                RankDiedError(
                    f"rank {member.rank} on {member.device} {_manner_of(exit_code)}",
                    next_step="see logs/ranks.log in the node's folder; if the machine ran out of memory, "
                    "lower [inner] batch or the number of ranks",
                )
            )

    def _on_hang(self, why: str) -> None:
        devices = ", ".join(dict.fromkeys(member.device for member in self._members))
        self._break(
            RankHungError(
                f"the ranks on {devices} {why}",
                next_step="see the log; if this machine is just that slow, raise hang_seconds in "
                "node.toml",
            )
        )
        for member in self._members:  # one that is stopped, or in a driver, takes no other signal
            if not member.ended.is_set():
                member.process.kill()

    def _break(self, error: AtollError) -> None:
        """Ends all ranks; the pending order, or else the next one, raises the first error."""
        if self._broken is not None:
            return
        self._broken = error
        if self._pending is not None and not self._pending.future.done():
            self._pending.future.set_exception(error)
        for member in self._members:
            if not member.ended.is_set():
                member.process.terminate()

    async def _all_ended(self, timeout_seconds: float) -> bool:
        waits = [asyncio.ensure_future(member.ended.wait()) for member in self._members]
        if not waits:
            return True
        _, unfinished = await asyncio.wait(waits, timeout=timeout_seconds)
        for wait in unfinished:
            wait.cancel()
        return not unfinished

    def _unwatch(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(member.connection.fileno())
        loop.remove_reader(member.process.sentinel)

    def _forget(self, member: _Member) -> None:
        if not member.ended.is_set():  # unkillable, in the kernel: leave it to the system
            self._unwatch(member)
            member.connection.close()
            return
        member.connection.close()
        member.process.join()
        member.process.close()


def _kind_of(command: Command) -> str:
    """What takes about as long each time."""
    if isinstance(command, Keep) and command.is_waited:
        return "writing a checkpoint"
    return type(command).__name__.lower()


_WHAT_SENDS = {
    "SIGKILL": " (the kernel does so for want of memory)",
    "SIGBUS": f" (as where a file that it reads was cut off, a disk fails, or {SHARED_MEMORY} is full)",
}


def _manner_of(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            return f"was ended by {name}{_WHAT_SENDS.get(name, '')}"
    if exit_code == _FORKSERVER_GONE:
        return f"ended with exit code {exit_code}, as where the process that forked it is killed"
    return f"ended by itself with exit code {exit_code}"


def _shared_copy(parameters: Vector) -> SharedVectors:
    """Where ranks find other parameters than the global ones; raises SystemRefusedError."""
    shared = SharedVectors.create(parameters.size, 1)
    shared.parameters[:] = parameters
    return shared
