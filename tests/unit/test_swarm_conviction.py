"""What the coordinator does about a reducer that left out what it had given a receipt for."""

from dataclasses import replace

from coordinator.swarm.events import GoBack, LeftOutProven, QuarantineAsked, Ruled, Ticked
from coordinator.swarm.members import MemberState
from protocol.trust.receipts import Omission
from protocol.trust.rulings import RulingKind
from protocol.wire.rounds import NodeId, RoundSpan
from tests.unit.swarm_scene import Scene, digest_of, of_kind

EVIDENCE = ("receipt 00", "report 00")


def scene_in_round_2() -> Scene:
    """All have trained; who can go back to the state after round 1 has said so."""
    scene = Scene(min_nodes=2)
    for name in "abc":
        scene.attach(name, invite=name)
    for name in "abc":
        scene.train(name)
    scene.commit(*"abc")
    scene.apply(digest_of("state 1"), *"abc")
    reach = (RoundSpan(first=1, last=1),)
    scene.change(reach_back=reach)
    for name in "abc":
        scene.train(name)
    assert scene.round.number == 2
    return scene


def left_out(scene: Scene, index: int = 0, of: str = "x") -> LeftOutProven:
    progress = scene.round.slices[index]
    assert progress.digest is not None
    omission = Omission(
        round=scene.round.number,
        slice_index=index,
        reducer_id=progress.slice.reducer_id,
        contributor_id=NodeId(of),
        result=progress.digest,
    )
    return LeftOutProven(omission=omission, evidence=EVIDENCE)


def test_it_is_put_in_quarantine_with_the_evidence_and_the_run_goes_back_to_before_the_round() -> (
    None
):
    scene = scene_in_round_2()
    scene.commit(*"abc")
    event = left_out(scene, of="b")
    scene.do(event)
    (asked,) = scene.asked(QuarantineAsked)
    assert asked.conviction.node_id == event.omission.reducer_id
    assert asked.conviction.evidence == EVIDENCE
    assert "left b out of slice 0 of round 2" in asked.conviction.reason
    assert scene.member(event.omission.reducer_id).audits.num_disputed == 1
    assert not of_kind(scene.log, GoBack), "it is put out before anybody says how far it reaches"
    out = event.omission.reducer_id
    scene.do(Ruled(kind=RulingKind.QUARANTINED, by="x", unix_seconds=0.0, node_id=out))
    (wish,) = of_kind(scene.log, GoBack)
    assert (wish.alarm.round, wish.alarm.evidence) == (1, EVIDENCE)
    assert "is convicted" in wish.alarm.reason
    assert scene.member(out).state is MemberState.QUARANTINED


def test_however_many_show_it_and_of_however_many_slices_it_is_convicted_once() -> None:
    scene = scene_in_round_2()
    scene.commit(*"abc")
    for name in ("b", "c", "b"):
        scene.do(left_out(scene, of=name))
    assert len(of_kind(scene.log, QuarantineAsked)) == 1
    alarm = scene.state.alarm
    assert alarm is not None and alarm.reason.count("is convicted") == 1


def test_before_the_commit_its_slice_becomes_void_and_nothing_need_be_undone() -> None:
    scene = scene_in_round_2()
    reducer = scene.round.slices[0].slice.reducer_id
    scene.reduce(reducer, 0, digest_of("result"))
    scene.do(left_out(scene))
    assert len(of_kind(scene.log, QuarantineAsked)) == 1
    assert scene.state.alarm is None
    assert "is convicted" in scene.round.slices[0].refused
    for progress in scene.round.slices[1:]:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
    for name in "abc":
        if scene.state.committed_round == 1:
            scene.hold(name, 0, digest_of("result"))
    assert scene.state.committed_round == 2
    assert "is convicted" in scene.state.recent[-1].commit.slices[0].void_reason


def test_what_is_shown_of_another_result_or_when_the_round_is_settled_changes_nothing() -> None:
    scene = scene_in_round_2()
    scene.commit(*"abc")
    event = left_out(scene)
    for false in (
        replace(event.omission, result=digest_of("another")),
        replace(
            event.omission, reducer_id=NodeId("b" if event.omission.reducer_id != "b" else "c")
        ),
        replace(event.omission, round=1),
    ):
        scene.do(replace(event, omission=false))
    scene.apply(digest_of("state 2"), *"abc")
    assert scene.round.number == 3
    scene.do(event)
    scene.do(Ticked())
    assert not of_kind(scene.log, QuarantineAsked) and scene.state.alarm is None
