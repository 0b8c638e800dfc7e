"""A going back that nobody can follow, in the core: who is believed before, and what is withdrawn after."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from coordinator.swarm.events import GoBack, Ruled, RulingsLearned, WithdrawalAsked
from coordinator.swarm.going_back import (
    is_in_reach,
    latest_in_reach,
    possible_in_words,
    rounds_in_reach,
    spans_in_words,
)
from coordinator.swarm.members import MemberState
from coordinator.swarm.steering import with_rulings
from protocol.errors import UsageError
from protocol.run.amendments import in_force
from protocol.trust.rulings import (
    COORDINATOR,
    NO_DIGEST,
    Ruling,
    RulingKind,
    in_words,
    least_key,
    ruling_from_json,
    undoes,
)
from protocol.wire.messages import CommitsWanted, RulingsTold
from protocol.wire.rounds import NodeId
from tests.tiny_runs import tiny
from tests.unit.going_back_scene import Kept
from tests.unit.swarm_scene import Scene, asked_of, digest_of

if TYPE_CHECKING:
    from coordinator.swarm.state import SwarmState

LONG = 1000.0
"""Seconds, longer than any deadline of the scene."""


def swarm_of(rounds: int, **invites: str) -> Kept:
    invites = invites or {"a": "one", "b": "two", "c": "one"}
    kept = Kept(scene=Scene(min_nodes=len(invites), rounds=100))
    for name, invite in invites.items():
        kept.attach(name, invite=invite)
    kept.scene.amend(min_nodes=2)
    kept.rounds(rounds)
    return kept


def gone_back_by_word_of_c() -> Kept:
    """a and b keep rounds 6 to 8; only c says that it keeps round 3, and the run owner believes it."""
    kept = swarm_of(8)
    for name in "ab":
        kept.reach(name, (6, 8))
    kept.reach("c", (1, 8))
    kept.go_back(3, node_id=NodeId("c"), node_name="c")
    return kept


def beat_for_a_while(kept: Kept, names: str) -> None:
    for _ in range(3):
        kept.scene.wait(60)
        for name in names:
            kept.beat(name)


def asked(kept: Kept) -> list[WithdrawalAsked]:
    return [each for each in kept.scene.log if isinstance(each, WithdrawalAsked)]


# Who is believed


def test_what_one_member_says_to_keep_is_not_in_reach_and_the_run_owner_hears_who_says_so() -> None:
    kept = swarm_of(8)
    for name in "ab":
        kept.reach(name, (6, 8))
    kept.reach("c", (1, 8))
    with pytest.raises(UsageError, match="c alone says that the run can go back to round 3") as no:
        kept.go_back(3)
    assert no.value.next_step == (
        "'atoll run rollback 3 --believe c' if you know that node; otherwise nodes that are here can "
        "go back to these rounds: 6 to 7; c alone says that it can go back to 1 to 5"
    )
    assert latest_in_reach(kept.scene.state, 3) is None, "nothing goes there by itself"
    assert latest_in_reach(kept.scene.state, 7) == 7
    kept.go_back(6)
    assert kept.scene.state.committed_round == 6


def test_two_of_one_invite_are_not_enough_unless_their_work_decides_or_all_say_so() -> None:
    for say_so, reached in (("a", False), ("ac", False), ("ab", True), ("acd", True)):
        kept = swarm_of(4, a="one", b="two", c="one", d="one", e="one")
        for name in "abcde":
            kept.reach(name, (1, 3) if name in say_so else (4, 4))
        assert is_in_reach(kept.scene.state, 2) is reached, say_so
    alone = swarm_of(4, a="one", b="one")
    alone.reach("b", (4, 4))
    assert not is_in_reach(alone.scene.state, 2)
    alone.scene.leave("b")
    assert is_in_reach(alone.scene.state, 2), "who is alone here decides alone"


def test_who_is_believed_must_be_here_and_say_so() -> None:
    kept = swarm_of(5)
    kept.reach("c", (4, 4))
    for name in "cx":
        with pytest.raises(UsageError, match=f"{name} is not here, or does not say"):
            kept.go_back(2, node_id=NodeId(name), node_name=name)
    kept.go_back(2, node_id=NodeId("a"), node_name="a")
    (told,) = kept.scene.asked(RulingsTold)
    assert in_words(told.rulings[0]).startswith(
        "the run went back to the state after round 2, which a alone said to keep; rounds 3 to 5"
    )


def test_the_run_goes_back_to_where_it_began_but_by_itself_only_where_that_is_what_is_wanted() -> (
    None
):
    kept = swarm_of(5)
    for name in "abc":
        kept.reach(name, (0, 0), (4, 5))
    state = kept.scene.state
    assert spans_in_words(rounds_in_reach(state)) == "0 and 4"
    assert latest_in_reach(state, 3) is None and latest_in_reach(state, 0) == 0
    kept.go_back(0)
    assert kept.scene.state.committed_round == 0
    for name in "abc":
        kept.follow(name)
    kept.rounds(1)
    assert kept.scene.state.recent[-1].commit.incarnation == 1


def test_where_the_run_file_states_the_first_weights_anybody_may_bring_them() -> None:
    kept = swarm_of(3)
    for name in "abc":
        kept.reach(name, (3, 3))
    assert not is_in_reach(kept.scene.state, 0)
    rules = replace(kept.scene.state.rules, first_digest=kept.made[0].base_digest)
    assert is_in_reach(replace(kept.scene.state, rules=rules), 0)


def test_many_stretches_of_many_members_are_told_in_order() -> None:
    kept = swarm_of(60)
    kept.reach("a", *((n, n + 2) for n in range(1, 60, 2)))
    kept.reach("b", (10, 20), (15, 30))
    kept.reach("c", (58, 58))
    assert spans_in_words(rounds_in_reach(kept.scene.state)) == "10 to 30 and 58"
    assert possible_in_words(kept.scene.state).endswith(
        "; a alone says that it can go back to 1 to 9, 31 to 57 and 59"
    )


# What is withdrawn


def test_a_going_back_that_nobody_follows_is_withdrawn_and_the_run_has_what_it_had() -> None:
    kept = gone_back_by_word_of_c()
    assert kept.scene.state.committed_round == 3
    assert "nobody holds the state after round 3 that the run went back to" in kept.scene.reason
    assert "that is withdrawn, 100 s left" in kept.scene.reason
    beat_for_a_while(kept, "abc")
    reason = asked(kept)[-1].reason
    assert reason == (
        "too few nodes came to hold the state after round 3 in 100 s; nodes that are here can go back "
        "to these rounds: 6 to 7; c alone says that it can go back to 1 to 5"
    )
    kept.withdraw()
    assert set(asked_of(kept.scene.actions, CommitsWanted)) == {"a", "b", "c"}
    assert kept.scene.asked(CommitsWanted)[0].after_round == 2
    kept.bring("a", 8)
    state = kept.scene.state
    assert (state.committed_round, state.token_clock) == (8, kept.settled_once[8].token_clock)
    assert {m.state for m in state.members.values()} == {MemberState.READY}
    assert kept.scene.reason.startswith("paused by the coordinator")
    kept.scene.do(Ruled(kind=RulingKind.RESUMED, by="the run owner", unix_seconds=0.0))
    kept.rounds(1)
    commit = kept.scene.state.recent[-1].commit
    assert (commit.round, commit.incarnation) == (9, 1)


def test_a_member_that_alone_says_to_hold_the_state_does_not_keep_the_run_there() -> None:
    kept = swarm_of(8)
    kept.go_back(3)
    kept.follow("a")
    assert kept.scene.state.open_round is None, "no round opens on the word of one"
    assert "a alone holds the state after round 3" in kept.scene.reason
    beat_for_a_while(kept, "abc")
    assert asked(kept)


def test_two_keys_of_one_invite_open_no_round_by_saying_that_they_hold_the_state() -> None:
    kept = swarm_of(8, a="one", b="two", c="three", d="one", e="four")
    kept.go_back(3)
    kept.follow("a")
    kept.follow("d")
    assert kept.scene.state.open_round is None
    assert "too few nodes hold the state after round 3" in kept.scene.reason
    kept.follow("b")
    assert kept.scene.state.open_round is not None


@pytest.mark.parametrize("is_lying", [False, True])
def test_who_says_to_hold_a_later_state_is_no_reason_to_wait_for_one_that_nobody_holds(
    is_lying: bool,
) -> None:
    """It is undone, or there is none; whoever has commits to bring may still bring them."""
    kept = swarm_of(8)
    kept.go_back(3)
    kept.follow("a")
    kept.follow("b")
    kept.rounds(1)
    kept.scene.wait(20)
    assert kept.scene.state.committed_round == 4
    kept.scene.leave("a")
    kept.scene.leave("b")
    kept.scene.wait(200)
    kept.scene.attach("d", at=3, digest=kept.settled[3].outer_digest)
    assert kept.scene.member("c").outer_round == 8
    if is_lying:
        kept.scene.beat("c", at=9, digest=digest_of("none that there is"), incarnation=7)
    kept.scene.wait(200)
    assert kept.scene.state.outer_digest == kept.settled[3].outer_digest
    assert kept.scene.state.recent[-1].is_void


def test_each_member_that_follows_gives_the_others_more_time_and_with_enough_the_run_goes_on() -> (
    None
):
    kept = swarm_of(8)
    kept.go_back(3)
    kept.scene.wait(90)
    kept.follow("a")
    kept.scene.wait(90)
    for name in "abc":
        kept.beat(name)
    assert asked(kept) == []
    kept.follow("b")
    assert kept.scene.state.open_round is not None and kept.scene.state.unfollowed is None
    with pytest.raises(UsageError, match="no going back to withdraw"):
        kept.scene.do(
            Ruled(kind=RulingKind.WITHDRAWN, by=COORDINATOR, unix_seconds=0.0, incarnation=1)
        )


def test_members_that_take_turns_in_saying_that_they_hold_the_state_win_no_time() -> None:
    kept = swarm_of(8, a="one", b="two", c="three", d="four")
    kept.go_back(3)
    state = kept.scene.state
    for place in range(12):
        kept.scene.wait(60)
        gone = NodeId("ad"[1 - place % 2])
        members = {**kept.scene.state.members}
        members[gone] = state.members[gone]  # as if it had attached anew with what it held
        kept.scene.state = replace(kept.scene.state, members=members)
        kept.follow("ad"[place % 2])
    assert asked(kept)


def test_others_may_fetch_for_long_from_one_whom_the_run_owner_believes_until_it_leaves() -> None:
    kept = gone_back_by_word_of_c()
    kept.follow("c")
    beat_for_a_while(kept, "abc")
    assert asked(kept) == []
    assert kept.scene.reason.endswith(
        "the others fetch the state after round 3 from c; if it does not give it, 'atoll nodes quarantine "
        "c' withdraws the going back"
    )
    kept.scene.leave("c")
    beat_for_a_while(kept, "ab")
    assert asked(kept)
    kept.withdraw()
    kept.bring("b", 8)
    assert kept.scene.state.committed_round == 8


def test_nothing_is_withdrawn_while_nobody_holds_what_could_be_had_instead() -> None:
    kept = gone_back_by_word_of_c()
    for name in "abc":
        kept.scene.leave(name)
    kept.scene.wait(LONG)
    kept.scene.attach("d")
    kept.scene.wait(LONG)
    assert asked(kept) == []
    kept.scene.attach("a", at=8, digest=kept.settled_once[8].outer_digest, invite="one")
    kept.scene.wait(LONG)
    assert asked(kept)


def test_what_cannot_be_ruled_is_asked_for_again() -> None:
    kept = gone_back_by_word_of_c()
    for _ in range(8):
        beat_for_a_while(kept, "abc")
    assert len(asked(kept)) > 2


def test_a_going_back_that_was_followed_stays_where_a_later_one_is_withdrawn() -> None:
    kept = swarm_of(8, a="one", b="two")
    kept.go_back(5)
    for name in "ab":
        kept.follow(name)
    kept.rounds(2)
    kept.go_back(3)
    beat_for_a_while(kept, "ab")
    assert asked(kept)[-1].withdrawn.incarnation == 2
    kept.withdraw()
    kept.made = [c for c in kept.made if c.round <= 5 or c.incarnation == 1]
    kept.bring("a", 7)
    state = kept.scene.state
    assert (state.committed_round, [r.incarnation for r in state.rolled_back]) == (7, [1])
    assert {m.state for m in state.members.values()} == {MemberState.READY}


def test_two_in_a_row_that_nobody_follows_are_withdrawn_together() -> None:
    kept = swarm_of(8)
    kept.go_back(5)
    kept.go_back(3)
    beat_for_a_while(kept, "abc")
    kept.withdraw()
    kept.bring("a", 8)
    state = kept.scene.state
    assert (state.committed_round, state.rolled_back) == (8, ())
    assert state.recent[-1].commit.outer_digest is not None


def test_a_run_that_went_back_by_itself_does_not_do_so_again_after_a_withdrawal() -> None:
    kept = swarm_of(8)
    kept.scene.amend(watches_loss=True, evaluate_every_rounds=1)
    kept.go_back(7, by=COORDINATOR)
    beat_for_a_while(kept, "abc")
    kept.withdraw()
    kept.bring("a", 8)
    kept.scene.do(Ruled(kind=RulingKind.RESUMED, by="the run owner", unix_seconds=0.0))
    assert not [each for each in kept.scene.log if isinstance(each, GoBack)]
    from coordinator.swarm.losses import _was_here_before

    assert _was_here_before(kept.scene.state, 8)


def test_the_ruling_comes_whole_from_json_from_the_disk_and_from_nodes() -> None:
    kept = gone_back_by_word_of_c()
    beat_for_a_while(kept, "abc")
    kept.withdraw()
    back, withdrawal = kept.scene.state.rulings
    assert ruling_from_json(withdrawal.canonical_json()) == withdrawal
    assert in_words(withdrawal).startswith(
        "the run did not go back to the state after round 3, and is paused with the one that it had: "
    )
    state = kept.scene.state
    bare = replace(state, rulings=(), rolled_back=(), paused=None)
    assert with_rulings(bare, (back, withdrawal)) == state
    loaded = kept.store.load(bare.rules, bare.run_digest)
    assert (loaded.rolled_back, loaded.paused) == ((), withdrawal)
    copy = swarm_of(8)
    copy.save()
    undone = copy.store.undone_after(3, rules=copy.scene.state.rules)
    copy.scene.do(RulingsLearned(rulings=(back, withdrawal), rules=bare.rules, undone={3: undone}))
    copy.bring("a", 8)
    assert copy.scene.state.committed_round == 8
    assert {m.state for m in copy.scene.state.members.values()} == {MemberState.READY}


def rulings_of(*fields: dict[str, object]) -> list[Ruling]:
    return [
        Ruling(number=n, before=NO_DIGEST.hex(), by="x", unix_seconds=0.0, **each)  # type: ignore[arg-type]
        for n, each in enumerate(fields, start=1)
    ]


def test_rounds_hold_again_under_the_rules_that_they_were_made_by() -> None:
    """An amendment reaches back to the first undone round, unless going back there is withdrawn."""
    back = {"kind": RulingKind.ROLLED_BACK, "from_round": 4, "last_round": 8, "incarnation": 1}

    def steps(number: int, at: int) -> dict[str, object]:
        changes = (("inner.steps", number),)
        return {"kind": RulingKind.AMENDED, "changes": changes, "from_round": at}

    withdrawal = {"kind": RulingKind.WITHDRAWN, "from_round": 4, "incarnation": 1}
    spec = tiny()
    rulings = rulings_of(steps(11, 7), back, steps(12, 4))
    before = [in_force(spec, rulings, round=n).inner.steps for n in (3, 4, 8, 9)]
    assert before == [spec.inner.steps, 12, 12, 12]
    rulings = rulings_of(steps(11, 7), back, steps(12, 4), withdrawal, steps(13, 10))
    after = [in_force(spec, rulings, round=n).inner.steps for n in (3, 4, 6, 7, 8, 9, 10)]
    assert after == [spec.inner.steps] * 3 + [11, 11, 12, 13]
    assert not undoes(rulings, 5, 0)
    assert undoes(rulings[:2], 5, 0)


def test_rounds_hold_again_though_the_coordinators_key_was_changed_meanwhile() -> None:
    back = {"kind": RulingKind.ROLLED_BACK, "from_round": 4, "last_round": 8, "incarnation": 1}
    key = {"kind": RulingKind.KEYED, "changes": (("number", 2),), "from_round": 4}
    withdrawal = {"kind": RulingKind.WITHDRAWN, "from_round": 4, "incarnation": 1}
    assert [least_key(rulings_of(back, key), round=n) for n in (3, 4, 8)] == [0, 2, 2]
    rulings = rulings_of(back, key, withdrawal)
    assert [least_key(rulings, round=n) for n in (3, 4, 8, 9)] == [0, 0, 0, 2]
    assert least_key(rulings) == 2


def test_nothing_is_agreed_on_anew_while_the_state_that_the_run_went_back_to_may_still_come() -> (
    None
):
    """Else whoever is one round behind would have the run take another step back."""
    kept = swarm_of(8)
    kept.go_back(3)
    kept.scene.attach("d", at=2, digest=kept.settled[2].outer_digest)
    before: SwarmState = kept.scene.state
    kept.scene.wait(99)
    after = kept.scene.state
    assert (after.committed_round, after.outer_digest) == (3, before.outer_digest)
    assert after.incarnation == before.incarnation
