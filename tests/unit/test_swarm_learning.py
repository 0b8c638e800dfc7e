"""A coordinator restored from an older copy of its database learns what it lacks from its nodes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.swarm.events import BaseLearned, CommitLearned, Event, HistoryTold, Started
from coordinator.swarm.members import MemberState
from coordinator.swarm.state import RoundPhase, SwarmState
from protocol.wire.messages import CommitsWanted, EvaluationAsked, RoundCommitted, RunFinished
from protocol.wire.rounds import Commit, Digest, NodeId
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of, of_kind

A = NodeId("node-a")


def after(number: int) -> Digest:
    return digest_of(f"after {number}")


def run_of(rounds: int) -> tuple[Scene, list[SwarmState]]:
    """Two nodes, so many rounds committed and applied; the states after each."""
    scene = Scene(min_nodes=2, rounds=50)
    scene.attach("node-a", "node-b")
    states = [scene.state]
    for number in range(1, rounds + 1):
        scene.commit("node-a", "node-b")
        scene.apply(after(number), "node-a", "node-b")
        states.append(scene.state)
    return scene, states


def commits_of(scene: Scene) -> list[Commit]:
    return [told.commit for told in of_kind(scene.log, RoundCommitted)]


def told(commits: Sequence[Commit]) -> list[Event]:
    """What the edge makes of commits in a row."""
    events: list[Event] = []
    for before, commit in zip([None, *commits], commits, strict=False):
        if before is not None:
            events.append(BaseLearned(after=before, digest=commit.base_digest))
        events.append(CommitLearned(commit=commit, node_id=A))
    return events


def restored(state: SwarmState, scene: Scene) -> Scene:
    """A coordinator that goes on from an older state, and finds its nodes ahead."""
    older = Scene(min_nodes=2, rounds=50)
    older.state, older.now = state, scene.now
    older.attach("node-a", "node-b", at=scene.state.committed_round, digest=after(5))
    return older


def test_it_asks_each_node_that_is_ahead_and_ends_up_with_the_same_books() -> None:
    scene, states = run_of(5)
    older = restored(states[2], scene)
    assert of_kind(older.log, CommitsWanted) == 2 * [CommitsWanted(after_round=1)]
    assert asked_of(older.log, CommitsWanted) == ["node-a", "node-b"]
    for event in told(commits_of(scene)):  # those that it has are passed over
        older.do(event)
    older.do(HistoryTold(node_id=A))
    # Nobody has to apply anything: both hold the state after round 5 and said so.
    assert older.state.committed_round == 5
    assert older.state.outer_digest == after(5)
    assert older.state.token_clock == scene.state.token_clock
    assert older.state.ledger.committed == scene.state.ledger.committed
    assert older.round.number == 6 and older.round.base_digest == after(5)
    assert {m.state for m in older.state.members.values()} == {MemberState.READY}
    tokens = {n: m.committed_tokens for n, m in scene.state.members.items()}
    assert {n: m.committed_tokens for n, m in older.state.members.items()} == tokens


def test_a_copy_made_between_commit_and_agreement_learns_the_digest_from_the_next_commit() -> None:
    scene, _ = run_of(1)
    scene.commit("node-a", "node-b")
    copy = scene.state
    assert scene.round.phase is RoundPhase.APPLYING
    scene.apply(after(2), "node-a", "node-b")
    for number in (3, 4, 5):
        scene.commit("node-a", "node-b")
        scene.apply(after(number), "node-a", "node-b")
    older = restored(copy, scene)
    for event in told(commits_of(scene)):
        older.do(event)
    assert (older.state.committed_round, older.state.outer_digest) == (5, after(5))
    assert older.state.token_clock == scene.state.token_clock


def test_nothing_is_learned_twice_out_of_order_or_from_another_history() -> None:
    scene, states = run_of(5)
    older = restored(states[2], scene)
    commits = commits_of(scene)
    other = replace(commits[2], base_digest=digest_of("another history"))
    for events in (told(commits[3:]), told([commits[1], other]), told(commits[:2])):
        before = older.state
        for event in events:
            older.do(event)
        assert older.state == before
    for event in (*told(commits[1:3]), *told(commits[1:3])):
        older.do(event)
    assert older.state.committed_round == 3


def test_an_older_incarnation_brought_back_after_a_newer_one_is_ignored() -> None:
    scene, states = run_of(3)
    older = restored(states[2], scene)
    commit = commits_of(scene)[2]
    for event in told([replace(commit, incarnation=1)]):
        older.do(event)
    assert older.state.incarnation == 1
    before = older.state
    for event in told([commit]):
        older.do(event)
    assert older.state == before


def test_what_was_agreed_on_after_another_commit_of_the_round_is_not_taken_over() -> None:
    scene, _ = run_of(1)
    scene.commit("node-a", "node-b")
    older = Scene(min_nodes=2, rounds=50)
    older.state, older.now = scene.state, scene.now
    made = commits_of(scene)[1]
    for other in (replace(made, incarnation=1), replace(made, assignments=())):
        older.do(BaseLearned(after=other, digest=after(2)))
        assert older.state == scene.state
    older.do(BaseLearned(after=replace(made, signature=b"signed"), digest=after(2)))
    assert older.state.outer_digest == after(2)


def test_a_round_that_was_taken_back_after_the_copy_gives_way_to_what_became_of_it() -> None:
    """Without that, its samples would be counted in both versions."""
    scene = Scene(min_nodes=1, rounds=50)
    scene.attach("node-a")
    scene.commit("node-a")
    copies = [scene.state]  # before the nodes agreed, and after
    agreed = Scene(min_nodes=1, rounds=50)
    agreed.state, agreed.now = scene.state, scene.now
    agreed.apply(after(1), "node-a")
    copies.append(agreed.state)
    scene.attach("node-a")  # a new process, with the state before
    scene.wait(2 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 1
    scene.apply(INITIAL, "node-a", incarnation=1)
    scene.commit("node-a")
    scene.apply(after(2), "node-a", incarnation=1)
    history = [c for c in commits_of(scene) if c.incarnation == 1]
    assert [commit.round for commit in history] == [1, 2]
    for copy in copies:
        older = Scene(min_nodes=1, rounds=50)
        older.state, older.now = copy, agreed.now
        older.attach("node-a", at=2, digest=after(2), incarnation=1)
        (ask,) = older.asked(CommitsWanted)
        assert ask.after_round == 0
        for event in told(history):
            older.do(event)
        assert (older.state.committed_round, older.state.outer_digest) == (2, after(2))
        assert older.state.incarnation == 1
        assert older.state.token_clock == scene.state.token_clock
        assert older.state.ledger.committed == scene.state.ledger.committed
        assert older.member("node-a").committed_tokens == scene.member("node-a").committed_tokens


def test_void_rounds_that_were_closed_without_their_nodes_give_way_to_what_those_bring() -> None:
    scene, states = run_of(5)
    older = Scene(min_nodes=2, rounds=50)
    older.state, older.now = states[2], scene.now
    older.do(Started())
    older.wait(10 * older.state.rules.lease_seconds)
    assert older.state.committed_round == 3 and older.state.recent[-1].is_void
    older.attach("node-a", "node-b", at=5, digest=after(5))
    for event in told(commits_of(scene)):
        older.do(event)
    older.do(HistoryTold(node_id=A))
    assert (older.state.committed_round, older.state.outer_digest) == (5, after(5))
    assert older.state.token_clock == scene.state.token_clock
    assert older.state.ledger.committed == scene.state.ledger.committed
    tokens = {n: m.committed_tokens for n, m in scene.state.members.items()}
    assert {n: m.committed_tokens for n, m in older.state.members.items()} == tokens
    assert older.round.number == 6 and older.round.base_digest == after(5)


def void_closed_without_nodes(copy: SwarmState, at: float, *, rounds: int = 50) -> Scene:
    """A coordinator that starts from a copy with a round in flight, and closes it alone."""
    alone = Scene(min_nodes=2, rounds=rounds, lease_seconds=30)
    alone.state, alone.now = replace(copy, rules=alone.state.rules), at
    alone.do(Started())
    alone.wait(10_000)
    assert alone.state.recent[-1].is_void
    return alone


def test_a_round_that_was_closed_without_its_nodes_gives_way_to_its_commit() -> None:
    scene, states = run_of(4)
    older = void_closed_without_nodes(states[2], scene.now)
    assert older.state.committed_round == 3
    older.attach("node-a", "node-b", at=4, digest=after(4))
    for event in (*told(commits_of(scene)), HistoryTold(node_id=A)):
        older.do(event)
    assert (older.state.committed_round, older.state.outer_digest) == (4, after(4))
    assert older.state.token_clock == scene.state.token_clock
    assert older.state.ledger.committed == scene.state.ledger.committed


@pytest.mark.parametrize("comes", ["with the last round", "with the round before"])
def test_a_run_that_ended_with_a_void_round_goes_on_when_its_commit_is_brought_back(
    comes: str,
) -> None:
    scene, states = run_of(4)
    older = void_closed_without_nodes(states[3], scene.now, rounds=4)
    assert older.state.is_finished
    older.do(Started())
    assert older.state.is_finished
    if comes == "with the round before":
        older.attach("node-b", at=3, digest=after(3))
        assert older.state.is_finished
    older.attach("node-a", at=4, digest=after(4))
    assert of_kind(older.actions, CommitsWanted)
    for event in (*told(commits_of(scene)), HistoryTold(node_id=A)):
        older.do(event)
    assert not older.state.is_finished and older.state.finished_at is None
    if comes == "with the round before":
        older.apply(after(4), "node-b")
    older.apply(after(4), "node-a")
    assert [ask.round for ask in of_kind(older.log, EvaluationAsked)].count(4) == 1
    older.evaluate(asked_of(older.log, EvaluationAsked)[-1], round=4)
    older.wait(10_000)
    assert older.state.is_finished
    assert [end.outer_digest for end in of_kind(older.log, RunFinished)] == [after(3), after(4)]
    assert older.state.token_clock == scene.state.token_clock
    assert older.state.ledger.committed == scene.state.ledger.committed


def taken_back() -> tuple[Scene, Scene]:
    """A run of four rounds, and a copy of its second in which node-b alone takes round 2 back."""
    scene, states = run_of(4)
    older = Scene(min_nodes=1, rounds=50, lease_seconds=30)
    older.state = replace(states[2], rules=older.state.rules, open_round=None)
    older.now = scene.now
    older.do(Started())
    older.attach("node-b", at=1, digest=after(1))
    longest = older.state.rules.commit_seconds + older.state.rules.apply_seconds
    begin = older.now
    while older.state.incarnation == 0:
        older.beat("node-b", at=1, digest=after(1))
        older.wait(5)
    assert older.now - begin >= older.state.rules.commit_seconds / 2, (
        "it waited for round 2's nodes"
    )
    assert older.now - begin <= longest + 5
    assert older.state.recent[0].is_void and older.state.committed_round == 2
    return scene, older


def test_a_round_that_was_taken_back_holds_again_when_a_node_returns_with_its_state() -> None:
    scene, older = taken_back()
    older.attach("node-a", at=4, digest=after(4))
    for event in (*told(commits_of(scene)), HistoryTold(node_id=A)):
        older.do(event)
    older.apply(after(4), "node-b")
    assert (older.state.committed_round, older.state.outer_digest) == (4, after(4))
    assert older.state.token_clock == scene.state.token_clock
    assert older.state.ledger.committed == scene.state.ledger.committed


def test_level_nodes_are_asked_for_commits_when_one_that_was_brought_takes_the_run_back() -> None:
    scene, states = run_of(1)
    (first,) = commits_of(scene)
    void = tuple(replace(outcome, digest=None, holder_ids=()) for outcome in first.slices)
    taken_back = replace(first, incarnation=1, slices=void, outer_digest=first.base_digest)
    later = replace(first, round=2, slices=void, base_digest=after(1), outer_digest=after(1))
    older = restored(states[1], scene)
    older.do(CommitLearned(commit=later, node_id=A))
    older.apply(after(1), "node-a", "node-b")
    assert {m.state for m in older.state.members.values()} == {MemberState.READY}
    older.do(CommitLearned(commit=taken_back, node_id=NodeId("node-b")))
    assert (older.state.committed_round, older.state.outer_digest) == (1, first.base_digest)
    assert asked_of(older.actions, CommitsWanted) == ["node-a", "node-b"]


def test_what_gave_way_does_not_come_back_to_a_copy_that_has_not_heard_of_it() -> None:
    """The copy knows by the commit that was made later, in the same incarnation, on what holds again."""
    scene, states = run_of(1)
    (first,) = commits_of(scene)
    void = tuple(replace(outcome, digest=None, holder_ids=()) for outcome in first.slices)
    taken_back = replace(first, incarnation=1, slices=void, outer_digest=first.base_digest)
    later = replace(taken_back, round=2, base_digest=after(1), outer_digest=after(1))
    older = restored(states[1], scene)
    older.do(CommitLearned(commit=later, node_id=A))
    assert (older.state.committed_round, older.state.incarnation) == (2, 1)
    older.do(CommitLearned(commit=taken_back, node_id=A))
    assert (older.state.committed_round, older.state.outer_digest) == (2, after(1))


def test_what_has_given_way_once_does_not_come_back() -> None:
    scene, older = taken_back()
    void = next(c for c in commits_of(older) if c.incarnation == 1)
    older.attach("node-a", at=4, digest=after(4))
    for event in (*told(commits_of(scene)[1:2]), HistoryTold(node_id=A)):
        older.do(event)
    before = older.state
    assert not before.recent[0].is_void and before.committed_round == 2
    older.do(CommitLearned(commit=void, node_id=NodeId("node-b")))
    assert older.state == before


@pytest.mark.parametrize("why", ["its node holds no such state", "results were committed since"])
def test_a_round_that_was_taken_back_does_not_hold_again(why: str) -> None:
    scene, older = taken_back()
    if why == "results were committed since":
        older.attach("node-b", at=2, digest=after(1), incarnation=1)
        older.commit("node-b")
        older.attach("node-a", at=4, digest=after(4))
    before = older.state
    for event in told(commits_of(scene)[1:2]):
        older.do(event)
    assert older.state == before
