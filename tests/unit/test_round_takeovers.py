"""What counts in a node's round when slices move, means come late, or results do not decode."""

from dataclasses import replace

from node.exchange.round.state import (
    Committed,
    Links,
    MeanTaken,
    PushBegan,
    PushEnded,
    Reduce,
    ResultFetched,
    ResultUndecodable,
    Tell,
    TimePassed,
    contradicted,
    refusal,
)
from node.exchange.round.transition import step
from protocol.wire.findings import ResultRefused
from protocol.wire.messages import ParticipantsIdle
from protocol.wire.rounds import BLOCK, Commit, Digest, SliceOutcome
from tests.unit.exchange_scene import RUN, A, B, C
from tests.unit.round_scene import (
    NODES,
    RULES,
    after,
    begun,
    contributed,
    contribution,
    made_by,
    reduced_to,
    taken_over,
)

EVERYBODY_IDLE = ParticipantsIdle(round=1, node_ids=NODES)


def test_the_mean_is_of_what_was_here_when_it_began() -> None:
    """The example that the machine comes to by itself only now and then."""
    state = after(begun(), (1.0, contribution(A)), (1.0, contribution(B)))
    (reduce,) = step(state, TimePassed(links=Links()), 20.0).actions
    assert isinstance(reduce, Reduce)
    assert (set(reduce.reduction.contributions), reduce.reduction.late) == ({A, B}, {C})
    state = after(state, (20.0, TimePassed(links=Links())))
    late = step(state, contribution(C), 20.1)
    assert late.refusal == "slice 0 of round 1 is already reduced"
    assert set(late.state.slices[0].contributions) == {A, B}


def test_a_mean_of_before_a_takeover_is_told_to_nobody() -> None:
    state = after(begun(), (1.0, EVERYBODY_IDLE))
    anew = step(state, taken_over(0, A), 2.0)  # while the first is still being taken
    (reduce,) = anew.actions
    assert isinstance(reduce, Reduce)
    assert not step(anew.state, MeanTaken(index=0, attempt=0, result=None), 3.0).actions
    assert step(anew.state, MeanTaken(index=0, attempt=reduce.attempt, result=None), 3.0).actions


def test_no_result_of_ours_stands_in_the_place_of_the_committed_one() -> None:
    """An earlier process of this node has made it, and the coordinator went back to a copy since."""
    committed, ours = made_by(A, 0, 0), made_by(A, 0, 1)
    outcome = SliceOutcome(index=0, start=0, num_elements=BLOCK, digest=committed.digest)
    commit = Commit(round=1, fragment=0, base_digest=RUN, slices=(outcome,))
    state = after(
        begun(),
        (1.0, EVERYBODY_IDLE),  # the mean is taken
        (2.0, Committed(commit=commit, links=Links())),
        (3.0, ResultFetched(payload=committed)),
    )
    late = step(state, MeanTaken(index=0, attempt=0, result=reduced_to(ours)), 4.0)
    assert not late.actions and late.state.slices[0].held is committed


def test_a_slice_that_comes_back_in_time_keeps_what_came_and_the_later_deadline() -> None:
    state = after(begun(), (1.0, contribution(B)))
    for attempt, seconds in ((1, 5.0), (2, 40.0)):
        state = after(state, (2.0, taken_over(0, A, attempt=attempt, seconds=seconds)))
        assert set(state.slices[0].contributions) == {B}
        assert state.slices[0].deadline == max(20.0, 2.0 + seconds)


def test_a_push_of_before_a_takeover_says_nothing_of_those_that_come_now() -> None:
    state = after(
        begun(),
        (1.0, PushBegan(index=1)),
        (2.0, taken_over(1, C)),
        (2.0, PushBegan(index=1)),
        (2.0, PushEnded(index=1, attempt=0, sender=B)),
    )
    assert state.slices[1].num_arriving == 1 and not state.slices[1].is_broken


def test_of_another_runs_payload_only_the_run_is_looked_at() -> None:
    header = replace(contributed(B, 0, 0).header, run_digest=Digest(b"x" * 32))
    assert refusal(RULES, begun(), B, header).startswith("run digest 7878")


def test_a_result_that_does_not_decode_is_told_of_once_and_its_bytes_are_not_taken_again() -> None:
    state = begun()
    nonsense, other = (made_by(B, 1, which).header for which in (0, 1))
    first = step(state, ResultUndecodable(header=nonsense), 1.0)
    (told,) = (each.report for each in first.actions if isinstance(each, Tell))
    assert told == ResultRefused(slice_index=1, digest=nonsense.digest, header=nonsense.encode())
    assert not step(first.state, ResultUndecodable(header=nonsense), 2.0).actions
    assert "does not decode" in refusal(RULES, first.state, B, nonsense)
    assert not refusal(RULES, first.state, B, other), "another one may decode"
    assert contradicted(first.state, replace(other, attempt=nonsense.attempt)) == nonsense
    assert not step(state, ResultUndecodable(header=made_by(C, 1, 0).header), 1.0).actions
    anew = after(first.state, (2.0, taken_over(1, C)))
    assert anew.slices[1].refused is None
