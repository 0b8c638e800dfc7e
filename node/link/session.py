"""The link to the coordinator over time: attach, heartbeats, events, reports; again after every break.

A report is sent until the coordinator has answered it; after a break all reports of the round are
sent once more, which the coordinator takes as one.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from node.disk.history import KeptRulings
from node.heavy import cancelled
from node.link.calls import AskMembers, Attachment, CoordinatorLink
from protocol.errors import (
    PASSING,
    AtollError,
    CertificateRefusedError,
    CopyAttachedError,
    HeldBackError,
    OtherSwarmError,
    TemporaryError,
    UnavailableError,
)
from protocol.terminal.console import seconds_in_words
from protocol.trust.rulings import SignedRuling, follows, num_in_a_message
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.messages import Message, Report, RulingsTold
from protocol.wire.rounds import Commit
from protocol.wire.vitals import Announcement, Vitals

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.5

MOST_REPORTS = 64
"""Sent in one call: what has gathered while the call before was answered."""

RENEW_AGAIN_SECONDS = 300.0
"""After a renewal that did not work; half of a day is left for it."""

CLOCK_OFF_SECONDS = 300.0
"""By so much a machine's clock may differ from the coordinator's without a word."""

LOOK_ELSEWHERE_SECONDS = 20.0
"""A coordinator that is away for so long may have moved without our hearing of it. A restart takes less."""

FIRST_TOLD_AGAIN_SECONDS = 60.0
LAST_TOLD_AGAIN_SECONDS = 3600.0
"""A coordinator that stays away is told of again after the first, then ever more seldom, up to the last."""

MOST_REASONS = 8
"""Of one absence that are told at once: some have a number in them that changes with each try."""

LEAVE_SECONDS = 3.0
"""A goodbye that takes longer is left out: the lease ends anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSide:
    """What a session asks its node, and what it tells it."""

    announce: Callable[[], Announcement]
    vitals: Callable[[], Vitals]
    on_attached: Callable[[Attachment], None]
    on_message: Callable[[Message], None]
    ask_members: AskMembers | None = None
    """Asks those that are connected where the coordinator is."""


@dataclass(slots=True, kw_only=True)
class _Queued:
    """A report on its way. It may be wanted again while a call that has it is not answered yet."""

    round: int
    report: Report
    times_wanted: int = 1
    times_answered: int = 0

    @property
    def is_answered(self) -> bool:
        """Whether nothing of it is left to be sent."""
        return self.times_answered == self.times_wanted


class Absence:
    """Which tries of a coordinator that is away are told: else those of a weekend fill the log."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._reasons: set[str] = set()
        self._pause_seconds = FIRST_TOLD_AGAIN_SECONDS
        self._again_at = since + self._pause_seconds

    def is_told(self, why: str, now: float) -> bool:
        """Whether this try is: each new reason is, and one that lasts ever more seldom."""
        is_new = why not in self._reasons and len(self._reasons) < MOST_REASONS
        if is_new:  # two addresses have one each, in turns
            self._reasons.add(why)
        if now >= self._again_at:
            self._pause_seconds = min(2 * self._pause_seconds, LAST_TOLD_AGAIN_SECONDS)
            self._again_at = now + self._pause_seconds
            return True
        return is_new


class Session:
    """Keeps a node attached."""

    def __init__(
        self,
        *,
        link: CoordinatorLink,
        node: NodeSide,
        rng: random.Random,
        rulings: KeptRulings,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._link = link
        self._looking: asyncio.Task[bool] | None = None
        self._wall_clock = wall_clock
        self._rulings = rulings
        self._node = node
        self._to_bring: tuple[SignedRuling, ...] = ()  # rulings that the coordinator lacks
        self._rng = rng
        self._reports: list[_Queued] = []  # of the latest rounds, in order
        self._reports_changed = asyncio.Event()
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._session_id: int | None = None
        self._has_moved = asyncio.Event()

    def move(self) -> None:
        """Attaches anew at once, over a new connection: the node has another address.

        A call that is under way, or a pause between two tries, does not hold it up.
        """
        self._has_moved.set()

    def report(self, round: int, report: Report) -> None:
        """Queues a report; reports of rounds before the last one are forgotten."""
        kept = [queued for queued in self._reports if queued.round >= round - 1]
        self._reports = [*kept, _Queued(round=round, report=report)]
        self._all_answered.clear()
        self._reports_changed.set()

    def repeat(self, round: int) -> None:
        """Sends the reports of a round once more: the coordinator's memory of it may be new."""
        for queued in self._reports:
            if queued.round == round:
                queued.times_wanted += 1
                self._all_answered.clear()
        self._reports_changed.set()

    def withdraw(self, round: int) -> None:
        """Forgets the reports of a round: they are of another plan."""
        self._reports = [queued for queued in self._reports if queued.round != round]

    def withdraw_after(self, round: int) -> None:
        """Forgets the reports of later rounds: they are undone."""
        self._reports = [queued for queued in self._reports if queued.round <= round]

    async def run(self) -> None:
        """Stays attached until cancelled. Raises what no waiting can mend (AtollError)."""
        while True:
            staying = asyncio.ensure_future(self._stay_attached())
            moving = asyncio.ensure_future(self._has_moved.wait())
            try:
                await asyncio.wait([staying, moving], return_when=asyncio.FIRST_COMPLETED)
                if staying.done():
                    staying.result()
            finally:
                await cancelled((staying, moving, *self._end_looking()))
            self._has_moved.clear()
            self._session_id = None
            self._link.reconnect()

    async def _stay_attached(self) -> None:
        clock = asyncio.get_running_loop().time
        pause_seconds = FIRST_PAUSE_SECONDS
        waits_for = ""
        absence: Absence | None = None
        while True:
            attached_at = math.inf
            try:
                attachment = await self._link.attach(
                    self._node.announce(),
                    num_rulings=self._rulings.number,
                    rulings_digest=self._rulings.digest,
                )
                attached_at, absence = clock(), None
                self._end_looking()
                self._session_id = attachment.session_id
                for queued in self._reports:
                    queued.times_wanted += 1
                    self._all_answered.clear()
                _tell_of_clock(attachment.unix_seconds - self._wall_clock(), attachment)
                self._take_rulings(attachment)
                self._node.on_attached(attachment)
                await self._while_attached(attachment)
            except PASSING as error:
                self._session_id = None
                absence = Absence(clock()) if absence is None else absence
                away_seconds = clock() - absence.since
                if isinstance(error, UnavailableError | OtherSwarmError):
                    self._link.reconnect()
                    if away_seconds >= LOOK_ELSEWHERE_SECONDS:
                        self._look_elsewhere()
                # A coordinator that ends sessions at once must not be asked ever faster.
                if clock() - attached_at > RETRY_CAP_SECONDS:
                    pause_seconds = FIRST_PAUSE_SECONDS
                # Full jitter: nodes that lost a coordinator together must not return together.
                pause = self._rng.uniform(0, pause_seconds)
                is_held_back = isinstance(error, CopyAttachedError | HeldBackError)
                if not is_held_back:
                    if absence.is_told(error.what, clock()):
                        log.warning(
                            "coordinator away",
                            why=error.what,
                            away_seconds=round(away_seconds),
                            next_try_seconds=round(pause, 1),
                        )
                elif error.what != waits_for:  # once: it may wait for days
                    is_copy = isinstance(error, CopyAttachedError)
                    log.error(
                        "not attached: this node's key is in use"
                        if is_copy
                        else "not attached: the run owner holds this node back",
                        why=error.what,
                        next_step=error.next_step,
                    )
                waits_for = error.what if is_held_back else ""
                await asyncio.sleep(pause)
                pause_seconds = min(2 * pause_seconds, RETRY_CAP_SECONDS)

    def _look_elsewhere(self) -> None:
        """Beside further tries, which nobody's answer is to hold up."""
        if self._node.ask_members is None:
            return
        if self._looking is not None and self._looking.done():
            self._looking.result()  # raises what nobody has foreseen
            self._looking = None
        if self._looking is None:
            looking = self._link.look_elsewhere(self._node.ask_members)
            self._looking = asyncio.ensure_future(looking)

    def _end_looking(self) -> list[asyncio.Task[bool]]:
        """Ends what `_look_elsewhere` began; returns it, to be waited for."""
        ended = [] if self._looking is None else [self._looking]
        self._looking = None
        for looking in ended:
            looking.cancel()
        return ended

    def _take_rulings(self, attachment: Attachment) -> None:
        """Keeps the rulings that came with the session, before anything is done by them."""
        told = frozenset(attachment.rulings)
        known = attachment.num_rulings
        has_prefix = self._rulings.digest_at(known) == attachment.rulings_digest
        has_ours = bool(attachment.rulings) and follows(
            attachment.rulings[0].ruling, next(reversed(self._rulings.rulings), None)
        )
        lacking = () if has_ours else self._rulings.after(known if has_prefix else 0)
        if lacking:
            self._to_bring = tuple(one for one in lacking if one not in told)
        if attachment.rulings:
            self._node.on_message(_told(attachment.rulings))
        if self._rulings.number < attachment.num_rulings:
            raise TemporaryError("there are more rulings than one answer has room for")

    async def _bring_rulings(self, attachment: Attachment) -> None:
        """Brings back the rulings that the coordinator lacks: it goes on from an older copy."""
        if self._to_bring:
            log.warning("the coordinator lacks rulings", rulings=len(self._to_bring))
            some = num_in_a_message(one.ruling for one in self._to_bring)
            await self._link.submit_rulings(attachment.session_id, self._to_bring[:some])
            self._to_bring = self._to_bring[some:]

    async def bring_back(
        self, commits_after: Callable[[int], tuple[Commit, ...]], round: int
    ) -> bool:
        """Submits commits after a round, batch by batch, as long as the coordinator can use them.

        That its newest round is as new as a batch says so; it may have had some of it. Then says that
        this was all. A break of the session ends it, and False is returned: the coordinator asks
        again. True when it has been told, or has refused what it was told.
        """
        try:
            while (session_id := self._session_id) is not None:
                commits = commits_after(round)
                known = await self._link.submit_commits(session_id, commits)
                if not commits:
                    return True
                round = commits[-1].round
                if known < round:
                    await self._link.submit_commits(session_id, ())
                    return True
        except AtollError as error:
            log.warning("commits not brought back", why=error.what)
            return not isinstance(error, PASSING)
        return False

    async def tell_vitals(self) -> None:
        """Sends a heartbeat out of turn, and waits until it is heard; at most for a while."""
        if self._session_id is None:
            return
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._link.heartbeat(self._session_id, self._node.vitals())
        except (AtollError, TimeoutError) as error:  # the next one tells it too
            log.debug("a heartbeat out of turn was not heard", why=str(error))

    async def leave(self, reason: str) -> None:
        """Says goodbye, with a last heartbeat that holds the final state and bytes.

        Call it when `run` has ended: it would take the end of the session for a break, and attach.
        """
        if self._session_id is None:
            return
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._link.heartbeat(self._session_id, self._node.vitals())
                await self._link.detach(self._session_id, reason)
        except (AtollError, TimeoutError) as error:
            log.info("left without a goodbye", why=str(error))

    async def flush(self, *, timeout_seconds: float) -> None:
        """Waits until every report is answered, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._all_answered.wait()

    async def _while_attached(self, attachment: Attachment) -> None:
        """Returns never; raises the first error of the four conversations."""
        conversations = [
            asyncio.ensure_future(conversation)
            for conversation in (
                self._send_heartbeats(attachment),
                self._send_reports(attachment.session_id),
                self._take_messages(attachment),
                self._renew_certificates(attachment),
            )
        ]
        try:
            done, _ = await asyncio.wait(conversations, return_when=asyncio.FIRST_COMPLETED)
            for conversation in done:
                conversation.result()
        finally:
            await cancelled(conversations)

    async def _send_heartbeats(self, attachment: Attachment) -> None:
        had_copy = False
        while True:
            has_copy = await self._link.heartbeat(attachment.session_id, self._node.vitals())
            if has_copy and not had_copy:
                log.warning(
                    "another process with this node's key asks to attach, and waits until this one ends",
                    next_step=CopyAttachedError.NEXT_STEP,
                )
            elif had_copy and not has_copy:
                log.info("the other process with this node's key does not ask to attach now")
            had_copy = has_copy
            await asyncio.sleep(attachment.heartbeat_seconds)

    async def _renew_certificates(self, attachment: Attachment) -> None:
        """Renews when the coordinator says, by its clock: this machine's may be years off."""
        renew, seconds = self._link.renew, attachment.renew_in_seconds
        while renew is not None and seconds > 0:
            # Nodes that attached together are not to come together.
            await asyncio.sleep(seconds * self._rng.uniform(0.9, 1.0))
            try:
                seconds = await renew()
                log.info("the certificate is renewed", next_in_seconds=round(seconds))
            except (CertificateRefusedError, UnavailableError, TemporaryError) as error:
                seconds = RENEW_AGAIN_SECONDS
                log.warning("the certificate is not renewed yet", why=error.what)
        await asyncio.Event().wait()  # the others decide when the session ends

    async def _send_reports(self, session_id: int) -> None:
        while True:
            self._reports_changed.clear()
            # Looked for anew each time: some may have been withdrawn while a call was answered.
            waiting = [queued for queued in self._reports if not queued.is_answered]
            if batch := [(queued, queued.times_wanted) for queued in waiting[:MOST_REPORTS]]:
                await self._link.report(session_id, [(q.round, q.report) for q, _ in batch])
                for queued, times_wanted in batch:
                    queued.times_answered = times_wanted
            else:
                self._all_answered.set()
                await self._reports_changed.wait()

    async def _take_messages(self, attachment: Attachment) -> None:
        await self._bring_rulings(attachment)
        try:
            async for message in self._link.messages(
                attachment.session_id,
                num_rulings=self._rulings.number,
                rulings_digest=self._rulings.digest,
            ):
                self._node.on_message(message)
        except CertificateRefusedError as error:
            # What that comes to is the next attach's to find out.
            raise TemporaryError(error.what, next_step=error.next_step) from error
        raise TemporaryError("the coordinator ended the stream of messages")


def _tell_of_clock(off_seconds: float, attachment: Attachment) -> None:
    """Nothing here goes by it, but logs do, and what fetches data from URLs."""
    if attachment.unix_seconds and abs(off_seconds) > CLOCK_OFF_SECONDS:
        which = "behind" if off_seconds > 0 else "ahead of"
        log.warning(
            f"this machine's clock is {seconds_in_words(abs(off_seconds))} {which} the coordinator's",
            next_step="set it, as with 'timedatectl set-ntp true'; training goes on meanwhile",
        )


def _told(signed: tuple[SignedRuling, ...]) -> RulingsTold:
    return RulingsTold(
        rulings=tuple(one.ruling for one in signed),
        signatures=tuple(one.signature for one in signed),
    )
