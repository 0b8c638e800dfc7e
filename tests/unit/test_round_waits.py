"""For whom a node waits in a round, and for how long: as a reducer, and for results."""

from dataclasses import replace

import pytest

from node.exchange.round.state import (
    Awaited,
    ContributionBegan,
    ContributionEnded,
    Event,
    Links,
    MeanTaken,
    Phase,
    PushBegan,
    PushEnded,
    RoundState,
    Tell,
    TimePassed,
)
from node.exchange.round.transition import collects_until, step
from protocol.wire.messages import ResultsSilent, TrainingEnded
from protocol.wire.rounds import WHOLE, NodeId, Way
from tests.unit.exchange_scene import A, B, C, plan_for
from tests.unit.round_scene import (
    NODES,
    RULES,
    after,
    begun,
    body_of,
    contributed,
    contribution,
    made_by,
    reduced_at,
    reduced_to,
    taken_over,
)

BEGINS, ENDS = ContributionBegan(sender=C), ContributionEnded(sender=C)
TRAINED = TrainingEnded(round=1)
TIME_PASSED = TimePassed(links=Links())


def awaiting(less: dict[NodeId, Awaited], *ways: Way) -> RoundState:
    """A round in which A and then B have contributed to A's slice."""
    state = begun(plan_for(*NODES, ways=ways), less)
    return after(state, (2.0, contribution(A)), (8.0, contribution(B)))


def collecting_for(*senders: NodeId, at: float) -> RoundState:
    """A round in which these contribute to A's slice at the same time."""
    plan = replace(plan_for(*NODES), contribute_seconds=3600, commit_seconds=3610)
    return after(begun(plan), *((at, contribution(sender)) for sender in senders))


def test_who_kept_contributions_lately_is_waited_for_a_quarter_as_long_again_as_others_took() -> (
    None
):
    assert reduced_at(awaiting({C: Awaited.BRIEFLY})) == 10.0
    assert awaiting({C: Awaited.NOT}).slices[0].phase is Phase.AVERAGING, "at once"
    assert reduced_at(awaiting({B: Awaited.BRIEFLY})) == 12.0, "for C in full, as A took 2 s"
    assert reduced_at(awaiting({})) == 20.0, "four times 8 s are more than there is"


@pytest.mark.parametrize(
    ("awaited", "at"), [(Awaited.BRIEFLY, 8 * 1.6 * 1.25), (Awaited.NOT, 8 * 1.6)]
)
def test_who_is_asked_for_more_steps_than_the_others_is_waited_for_as_much_longer(
    awaited: Awaited, at: float
) -> None:
    """Others check somebody's work, and the coordinator asks them for fewer steps."""
    steps = {A: 10, B: 5, C: 16}
    plan = plan_for(*NODES)
    assignments = tuple(replace(a, inner_steps=steps[a.node_id]) for a in plan.assignments)
    state = begun(replace(plan, assignments=assignments), {C: awaited})
    assert reduced_at(state, (2.0, contribution(A)), (8.0, contribution(B))) == at


def test_who_is_carried_to_us_gets_a_quarter_more_though_it_was_waited_for_in_vain_and_no_more() -> (
    None
):
    through = Way(one=A, other=C, through=(B,))
    state = awaiting({C: Awaited.NOT}, through)
    assert reduced_at(state) == 10.0
    assert reduced_at(state, (9.0, BEGINS)) == 10.0, "who trickles gains nothing"
    came = after(state, (9.5, contribution(C)))
    assert came.slices[0].phase is Phase.AVERAGING and C in came.slices[0].contributions
    between_others = awaiting({C: Awaited.NOT}, Way(one=B, other=C, through=(A,)))
    assert between_others.slices[0].phase is Phase.AVERAGING, "C reaches us"


def test_who_was_waited_for_in_vain_has_a_quarter_more_while_something_comes() -> None:
    """Else a member with the slowest link, once late, was never in time again."""
    state = begun(less={C: Awaited.NOT})
    state = after(state, (2.0, contribution(A)), (7.0, BEGINS), (8.0, contribution(B)))
    assert reduced_at(state) == 10.0
    assert reduced_at(state, (9.0, ENDS)) == 9.0, "it broke off"
    came = after(state, (9.5, contribution(C)))
    assert came.slices[0].phase is Phase.AVERAGING and C in came.slices[0].contributions


def test_one_of_whom_nothing_comes_is_not_waited_for_to_a_deadline_of_hours() -> None:
    state = collecting_for(A, B, at=8.0)
    assert reduced_at(state) == 4 * 8.0
    assert reduced_at(state, (31.0, BEGINS)) == 3600.0, "its link is slow"
    grace = RULES.waits.grace_seconds
    assert reduced_at(state, (9.0, BEGINS), (31.5, ENDS)) == max(32.0, 31.5 + grace)
    assert reduced_at(collecting_for(A, B, at=1.0)) == 1.0 + 10.0
    assert reduced_at(collecting_for(A, at=8.0)) == 3600.0, "most are late"


def test_once_all_have_trained_nobody_waits_long_for_one_of_whom_nothing_comes() -> None:
    state = collecting_for(A, B, at=20.0)
    assert reduced_at(state, (20.0, TRAINED)) == 1.4 * 20
    assert reduced_at(state, (20.0, TRAINED), (27.0, TRAINED)) == 1.4 * 20, "told again"
    assert reduced_at(state, (50.0, TRAINED)) == 50 + 0.4 * 20, "it has trained for longer"
    assert reduced_at(collecting_for(A, B, at=1.0), (1.0, TRAINED)) == 1.0 + 4.0
    assert reduced_at(state, (20.0, TRAINED), (27.0, BEGINS)) == 3600.0
    assert reduced_at(collecting_for(A, at=8.0), (8.0, TRAINED)) == 3600.0


def test_members_that_come_one_after_the_other_do_not_have_a_reducer_wait_for_the_last() -> None:
    """It goes by when most of the weight was here: here four of six, at 20 s."""
    nodes = tuple(NodeId(name) for name in "abcdef")
    plan = replace(plan_for(*nodes), contribute_seconds=3600.0, commit_seconds=3700.0)
    state = after(begun(plan), (20.0, TRAINED))
    for sender, at in zip(nodes[:-1], (20.0, 20.0, 20.0, 20.0, 27.0), strict=True):
        state = after(state, (at, contribution(sender)))
    assert reduced_at(state) == 28.0


def test_votes_say_who_most_are() -> None:
    votes = (WHOLE // 8, WHOLE // 8, WHOLE - 2 * (WHOLE // 8))
    plan = replace(plan_for(*NODES), contribute_seconds=3600.0, commit_seconds=3700.0, votes=votes)
    state = after(begun(plan), (8.0, TRAINED), (8.0, contribution(A)), (8.0, contribution(B)))
    assert reduced_at(state) == 4 * 8.0, "C has most of the weight"


def test_a_result_of_which_nothing_comes_is_told_of_while_most_others_are_here() -> None:
    state = begun()
    told: list[tuple[float, tuple[int, ...]]] = []

    def feed(event: Event, at: float) -> None:
        nonlocal state
        transition = step(state, event, at)
        state = transition.state
        for action in transition.actions:
            if isinstance(action, Tell) and isinstance(action.report, ResultsSilent):
                told.append((at, action.report.slice_indexes))

    feed(body_of(made_by(B, 1, 0)), 10.0)
    assert state.most_held_at is None, "one of three"
    feed(taken_over(0, B), 10.0)
    feed(body_of(made_by(B, 0, 0), 1), 20.0)
    wake = step(state, TIME_PASSED, 20.0).wake_at
    assert wake == 1.2 * 20
    feed(TIME_PASSED, wake)
    feed(PushBegan(index=2), 25.0)
    feed(PushEnded(index=2, attempt=0, sender=C), 40.0)
    feed(TIME_PASSED, 44.0)
    assert told == [(24.0, (2,)), (25.0, ()), (44.0, (2,))], "it broke off, and nothing came again"


@pytest.mark.parametrize(("begins", "phase"), [(False, Phase.AVERAGING), (True, Phase.COLLECTING)])
def test_in_a_slice_that_comes_to_us_nobody_is_waited_for_of_whom_nothing_came_before(
    begins: bool, phase: Phase
) -> None:
    state = after(
        collecting_for(A, B, at=20.0),
        (20.0, TRAINED),
        (28.0, TIME_PASSED),
        (28.0, contribution(A, 2)),
        (30.0, taken_over(2, A, seconds=100.0)),
        *([(30.5, BEGINS)] if begins else []),
        (31.0, contribution(B, 2, attempt=1)),
    )
    assert state.slices[2].phase is phase, "what comes is waited for"


def test_of_whom_no_contribution_came_a_result_is_not_waited_for_as_long_again() -> None:
    state = after(collecting_for(A, B, at=20.0), (20.0, TRAINED), (28.0, TIME_PASSED))
    assert state.given_up == {C}
    state = after(state, (28.0, body_of(made_by(B, 1, 0))))
    ours = MeanTaken(index=0, attempt=0, result=reduced_to(made_by(A, 0, 0)))
    assert step(state, ours, 28.0).wake_at == 28.0 + 1.0


def test_of_whom_something_comes_is_waited_for_as_long_as_it_does() -> None:
    state, grace = awaiting({C: Awaited.BRIEFLY}), RULES.waits.grace_seconds
    assert reduced_at(state, (9.0, BEGINS)) == 20.0
    assert reduced_at(state, (9.0, BEGINS), (15.0, ENDS)) == 15.0 + grace
    assert reduced_at(state, (9.0, BEGINS), (9.5, ENDS)) == 9.5 + grace
    assert reduced_at(state, (8.0, BEGINS), (8.0, ENDS)) == 10.0


def test_what_comes_in_time_counts_whoever_was_waited_for() -> None:
    state = after(awaiting({C: Awaited.BRIEFLY}), (11.0, contribution(C)))
    assert state.slices[0].phase is Phase.AVERAGING
    assert set(state.slices[0].contributions) == {A, B, C}


def test_a_slice_that_is_taken_over_is_sent_anew_and_waited_for_anew() -> None:
    state = after(
        begun(less={C: Awaited.BRIEFLY}),
        (10.0, taken_over(1, A, seconds=30.0)),
        *((14.0, body_of(contributed(sender, 1, 0), 1)) for sender in (A, B)),
    )
    assert collects_until(state, state.slices[1]) == 15.0
