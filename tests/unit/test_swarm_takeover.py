"""A slice whose reducer is gone: its result is passed on, or a backup reduces it."""

from dataclasses import replace

from coordinator.swarm.events import Ticked
from protocol.wire.messages import ParticipantsIdle, ResultOffered, RoundOpened, SliceTakenOver
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import INITIAL, TOKENS, Scene, digest_of, of_kind, three_nodes

RESULT = digest_of("result")
OTHER = digest_of("other")


def reducers(scene: Scene) -> list[str]:
    return [str(progress.slice.reducer_id) for progress in scene.round.slices]


def test_a_slice_whose_reducer_leaves_goes_to_who_reduces_least_and_all_are_told() -> None:
    scene = three_nodes()
    assert reducers(scene) == ["node-a", "node-b", "node-c"]
    scene.leave("node-b")
    assert reducers(scene) == ["node-a", "node-a", "node-c"]
    (takeover,) = scene.asked(SliceTakenOver)
    assert takeover == SliceTakenOver(
        round=1,
        slice_index=1,
        reducer_id=NodeId("node-a"),
        attempt=1,
        contribute_seconds=scene.state.rules.contribute_seconds,
    )
    scene.leave("node-a")  # both of its slices move on
    assert reducers(scene) == ["node-c"] * 3
    assert [t.attempt for t in scene.asked(SliceTakenOver)] == [1, 2]


def test_a_slice_that_was_taken_over_commits_with_the_backups_result_only() -> None:
    scene = three_nodes()
    scene.reduce("node-b", 1, RESULT)
    scene.leave("node-b")  # nobody else has said to hold it
    assert reducers(scene)[1] == "node-a"
    scene.hold("node-c", 1, RESULT)
    scene.reduce("node-a", 1, OTHER, {"node-a": TOKENS, "node-c": TOKENS})
    for index in (0, 2):
        scene.reduce(reducers(scene)[index], index, RESULT)
        scene.hold("node-a", index, RESULT)
        scene.hold("node-c", index, RESULT)
    assert scene.state.committed_round == 0  # node-c still holds what nobody can commit
    scene.hold("node-c", 1, OTHER)
    assert scene.state.last_closed is not None
    taken_over = scene.state.last_closed.commit.slices[1]
    assert taken_over.digest == OTHER
    assert taken_over.holder_ids == ("node-a", "node-c")


def test_a_result_that_somebody_holds_is_offered_instead_of_reduced_again() -> None:
    scene = three_nodes()
    scene.reduce("node-b", 1, RESULT)
    scene.hold("node-c", 1, RESULT)
    scene.reduce("node-a", 0, None, {})
    scene.reduce("node-c", 2, None, {})
    assert scene.state.committed_round == 1  # two hold it already
    scene = three_nodes()
    scene.hold("node-c", 1, RESULT)
    scene.reduce("node-b", 1, RESULT)
    scene.attach("node-b")  # a new process: it holds nothing any more
    (offer,) = scene.asked(ResultOffered)
    assert (offer.slice_index, offer.digest, offer.holder_ids) == (1, RESULT, ("node-c",))
    assert reducers(scene)[1] == "node-b"
    scene.do(Ticked())
    assert not scene.asked(ResultOffered)  # once


def test_a_reducer_whose_process_began_anew_has_lost_what_it_was_sent() -> None:
    scene = three_nodes()
    scene.attach("node-b", is_new_process=False)
    assert reducers(scene)[1] == "node-b"
    scene.attach("node-b")
    assert reducers(scene)[1] == "node-a"


def test_who_came_back_in_mid_round_takes_nothing_over_while_there_are_others() -> None:
    scene = three_nodes()
    scene.leave("node-a")
    assert reducers(scene) == ["node-b", "node-b", "node-c"]
    scene.attach("node-a")  # reduces nothing now, and trains from the beginning
    scene.leave("node-b")
    assert reducers(scene) == ["node-c"] * 3
    scene.leave("node-c")
    assert reducers(scene) == ["node-a"] * 3


def test_alone_in_a_round_a_reborn_reducer_takes_over_from_itself() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.attach("node-a")
    assert reducers(scene) == ["node-a"]
    assert [t.attempt for t in scene.asked(SliceTakenOver)] == [1]


def test_a_takeover_late_in_the_round_has_half_of_what_is_left_and_none_in_the_last_second() -> (
    None
):
    scene = three_nodes()
    for name, index in (("node-a", 0), ("node-c", 2)):
        scene.reduce(name, index, RESULT)
    scene.wait(72)  # contributions end at 70, the round at 80
    scene.leave("node-b")
    assert [t.contribute_seconds for t in scene.asked(SliceTakenOver)] == [4]
    scene.wait(6)
    assert reducers(scene)[1] == "node-c"  # node-a, which took over, was overdue at 77
    scene.wait(1.5)
    scene.leave("node-c")
    assert not scene.asked(SliceTakenOver)


def test_a_reducer_that_does_not_report_is_given_up_a_quarter_before_the_commit() -> None:
    scene = three_nodes()
    for name, index in (("node-a", 0), ("node-c", 2)):
        scene.reduce(name, index, RESULT)
    scene.wait_until(1072.4)  # contributions end at 1070, the round at 1080
    assert reducers(scene)[1] == "node-b"
    scene.wait_until(1072.6)
    assert reducers(scene)[1] == "node-a"
    scene.reduce("node-b", 1, OTHER)  # too late: another reduces it now
    assert scene.round.slices[1].digest is None
    scene.wait_until(1077.5)  # half of what was left is over, and a quarter of the rest
    assert reducers(scene)[1] == "node-b"
    scene.wait_until(1081)
    assert scene.state.committed_round == 1


def test_with_nobody_else_a_slow_reducer_keeps_its_slice() -> None:
    scene = Scene()
    scene.attach("node-a")
    scene.wait_until(1079)
    assert [p.attempt for p in scene.round.slices] == [0]


def test_a_draining_reducer_hands_its_open_slices_over_and_stays_a_contributor() -> None:
    scene = three_nodes()
    scene.reduce("node-b", 1, RESULT)
    scene.drain("node-b")
    assert reducers(scene)[1] == "node-b"  # it hands out what it has made
    scene.drain("node-a")
    assert reducers(scene) == ["node-c", "node-b", "node-c"]
    scene.train("node-a", tokens=TOKENS)
    assert NodeId("node-a") in scene.round.trained


def test_no_plan_counts_on_who_is_draining() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("node-a", "node-b", "node-c")  # the third comes in mid-round
    scene.drain("node-b")
    scene.commit("node-a", "node-b")
    scene.apply(digest_of("after"), "node-a", "node-b", "node-c")
    (plan,) = of_kind(scene.log, RoundOpened)[1:]
    assert plan.plan.participants == ("node-a", "node-c")


def test_when_all_are_draining_the_slices_stay_where_they_are() -> None:
    scene = three_nodes()
    for name in ("node-a", "node-b", "node-c"):
        scene.drain(name)
    assert set(reducers(scene)) == {"node-c"}


def test_reducers_need_not_wait_for_a_participant_without_tokens() -> None:
    scene = three_nodes()
    scene.train("node-a")
    assert not scene.asked(ParticipantsIdle)
    scene.train("node-b", tokens=0, inner_steps=0)
    assert scene.asked(ParticipantsIdle) == [
        ParticipantsIdle(round=1, node_ids=(NodeId("node-b"),))
    ]


def test_who_does_not_reach_all_others_reduces_nothing() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("node-a", "node-b")
    scene.beat("node-a", at=0, digest=INITIAL, unreachable=("node-b",))
    scene.attach("node-c")
    assert reducers(scene) == ["node-c"]
    (send,) = scene.asked(RoundOpened)
    told = "3 nodes are ready, 1 of them reduces: not all reach each other"
    assert send.plan.reason.startswith(told)
    scene.leave("node-c")
    assert reducers(scene) == ["node-a"]  # better than nobody


def test_cut_in_a_ring_everybody_reduces() -> None:
    scene = Scene(min_nodes=4)
    scene.attach("node-a", "node-b", "node-c")
    scene.beat("node-a", at=0, digest=INITIAL, unreachable=("node-c",))
    scene.beat("node-b", at=0, digest=INITIAL, unreachable=("node-d",))
    scene.attach("node-d")
    assert reducers(scene) == ["node-a", "node-b", "node-c", "node-d"]


def test_who_is_late_and_alone_is_given_its_slices_once() -> None:
    """Each event gave them to it anew, and it began anew."""
    scene = Scene(min_nodes=2)
    scene.attach("a", "b")
    late = replace(scene.round, on_trial=(NodeId("b"),), is_excused=True)
    scene.state = replace(scene.state, open_round=late)
    scene.leave("a")
    assert {progress.slice.reducer_id for progress in scene.round.slices} == {"b"}
    scene.do(Ticked())
    assert not scene.asked(SliceTakenOver)
