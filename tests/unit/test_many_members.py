"""More than a thousand members: nothing is refused for their number, and work grows as they do.

Work is counted in lines of Python that the core runs, so that no machine's speed decides.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import coordinator.swarm
from coordinator.driver import Driver, LoopClock
from coordinator.journal import log_transition
from coordinator.services import session
from coordinator.services.session import MOST_OUT_OF_REACH, SentMessages, SessionDesk
from coordinator.services.status import MOST_LOSSES, StatusDesk
from coordinator.store import Store
from coordinator.streams import Telemetry
from coordinator.swarm import rounds
from coordinator.swarm.events import Event, HeartbeatSeen, Reported, ReportedTogether
from coordinator.swarm.ledger import Ledger, Places, lease, reopen, settle
from coordinator.swarm.members import Member
from coordinator.swarm.opening import MOST_REDUCERS
from coordinator.swarm.reach import best_reducers
from coordinator.swarm.state import (
    REMEMBERED,
    HeldOut,
    Round,
    SliceProgress,
    SwarmState,
    remembered,
)
from coordinator.swarm.transition import next_deadline, step
from coordinator.swarm.weighing import say_of
from protocol.errors import BadDataError
from protocol.run.run_spec import RunSpec
from protocol.trust.rulings import Ruling, RulingKind
from protocol.trust.signing import CommitSigner
from protocol.v1 import session_pb2, status_pb2
from protocol.wire.messages import Held, RulingsTold
from protocol.wire.payload import RESULT, PayloadHeader
from protocol.wire.rounds import Assignment, NodeId
from tests.unit.payload_scene import sealed
from tests.unit.swarm_scene import INITIAL, LAYOUT, RUN, TOKENS, Scene, digest_of

SWARM = str(Path(coordinator.swarm.__file__).parent)
SIGNER = CommitSigner(Ed25519PrivateKey.generate())
LARGE = replace(LAYOUT, fragment_elements=(1 << 26,))
MANY = 1100


def lines_run(work: Callable[[], object]) -> int:
    """Lines of coordinator.swarm and of the journal that ran, each as often as it did."""
    count = 0

    def in_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_line

    def in_call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return in_line if name.startswith(SWARM) or name.endswith("journal.py") else None

    before = sys.gettrace()
    sys.settrace(in_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(work_of: Callable[[int], Callable[[], object]], num: int) -> None:
    """Twice as many members are hardly more than twice the work."""
    once, twice = lines_run(work_of(num)), lines_run(work_of(2 * num))
    assert once > num / 4, "it must look at them"
    assert twice < 2.5 * once


def names_of(num_nodes: int) -> list[str]:
    return [f"node-{number:05}" for number in range(num_nodes)]


def scene_of(num_nodes: int) -> Scene:
    scene = Scene(min_nodes=num_nodes, layout=LARGE, slice_elements=1 << 20)
    scene.attach(*names_of(num_nodes))
    return scene


def half_cut_off(num_nodes: int) -> list[Member]:
    """Of all, every second one does not reach sixteen others."""
    names = [NodeId(name) for name in names_of(num_nodes)]
    members = scene_of(num_nodes).state.members
    return [
        replace(members[name], unreachable=tuple(names[place + 1 : place + 17]))
        if place % 2
        else members[name]
        for place, name in enumerate(names)
    ]


def test_finding_the_best_reducers_grows_with_what_is_told_and_not_with_all_pairs() -> None:
    def work_of(num_nodes: int) -> Callable[[], object]:
        members = half_cut_off(num_nodes)
        return lambda: best_reducers(members, say_of(members, 0))

    assert_linear(work_of, 100)


def pieces(num_nodes: int) -> tuple[Ledger, list[Assignment], dict[NodeId, int]]:
    """A ledger in which every second of so many leases was committed."""
    ledger, leased = lease(Ledger(), [4] * num_nodes)
    assignments = [
        Assignment(
            node_id=NodeId(f"n{place}"),
            inner_steps=1,
            first_sample=places.first,
            num_samples=places.num_samples,
        )
        for place, places in enumerate(leased)
    ]
    taken = {a.node_id: 4 for a in assignments[::2]}
    return settle(ledger, assignments, taken), assignments, taken


def test_leasing_and_taking_back_grow_with_the_members() -> None:
    def leasing(num_nodes: int) -> Callable[[], object]:
        ledger, _, _ = pieces(num_nodes)
        return lambda: lease(ledger, [4 + place % 2 for place in range(num_nodes)])

    def taking_back(num_nodes: int) -> Callable[[], object]:
        ledger, assignments, taken = pieces(num_nodes)
        return lambda: reopen(ledger, assignments, taken)

    assert_linear(leasing, 200)
    assert_linear(taking_back, 200)
    assert lease(pieces(3)[0], [4, 4])[1] == [Places(first=4, end=8), Places(first=12, end=16)]


def test_a_step_that_opens_a_round_grows_with_the_members() -> None:
    def work_of(num_nodes: int) -> Callable[[], object]:
        scene = scene_of(num_nodes)
        scene.commit(*names_of(num_nodes * 2 // 3 + 1))
        *most, last = names_of(num_nodes)
        scene.apply(digest_of("after 1"), *most)
        assert scene.state.committed_round == 1 and scene.round.commit is not None

        def work() -> None:
            scene.apply(digest_of("after 1"), last)
            assert scene.round.number == 2

        return work

    assert_linear(work_of, 100)


def test_the_loss_of_all_members_at_once_grows_with_them() -> None:
    def work_of(num_nodes: int) -> Callable[[], object]:
        scene = scene_of(num_nodes)
        scene.now += 20_000

        def work() -> None:
            scene.beat(names_of(1)[0], at=0, digest=digest_of("other"))
            assert len(scene.state.members) == num_nodes

        return work

    assert_linear(work_of, 100)


def test_a_heartbeat_that_tells_whom_it_does_not_reach_is_logged_without_all_pairs() -> None:
    def work_of(num_nodes: int) -> Callable[[], object]:
        scene = scene_of(num_nodes)
        members = {one.node_id: one for one in half_cut_off(num_nodes)}
        before = replace(scene.state, members=members)
        member = members[NodeId("node-00001")]
        event = HeartbeatSeen(
            node_id=member.node_id,
            session_id=member.session_id,
            outer_round=0,
            outer_digest=member.outer_digest,
            unreachable=(*member.unreachable, NodeId("node-00090")),
        )
        transition = step(before, event, scene.now)
        return lambda: log_transition(before, transition)

    assert_linear(work_of, 100)


class CountedId(str):
    """A node's id that counts how often ids are compared: looking one up among others in a tuple does."""

    __slots__ = ()
    __hash__ = str.__hash__
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.num_compared += 1
        return str.__eq__(self, other)


class CountingScene(Scene):
    """Knows of each kind of event the most comparisons that one of them took."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(min_nodes=num_nodes, layout=LARGE, slice_elements=1 << 20)
        self.most: Counter[str] = Counter()

    def do(self, event: Event) -> None:
        before = CountedId.num_compared
        super().do(event)
        next_deadline(self.state)
        kind = type(event.report if isinstance(event, Reported) else event).__name__
        self.most[kind] = max(self.most[kind], CountedId.num_compared - before)

    def commit_at_once(self, holders: Sequence[NodeId]) -> None:
        """Each slice is reduced, and each holder tells in one call that it has all of them."""
        number = self.round.number
        tokens: dict[str, int] = dict.fromkeys(self.round.trained, TOKENS)
        results = [
            (p.slice, digest_of(f"result {number}/{p.slice.index}")) for p in self.round.slices
        ]
        for part, digest in results:
            self.reduce(part.reducer_id, part.index, digest, tokens)
        held = [Held(slice_index=part.index, digest=digest) for part, digest in results]
        for node_id in holders:
            told = (Reported(node_id=node_id, round=number, report=one) for one in held)
            self.do(ReportedTogether(reports=tuple(told)))
        assert self.state.committed_round == number, self.reason


def most_compared(num_nodes: int) -> Mapping[str, int]:
    """In three rounds: all in time, some late and then in time, and some and a reducer gone for good."""
    scene = CountingScene(num_nodes)
    names = [NodeId(CountedId(name)) for name in names_of(num_nodes)]
    late = names[-num_nodes // 10 :]
    scene.attach(*names)
    digest = INITIAL
    for number in (1, 2, 3):
        for name in names[: -len(late)]:
            scene.train(name)
            scene.now += 0.01
        for name in names:
            scene.beat(name, at=number - 1, digest=digest)
        if number == 3:
            break
        for name in late:
            scene.wait(0.1 * number)
            scene.train(name)
        scene.commit_at_once(names[: 2 * num_nodes // 3 + 1])
        digest = digest_of(f"after {number}")
        scene.apply(digest, *names)
    scene.leave(scene.round.slices[0].slice.reducer_id)
    scene.wait(200)  # the others are taken over one by one, and the round ends at its deadline
    assert scene.state.committed_round >= 3
    return scene.most


def test_no_step_of_a_round_compares_every_member_with_every_other() -> None:
    num_nodes = MOST_REDUCERS + 6
    once, twice = most_compared(num_nodes), most_compared(2 * num_nodes)
    assert {"Trained", "HeartbeatSeen", "Reduced", "ReportedTogether", "Ticked", "Detached"} <= set(
        twice
    )
    grown = {
        kind: (once[kind], most)
        for kind, most in twice.items()
        if most > 3 * once[kind] + num_nodes
    }
    assert not grown


def test_a_report_looks_at_one_slice_and_not_again_at_all_that_are_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = scene_of(16)
    names = names_of(16)
    for name in names:
        scene.train(name)
    for progress in scene.round.slices:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, digest_of("result"))
    *most, last = range(len(scene.round.slices))
    for name in names[: 2 * len(names) // 3 + 1]:
        for index in most:
            scene.hold(name, index, digest_of("result"))

    looked_at: list[int] = []
    ask = rounds.is_undecided

    def noting(state: SwarmState, current: Round, one: SliceProgress) -> bool:
        looked_at.append(one.slice.index)
        return ask(state, current, one)

    monkeypatch.setattr(rounds, "is_undecided", noting)
    scene.hold(names[0], last, digest_of("result"))
    assert looked_at == [last]


def driver_of(scene: Scene) -> Driver:
    return Driver(state=scene.state, store=Store.in_memory(), clock=LoopClock(starts_at=scene.now))


async def test_a_result_of_more_than_a_thousand_contributors_is_reported_and_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PayloadHeader, "forgery", lambda header: "")  # ids are no keys' digests
    scene = scene_of(MANY)
    driver = driver_of(scene)
    desk = SessionDesk(driver, Telemetry(), RunSpec(), SIGNER)
    reducer_id = scene.round.slices[0].slice.reducer_id
    session_id = scene.member(reducer_id).session_id
    opened_at = scene.round.opened_at
    header = sealed(RESULT, reducer_id, run_digest=RUN, norm=1.5, plan_opened_at=opened_at).header

    def report(
        num_contributors: int, number: int = 1, header: PayloadHeader = header
    ) -> session_pb2.ReportRequest:
        request = session_pb2.ReportRequest(session_id=session_id)
        reduced = request.reports.add(round=number).reduced
        reduced.digest, reduced.header = header.digest, header.encode()
        for name in names_of(num_contributors):
            reduced.contributors.add(
                node_id=name, samples=TOKENS // 8, tokens=TOKENS, contribution=bytes(16)
            )
        return request

    other = replace(header, plan_opened_at=1.0, report_digest=b"d" * 32)
    # Of an earlier plan of the round, of more members: who was away when the run went back repeats it.
    await desk.report(reducer_id, report(MANY + 1, header=other))
    await desk.report(reducer_id, report(MANY + 1))  # of more than there are
    await desk.report(reducer_id, report(MANY, number=7))  # of no round that there is
    assert driver.state.open_round is not None
    assert driver.state.open_round.slices[0].digest is None
    await desk.report(reducer_id, report(MANY))
    assert driver.state.open_round.slices[0].digest == header.digest
    assert driver.state.open_round.slices[0].norm == 1.5
    assert len(driver.state.open_round.slices[0].contributors) == MANY
    assert len({part.slice.reducer_id for part in scene.round.slices}) == MOST_REDUCERS


async def test_a_member_that_reaches_nobody_of_more_than_a_thousand_is_heard_and_shown() -> None:
    scene = scene_of(MANY)
    driver = driver_of(scene)
    telemetry = Telemetry()
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER)
    status = StatusDesk(driver, telemetry, RunSpec(), swarm_id="swarm")
    first, *others = names_of(MANY)
    beat = session_pb2.HeartbeatRequest(
        session_id=scene.member(first).session_id,
        outer_digest=scene.member(first).outer_digest,
        unreachable_ids=others,
    )
    await desk.heartbeat(NodeId(first), beat)
    assert driver.state.members[NodeId(first)].unreachable == tuple(others)
    shown = status.get_status(status_pb2.GetStatusRequest()).nodes[0].heartbeat
    assert list(shown.unreachable_ids) == others[:MOST_OUT_OF_REACH]
    beat.unreachable_ids.extend(["nobody"] * (session.MAX_STRANGERS + 2))
    with pytest.raises(BadDataError, match="members out of reach"):
        await desk.heartbeat(NodeId(first), beat)


async def test_of_whom_others_carry_to_and_whom_only_small_packets_reach_members_alone_are_kept() -> (
    None
):
    scene = scene_of(MANY)
    driver = driver_of(scene)
    telemetry = Telemetry()
    desk = SessionDesk(driver, telemetry, RunSpec(), SIGNER)
    status = StatusDesk(driver, telemetry, RunSpec(), swarm_id="swarm")
    first, *others = names_of(MANY)
    beat = session_pb2.HeartbeatRequest(
        session_id=scene.member(first).session_id,
        outer_digest=scene.member(first).outer_digest,
        narrow_ids=["nobody", *others],
        by_proxy_ids=["nobody", *others],
        carry_bytes_per_second=1e6,
    )
    for other in others[1:]:
        beat.through.add(node_id=other, through_id=others[0])
    beat.through.add(node_id=others[0], through_id="nobody")
    beat.through.add(node_id="nobody", through_id=others[0])
    await desk.heartbeat(NodeId(first), beat)
    member = driver.state.members[NodeId(first)]
    assert member.through == dict.fromkeys(map(NodeId, others[1:]), NodeId(others[0]))
    assert member.carry_bytes_per_second == 1e6
    shown = status.get_status(status_pb2.GetStatusRequest()).nodes[0].heartbeat
    assert len(shown.through) == len(shown.narrow_ids) == MOST_OUT_OF_REACH
    assert "nobody" not in shown.narrow_ids
    assert shown.by_proxy_ids == shown.narrow_ids
    most = session.MAX_STRANGERS + 2
    too_many = (("narrow_ids", ["x"] * most), ("by_proxy_ids", ["x"] * most))
    for field, more in (*too_many, ("through", [beat.through[0]] * most)):
        getattr(beat, field).extend(more)
        with pytest.raises(BadDataError, match="members that"):
            await desk.heartbeat(NodeId(first), beat)
        del getattr(beat, field)[-most:]
    beat.carry_bytes_per_second = math.nan
    with pytest.raises(BadDataError, match="carry bytes per second is nan"):
        await desk.heartbeat(NodeId(first), beat)


async def test_of_very_many_held_out_losses_the_newest_and_some_of_all_before_are_told() -> None:
    scene = Scene(min_nodes=2)
    losses = tuple(HeldOut(round=n, loss=2.0, tokens=1) for n in range(10 * MOST_LOSSES))
    scene.state = replace(scene.state, held_out=losses)
    status = StatusDesk(driver_of(scene), Telemetry(), RunSpec(), swarm_id="swarm")
    told = status.get_status(status_pb2.GetStatusRequest()).run.held_out_losses
    rounds = [loss.round for loss in told]
    assert len(rounds) == MOST_LOSSES and rounds == sorted(set(rounds))
    assert rounds[0] == 0 and rounds[MOST_LOSSES // 2 :] == [
        loss.round for loss in losses[-MOST_LOSSES // 2 :]
    ]


def test_rulings_are_written_and_signed_once_however_many_members_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rulings = tuple(
        Ruling(number=n, before="", kind=RulingKind.JOINED, by="coordinator", unix_seconds=0.0)
        for n in range(1, 51)
    )
    written, signed = Counter[str](), Counter[str]()
    write, sign = json.dumps, CommitSigner.signature_of

    def noting(value: Any, **options: Any) -> str:
        written["rulings"] += 1
        return write(value, **options)

    def signing(signer: CommitSigner, statement: bytes) -> bytes:
        signed["rulings"] += 1
        return sign(signer, statement)

    monkeypatch.setattr("protocol.trust.rulings.json.dumps", noting)
    monkeypatch.setattr(CommitSigner, "signature_of", signing)
    sent = SentMessages(SIGNER)
    for _ in range(20):  # each who joins is told all of them, in a message of its own
        told = sent.made_of(RulingsTold(rulings=rulings)).rulings.rulings
        assert len(told) == len(rulings)
    assert written["rulings"] == signed["rulings"] == len(rulings)


def test_results_are_remembered_of_the_very_same_values_and_of_few() -> None:
    asked: list[tuple[str, ...]] = []

    @remembered
    def counted(names: tuple[str, ...]) -> int:
        asked.append(names)
        return len(names)

    one, equal = tuple("ab"), tuple("a") + tuple("b")
    assert [counted(one), counted(one), counted(equal)] == [2, 2, 2]
    assert len(asked) == 2  # to compare them would take as long as to count
    others = [(str(number),) for number in range(REMEMBERED)]
    for other in others:
        counted(other)
    assert counted(others[0]) == 1 and len(asked) == 2 + REMEMBERED
    assert counted(one) == 2 and len(asked) == 3 + REMEMBERED
