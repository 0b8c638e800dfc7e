"""The link to the coordinator over time, against a link that breaks when told to."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import structlog.testing

from node.disk.history import KeptRulings
from node.link.calls import Attachment, CoordinatorLink
from node.link.session import (
    LAST_TOLD_AGAIN_SECONDS,
    LEAVE_SECONDS,
    LOOK_ELSEWHERE_SECONDS,
    MOST_REASONS,
    MOST_REPORTS,
    NodeSide,
    Session,
)
from protocol.errors import (
    AtollError,
    CertificateRefusedError,
    NotPermittedError,
    OtherSwarmError,
    SessionEndedError,
    UnavailableError,
)
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import NO_DIGEST, RUN_OWNER, Ruling, RulingKind, SignedRuling, digest_of
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.messages import EvaluationAsked, Held, Message, Report, RulingsTold
from protocol.wire.rounds import Commit, Digest
from tests.unit.exchange_scene import in_virtual_time

HEARTBEAT_SECONDS = 3.0
AWAY = UnavailableError("the coordinator is away")


def report(number: int) -> Held:
    return Held(slice_index=number, digest=Digest(b""))


def slice_of(report: Report) -> int:
    assert isinstance(report, Held)
    return report.slice_index


class Link(CoordinatorLink):
    """A coordinator's side that notes what is called and when."""

    renew: Callable[[], Awaitable[float]] | None = None

    def __init__(self) -> None:
        self.error: AtollError | None = None  # what every call ends with
        self.is_slow = False
        self.renew_in_seconds = 0.0
        self.unix_seconds = 0.0
        self.attached_at: list[float] = []
        self.heartbeats: list[tuple[int, Any]] = []
        self.reports: list[tuple[int, int, Report]] = []
        self.calls: list[int] = []  # how many reports each brought
        self.goodbyes: list[tuple[int, str]] = []
        self.num_reconnects = 0
        self.rulings: tuple[SignedRuling, ...] = ()  # that it knows
        self.brought: list[SignedRuling] = []
        self.looked_at: list[float] = []
        self.look_seconds = 0.0
        self._events: asyncio.Queue[Message | AtollError] = asyncio.Queue()

    def say(self, event: Message | AtollError) -> None:
        self._events.put_nowait(event)

    async def attach(
        self, announcement: Any, *, num_rulings: int = 0, rulings_digest: Digest = NO_DIGEST
    ) -> Attachment:
        await self._call()
        self._events = asyncio.Queue()
        self.attached_at.append(asyncio.get_running_loop().time())
        known = [signed.ruling for signed in self.rulings]
        is_prefix = digest_of(known[:num_rulings]) == rulings_digest
        return Attachment(
            num_rulings=len(known),
            rulings_digest=digest_of(known),
            rulings=self.rulings[num_rulings if is_prefix else 0 :],
            session_id=len(self.attached_at),
            heartbeat_seconds=HEARTBEAT_SECONDS,
            committed_round=0,
            renew_in_seconds=self.renew_in_seconds,
            unix_seconds=self.unix_seconds,
        )

    async def heartbeat(self, session_id: int, vitals: Any) -> bool:
        await self._call()
        self.heartbeats.append((session_id, vitals))
        return False

    async def report(self, session_id: int, reports: Sequence[tuple[int, Report]]) -> None:
        await self._call()
        self.calls.append(len(reports))
        self.reports += [(session_id, round_, report) for round_, report in reports]

    async def look_elsewhere(self, ask: Any) -> bool:
        self.looked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.look_seconds)
        return bool(await ask(None))

    def reconnect(self) -> None:
        self.num_reconnects += 1
        self.is_slow = False  # it was the connection

    async def submit_rulings(self, session_id: int, rulings: Sequence[SignedRuling]) -> int:
        self.brought += rulings
        return len(self.brought)

    async def detach(self, session_id: int, reason: str) -> None:
        await self._call()
        self.goodbyes.append((session_id, reason))

    async def messages(self, session_id: int, **_: object) -> AsyncIterator[Message]:
        while True:
            event = await self._events.get()
            if isinstance(event, AtollError):
                raise event
            yield event

    async def _call(self) -> None:
        await asyncio.sleep(1e6 if self.is_slow else 0)
        if self.error is not None:
            raise self.error


def session_on(link: Link, **wants: Any) -> Session:
    return Session(
        link=link,
        node=NodeSide(
            announce=lambda: None,  # type: ignore[arg-type,return-value]
            vitals=lambda: "vitals",  # type: ignore[arg-type,return-value]
            on_attached=wants.get("on_attached", lambda attachment: None),
            on_message=wants.get("on_message", lambda event: None),
            ask_members=wants.get("ask_members"),
        ),
        rng=random.Random(0),
        rulings=wants.get("rulings") or KeptRulings(RunSpec()),
        wall_clock=wants.get("wall_clock", lambda: 0.0),
    )


async def started(session: Session) -> asyncio.Task[None]:
    running = asyncio.create_task(session.run())
    await asyncio.sleep(1)
    return running


async def ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_heartbeats_go_on_and_messages_arrive() -> None:
    link = Link()
    heard: list[Message] = []
    running = await started(session_on(link, on_message=heard.append))
    link.say(EvaluationAsked(round=3))
    await asyncio.sleep(10 * HEARTBEAT_SECONDS)
    assert len(link.heartbeats) == 11
    assert heard == [EvaluationAsked(round=3)]
    assert len(link.attached_at) == 1
    await ended(running)


@in_virtual_time
async def test_a_node_that_has_moved_attaches_anew_at_once_though_a_call_hangs() -> None:
    link = Link()
    session = session_on(link)
    running = await started(session)
    session.report(1, report(1))
    await asyncio.sleep(1)
    link.is_slow = True  # nothing comes back over the connection that there is
    session.report(1, report(2))
    await asyncio.sleep(5)
    assert len(link.attached_at) == 1
    moved_at = asyncio.get_running_loop().time()
    session.move()
    await asyncio.sleep(1)
    assert link.attached_at[1:] == [moved_at]
    assert link.num_reconnects == 1
    assert [(s, slice_of(r)) for s, _, r in link.reports] == [(1, 1), (2, 1), (2, 2)]
    await ended(running)


@in_virtual_time
async def test_a_node_that_has_moved_does_not_wait_for_its_next_try() -> None:
    link = Link()
    link.error = AWAY
    session = session_on(link)
    running = await started(session)
    await asyncio.sleep(60)  # pauses are at their longest
    link.error = None
    moved_at = asyncio.get_running_loop().time()
    session.move()
    await asyncio.sleep(0.001)
    assert link.attached_at == [moved_at]
    await ended(running)


@in_virtual_time
async def test_each_try_after_a_break_goes_over_a_new_connection() -> None:
    link = Link()
    running = await started(session_on(link))
    link.error = AWAY
    link.say(AWAY)
    await asyncio.sleep(30)
    link.error = None
    await asyncio.sleep(RETRY_CAP_SECONDS)
    assert len(link.attached_at) == 2
    assert link.num_reconnects > 2
    await ended(running)


@in_virtual_time
async def test_a_node_waits_while_another_runs_coordinator_is_in_the_place_of_its_own() -> None:
    link = Link()
    running = await started(session_on(link))
    other = OtherSwarmError("the coordinator at h:1 is not of swarm s")
    link.error = other
    link.say(
        CertificateRefusedError(other.what)
    )  # as a stream finds it, which gets no new certificate
    with structlog.testing.capture_logs() as logs:
        await asyncio.sleep(60)
    assert next(e["why"] for e in logs if e["event"] == "coordinator away") == other.what
    link.error = None
    await asyncio.sleep(RETRY_CAP_SECONDS + 1)
    assert len(link.attached_at) == 2
    await ended(running)


@in_virtual_time
async def test_commits_are_brought_again_where_another_runs_coordinator_came_between() -> None:
    class Replaced(Link):
        async def submit_commits(self, session_id: int, commits: tuple[Commit, ...]) -> int:
            raise OtherSwarmError("the coordinator at h:1 is not of swarm s")

    session = session_on(Replaced())
    running = await started(session)
    assert not await session.bring_back(lambda after: (), 0)
    await ended(running)


@in_virtual_time
async def test_a_coordinator_that_is_away_for_two_days_is_told_of_at_once_and_then_ever_more_seldom() -> (
    None
):
    link = Link()
    clock = asyncio.get_running_loop().time
    running = await started(session_on(link))
    with structlog.testing.capture_logs() as logs:

        def told() -> list[float]:
            return [e["away_seconds"] for e in logs if e["event"] == "coordinator away"]

        for number in range(20):  # two addresses in turns, and a number that changes
            link.error = UnavailableError(f"nobody is at {number % 2}, port {number // 2}")
            if not number:
                link.say(AWAY)
            await asyncio.sleep(RETRY_CAP_SECONDS)
        assert len(told()) <= MOST_REASONS + 2 and told()[0] == 0
        link.error = AWAY
        away_since = clock() - told()[-1]
        await asyncio.sleep(48 * 3600)
        assert 48 < len(told()) < 70
        pauses = [later - sooner for sooner, later in pairwise(told()[MOST_REASONS:])]
        assert max(pauses) < 1.1 * LAST_TOLD_AGAIN_SECONDS
        assert told()[-1] == pytest.approx(clock() - away_since, abs=2 * LAST_TOLD_AGAIN_SECONDS)
        logs.clear()
        link.error = None
        await asyncio.sleep(RETRY_CAP_SECONDS)
        link.error = AWAY  # and again, which is news
        link.say(AWAY)
        await asyncio.sleep(RETRY_CAP_SECONDS)
        assert told() == [0]
    link.error = None
    await ended(running)


@in_virtual_time
async def test_members_are_asked_for_a_coordinator_that_is_away_for_long_while_tries_go_on() -> (
    None
):
    asked: list[object] = []

    async def ask_members(credentials: object) -> list[object]:
        asked.append(credentials)
        return []

    link = Link()
    running = await started(session_on(link, ask_members=ask_members))
    link.error = AWAY
    link.say(AWAY)
    await asyncio.sleep(LOOK_ELSEWHERE_SECONDS - 1)
    assert not link.looked_at  # a restart takes less
    link.look_seconds = 1e6
    await asyncio.sleep(60)
    assert len(link.looked_at) == 1 and not asked  # nobody has answered yet
    link.error = None
    await asyncio.sleep(RETRY_CAP_SECONDS)
    assert len(link.attached_at) == 2  # and that held up nothing
    link.look_seconds, link.error = 0, AWAY
    link.say(AWAY)
    await asyncio.sleep(LOOK_ELSEWHERE_SECONDS + 2 * RETRY_CAP_SECONDS)
    assert len(link.looked_at) >= 2 and asked
    await ended(running)


@in_virtual_time
async def test_no_report_is_lost_when_the_coordinator_goes_away() -> None:
    link = Link()
    session = session_on(link)
    running = await started(session)
    session.report(1, report(1))
    await asyncio.sleep(1)
    link.error = AWAY
    session.report(1, report(2))  # fails while it is sent
    await asyncio.sleep(60)
    session.report(2, report(3))  # made while nobody is there
    link.error = None
    await asyncio.sleep(60)
    # What the coordinator answered may still be lost with it: all are sent again, in order.
    assert [(s, n, slice_of(r)) for s, n, r in link.reports] == [
        (1, 1, 1),
        (2, 1, 1),
        (2, 1, 2),
        (2, 2, 3),
    ]
    await ended(running)


@in_virtual_time
async def test_what_gathers_while_a_call_is_answered_goes_out_in_the_next() -> None:
    link = Link()
    session = session_on(link)
    running = await started(session)
    for number in range(MOST_REPORTS + 3):
        session.report(1, report(number))
    await asyncio.sleep(1)
    assert link.calls == [MOST_REPORTS, 3]
    assert [slice_of(r) for _, _, r in link.reports] == list(range(MOST_REPORTS + 3))
    await ended(running)


@pytest.mark.parametrize("change", ["repeat", "withdraw"])
@in_virtual_time
async def test_what_changes_while_a_call_is_answered_is_not_overwritten_by_its_answer(
    change: str,
) -> None:
    link, answered = Link(), asyncio.Event()
    call = link._call

    async def answer_when_told() -> None:
        await answered.wait()
        await call()

    session = session_on(link)
    running = await started(session)
    link._call = answer_when_told  # type: ignore[method-assign]
    for number in range(MOST_REPORTS + 1):
        session.report(1, report(number))
    await asyncio.sleep(1)  # the first batch is on its way
    flushing = asyncio.create_task(session.flush(timeout_seconds=100))
    if change == "repeat":
        session.repeat(1)
    else:
        session.withdraw(1)
        session.report(1, report(1000))
    answered.set()
    await asyncio.sleep(1)
    sent = [slice_of(r) for _, _, r in link.reports]
    first = list(range(MOST_REPORTS))
    if change == "repeat":
        assert sorted(sent) == sorted([*first, *first, MOST_REPORTS])
    else:
        assert sent == [*first, 1000]  # the rest of the other plan stays here
    assert flushing.done()
    await ended(running)


@in_virtual_time
async def test_reports_of_rounds_long_past_are_not_kept() -> None:
    session = session_on(Link())
    for number in range(1, 100):
        session.report(number, report(number))
    assert [queued.round for queued in session._reports] == [98, 99]


@in_virtual_time
async def test_a_flush_ends_when_all_is_answered_or_its_time_is_over() -> None:
    link, clock = Link(), asyncio.get_running_loop().time
    session = session_on(link)
    await session.flush(timeout_seconds=5)
    assert clock() == 0  # nothing to flush
    session.report(1, report(1))
    await session.flush(timeout_seconds=5)
    assert clock() == 5  # nobody is attached
    running = await started(session)
    await session.flush(timeout_seconds=5)
    assert clock() == 6
    assert len(link.reports) == 1
    await ended(running)


@in_virtual_time
async def test_sessions_that_end_at_once_are_opened_ever_more_slowly() -> None:
    """Whatever ends them: the coordinator is not asked ever faster."""
    link = Link()

    def end(attachment: Attachment) -> None:
        link.say(SessionEndedError("the node attached anew"))

    running = await started(session_on(link, on_attached=end))
    await asyncio.sleep(600)
    assert len(link.attached_at) < 2 * 600 / RETRY_CAP_SECONDS + 20
    await ended(running)


@in_virtual_time
async def test_a_long_session_that_breaks_is_opened_again_at_once() -> None:
    link, clock = Link(), asyncio.get_running_loop().time
    link.error = AWAY
    running = await started(session_on(link))
    await asyncio.sleep(600)  # pauses are long by now
    link.error = None
    await asyncio.sleep(600)
    broken_at = clock()
    link.say(SessionEndedError("the coordinator restarts"))
    await asyncio.sleep(60)
    assert link.attached_at[-1] - broken_at < 1
    await ended(running)


@in_virtual_time
async def test_what_no_waiting_can_mend_ends_it() -> None:
    link = Link()
    running = await started(session_on(link))
    link.error = NotPermittedError("this node was removed")
    with pytest.raises(NotPermittedError):
        await asyncio.wait_for(running, 10)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_goodbye_comes_with_a_last_heartbeat_and_hangs_nobody() -> None:
    link, clock = Link(), asyncio.get_running_loop().time
    session = session_on(link)
    await session.leave("never attached")
    running = await started(session)
    await ended(running)
    num_heartbeats = len(link.heartbeats)
    await session.leave("enough")
    assert len(link.heartbeats) == num_heartbeats + 1
    assert link.goodbyes == [(1, "enough")]
    link.error = SessionEndedError("gone")
    await session.leave("refused")
    link.is_slow, before = True, clock()
    await session.leave("nobody answers")
    assert clock() - before == LEAVE_SECONDS
    assert len(link.goodbyes) == 1


@in_virtual_time
async def test_a_certificate_is_renewed_by_the_coordinators_clock_and_again_where_that_fails() -> (
    None
):
    link, asked = Link(), []
    clock = asyncio.get_running_loop().time

    async def renew() -> float:
        asked.append(clock())
        if len(asked) == 2:
            raise UnavailableError("away")
        return 1000.0

    link.renew, link.renew_in_seconds = renew, 100.0
    running = await started(session_on(link))
    await asyncio.sleep(2500)
    first, second, third, fourth = asked
    assert 90 <= first <= 101 and 900 <= second - first <= 1000
    assert 270 <= third - second <= 300 and 900 <= fourth - third <= 1000
    assert len(link.attached_at) == 1  # in one session
    await ended(running)


@in_virtual_time
async def test_a_node_that_may_not_renew_ends_with_the_reason() -> None:
    link = Link()

    async def refused() -> float:
        raise NotPermittedError("node-a is expelled")

    link.renew, link.renew_in_seconds = refused, 1.0
    with pytest.raises(NotPermittedError, match="node-a is expelled"):
        await session_on(link).run()


@in_virtual_time
async def test_a_wrong_clock_is_one_sentence_and_no_reason_to_stay_out() -> None:
    for clock, words in ((1e9, "ahead of"), (-1e9, "behind"), (250.0, "")):
        link = Link()
        link.unix_seconds = 1.0
        with structlog.testing.capture_logs() as logs:
            running = await started(session_on(link, wall_clock=lambda clock=clock: clock))
            await ended(running)
        told = [line["event"] for line in logs if "clock" in line["event"]]
        assert len(told) == bool(words) and all(words in event for event in told)
        assert len(link.attached_at) == 1


def ruled(*reasons: str) -> tuple[SignedRuling, ...]:
    made: list[Ruling] = []
    for reason in reasons:
        ruling = Ruling(
            number=len(made) + 1,
            before=digest_of(made).hex(),
            kind=RulingKind.RESUMED,
            by=RUN_OWNER,
            unix_seconds=1.5,
            reason=reason,
        )
        made.append(ruling)
    return tuple(SignedRuling(ruling=ruling, signature=b"s") for ruling in made)


@pytest.mark.parametrize(
    ("here", "there", "brought"),
    [
        (2, 3, 0),  # the node slept while one more was made
        (0, 3, 0),
        (3, 3, 0),
        (3, 2, 1),  # the coordinator goes on from an older copy
        (3, 0, 3),
    ],
)
@in_virtual_time
async def test_rulings_are_brought_back_only_to_a_coordinator_that_lacks_them(
    here: int, there: int, brought: int
) -> None:
    made, link, rulings = ruled("one", "two", "three"), Link(), KeptRulings(RunSpec())
    rulings.take(made[:here])
    link.rulings = made[:there]

    def take(told: Message) -> None:
        assert isinstance(told, RulingsTold)
        rulings.take(made[told.rulings[0].number - 1 :][: len(told.rulings)])

    with structlog.testing.capture_logs() as logs:
        await ended(await started(session_on(link, rulings=rulings, on_message=take)))
    assert rulings.number == max(here, there)
    assert link.brought == list(made[there : there + brought])
    assert any(line["event"] == "the coordinator lacks rulings" for line in logs) == bool(brought)
