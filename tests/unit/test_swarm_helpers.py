"""Helpers in the pure core: members that reduce for others, train nothing and decide nothing."""

from typing import Any

import pytest

from coordinator.swarm.bounds import MOST_TIMES_USUAL, stride_of
from coordinator.swarm.events import Ticked
from coordinator.swarm.ledger import lease_again
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.weighing import say_of
from protocol.run.run_spec import RunSection, RunSpec
from protocol.run.schedule import Schedule
from protocol.wire.messages import EvaluationAsked, ParticipantsIdle, SliceTakenOver, Trained
from protocol.wire.rounds import WHOLE, LayoutSummary, NodeId
from protocol.wire.vitals import LinkRates
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of

NODES = ("a", "b", "c")
MB = 1e6


def scene(*helpers: str, min_nodes: int = 3, is_behind_nat: bool = True, **more: Any) -> Scene:
    """Three nodes behind routers that reach nobody but helpers, and those."""
    scene = Scene(min_nodes=min_nodes, **more)
    scene.attach(*helpers, is_helper=True, cannot_train=True, cannot_evaluate=True, num_ranks=0)
    scene.attach(*NODES[:-1])
    if is_behind_nat:
        for name in NODES[:-1]:
            others = tuple(other for other in NODES if other != name)
            scene.beat(name, at=0, digest=INITIAL, unreachable=others)
    scene.attach(NODES[-1])
    return scene


def reducers(scene: Scene) -> set[str]:
    return {progress.slice.reducer_id for progress in scene.round.slices}


def play(scene: Scene, *, number: int, norm: float = 0.0, inner_steps: int = 5) -> None:
    """All nodes train, the round commits, and all apply it."""
    for name in NODES:
        scene.train(name, inner_steps=inner_steps)
    scene.commit(*NODES, *(h for h in scene.state.members if h.startswith("h")), norm=norm)
    scene.apply(digest_of(f"state {number}"), *scene.state.members)


def test_a_helper_that_all_reach_reduces_all_for_nodes_that_reach_nobody_else() -> None:
    on_stage = scene("h")
    assert reducers(on_stage) == {"h"}
    assert "1 helper reduces all" in on_stage.round.reason


def test_a_helper_that_reduces_all_is_not_cut_for_a_warm_up_and_is_for_a_lie() -> None:
    on_stage = scene("h", rounds=100)
    spec = RunSpec(run=RunSection(rounds=100, min_nodes=3))
    on_stage.amend(schedule=Schedule.of(spec))
    cut = []
    for number in range(1, 13):  # the first tenth of 100 rounds is a warm-up
        steps = 1 if number == 1 else 5  # a fifth of the steps, at a fifth of the round's rates
        norm = 1e9 if number == 11 else steps**2 / 25 * (2 * number - 1)
        play(on_stage, number=number, norm=norm, inner_steps=steps)
        assert on_stage.state.last_closed is not None
        (outcome,) = on_stage.state.last_closed.commit.slices
        if outcome.factor < WHOLE:
            cut.append((number, outcome.norm * outcome.factor / WHOLE))
    assert [number for number, _ in cut] == [11]
    assert cut[0][1] < MOST_TIMES_USUAL * 20


def test_a_plan_asks_a_helper_for_nothing_and_leases_it_nothing() -> None:
    on_stage = scene("h")
    (asked,) = (a for a in on_stage.round.assignments if a.node_id == "h")
    assert (asked.inner_steps, asked.num_samples) == (0, 0)
    assert len(on_stage.state.ledger.leased) == len(NODES)
    on_stage.commit(*NODES, "h", tokens=dict.fromkeys(NODES, 80))
    assert on_stage.state.ledger.leased == ()
    assert on_stage.member("h").committed_tokens == 0


def test_a_round_that_is_taken_back_leases_nothing_to_helpers_again() -> None:
    on_stage = scene("h")
    asked = on_stage.round.assignments
    ledger = lease_again(on_stage.state.ledger, [a for a in asked if a.node_id == "h"])
    assert ledger == on_stage.state.ledger


def test_helpers_do_not_count_among_the_nodes_that_a_round_waits_for() -> None:
    on_stage = Scene(min_nodes=2)
    on_stage.attach("h", "i", "j", is_helper=True)
    on_stage.attach("a")
    assert on_stage.state.open_round is None
    assert "1 of 2 is ready" in on_stage.reason
    assert "h waits" not in on_stage.reason


def test_several_helpers_share_and_one_that_nobody_reaches_gets_nothing() -> None:
    on_stage = scene("h", "i")
    assert reducers(on_stage) == {"h", "i"}
    play(on_stage, number=1)
    on_stage.apply(digest_of("state 1"), "h", "i")
    for name in NODES:
        others = tuple(other for other in NODES if other != name)
        on_stage.beat(name, at=1, digest=digest_of("state 1"), unreachable=(*others, "i"))
    play(on_stage, number=2)
    assert reducers(on_stage) == {"h"}


def test_a_node_with_confirmed_work_that_all_reach_reduces_beside_a_helper() -> None:
    on_stage = scene("h", is_behind_nat=False)
    assert reducers(on_stage) == {"h"}
    play(on_stage, number=1)
    assert reducers(on_stage) == {"h"}  # nobody knows yet whom the others reach
    on_stage.wait(30)
    play(on_stage, number=2)
    assert reducers(on_stage) == {"h", *NODES}


def test_after_a_void_round_nodes_reduce_beside_a_helper_whatever_they_have_done() -> None:
    on_stage = scene("h", is_behind_nat=False)
    on_stage.wait(100)
    assert on_stage.state.committed_round == 1
    assert reducers(on_stage) > {"h"}


def test_a_helper_is_told_to_nobody_as_idle_and_its_report_of_training_changes_nothing() -> None:
    on_stage = scene("h")
    before = on_stage.state
    on_stage.train("h", tokens=0, inner_steps=0)
    assert on_stage.asked(ParticipantsIdle) == []
    assert on_stage.state == before


def test_an_idle_helper_is_not_at_fault_and_one_whose_slices_are_overdue_is() -> None:
    on_stage = scene("h", "i", rounds=40)
    for number in (1, 2, 3):
        play(on_stage, number=number)
        assert on_stage.member("h").standing.num_faults == 0
    for _ in range(2):
        number = on_stage.round.number
        for name in NODES:
            on_stage.train(name)
        on_stage.wait_until(on_stage.round.contribute_deadline + 5)  # h and i reduce nothing
        taken = on_stage.asked(SliceTakenOver)
        assert taken or any(p.attempt > 0 for p in on_stage.round.slices)
        play(on_stage, number=number)
    assert on_stage.member("h").standing.num_faults == 1
    assert on_stage.member("h").standing.is_on_trial


def test_a_lone_helper_is_tried_again_at_once_however_often_it_was_at_fault() -> None:
    on_stage = scene("h", rounds=40)
    for number in (1, 2, 3):
        for name in NODES:
            on_stage.train(name)
        on_stage.wait_until(on_stage.round.contribute_deadline + 5)
        play(on_stage, number=number)
        assert "h" in reducers(on_stage)


def test_helpers_weigh_nothing_and_their_holding_a_result_decides_nothing() -> None:
    on_stage = scene("h", "i")
    say = say_of(on_stage.state.members.values(), 0)
    assert set(say.weights) == set(NODES)
    for name in NODES:
        on_stage.train(name)
    result = digest_of("result")
    for progress in on_stage.round.slices:
        on_stage.reduce(progress.slice.reducer_id, progress.slice.index, result)
        on_stage.hold("h", progress.slice.index, result)
        on_stage.hold("i", progress.slice.index, result)
    assert on_stage.state.committed_round == 0
    for progress in on_stage.round.slices:
        for name in NODES[:2]:
            on_stage.hold(name, progress.slice.index, result)
    assert on_stage.state.committed_round == 1


def test_when_a_helper_is_lost_another_one_takes_its_slices_over() -> None:
    on_stage = scene("h", "i")
    on_stage.leave("h")
    assert reducers(on_stage) == {"i"}


def test_a_helper_that_leaves_reduces_to_its_end_where_nobody_else_can() -> None:
    on_stage = scene("h")
    on_stage.drain("h")
    assert reducers(on_stage) == {"h"}
    on_stage = scene("h", "i")
    on_stage.drain("h")
    assert reducers(on_stage) == {"i"}


def test_a_helper_that_leaves_before_it_is_known_whom_nodes_reach_reduces_to_its_end() -> None:
    """Nodes tell that within twenty seconds: before that a newcomer would take over what none can send it."""
    on_stage = scene("h", is_behind_nat=False)
    on_stage.drain("h")
    assert reducers(on_stage) == {"h"}
    on_stage.wait(40)  # the round is the same
    assert reducers(on_stage) == {"h"}
    play(on_stage, number=1)
    assert on_stage.state.committed_round == 1
    known = scene("h", is_behind_nat=False)
    play(known, number=1)
    known.wait(30)
    play(known, number=2)
    known.drain("h")
    assert known.round.number == 3
    assert reducers(known) <= {*NODES} and len(known.round.slices) > 1


@pytest.mark.parametrize("is_behind_nat", [True, False])
def test_a_helper_that_was_killed_and_is_back_in_the_round_reduces_it_after_all(
    is_behind_nat: bool,
) -> None:
    """Nodes took its slices over, and nobody knows that others reach them, or that they do not is known."""
    on_stage = scene("h", is_behind_nat=is_behind_nat)
    number = on_stage.round.number
    on_stage.leave("h")
    assert reducers(on_stage) <= {*NODES}
    on_stage.attach("h", is_helper=True, cannot_train=True, cannot_evaluate=True, num_ranks=0)
    assert on_stage.round.number == number
    assert reducers(on_stage) == {"h"}
    taken = on_stage.asked(SliceTakenOver)
    assert {one.reducer_id for one in taken} == {"h"}
    on_stage.do(Ticked())
    assert not on_stage.asked(SliceTakenOver)  # once
    play(on_stage, number=number)
    assert on_stage.state.committed_round == number


def test_a_helper_that_was_started_again_at_once_goes_on_with_its_slices_and_nobody_else_begins() -> (
    None
):
    """Nodes took them over, and gave them back with the next message of anybody."""
    on_stage = scene("h", is_behind_nat=False)
    num_slices = len(on_stage.round.slices)
    on_stage.attach("h", is_helper=True, cannot_train=True, cannot_evaluate=True, num_ranks=0)
    assert reducers(on_stage) == {"h"}
    assert [one.reducer_id for one in on_stage.asked(SliceTakenOver)] == ["h"] * num_slices
    on_stage.do(Ticked())
    assert not on_stage.asked(SliceTakenOver)


def test_a_helper_that_stalls_gets_nothing_back_in_the_round() -> None:
    """A newcomer may be reached, and this one has shown that it does nothing."""
    on_stage = scene("h", is_behind_nat=False)
    for name in NODES:
        on_stage.train(name)
    current = on_stage.round
    due = current.contribute_deadline
    on_stage.wait_until(due + (current.commit_deadline - due) / 4 + 0.1)
    assert reducers(on_stage) <= {*NODES}
    on_stage.do(Ticked())
    assert on_stage.round.number == current.number
    assert reducers(on_stage) <= {*NODES}


def test_a_slice_that_a_node_is_known_to_be_sent_stays_there_when_a_helper_comes_back() -> None:
    on_stage = scene("h", is_behind_nat=False)
    play(on_stage, number=1)
    on_stage.wait(31)
    play(on_stage, number=2)
    on_stage.leave("h")
    assert reducers(on_stage) == {*NODES}
    on_stage.attach(
        *("h",),
        at=2,
        digest=digest_of("state 2"),
        is_helper=True,
        cannot_train=True,
        cannot_evaluate=True,
        num_ranks=0,
    )
    assert reducers(on_stage) == {*NODES}


def test_who_takes_over_from_a_helper_that_is_lost_is_rather_one_that_is_known() -> None:
    on_stage = scene("h", is_behind_nat=False)
    play(on_stage, number=1)
    on_stage.wait(31)
    on_stage.attach(
        "0", at=1, digest=digest_of("state 1")
    )  # it reduces nothing, and comes first by its id
    play(on_stage, number=2)
    assert reducers(on_stage) == {"h", *NODES}
    on_stage.leave("h")
    assert reducers(on_stage) == {*NODES}


def test_nobody_asks_a_helper_for_a_held_out_loss() -> None:
    on_stage = scene("h", evaluate_every=1)
    play(on_stage, number=1)
    play(on_stage, number=2)
    assert "h" not in asked_of(on_stage.log, EvaluationAsked)


def test_a_helper_has_no_say_in_the_first_state() -> None:
    on_stage = Scene(min_nodes=2)
    on_stage.attach("h", "i", "j", is_helper=True, digest=digest_of("another"))
    on_stage.attach("a", "b")
    assert on_stage.state.outer_digest == INITIAL


def test_adaptive_deadlines_are_measured_without_helpers() -> None:
    on_stage = scene("h", adapts_deadlines=True)
    on_stage.now += 20
    play(on_stage, number=1)
    (trained,) = on_stage.state.phase_times.train
    assert trained.seconds == pytest.approx(20)
    assert on_stage.state.phase_times.exchange[0].cut_session_ids == ()


def test_the_plan_counts_on_what_a_helpers_link_carries() -> None:
    layout = LayoutSummary(digest=digest_of("l"), fragment_elements=(1 << 20,))
    on_stage = scene("h", "i", layout=layout)
    play(on_stage, number=1)
    state = digest_of("state 1")
    on_stage.beat(
        "h",
        at=1,
        digest=state,
        rates=LinkRates(up_bytes_per_second=90 * MB, down_bytes_per_second=90 * MB),
    )
    on_stage.beat(
        "i",
        at=1,
        digest=state,
        rates=LinkRates(up_bytes_per_second=50 * MB, down_bytes_per_second=50 * MB),
    )
    play(on_stage, number=2)
    sizes = {
        name: sum(p.slice.num_elements for p in on_stage.round.slices if p.slice.reducer_id == name)
        for name in ("h", "i")
    }
    assert 2 < sizes["h"] / sizes["i"] < 3


def test_how_far_a_round_led_follows_most_nodes_and_no_single_one() -> None:
    on_stage = scene("h")
    plan, rules = plan_of(on_stage.round, 0.0), on_stage.state.rules
    told = {
        name: Trained(inner_steps=steps, samples=1, tokens=8, loss=2.0, seconds=1.0)
        for name, steps in zip(map(NodeId, NODES), (5, 1, 5), strict=True)
    }
    assert stride_of(rules, plan, {}) == stride_of(rules, plan, told) == 5
    two = {name: trained for name, trained in told.items() if name != "c"}
    assert stride_of(rules, plan, two) == 5
    assert stride_of(rules, plan, {NodeId("b"): told[NodeId("b")]}) == 1
