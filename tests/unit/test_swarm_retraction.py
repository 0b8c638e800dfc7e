"""What was committed and nobody can supply any more is taken back."""

from dataclasses import replace

from coordinator.swarm.explain import explain
from coordinator.swarm.going_back import is_in_reach
from coordinator.swarm.ledger import free_again, num_samples_of
from coordinator.swarm.members import MemberState
from coordinator.swarm.state import RoundPhase
from protocol.wire.messages import EvaluationAsked, RefetchAsked, RoundCommitted
from protocol.wire.rounds import Digest, RoundSpan
from tests.unit.swarm_scene import INITIAL, STEP_TOKENS, Scene, asked_of, digest_of, of_kind

AFTER = digest_of("after")
TAKEN_BACK = "taken back: all that held it are gone (node-a, node-b)"


def committed_by_two_of_three() -> Scene:
    """node-c takes part, and holds nothing when the round commits."""
    names = ("node-a", "node-b", "node-c")
    scene = Scene(min_nodes=3, lease_seconds=10_000)
    scene.attach(*names)
    for digest in ("one", "two"):
        scene.commit(*names)
        scene.apply(digest_of(digest), *names)
    scene.amend(min_nodes=1)
    assert [str(a.node_id) for a in scene.round.assignments] == ["node-a", "node-b", "node-c"]
    for progress in scene.round.slices:
        index, reducer = progress.slice.index, str(progress.slice.reducer_id)
        scene.reduce(reducer, index, result(index))
        for name in ("node-a", "node-b"):
            if scene.state.committed_round == 2:
                scene.hold(name, index, result(index))
    assert scene.round.phase is RoundPhase.APPLYING
    return scene


def result(index: int) -> Digest:
    return digest_of(f"result {index}")


def test_the_round_is_committed_once_more_without_the_slices_that_are_lost() -> None:
    scene = committed_by_two_of_three()
    tokens, committed = scene.state.token_clock, scene.state.ledger.committed
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(scene.state.rules.apply_seconds - 1)
    assert not of_kind(scene.log[-3:], RoundCommitted)
    scene.wait(2)
    commits = [a.commit for a in of_kind(scene.log, RoundCommitted) if a.commit.round == 3]
    first, second = commits
    assert (first.incarnation, second.incarnation) == (0, 1)
    assert first.base_digest == second.base_digest
    # node-c reduced the last slice itself, and holds it.
    assert [s.void_reason for s in second.slices] == [TAKEN_BACK, TAKEN_BACK, ""]
    assert second.slices[2].digest == first.slices[2].digest == result(2)
    assert scene.state.committed_round == 3
    assert scene.state.incarnation == 1
    # The slice that is left still counts the tokens and samples of all three.
    assert (scene.state.token_clock, scene.state.ledger.committed) == (tokens, committed)
    scene.apply(AFTER, "node-c", incarnation=1)
    assert scene.state.outer_digest == AFTER
    assert scene.round.number == 4


def test_with_nothing_left_of_it_the_round_is_void_and_its_samples_are_free_again() -> None:
    scene = committed_by_two_of_three()
    tokens = scene.state.token_clock
    scene.attach("node-c", at=2, digest=digest_of("two"))  # a new process holds nothing
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(scene.state.rules.apply_seconds + 1)
    assert scene.state.last_closed is not None
    assert scene.state.last_closed.commit.outer_digest == digest_of("two")
    assert scene.state.last_closed.tokens == 0
    assert scene.state.token_clock == tokens - 3 * 5 * STEP_TOKENS
    # A round goes on from there, with the same samples.
    scene.apply(digest_of("two"), "node-c", incarnation=1)
    assert scene.round.number == 4
    assert scene.round.base_digest == digest_of("two")
    leased, free = scene.state.ledger.leased, free_again(scene.state.ledger)
    assert num_samples_of(leased) + num_samples_of(free) == 3 * 10


def test_with_nothing_left_of_it_and_nobody_with_the_state_before_that_round_goes_too() -> None:
    """It was forgotten, so the run ended, or waited, with a state that nobody held."""
    scene = committed_by_two_of_three()
    scene.attach("node-c", at=1, digest=digest_of("one"))  # it has lost its newest state
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(scene.state.rules.apply_seconds + 1)
    assert [closed.commit.round for closed in scene.state.recent] == [2, 3]
    assert scene.state.outer_digest == digest_of("two")
    scene.wait(scene.state.rules.apply_seconds + 1)
    assert scene.state.outer_digest == digest_of("one")
    assert all(closed.is_void for closed in scene.state.recent)


def test_nothing_is_taken_back_while_somebody_can_supply_it() -> None:
    scene = committed_by_two_of_three()
    scene.leave("node-a")
    scene.wait(3 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 0
    scene.apply(AFTER, "node-b")
    scene.leave("node-b")
    scene.attach("node-b", at=3, digest=AFTER)  # it has the state, if not the results
    scene.wait(3 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 0


def test_nothing_is_taken_back_while_nobody_is_here() -> None:
    scene = committed_by_two_of_three()
    for name in ("node-a", "node-b", "node-c"):
        scene.leave(name)
    scene.wait(10 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 0


def test_a_result_that_arrives_after_the_commit_can_be_supplied_too() -> None:
    scene = committed_by_two_of_three()
    for index in (0, 1):
        scene.hold("node-c", index, result(index))
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(3 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 0


def test_who_applied_what_was_taken_back_has_no_vote_and_fetches_the_state_anew() -> None:
    scene = committed_by_two_of_three()
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(scene.state.rules.apply_seconds + 1)
    assert scene.state.incarnation == 1
    scene.attach("node-a", at=3, digest=AFTER, incarnation=0)
    assert scene.member("node-a").state is MemberState.DIVERGED
    (ask,) = scene.asked(RefetchAsked)
    assert (ask.round, ask.outer_digest) == (2, digest_of("two"))
    assert ask.reason.endswith("round 3 was taken back")
    scene.apply(digest_of("three"), "node-c", incarnation=1)
    scene.wait(2 * scene.state.rules.apply_seconds)  # node-a, with as much weight, is awaited
    assert scene.state.outer_digest == digest_of("three")


def test_who_applied_what_was_taken_back_and_only_lost_its_session_has_no_vote_either() -> None:
    scene = committed_by_two_of_three()
    scene.apply(AFTER, "node-a")
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(scene.state.rules.apply_seconds + 1)
    assert scene.state.incarnation == 1
    scene.attach("node-a", at=3, digest=AFTER, is_new_process=False)
    scene.apply(digest_of("three"), "node-c", incarnation=1)
    scene.wait(2 * scene.state.rules.apply_seconds)
    assert scene.state.outer_digest == digest_of("three")


def test_void_rounds_alone_are_not_taken_back_from_a_node_that_has_yet_to_pass_them() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    for _ in range(2):
        scene.wait_until(scene.round.commit_deadline)
    scene.leave("node-a")
    scene.leave("node-b")
    assert all(closed.is_void for closed in scene.state.recent)
    scene.attach("node-a", at=0)
    scene.wait(5 * scene.state.rules.apply_seconds)
    assert scene.state.incarnation == 0
    assert not [a for a in of_kind(scene.log, RoundCommitted) if a.commit.incarnation]


def agreed_on_a_lie() -> Scene:
    """node-c alone reported a state in time, and a wrong one; then it left, in the midst of a round."""
    scene = committed_by_two_of_three()
    scene.apply(digest_of("a lie"), "node-c")
    scene.wait(2 * scene.state.rules.apply_seconds + 1)
    assert scene.round.number == 4, "the run goes on from the lie"
    scene.leave("node-c")
    assert scene.state.open_round is None, "its round is void"
    assert (scene.state.committed_round, scene.state.outer_digest) == (4, digest_of("a lie"))
    return scene


def hold_after_round_3(scene: Scene, digest: Digest, *names: str) -> None:
    for name in names:
        scene.beat(name, at=3, digest=digest)


def test_what_most_participants_hold_is_agreed_on_when_nobody_holds_what_was() -> None:
    scene = agreed_on_a_lie()
    tokens = scene.state.token_clock
    hold_after_round_3(scene, AFTER, "node-a", "node-b")
    assert scene.reason.startswith(
        "waiting for 1 more node: 0 of 1 are ready; node-a is at round 3 and has to apply round 4; "
        "node-b is at round 3 and has to apply round 4; nobody here holds the state after round 4: "
        "another that most hold is agreed on unless a node returns with it, "
    )
    scene.wait(scene.state.rules.apply_seconds + 1)
    # The round stays, with all its tokens; the void one after it is made anew on the right state.
    assert scene.state.outer_digest == AFTER
    assert scene.state.token_clock == tokens
    right, void = scene.state.recent
    assert (right.commit.outer_digest, right.commit.incarnation) == (AFTER, 0)
    assert (void.commit.base_digest, void.commit.outer_digest) == (AFTER, AFTER)
    assert void.commit.incarnation == 1
    scene.apply(AFTER, "node-a", "node-b", incarnation=1)
    assert (scene.round.number, scene.round.base_digest) == (5, AFTER)


def test_the_loss_of_a_lie_is_dropped_and_what_is_agreed_on_anew_is_evaluated() -> None:
    scene = Scene(min_nodes=3, evaluate_every=1)
    scene.attach("node-a", "node-b", "node-c")
    scene.amend(min_nodes=2)
    scene.evaluate("node-a", round=0)
    scene.commit("node-a", "node-b")
    scene.apply(digest_of("a lie"), "node-a")
    scene.wait(2 * scene.state.rules.apply_seconds)
    scene.evaluate("node-a", round=1)
    assert [kept.round for kept in scene.state.held_out] == [0, 1]
    scene.leave("node-a")
    for name in ("node-b", "node-c"):
        scene.beat(name, at=1, digest=AFTER)
    scene.wait(scene.state.rules.apply_seconds)
    assert scene.state.outer_digest == AFTER
    assert [kept.round for kept in scene.state.held_out] == [0]
    (ask,) = scene.asked(EvaluationAsked)
    assert ask.round == 1
    (asked,) = asked_of(scene.actions, EvaluationAsked)
    scene.evaluate(asked, round=1)
    assert [kept.round for kept in scene.state.held_out] == [0, 1]


def test_who_returns_with_what_was_agreed_on_has_the_others_fetch_it() -> None:
    scene = agreed_on_a_lie()
    hold_after_round_3(scene, AFTER, "node-a", "node-b")
    scene.wait(scene.state.rules.apply_seconds - 1)
    scene.attach("node-c", at=4, digest=digest_of("a lie"))
    scene.wait(2)
    assert scene.state.outer_digest == digest_of("a lie")


def all_come_back_two_rounds_behind(*, reach: tuple[RoundSpan, ...]) -> Scene:
    """Their disks have refused the latest states."""
    names = ("node-a", "node-b")
    scene = Scene(min_nodes=2)
    scene.attach(*names)
    for number in range(1, 6):
        scene.commit(*names)
        scene.apply(digest_of(f"after {number}"), *names)
    for name in names:
        scene.leave(name)
    scene.attach(*names, at=3, digest=digest_of("after 3"))
    scene.change(reach_back=reach)
    scene.wait(10 * scene.state.rules.commit_seconds)
    return scene


def test_where_all_are_more_than_a_round_behind_the_way_back_is_named_and_leads_on() -> None:
    scene = all_come_back_two_rounds_behind(reach=(RoundSpan(first=1, last=3),))
    number = scene.state.committed_round
    assert explain(scene.state, scene.now).endswith(
        f"; nobody here holds the state after round {number}, nor the one before it: start a node that "
        "does, or, where none is left, go on from what those here keep: 'atoll run rollback 3'"
    )
    assert is_in_reach(scene.state, 3)
    scene.attach("node-c", at=number, digest=digest_of("after 5"))
    assert "nobody here holds" not in explain(scene.state, scene.now)


def test_nobody_is_sent_back_to_where_the_run_began() -> None:
    scene = all_come_back_two_rounds_behind(reach=(RoundSpan(first=0, last=0),))
    words = explain(scene.state, scene.now)
    assert words.endswith("nor the one before it: a node that does has to come back")


def test_half_of_the_participants_do_not_agree_anew_for_the_others() -> None:
    scene = agreed_on_a_lie()
    scene.leave("node-b")
    hold_after_round_3(scene, AFTER, "node-a")
    scene.wait(5 * scene.state.rules.apply_seconds)
    assert scene.state.outer_digest == digest_of("a lie")


def test_those_who_hold_different_states_agree_on_none_of_them() -> None:
    scene = agreed_on_a_lie()
    hold_after_round_3(scene, AFTER, "node-a")
    hold_after_round_3(scene, digest_of("other"), "node-b")
    scene.wait(5 * scene.state.rules.apply_seconds)
    assert scene.state.outer_digest == digest_of("a lie")


def test_two_nodes_that_told_a_wrong_state_alike_go_on_from_the_one_they_hold() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.commit("node-a", "node-b")
    scene.beat("node-a", at=1, digest=INITIAL)  # the new round with the old digest
    scene.beat("node-b", at=1, digest=INITIAL)
    assert scene.round.number == 2
    for name in ("node-a", "node-b"):
        scene.beat(name, at=1, digest=AFTER)
    assert scene.member("node-a").state is MemberState.DIVERGED
    scene.wait_until(scene.round.commit_deadline)
    scene.wait(scene.state.rules.apply_seconds + 1)
    for name in ("node-a", "node-b"):
        scene.beat(name, at=2, digest=AFTER, incarnation=1)
    assert (scene.round.number, scene.round.base_digest) == (3, AFTER)


def test_three_of_four_agree_anew_and_two_only_after_the_longest_rounds_time() -> None:
    for num_here, agreed in ((2, digest_of("a lie")), (3, AFTER)):
        scene = Scene(min_nodes=4)
        names = ["node-a", "node-b", "node-c", "node-d"]
        scene.attach(*names)
        scene.commit("node-a", "node-b", "node-c")
        scene.apply(digest_of("a lie"), "node-d")
        scene.wait(2 * scene.state.rules.apply_seconds)
        assert scene.state.outer_digest == digest_of("a lie")
        for name in names[num_here:]:
            scene.leave(name)
        for name in names[:num_here]:
            scene.beat(name, at=1, digest=AFTER)
        scene.wait(4 * scene.state.rules.apply_seconds)
        assert scene.state.outer_digest == agreed
        scene.wait(scene.state.rules.commit_seconds)
        assert scene.state.outer_digest == AFTER, "the liar stays away, and the run goes on"


def test_a_plan_with_little_time_to_apply_takes_nothing_back_before_the_run_files_time() -> None:
    scene = committed_by_two_of_three()
    apply_seconds = scene.state.rules.apply_seconds
    scene.state = replace(
        scene.state, open_round=replace(scene.round, apply_deadline=scene.now + apply_seconds / 4)
    )
    scene.leave("node-a")
    scene.leave("node-b")
    scene.wait(apply_seconds / 2)  # over by the plan; who comes back now may hold it all
    assert scene.state.incarnation == 0
    scene.wait(apply_seconds)
    assert scene.state.incarnation == 1
