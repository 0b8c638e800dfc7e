"""The run goes back, in the core: what is refused, who is told what, and what counts no more."""

from dataclasses import replace

import pytest

from coordinator.swarm.events import CommitLearned, Started
from coordinator.swarm.going_back import (
    HistoryMovedError,
    books_after,
    rounds_in_reach,
    spans_in_words,
)
from coordinator.swarm.members import Against, MemberState
from coordinator.swarm.start import bringing
from coordinator.swarm.steering import with_rulings
from protocol.errors import UsageError
from protocol.trust.rulings import in_words, ruling_from_json
from protocol.wire.messages import CommitsWanted, RefetchAsked, RulingsTold
from protocol.wire.rounds import NodeId, RoundSpan
from tests.unit.going_back_scene import Kept
from tests.unit.swarm_scene import Scene, asked_of, digest_of


def swarm_of(rounds: int) -> Kept:
    kept = Kept()
    kept.attach("a")
    kept.attach("b")
    kept.rounds(rounds)
    return kept


def test_nodes_hear_the_ruling_and_then_which_state_to_go_on_from() -> None:
    kept = swarm_of(5)
    kept.go_back(2, reason="the loss has jumped")
    (told,) = kept.scene.asked(RulingsTold)
    assert in_words(told.rulings[0]) == (
        "the run went back to the state after round 2; rounds 3 to 5 are undone, to which a, b "
        "contributed: the loss has jumped"
    )
    assert asked_of(kept.scene.actions, RefetchAsked) == ["a", "b"]
    asked = kept.scene.asked(RefetchAsked)[0]
    assert (asked.round, asked.outer_digest) == (2, kept.settled[2].outer_digest)
    assert asked.reason.endswith("round 5, which it holds, is undone")
    places = [type(each) for each in kept.scene.asked(object)]
    assert places.index(RulingsTold) < places.index(RefetchAsked)
    assert {m.state for m in kept.scene.state.members.values()} == {MemberState.DIVERGED}
    assert kept.scene.reason.startswith("waiting for 2 more nodes")


def test_the_round_after_it_is_made_again_and_is_told_from_the_undone_one() -> None:
    kept = swarm_of(5)
    kept.go_back(2)
    kept.all_follow()
    kept.rounds(1)
    commit = kept.scene.state.recent[-1].commit
    assert (commit.round, commit.incarnation) == (3, 1)
    assert commit.base_digest == kept.settled[2].outer_digest


def test_whom_the_others_contradict_is_not_excused_by_going_back() -> None:
    """But of the undone rounds, which may all have spoken against it."""
    kept = swarm_of(5)
    kept.scene.change("b", against=Against(rounds=9))
    kept.save()
    kept.go_back(2)
    assert kept.scene.member("b").against == Against(rounds=6)
    assert kept.scene.member("a").against == Against()


def test_a_node_that_comes_with_an_undone_state_is_sent_back_and_asked_for_no_commits() -> None:
    kept = swarm_of(5)
    kept.scene.leave("b")
    kept.rounds(0)
    kept.go_back(2)
    kept.scene.attach("b", at=5, digest=digest_of("state 5, made 5"))
    assert asked_of(kept.scene.actions, RefetchAsked) == ["b"]
    assert kept.scene.asked(CommitsWanted) == []
    assert bringing(kept.scene.state) == []


def test_an_undone_commit_that_is_brought_back_is_left_out() -> None:
    kept = swarm_of(4)
    kept.go_back(2)
    before = kept.scene.state
    kept.scene.do(CommitLearned(commit=kept.made[2], node_id=NodeId("a")))
    assert kept.scene.state == before


def test_samples_of_undone_rounds_are_leased_again_first() -> None:
    kept = swarm_of(4)
    undone = [a.first_sample for commit in kept.made[2:] for a in commit.assignments]
    kept.go_back(2)
    kept.all_follow()
    leased = [a.first_sample for a in kept.scene.round.assignments]
    assert leased == sorted(undone)[: len(leased)]


def test_what_cannot_be_gone_back_to_is_refused_with_what_can() -> None:
    kept = swarm_of(6)
    reach = (RoundSpan(first=2, last=2), RoundSpan(first=4, last=5))
    kept.scene.change(reach_back=reach)
    before = kept.scene.state
    for round, words in (
        (6, "round 6 is not behind the run: round 6 is the latest"),
        (9, "round 9 is not behind the run"),
        (3, "no node that is here can go back to round 3"),
    ):
        with pytest.raises(UsageError, match=words) as refused:
            kept.go_back(round)
        assert refused.value.next_step is not None
        assert refused.value.next_step.endswith("can go back to these rounds: 2 and 4 to 5")
    assert kept.scene.state == before
    kept.go_back(4)
    assert kept.scene.state.committed_round == 4


def test_where_no_node_is_here_going_back_begins_with_starting_some() -> None:
    kept = swarm_of(4)
    for name in list(kept.scene.state.members):
        kept.scene.leave(name)
    with pytest.raises(UsageError, match="no node that is here") as refused:
        kept.go_back(2)
    assert refused.value.next_step == (
        "start nodes again, and repeat this when they are here: they alone keep states"
    )


def test_a_database_that_was_asked_before_the_latest_round_closed_is_asked_again() -> None:
    kept = swarm_of(4)
    older = kept.store.undone_after(2, rules=kept.scene.state.rules)
    kept.rounds(1)
    with pytest.raises(HistoryMovedError):
        kept.go_back(2, undone=older)
    kept.go_back(2)


def test_nothing_is_undone_while_a_coordinator_that_has_started_waits_for_its_nodes() -> None:
    kept = swarm_of(4)
    kept.scene.do(Started())
    with pytest.raises(UsageError, match="has just started"):
        kept.go_back(2)


def test_a_going_back_that_is_ruled_anew_holds_once() -> None:
    kept, copy = swarm_of(5), swarm_of(5)
    kept.go_back(2)
    (ruling,) = kept.scene.state.rulings
    fields = {
        "last_round": ruling.last_round,
        "incarnation": ruling.incarnation,
        "outer_digest": ruling.outer_digest,
        "contributors": ruling.contributors,
    }
    copy.go_back(2, **fields)
    assert copy.scene.state.committed_round == 2
    assert copy.scene.state.rulings == (ruling,)
    with pytest.raises(UsageError, match="went back to round 2 already"):
        copy.go_back(2, **fields)


def test_the_ruling_comes_whole_from_json_and_from_the_disk() -> None:
    kept = swarm_of(3)
    kept.go_back(1)
    (ruling,) = kept.scene.state.rulings
    assert ruling_from_json(ruling.canonical_json()) == ruling
    bare = replace(kept.scene.state, rulings=(), rolled_back=())
    assert with_rulings(bare, (ruling,)) == kept.scene.state
    assert kept.store.load(bare.rules, bare.run_digest).rolled_back == (ruling,)


def test_rounds_in_reach_are_joined_and_told_as_people_read_them() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("a", "b", invite="one")
    scene.attach("c", "d", invite="two")
    spans = {
        "a": (RoundSpan(first=0, last=2), RoundSpan(first=8, last=30)),
        "b": (RoundSpan(first=3, last=3),),
        "c": (RoundSpan(first=0, last=2), RoundSpan(first=9, last=30)),
        "d": (RoundSpan(first=3, last=3), RoundSpan(first=8, last=8)),
    }
    members = {n: replace(m, reach_back=spans[n]) for n, m in scene.state.members.items()}
    state = replace(scene.state, members=members, committed_round=20)
    assert spans_in_words(rounds_in_reach(state)) == "0 to 3 and 8 to 19"
    assert spans_in_words([RoundSpan(first=n, last=n) for n in (2, 5, 9)]) == "2, 5 and 9"


def test_what_was_counted_after_an_earlier_round_is_found_again() -> None:
    """Also while a round is in flight whose leases are not over, and where the run has gone back since."""
    kept = swarm_of(6)
    kept.go_back(4)
    kept.all_follow()
    kept.rounds(2)
    kept.scene.train("a")
    kept.save()
    state = kept.scene.state
    for round in range(1, 7):
        later = kept.store.whole_commits_after(round)
        found = books_after(state, round, later)
        assert found is not None
        tokens, ledger = found
        then = kept.settled[round]
        assert (tokens, ledger.committed) == (then.token_clock, then.ledger.committed)
        assert (ledger.leased, ledger.ahead) == ((), ())
        if later:
            assert books_after(state, round, later[1:]) is None
    assert books_after(kept.settled[5], 3, kept.store.whole_commits_after(3)) is not None


def test_results_are_bounded_by_what_is_remembered_after_a_restart_and_a_going_back() -> None:
    kept = swarm_of(4)
    state = kept.scene.state
    assert [each.round for each in state.norms] == [1, 2, 3, 4]
    assert kept.store.load(state.rules, state.run_digest).norms == state.norms
    kept.go_back(2)
    assert kept.scene.state.norms == kept.settled[2].norms
