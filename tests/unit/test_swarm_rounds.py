from dataclasses import replace

import pytest

from coordinator.swarm.events import Reported
from coordinator.swarm.explain import explain
from coordinator.swarm.members import MemberState
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.state import RoundPhase
from protocol.wire.messages import Reduced, RefetchAsked, RoundCommitted, RoundOpened
from protocol.wire.rounds import ContributionDigest, Contributor, NodeId
from tests.unit.swarm_scene import (
    INITIAL,
    LAYOUT,
    TOKENS,
    Scene,
    asked_of,
    contribution_from,
    digest_of,
    of_kind,
    two_nodes,
)

RESULT = digest_of("result")
OTHER = digest_of("other")
AFTER = digest_of("after")


def phase_of(scene: Scene) -> RoundPhase:
    return scene.round.phase


def closed_slices(scene: Scene) -> list[tuple[bool, str]]:
    """For each slice of the last commit: whether it is committed, and why not."""
    assert scene.state.last_closed is not None
    return [(s.digest is not None, s.void_reason) for s in scene.state.last_closed.commit.slices]


def test_a_round_opens_when_enough_nodes_are_ready_and_says_what_it_waits_for_before() -> None:
    scene = Scene(min_nodes=3)
    assert explain(scene.state, scene.now) == "waiting for the first node"
    scene.attach("node-a")
    assert scene.reason == "waiting for 2 more nodes: 1 of 3 is ready"
    scene.attach("node-b", digest=OTHER)
    assert scene.reason.endswith("; node-b has yet to confirm round 0")
    scene.attach("node-c")
    assert scene.reason.endswith("; node-b holds another state and fetches the swarm's")
    assert not of_kind(scene.log, RoundOpened)
    scene.beat("node-b", at=0, digest=INITIAL)
    (send,) = scene.asked(RoundOpened)
    plan = send.plan
    assert plan.reason == "3 nodes are ready"
    assert plan.participants == ("node-a", "node-b", "node-c")
    assert (plan.round, plan.fragment, plan.base_digest) == (1, 0, INITIAL)
    assert (plan.token_clock, plan.round_tokens) == (0, 3 * TOKENS)
    assert [a.first_sample for a in plan.assignments] == [0, 10, 20]
    assert (plan.train_seconds, plan.contribute_seconds, plan.commit_seconds) == (60, 70, 80)


def test_a_node_that_fetches_the_first_weights_is_said_to_do_that() -> None:
    scene = Scene(min_nodes=2, first_digest=INITIAL)
    scene.attach("node-a")
    scene.attach("node-b", digest=OTHER)
    scene.beat("node-a", at=0, digest=INITIAL)
    assert scene.reason == (
        "waiting for 1 more node: 1 of 2 is ready; node-b fetches the weights that the run begins with"
    )


def test_fragments_take_turns_and_samples_are_never_leased_twice() -> None:
    scene = Scene(min_nodes=2, layout=replace(LAYOUT, fragment_elements=(512, 256, 1024)))
    scene.attach("node-a", "node-b")
    for number in (1, 2, 3):
        assert scene.round.fragment == number % 3
        scene.commit("node-a", "node-b")
        scene.apply(digest_of(str(number)), "node-a", "node-b")
    plans = [send.plan for send in of_kind(scene.log, RoundOpened)]
    samples = [[a.first_sample for a in plan.assignments] for plan in plans]
    assert samples == [[0, 10], [20, 30], [40, 50], [60, 70]]
    assert [plan.token_clock for plan in plans] == [0, 2 * TOKENS, 4 * TOKENS, 6 * TOKENS]


def test_a_node_that_reconnects_gets_the_time_that_remains() -> None:
    scene = two_nodes()
    plan = plan_of(scene.round, scene.now + 65)
    assert (plan.train_seconds, plan.contribute_seconds, plan.commit_seconds) == (0, 5, 15)


def test_a_round_commits_at_once_when_two_hold_every_slice() -> None:
    scene = two_nodes()
    scene.train("node-a")
    assert phase_of(scene) is RoundPhase.EXCHANGING
    scene.reduce("node-a", 0, RESULT)
    scene.reduce("node-b", 1, OTHER)
    scene.hold("node-b", 0, RESULT)
    assert not scene.asked(RoundCommitted)
    scene.hold("node-a", 1, OTHER)
    (send,) = scene.asked(RoundCommitted)
    assert [s.digest for s in send.commit.slices] == [RESULT, OTHER]
    assert send.commit.slices[0].holder_ids == ("node-a", "node-b")
    assert send.commit.outer_digest is None
    assert phase_of(scene) is RoundPhase.APPLYING
    assert scene.state.token_clock == 2 * TOKENS


def test_a_single_node_commits_alone() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.reduce("node-a", 0, RESULT)
    assert scene.state.committed_round == 1


def test_a_result_may_be_held_before_its_reducer_reports() -> None:
    scene = two_nodes()
    scene.hold("node-b", 0, RESULT)
    scene.reduce("node-b", 1, None, {})
    scene.reduce("node-a", 0, RESULT)
    assert closed_slices(scene) == [(True, ""), (False, "its reducer node-b had nothing to reduce")]


def test_who_holds_something_else_than_the_reducer_reported_does_not_count() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT)
    scene.reduce("node-b", 1, None, {})
    scene.hold("node-b", 0, OTHER)
    scene.wait(80)
    assert closed_slices(scene)[0] == (False, "held by 1 of 2 nodes with 50 % of the weight")


@pytest.mark.parametrize(
    ("reducer", "tokens"),
    [
        ("node-b", {"node-a": 1}),
        ("node-a", {"node-z": 1}),
        ("node-a", {"node-a": TOKENS + 1}),
        ("node-a", {"node-a": -1}),
        ("node-a", {}),
    ],
    ids=["not its reducer", "a stranger", "more than leased", "negative", "nobody"],
)
def test_an_impossible_result_leaves_its_slice_open(reducer: str, tokens: dict[str, int]) -> None:
    scene = two_nodes()
    before = scene.state
    scene.reduce(reducer, 0, RESULT, tokens)
    assert scene.state == before
    scene.reduce("node-a", 0, OTHER)
    assert scene.round.slices[0].digest == OTHER


@pytest.mark.parametrize("num_named", [0, 1, 3])
def test_a_result_that_does_not_name_what_each_has_contributed_leaves_its_slice_open(
    num_named: int,
) -> None:
    scene = two_nodes()
    before = scene.state
    contributors = tuple(
        Contributor(node_id=NodeId(name), samples=1, tokens=1) for name in ("node-b", "node-a")
    )
    reduced = Reduced(
        slice_index=0,
        digest=RESULT,
        contributors=contributors,
        contributions=tuple(ContributionDigest(bytes([n]) * 16) for n in range(num_named)),
    )
    scene.do(Reported(node_id=NodeId("node-a"), round=1, report=reduced))
    assert scene.state == before
    named = (ContributionDigest(b"b" * 16), ContributionDigest(b"a" * 16))
    reduced = replace(reduced, contributions=named)
    scene.do(Reported(node_id=NodeId("node-a"), round=1, report=reduced))
    assert scene.round.slices[0].contributors == contributors[::-1]
    assert scene.round.slices[0].contributions == named[::-1]


def test_a_commit_says_what_of_each_contributor_it_took() -> None:
    scene = two_nodes()
    for name, index in (("node-a", 0), ("node-b", 1)):
        scene.reduce(name, index, RESULT)
        scene.hold("node-a", index, RESULT)
        scene.hold("node-b", index, RESULT)
    commit = scene.state.recent[-1].commit
    for outcome in commit.slices:
        for name in ("node-a", "node-b"):
            named = outcome.contribution_of(NodeId(name))
            assert named == contribution_from(name, outcome.index)


def test_what_a_reducer_reports_later_does_not_replace_its_first_report() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT)
    before = scene.state
    scene.reduce("node-a", 0, OTHER)
    scene.reduce("node-a", 0, None, {})
    assert scene.state == before


def test_a_round_ends_at_its_deadline_and_every_void_slice_says_why() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("node-a", "node-b", "node-c")
    scene.reduce("node-a", 0, RESULT)
    scene.hold("node-c", 0, RESULT)
    scene.reduce("node-c", 2, OTHER)
    scene.wait(79.9)
    assert scene.state.committed_round == 0
    assert scene.reason.startswith("training")
    scene.wait(0.1)
    assert closed_slices(scene) == [
        (True, ""),
        (False, "its reducer node-a never reported"),  # it took over from node-b
        (False, "held by 1 of 3 nodes with 33 % of the weight"),
    ]
    assert scene.state.last_closed is not None
    assert scene.state.last_closed.seconds == 80
    assert scene.state.last_closed.reason.startswith("1 of 3 slices are committed at the deadline")


def test_a_void_round_changes_no_state_and_the_next_one_opens_at_once() -> None:
    scene = two_nodes()
    scene.wait(80)
    assert scene.state.committed_round == 1
    assert scene.state.outer_digest == INITIAL
    assert scene.state.token_clock == 0
    (commit,) = scene.asked(RoundCommitted)
    assert commit.commit.outer_digest == INITIAL
    assert scene.round.number == 2
    scene.apply(INITIAL, "node-a", round=1)
    assert scene.member("node-a").state is MemberState.READY


def test_the_tokens_of_a_node_count_once_by_its_largest_weight() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT, {"node-a": 30, "node-b": 40})
    scene.hold("node-b", 0, RESULT)
    scene.reduce("node-b", 1, OTHER, {"node-a": 50})
    scene.hold("node-a", 1, OTHER)
    assert scene.state.token_clock == 90
    assert scene.member("node-a").committed_tokens == 50
    assert scene.member("node-b").committed_tokens == 40


def test_a_lost_holder_is_no_longer_waited_for() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT)
    scene.reduce("node-b", 1, None, {})
    scene.leave("node-b")
    assert closed_slices(scene) == [(True, ""), (False, "its reducer node-b had nothing to reduce")]


def test_a_round_that_lost_all_its_participants_closes_at_once() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT)
    scene.reduce("node-b", 1, RESULT)
    scene.leave("node-a")
    assert scene.state.committed_round == 0
    scene.leave("node-b")
    assert closed_slices(scene) == [(False, "no participant is left")] * 2
    assert scene.state.token_clock == 0


def test_a_node_whose_session_broke_still_holds_what_it_held() -> None:
    scene = two_nodes()
    scene.reduce("node-a", 0, RESULT)
    scene.attach("node-a", is_new_process=False)
    scene.reduce("node-b", 1, None, {})
    assert scene.state.committed_round == 0
    scene.hold("node-b", 0, RESULT)
    assert scene.state.committed_round == 1


def test_a_settled_round_makes_those_who_agree_ready_and_others_refetch() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("node-a", "node-b", "node-c", "node-d")
    scene.commit("node-a", "node-b")
    scene.apply(OTHER, "node-a")
    scene.apply(AFTER, "node-b")
    assert scene.state.outer_digest is None
    assert scene.reason.startswith("applying: waiting for node-c")
    scene.apply(AFTER, "node-c")
    assert scene.state.outer_digest is None, "node-d joined meanwhile and is about to have it too"
    scene.wait_until(scene.round.apply_deadline)
    assert scene.state.outer_digest == AFTER
    states = [scene.member(f"node-{x}").state for x in "abcd"]
    assert states == [
        MemberState.DIVERGED,
        MemberState.READY,
        MemberState.READY,
        MemberState.JOINING,
    ]
    assert asked_of(scene.actions, RefetchAsked) == ["node-a"]
    assert scene.state.last_closed is not None
    assert scene.state.last_closed.commit.outer_digest == AFTER
    scene.apply(AFTER, "node-d")
    assert scene.round.number == 2
    assert NodeId("node-a") not in plan_of(scene.round, scene.now).participants


def test_equal_votes_are_decided_by_the_smallest_node_id() -> None:
    scene = two_nodes()
    scene.commit("node-a", "node-b")
    scene.apply(AFTER, "node-b")
    scene.apply(OTHER, "node-a")
    assert scene.state.outer_digest == OTHER


def test_a_participant_that_does_not_apply_in_time_is_not_waited_for() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b", "node-c")
    scene.commit("node-a", "node-b")
    scene.apply(AFTER, "node-a")
    scene.wait(20)
    assert scene.state.outer_digest is None, "half of the weight is not enough at first"
    scene.wait(20)
    assert scene.state.outer_digest == AFTER
    assert scene.member("node-b").state is MemberState.JOINING
    assert scene.reason.startswith("waiting for 1 more node: 1 of 2 is ready; node-b is at round 0")


def test_a_digest_is_never_invented_however_long_nobody_reports() -> None:
    scene = two_nodes()
    scene.commit("node-a", "node-b")
    scene.wait(500)
    assert scene.state.outer_digest is None
    assert "no participant has reported the state after round 1 yet" in scene.reason
    scene.apply(AFTER, "node-a")
    assert scene.reason.startswith("applying: waiting for node-b to apply round 1")
    scene.apply(AFTER, "node-b")
    assert scene.state.outer_digest == AFTER


def test_a_heartbeat_proves_that_a_commit_was_applied() -> None:
    scene = two_nodes()
    scene.commit("node-a", "node-b")
    scene.beat("node-a", at=1, digest=AFTER)
    scene.beat("node-b", at=1, digest=AFTER)
    assert scene.state.outer_digest == AFTER


def test_a_node_that_goes_back_for_another_snapshot_takes_back_its_vote() -> None:
    scene = Scene()
    scene.attach("node-b")
    scene.attach("node-a", digest=OTHER)  # diverged; its vote would win as the smallest id's
    scene.commit()
    scene.apply(OTHER, "node-a")
    scene.beat("node-a", at=0, digest=INITIAL)
    scene.apply(AFTER, "node-b")
    assert scene.state.outer_digest == AFTER


def test_reports_of_other_rounds_and_of_strangers_change_nothing() -> None:
    scene = two_nodes()
    scene.commit("node-a", "node-b")
    scene.apply(AFTER, "node-a", "node-b")
    before = scene.state
    scene.apply(AFTER, "node-z", "node-a")
    scene.apply(OTHER, "node-a", round=5)
    scene.hold("node-z", 0, RESULT)
    scene.hold("node-a", 9, RESULT)
    scene.reduce("node-z", 0, RESULT)
    scene.train("node-z")
    scene.train("node-a", tokens=TOKENS, samples=11)
    scene.train("node-a", tokens=TOKENS + 1, samples=10)
    scene.train("node-a", tokens=9, samples=1)
    scene.reduce("node-a", 0, RESULT, {"node-b": TOKENS}, samples={"node-b": 11})
    scene.reduce("node-a", 0, RESULT, {"node-b": TOKENS + 1}, samples={"node-b": 10})
    scene.reduce("node-a", 0, RESULT, {"node-b": 9}, samples={"node-b": 1})
    assert scene.state == before


def test_what_a_member_without_a_part_in_the_round_holds_does_not_count() -> None:
    """It joined during the round. Only participants are told what becomes of a result."""
    scene = two_nodes()
    scene.attach("node-c")
    before = scene.state
    scene.hold("node-c", 0, RESULT)
    assert scene.state.open_round == before.open_round
    scene.reduce("node-a", 0, RESULT)
    scene.hold("node-c", 0, RESULT)
    assert NodeId("node-c") not in scene.round.held


def test_the_reason_tells_who_still_trains_and_which_slices_are_missing() -> None:
    scene = two_nodes()
    assert scene.reason == "training: 0 of 2 nodes are done, 60 s left"
    scene.train("node-a")
    scene.reduce("node-a", 0, RESULT)
    assert explain(scene.state, scene.now + 10) == (
        "exchanging: waiting for 2 of 2 slices (node-b still training): "
        "slice 0 held by 1 of 2 nodes with 50 % of the weight, slice 1 from the reducer node-b, 70 s left"
    )


def test_the_reason_counts_slices_that_wait_for_the_same() -> None:
    scene = Scene(min_nodes=2, slice_elements=64)  # two slices each
    scene.attach("node-a", "node-b")
    scene.train("node-a")
    scene.train("node-b")
    scene.reduce("node-a", 0, RESULT)
    assert scene.reason.startswith(
        "exchanging: waiting for 4 of 4 slices: slice 0 held by 1 of 2 nodes with 50 % of the weight, "
        "slice 1 from the reducer node-a, 2 slices from the reducer node-b, "
    )


def test_nothing_commits_on_a_state_that_nobody_who_is_here_holds_any_more() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    scene.commit("node-a", "node-b")
    scene.apply(digest_of("one"), "node-a", "node-b")
    for name in ("node-a", "node-b"):  # each has lost its state, and not the round's results
        scene.attach(name, at=0, is_new_process=False)
    for progress in scene.round.slices:
        index = progress.slice.index
        scene.reduce(str(progress.slice.reducer_id), index, digest_of("result"))
        for name in ("node-a", "node-b"):
            if scene.state.committed_round == 1:
                scene.hold(name, index, digest_of("result"))
    assert scene.state.last_closed is not None
    assert scene.state.last_closed.commit.round == 2
    reasons = {outcome.void_reason for outcome in scene.state.last_closed.commit.slices}
    assert reasons == {"nobody who is here holds the state that it builds on"}


def test_the_next_plan_begins_where_schedules_were_told_that_they_would_be() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b")
    told = of_kind(scene.log, RoundOpened)[-1].plan
    assert (told.token_clock, told.round_tokens) == (0, 2 * TOKENS)
    scene.commit("node-a", "node-b", tokens={"node-a": TOKENS})
    scene.apply(digest_of("one"), "node-a", "node-b")
    assert scene.state.token_clock == TOKENS
    late = of_kind(scene.log, RoundOpened)[-1].plan
    assert (late.token_clock, late.round_tokens) == (2 * TOKENS, TOKENS)


def test_schedules_in_tokens_expect_of_a_plan_what_counted_of_those_before() -> None:
    """A quarter of the places in chats, say: the clock that steps go by must not run four times as fast."""
    scene = two_nodes()
    few, all_samples = (
        dict.fromkeys(("node-a", "node-b"), TOKENS // 4),
        {"node-a": 10, "node-b": 10},
    )
    scene.commit("node-a", "node-b", tokens=few, samples=all_samples)
    scene.apply(digest_of("one"), "node-a", "node-b")
    plan = of_kind(scene.log, RoundOpened)[-1].plan
    # The first plan could not know, and what it told stays the least.
    assert plan.token_clock == 2 * TOKENS and plan.round_tokens == 0
    assert scene.state.token_clock == TOKENS // 2
    assert "; of 160 tokens in their samples about 40 count" in plan.reason
    for number in range(2, 6):
        scene.commit("node-a", "node-b", tokens=few, samples=all_samples)
        scene.apply(digest_of(str(number)), "node-a", "node-b")
    plan = of_kind(scene.log, RoundOpened)[-1].plan
    assert scene.state.token_clock == 5 * TOKENS // 2
    assert (plan.token_clock, plan.round_tokens) == (scene.state.token_clock, TOKENS // 2)


def test_before_anything_counted_all_of_a_plan_is_expected_to() -> None:
    scene = Scene(min_nodes=1)
    scene.attach("node-a")
    scene.attach("node-b", at=0)
    scene.train("node-a", tokens=0, samples=10)
    scene.reduce("node-a", 0, None)
    plan = of_kind(scene.log, RoundOpened)[-1].plan
    assert (plan.round, len(plan.assignments)) == (2, 2)
    assert (plan.token_clock, plan.round_tokens) == (TOKENS, TOKENS)
