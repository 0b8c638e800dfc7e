"""Fetching many pieces from several donors at once: who is asked for what, and what a failure means.

A piece is a chunk of a state or a result of a slice. The schedule is a value that is told the time;
`fetch_pieces` asks, waits and tells it what came. A queue that all donors are served from needs no
measured speeds: who delivers sooner is asked for the next piece sooner.

Each piece has a libp2p stream of its own, which begins with a small window and costs some round
trips, so a long way takes many streams to fill. How many are asked of a donor follows from how long
its pieces take: where they come soon there is more under way, where they come late there is less.

A donor may take a request and send nothing: then another one is asked after a second, whoever brings
the piece first counts, and the silent donor is asked last for a while.

Results of slices are fetched here from first to last (`fetch_results`), whoever needs them.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from node.exchange.codecs.codec import CodecError
from node.exchange.outer_optimizer import OuterRules
from node.exchange.peers import (
    FalseAnswerError,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    Waits,
    WantResult,
)
from node.exchange.round.state import misfit
from node.heavy import cancelled
from protocol.wire.payload import Payload, PayloadHeader
from protocol.wire.rounds import NodeId, SliceOutcome

log = structlog.get_logger()

MOST_AT_ONCE = 16
"""Pieces under way from all donors together. What is in memory of them is bounded by this: with
chunks of a state, 32 MiB."""

FIRST_FROM_ONE = 2
"""Pieces under way from one donor at first, and at least: the second hides the round trips of the
first. Not more, for a donor may upload no faster than 256 kbit/s, and gives all pieces equal shares."""

MOST_FROM_ONE = 12
"""Pieces under way from one donor at most. A donor serves 24 streams of one peer."""

OVERDUE_FACTOR = 3.0
"""An overdue piece (Waits.overdue_seconds) takes so many times longer than the mean of those that came."""

SILENT_ROUND_TRIPS = 8
"""A donor is silent (Waits.silent_seconds) after so many round trips at least: a connection made anew is
five or six of them, and a stream one."""

Key = TypeVar("Key", bound=Hashable)


class Outcome(Enum):
    """What came of asking one donor for one piece."""

    ARRIVED = auto()
    LACKING = auto()  # it does not hold this piece; others it may
    REFUSED = auto()  # it has enough to do for us; or, when it does nothing for us, it is out
    OUT = auto()  # nothing more is asked of it: it is gone, or it lied


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[Key]):
    """One piece, asked of one donor."""

    key: Key
    donor: NodeId


class Silences:
    """The donors that were silent lately, as all fetches of a node found them. Pure: told the time."""

    def __init__(self, round_trip_seconds: Callable[[NodeId], float], waits: Waits) -> None:
        self.waits = waits
        self._round_trip_seconds = round_trip_seconds
        self._last_until: dict[NodeId, float] = {}

    def patience_seconds(self, donor: NodeId) -> float:
        """How long nothing may come of a donor that is asked."""
        return max(self.waits.silent_seconds, SILENT_ROUND_TRIPS * self._round_trip_seconds(donor))

    def note(self, donor: NodeId, now: float) -> None:
        """Has a donor asked last from now on."""
        self._last_until[donor] = now + self.waits.asked_last_seconds

    def forget(self, donor: NodeId) -> None:
        """Something has come of the donor."""
        self._last_until.pop(donor, None)

    def has(self, donor: NodeId, now: float) -> bool:
        """Whether the donor was silent lately."""
        return self._last_until.get(donor, -math.inf) > now


class Schedule(Generic[Key]):
    """Which piece to ask whom for next. Pure: no clock, no waiting.

    `wanted` names the pieces in the order in which they are needed, each with those who hold it for
    certain; `donors` are all that may be asked, the preferred first. `silences` outlives the schedule.
    """

    def __init__(
        self,
        wanted: Mapping[Key, Iterable[NodeId]],
        donors: Iterable[NodeId],
        silences: Silences,
    ) -> None:
        self._holders = {key: frozenset(holders) for key, holders in wanted.items()}
        self._waiting = dict.fromkeys(wanted)  # pieces that nobody is asked for
        self._under_way: dict[Job[Key], float] = {}  # since when
        self._lacking: set[Job[Key]] = set()
        self._arrival_seconds: list[float] = []
        self._widths: dict[NodeId, int] = {}  # pieces to have under way from a donor
        self._silences = silences
        self._quiet_since: dict[NodeId, float] = {}  # when something came last, or it was asked
        self.donors = list(dict.fromkeys(donors))

    def add_donor(self, donor: NodeId) -> None:
        """Asks one more for pieces, or one again that was out."""
        if donor not in self.donors:
            self.donors.append(donor)

    def begin(self, now: float) -> Job[Key] | None:
        """The next piece to ask for, which counts as under way from now on; None for none yet."""
        if len(self._under_way) >= MOST_AT_ONCE:
            return None
        busy = Counter(job.donor for job in self._under_way)
        free = [donor for donor in self.donors if busy[donor] < self.width_of(donor)]
        if not free:
            return None
        is_wanted = self._looks_for_overdue()
        overdue = [k for k, at in self._overdue_at().items() if at <= now] if is_wanted else []
        silent = frozenset(donor for donor in self.donors if self._is_silent(donor, now))
        job = self._choose(free, busy, silent, overdue)
        if job is not None:
            self._waiting.pop(job.key, None)
            self._under_way[job] = now
            if not busy[job.donor]:
                self._quiet_since[job.donor] = now
        return job

    def _choose(
        self,
        free: Sequence[NodeId],
        busy: Counter[NodeId],
        silent: frozenset[NodeId],
        overdue: Sequence[Key],
    ) -> Job[Key] | None:
        """For the first piece that somebody can be asked for, the best of those who can."""
        for key in (*self._waiting, *overdue):
            untried = [d for d in self.donors if not self._is_tried(Job(key=key, donor=d))]
            # One that sends and is only busy is waited for, rather than to ask one that is silent.
            asked = [d for d in untried if d not in silent] or untried
            able = [d for d in asked if d in free]
            if able:
                # Holders before others, the idle before the busy, the preferred before the rest.
                donor = min(able, key=lambda d: (d not in self._holders[key], busy[d]))
                return Job(key=key, donor=donor)
        return None

    def _looks_for_overdue(self) -> bool:
        """Whether more than one may be asked for a piece now."""
        return not self._waiting

    def hear(self, donor: NodeId, now: float) -> None:
        """Some bytes of a donor have come."""
        self._quiet_since[donor] = now
        self._silences.forget(donor)

    def fallen_silent(self, now: float) -> tuple[NodeId, ...]:
        """Donors that are silent now and were not known to be; they are from here on."""
        new = tuple(
            donor
            for donor in dict.fromkeys(job.donor for job in self._under_way)
            if self._silent_at(donor) <= now and not self._silences.has(donor, now)
        )
        for donor in new:
            self._silences.note(donor, now)
        return new

    def _is_silent(self, donor: NodeId, now: float) -> bool:
        is_asked = self._num_under_way(donor) > 0
        return self._silences.has(donor, now) or (is_asked and self._silent_at(donor) <= now)

    def _silent_at(self, donor: NodeId) -> float:
        """When a donor that is asked becomes silent, if nothing comes of it."""
        return self._quiet_since[donor] + self._silences.patience_seconds(donor)

    def width_of(self, donor: NodeId) -> int:
        """How many pieces may be under way from a donor now."""
        return self._widths.get(donor, FIRST_FROM_ONE)

    def seconds_until_overdue(self, now: float) -> float:
        """How long from now until `begin` may have more to give, if nothing else happens."""
        times = [self._silent_at(job.donor) for job in self._under_way]
        if self._looks_for_overdue():
            times += self._overdue_at().values()
        coming = [at - now for at in times if at > now]
        # Not so soon that a clock, rounding, wakes up before it over and over again.
        return max(min(coming, default=math.inf), 0.01)

    def end(self, job: Job[Key], outcome: Outcome, now: float) -> tuple[Job[Key], ...]:
        """Takes in what came of a job; returns the jobs that need not go on."""
        since = self._under_way.pop(job)
        if outcome is not Outcome.OUT:
            self.hear(job.donor, now)
        same = tuple(other for other in self._under_way if other.key == job.key)
        match outcome:
            case Outcome.ARRIVED:
                self._arrival_seconds.append(now - since)
                self._adapt(job.donor, now - since)
                for other in same:
                    del self._under_way[other]
                return same
            case Outcome.LACKING:
                self._lacking.add(job)
            case Outcome.REFUSED if num_others := self._num_under_way(job.donor):
                self._widths[job.donor] = num_others
            case Outcome.REFUSED | Outcome.OUT:  # what else is under way from it ends by itself
                self._widths.pop(job.donor, None)
                if job.donor in self.donors:
                    self.donors.remove(job.donor)
        if not same:
            self._waiting = {job.key: None, **self._waiting}  # it is needed before the others
        return ()

    def _num_under_way(self, donor: NodeId) -> int:
        return sum(job.donor == donor for job in self._under_way)

    def _adapt(self, donor: NodeId, seconds: float) -> None:
        """Learns from the time that a piece of a donor took how many are worth having under way.

        A way that is not full gives each piece the same time, so more come in it. One that is full
        gives each a smaller share, until they come late.
        """
        width = self.width_of(donor)
        if seconds < self._silences.waits.soon_seconds and width < MOST_FROM_ONE:
            self._widths[donor] = width + 1
        elif seconds > self._silences.waits.late_seconds and width > FIRST_FROM_ONE:
            self._widths[donor] = width - 1

    def _is_tried(self, job: Job[Key]) -> bool:
        return job in self._lacking or job in self._under_way

    def _overdue_at(self) -> dict[Key, float]:
        """When each piece under way is worth asking one more donor for.

        Where all that are asked for it are silent, however many; where only one is, also if it sends.
        """
        num_arrived = len(self._arrival_seconds)
        mean = sum(self._arrival_seconds) / num_arrived if num_arrived else 0.0
        seconds = max(self._silences.waits.overdue_seconds, OVERDUE_FACTOR * mean)
        num_asked = Counter(job.key for job in self._under_way)
        due: dict[Key, float] = {}
        for job, since in self._under_way.items():
            silent_at = self._silent_at(job.donor)
            if num_asked[job.key] == 1:
                due[job.key] = min(silent_at, since + seconds)
            else:
                due[job.key] = max(silent_at, due.get(job.key, silent_at))
        return due


async def fetch_pieces(
    schedule: Schedule[Key],
    fetch: Callable[[Key, NodeId, Callable[[], None]], Awaitable[Outcome]],
    news: asyncio.Event | None = None,
) -> None:
    """Works a schedule off; returns when all has come, or when nobody is left who could supply it.

    `news` says that donors have come, or have more to give. `fetch` calls its last argument whenever bytes
    come of the donor, and keeps what it got before it returns. What it raises ends everything under way.
    """
    clock = asyncio.get_running_loop().time
    tasks: dict[Job[Key], asyncio.Future[Outcome]] = {}
    told: asyncio.Future[Any] | None = None
    try:
        while True:
            if news is not None and (told is None or told.done()):
                news.clear()
                told = asyncio.ensure_future(news.wait())
            for donor in schedule.fallen_silent(clock()):
                log.info("a donor is silent", peer=donor, next_step="others are asked first")
            while (job := schedule.begin(clock())) is not None:
                heard = partial(_hear, schedule, job.donor)
                tasks[job] = asyncio.ensure_future(fetch(job.key, job.donor, heard))
            if not tasks:
                return
            seconds = schedule.seconds_until_overdue(clock())
            watched: list[asyncio.Future[Any]] = [*tasks.values()]
            await asyncio.wait(
                watched if told is None else [*watched, told],
                timeout=None if seconds == math.inf else seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for job, task in [(job, task) for job, task in tasks.items() if task.done()]:
                if tasks.pop(job, None) is None:
                    continue  # another one brought the piece in the same moment
                needless = schedule.end(job, task.result(), clock())
                await cancelled([tasks.pop(other) for other in needless])
    finally:
        await cancelled([*tasks.values(), *([] if told is None else [told])])


def _hear(schedule: Schedule[Key], donor: NodeId) -> None:
    schedule.hear(donor, asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Donors:
    """Who can be asked for what this node lacks, and over what."""

    node_id: NodeId  # ours
    transport: Transport
    peers: Callable[[], tuple[NodeId, ...]]  # all other members, those first that can be reached
    silences: Silences
    forgery: Callable[[PayloadHeader], str] = PayloadHeader.forgery
    process_of: Callable[[NodeId], int] = lambda node_id: 0
    """Of a member, as it announced; what another process of it signs is not believed."""

    @property
    def waits(self) -> Waits:
        """How long donors are waited for."""
        return self.silences.waits


async def fetch_results(
    wanted: Mapping[WantResult, SliceOutcome],
    take: Callable[[Payload], Awaitable[None]],
    *,
    of: Donors,
    peers: Iterable[NodeId],
    rules_in: Callable[[int], OuterRules],
) -> None:
    """Fetches results from those of the peers that hold them, as far as they deliver; holders first.

    Each goes to `take` when it is here: the very payload that was named, and as its slice must have
    it. What that raises CodecError for is as wrong at any donor.
    """

    async def fetch(want: WantResult, peer: NodeId, heard: Callable[[], None]) -> Outcome:
        outcome, downlink = wanted[want], rules_in(want.round).downlink
        max_body_bytes = downlink.most_bytes(outcome.num_elements)
        try:
            payload = await of.transport.fetch(
                peer,
                want,
                max_body_bytes=max_body_bytes,
                timeout_seconds=of.waits.for_fetch_of(max_body_bytes),
                heard=heard,
            )
        except NotHeldError:
            return Outcome.LACKING
        except (PeerUnreachableError, FalseAnswerError) as error:
            log.info("a donor does not deliver", peer=peer, why=str(error))
            return Outcome.OUT
        except TransferRefusedError as error:
            log.info("a donor refuses", peer=peer, why=str(error))
            return Outcome.REFUSED
        why = misfit(payload.header, outcome, downlink) or of.forgery(payload.header)
        if not why:
            try:
                await take(payload)
                return Outcome.ARRIVED
            except CodecError as error:
                why = str(error)
        log.warning("a result is malformed", peer=peer, why=why)
        return Outcome.LACKING

    holders = {want: outcome.holder_ids for want, outcome in wanted.items()}
    await fetch_pieces(Schedule(holders, peers, of.silences), fetch)
