"""The leader's side: its own ranks and those of the hosts that follow, as one island.

A start takes a set of checkpoints whose parts are all with hosts that are here, however many there were
when it was written, and whatever their mesh. Writing and reading, and how values come to ranks of other
hosts, is node.island.checkpoints' (writer, passing).
"""

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from node.heavy import cancelled, in_thread
from node.hosts.wire import (
    Adopt,
    End,
    Evaluate,
    Hold,
    KeepPart,
    LeaderKey,
    Message,
    OpenShelf,
    Order,
    Part,
    Publish,
    Start,
    Stop,
    TakeOver,
    Train,
    Wire,
    answer_from_wire,
    interface_of,
    is_invited,
    open_store,
    to_wire,
    zeros,
)
from node.island.checkpoints.folder import Checkpoint, Kept, Loaded
from node.island.island import Evaluation, InnerReport, InnerWork, Island, Progress, rebases
from node.island.ranks.commands import Keep, MeetingPoint
from node.island.ranks.faults import (
    OriginAwayError,
    RankDiedError,
    RankFailedError,
    TrainingDivergedError,
)
from node.island.ranks.launcher import ProcessIsland
from node.outer_state import SharedVectors, Vector
from protocol.errors import AtollError, ConfigError, ProtocolMismatchError, SystemRefusedError
from protocol.run.models import layout_of
from protocol.wire.rounds import CorpusSummary

if TYPE_CHECKING:
    from node.island.ranks.aside import Aside


log = structlog.get_logger()

_FAULTS: dict[str, type[AtollError]] = {
    kind.__name__: kind
    for kind in (
        RankDiedError,
        OriginAwayError,
        RankFailedError,
        TrainingDivergedError,
        ConfigError,
    )
}
"""Errors of a follower that mean the same here; others are told as one of its machine's."""

STOP_SECONDS = 10.0

Answer = TypeVar("Answer")


class Host:
    """One that follows. It gets one order at a time; `is_gone` says that it went."""

    def __init__(self, wire: Wire, *, name: str) -> None:
        self._wire = wire
        self.name = name
        self.address = wire.peer
        self._number = 0
        self._answer: asyncio.Future[Any] | None = None
        self._into: Vector | None = None
        self._most_elements = 0  # of the order that last asked for values
        self._on_progress: Callable[[Progress], None] | None = None
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._listening.done()

    async def give(
        self,
        order: Order[Answer],
        *,
        vector: Vector | None = None,
        into: Vector | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Answer:
        """Its answer; a vector in it lies in `into`. Raises what the follower met, or RankDiedError."""
        if self.is_gone:
            raise self._death()
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._into, self._on_progress = into, on_progress
        self._most_elements = self._most_elements if into is None else len(into)
        try:
            with suppress(OSError):  # the listener says what became of the connection
                await self._wire.send(to_wire(order) | {"number": self._number}, vector)
            return answer_from_wire(order, await self._answer)
        finally:
            self._answer = self._into = self._on_progress = None

    async def close(self) -> None:
        """Lets it go; safe to repeat."""
        await cancelled((self._listening,))
        self._wire.close()

    def _death(self) -> RankDiedError:
        return RankDiedError(
            f"host {self.name} ({self.address}), which followed, is gone",
            next_step="see its log, and start it again: atoll node follow island.token",
        )

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await self._received())
        except (OSError, EOFError):
            pass
        except ProtocolMismatchError as error:
            log.warning("a host is let go", host=self.name, why=error.what)
        finally:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(self._death())
            self._wire.close()

    async def _received(self) -> Message:
        message = await self._wire.receive()
        if "num_elements" in message:
            is_awaited = self._into is not None and message.get("number") == self._number
            # When its order was given up, the values are read all the same, and forgotten.
            into = self._into if is_awaited else zeros(self._most_elements)
            assert into is not None
            await self._wire.receive_vector(message, into)
        return message

    def _take(self, message: Message) -> None:
        if message.get("number") != self._number or self._answer is None or self._answer.done():
            return
        if "progress" in message and self._on_progress is not None:
            self._on_progress(Progress(**message["progress"]))
        elif "fault" in message:
            kind = _FAULTS.get(message["fault"], SystemRefusedError)
            what = f"host {self.name}: {message['what']}"
            self._answer.set_exception(kind(what, next_step=message["next_step"]))
        elif "answer" in message:
            self._answer.set_result(message["answer"])


class HostDesk:
    """Listens for hosts that want to follow, on one address."""

    def __init__(self, *, key: LeaderKey, version: str, device_kind: str) -> None:
        self._key = key
        self._version = version
        self._device_kind = device_kind
        self._hosts: list[Host] = []
        self._come = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._welcoming: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Begins to listen; returns the port. Raises SystemRefusedError."""
        try:
            self._server = await asyncio.start_server(
                self._meet,
                host,
                port,
                ssl=self._key.server_context(),
                ssl_handshake_timeout=STOP_SECONDS,
            )
        except OSError as error:
            raise SystemRefusedError(
                f"cannot listen for hosts on {host}:{port}: {error.strerror}",
                next_step="choose another address with --island-listen",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Tells all hosts that it is over, and stops listening."""
        if self._server is not None:
            self._server.close()
        for task in list(self._welcoming):
            task.cancel()
        for host in self._hosts:
            with suppress(AtollError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await host.give(End())
            await host.close()
        self._hosts = []

    async def hosts(self, number: int, *, within_seconds: float | None) -> list[Host]:
        """That many hosts, when they are there. Raises RankDiedError when they do not come."""
        self._hosts = [host for host in self._hosts if not host.is_gone]
        if len(self._hosts) < number:
            log.info("waiting for hosts to follow", there=len(self._hosts), of=number)
        try:
            async with asyncio.timeout(within_seconds), self._come:
                while len(self._hosts) < number:
                    await self._come.wait()
                    self._hosts = [host for host in self._hosts if not host.is_gone]
        except TimeoutError:
            raise RankDiedError(
                f"{len(self._hosts)} of {number} hosts follow, and no more came within "
                f"{within_seconds:g} s",
                next_step="start the others again: atoll node follow island.token",
            ) from None
        return self._hosts[:number]

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._welcoming.add(task)
        try:
            wire = Wire(reader, writer)  # which fails when the other side is gone already
            if await is_invited(wire, self._key.secret.hex()):
                await self._welcome(wire)
            else:
                log.warning("turned away who does not know the island's secret", peer=wire.peer)
                writer.close()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError, ProtocolMismatchError):
            writer.close()
        finally:
            self._welcoming.discard(task)

    async def _welcome(self, wire: Wire) -> None:
        async with asyncio.timeout(10):
            hello = await wire.receive()
        for what, theirs, ours in (
            ("version", hello.get("version"), self._version),
            ("kind of device", hello.get("device_kind"), self._device_kind),
        ):
            if theirs != ours:
                await wire.send({"refused": f"its {what} is {theirs!r}, and the leader's {ours!r}"})
                wire.close()
                return
        await wire.send({"welcome": True})
        async with self._come:
            name = str(hello.get("name"))[:64]
            self._hosts.append(Host(wire, name=name))
            log.info("a host follows", host=name, address=wire.peer, hosts=len(self._hosts))
            self._come.notify_all()


Theirs = TypeVar("Theirs")

_GRACE_SECONDS = 5.0
COME_BACK_SECONDS = 60.0
"""How long ranks that are started again wait for a host that is gone."""


class HostsIsland(Island):
    """The ranks of all hosts as one; implements Island.

    The first ranks are this host's. Global parameters go to the other hosts before they are
    adopted, and what they publish comes back: every value from one of them, so it is added up. With
    overlap that sum goes to them as well, as the ranks keep what they trained since.
    """

    def __init__(
        self,
        *,
        own: ProcessIsland,
        desk: HostDesk,
        num_hosts: int,
        listen_host: str,
        shared: SharedVectors,
        come_back_seconds: float = COME_BACK_SECONDS,
    ) -> None:
        self._own = own
        self._desk = desk
        self._num_hosts = num_hosts
        self._listen_host = listen_host
        self._layout = layout_of(own.spec)
        self._shared = shared
        self._others: list[Host] = []
        self._store: Aside | None = None
        self._has_started = False
        self._come_back_seconds = come_back_seconds

    async def start(self) -> CorpusSummary:
        """See Island. Waits for the hosts; for good the first time, as somebody has to start them."""
        self._others = await self._desk.hosts(
            self._num_hosts - 1,
            within_seconds=self._come_back_seconds if self._has_started else None,
        )
        self._has_started = True
        checkpoints = await self._arrange()
        self._store, port = await open_store(self._listen_host)
        self._own.meet_at(
            MeetingPoint(
                host=self._listen_host,
                port=port,
                interface=interface_of(self._listen_host),
                num_hosts=self._num_hosts,
            )
        )
        each = self._own.shape.num_ranks // self._num_hosts
        summary, theirs = await _together(
            self._own.bring_up(),
            (
                host.give(
                    Start(
                        spec=json.loads(self._own.spec.canonical_json()),
                        shape=self._own.shape,
                        local=self._own.local,
                        first_rank=each * (place + 1),
                        num_ranks=each,
                        host=self._listen_host,
                        port=port,
                        num_hosts=self._num_hosts,
                    )
                )
                for place, host in enumerate(self._others)
            ),
        )
        for host, answer in zip(self._others, theirs, strict=True):
            if answer.corpus != summary.digest.hex():
                raise ConfigError(
                    f"host {host.name} reads other text than the leader: {answer.corpus[:12]}, "
                    f"not {summary.digest.hex()[:12]}",
                    next_step="give all hosts the same files, and start them in the same folder",
                )
        await self._own.resuming.resume(self._load, checkpoints)
        return summary

    async def _arrange(self) -> list[Checkpoint]:
        """Gives the hosts places by their parts of checkpoints; returns those that they can read.

        Their ranks have not been started.
        """
        folder = self._own.resuming.folder
        if folder is None:
            return []
        own, theirs = await _together(
            asyncio.to_thread(lambda: list(folder.whole())),
            (
                host.give(
                    OpenShelf(
                        run_digest=folder.run_digest.hex(),
                        layout_digest=folder.layout_digest.hex(),
                        every_rounds=folder.every_rounds,
                        num_hosts=folder.num_hosts,
                        num_elements=self._layout.num_elements,
                        num_parts=len(self._layout.places)
                        * self._own.shape.num_ranks
                        // self._num_hosts,
                    )
                )
                for host in self._others
            ),
        )
        arrangement = arranged(
            [Part.of(checkpoint.about) for checkpoint in own],
            [shelved.parts for shelved in theirs],
        )
        self._others = [self._others[index] for index in arrangement.order]
        had = []
        for checkpoint, lack in zip(own, arrangement.lacks, strict=True):
            if lack:
                log.warning("checkpoint left out", path=str(checkpoint.path), why=lack)
            else:
                had.append(checkpoint)
        return had

    async def _load(self, checkpoint: Checkpoint) -> Loaded:
        """Has the ranks of all hosts take a checkpoint over; none does when one cannot."""
        # Which files it has differs by host.
        order = TakeOver(about=checkpoint.about.model_copy(update={"files": {}}))
        loaded, theirs = await _together(
            self._own.load(checkpoint.about, checkpoint.path),
            (host.give(order) for host in self._others),
        )
        return replace(
            loaded, failure=self._reasons(loaded.failure, [other.failure for other in theirs])
        )

    def _reasons(self, own: str, theirs: list[str]) -> str:
        """Why something failed, on the hosts that say so; what all ranks know is said once."""
        said = zip(self._others, theirs, strict=True)
        of_hosts = [f"host {host.name}: {why}" for host, why in said if why not in ("", own)]
        return "; ".join([own, *of_hosts] if own else of_hosts)

    async def stop(self, why: str = "") -> None:
        """See Island."""
        await self._own.stop(why)
        await asyncio.gather(*(self._stop(host) for host in self._others))
        if self._store is not None:
            self._store.close()
            self._store = None

    async def adopt(self, fragment: int | None = None, *, is_taken: bool = True) -> None:
        """See Island."""
        await _together(
            self._own.adopt(fragment, is_taken=is_taken),
            (self._adopt_there(host, fragment, is_taken=is_taken) for host in self._others),
        )

    async def _adopt_there(self, host: Host, fragment: int | None, *, is_taken: bool) -> None:
        parameters = self._shared.parameters
        if fragment is not None:
            span = self._layout.fragments[fragment].span
            parameters = parameters[span]
            if rebases(self._own.spec.exchange, is_taken=is_taken):
                # A rank may hold what one of another host published: each has its own part only.
                published = self._shared.published[: span.stop - span.start]
                await host.give(Hold(fragment=fragment), vector=published)
        await host.give(Adopt(fragment=fragment, is_taken=is_taken), vector=parameters)

    async def train(self, work: InnerWork, on_progress: Callable[[Progress], None]) -> InnerReport:
        """See Island."""
        report, _ = await _together(
            self._own.train(work, on_progress),
            (host.give(Train(work=work), on_progress=on_progress) for host in self._others),
        )
        return report

    def halt(self) -> None:
        """See Island. Rank 0 decides for all, and it is here."""
        self._own.halt()

    async def publish(self, fragment: int) -> None:
        """See Island."""
        published = self._shared.published[: self._layout.fragments[fragment].num_elements]
        await in_thread(lambda: published.fill(0))
        parts = [zeros(len(published)) for _ in self._others]
        await _together(
            self._own.publish(fragment),
            (
                host.give(Publish(fragment=fragment), into=part)
                for host, part in zip(self._others, parts, strict=True)
            ),
        )
        await in_thread(lambda: _add_all(published, parts))

    async def keep(self, round: int, *, is_last: bool = False) -> None:
        """See Island. Each host writes its ranks' part to its own disk."""
        if (folder := self._own.resuming.folder_if_due(is_last=is_last)) is None:
            return
        set_id = secrets.token_hex(8)
        kept, theirs = await _together(
            self._own.set_aside(Keep(folder, round, is_waited=is_last, set_id=set_id)),
            (
                host.give(KeepPart(round=round, is_waited=is_last, set_id=set_id))
                for host in self._others
            ),
        )
        failure = self._reasons(kept.failure, [other.failure for other in theirs])
        self._own.resuming.tell_of_keeping(round, Kept(is_busy=kept.is_busy, failure=failure))

    async def begin_anew(self, round: int) -> None:
        """See Island."""
        self._own.resuming.leave_out_after = round
        await self.stop()
        await self.start()

    async def evaluate(self) -> Evaluation:
        """See Island."""
        evaluation, _ = await _together(
            self._own.evaluate(),
            (host.give(Evaluate(), vector=self._shared.parameters) for host in self._others),
        )
        return evaluation

    async def losses_at(self, parameters: Vector, places: Sequence[int]) -> None:
        """See Island. Not over several hosts: these get no other parameters than the global ones."""
        return

    async def _stop(self, host: Host) -> None:
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await host.give(Stop())
        except (AtollError, TimeoutError):
            await host.close()


def _add_all(published: Vector, parts: Sequence[Vector]) -> None:
    for part in parts:
        published += part


async def _together(
    own: Awaitable[Answer], orders: Iterable[Awaitable[Theirs]]
) -> tuple[Answer, list[Theirs]]:
    """All answers; the first error ends the wait for the others, as they may hang because of it.

    A rank that failed may have done so because another one died, which is what people should hear.
    """
    first = asyncio.ensure_future(own)
    others = [asyncio.ensure_future(order) for order in orders]
    tasks: list[asyncio.Future[Any]] = [first, *others]
    try:
        ended, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in ended if task.exception() is not None]
        if pending and all(isinstance(error, RankFailedError) for error in errors):
            more, _ = await asyncio.wait(
                pending, timeout=_GRACE_SECONDS, return_when=asyncio.FIRST_EXCEPTION
            )
            errors += [task.exception() for task in more if task.exception() is not None]
        for error in sorted(errors, key=lambda each: not isinstance(each, RankDiedError)):
            assert error is not None
            raise error
        return first.result(), [task.result() for task in others]
    finally:
        await cancelled(tasks)


# Checkpoints of several hosts: each has its own ranks' part on its own disk, and a set is all parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Which of the hosts that follow takes which place, and which of the leader's sets can be had."""

    order: tuple[int, ...]  # of the first place the index of its host, and so on
    lacks: tuple[str, ...]  # of each what is not here; empty: all of it is


def arranged(own: Sequence[Part], others: Sequence[Sequence[Part]]) -> Arrangement:
    """Gives hosts the places that they had when the newest set was written of which all parts are here.

    They come in any order, and with its old place a host finds most of what it wants on its own disk.
    Hosts that have no part come last. `own` is what the leader has, the newest first; of other sets
    nobody would know the round. Without a set the order is that in which they came.
    """
    lacks = tuple(_lack_of(part, others) for part in own)
    newest = next((part.set_id for part, lack in zip(own, lacks, strict=True) if not lack), None)
    place_of = {
        index: part.host
        for index, parts in enumerate(others)
        for part in parts
        if part.set_id == newest
    }
    order = sorted(range(len(others)), key=lambda index: place_of.get(index, math.inf))
    return Arrangement(order=tuple(order), lacks=lacks)


def _lack_of(part: Part, others: Sequence[Sequence[Part]]) -> str:
    """What is not here of a set of which the leader has a part."""
    here = {other.host for parts in others for other in parts if other.set_id == part.set_id}
    missing = sorted(set(range(part.num_hosts)) - here - {part.host})
    if not missing:
        return ""
    whose = " and ".join(f"host {host}'s" for host in missing)
    return f"{whose} part of it is not here"
