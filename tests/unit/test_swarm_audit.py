"""Which slices are audited and by whom, and what the coordinator makes of what is found."""

from dataclasses import replace

import pytest

from coordinator.swarm.actions import QuarantineAsked
from coordinator.swarm.events import Reported
from coordinator.swarm.state import MemberState, SliceProgress, Verdict, Work
from protocol.wire.messages import AuditAsked, Audited
from protocol.wire.rounds import Digest, NodeId
from tests.unit.swarm_scene import INITIAL, Scene, asked_of, digest_of

OTHER = digest_of("another result")
RESULT = digest_of("result 1/0")


def scene_of(*names: str, share: float = 1.0, secret: bytes = b"secret") -> Scene:
    """A round in which all have trained; each is of an invite of its own."""
    scene = Scene(min_nodes=len(names))
    rules = replace(scene.state.rules, audited_share=share)
    scene.state = replace(scene.state, rules=rules, audit_secret=secret)
    for name in names:
        scene.attach(name, invite=name)
    for name in names:
        scene.train(name)
    return scene


def slice_0(scene: Scene) -> SliceProgress:
    return scene.round.slices[0]


def reduce_0(scene: Scene, digest: Digest = RESULT, *, error_before: bytes = b"") -> NodeId:
    """The reducer of slice 0 reports, and all hold its result; returns the auditor."""
    reducer = slice_0(scene).slice.reducer_id
    scene.reduce(reducer, 0, digest)
    (auditor,) = asked_of(scene.actions, AuditAsked)
    for name in scene.state.members:
        scene.hold(name, 0, digest)
    return auditor


def find(scene: Scene, name: str, found: bytes, why: str = "") -> None:
    report = Audited(slice_index=0, digest=RESULT, found=found, why=why)
    scene.do(Reported(node_id=NodeId(name), round=scene.round.number, report=report))


def verdict(scene: Scene) -> Verdict | None:
    audit = slice_0(scene).audit
    assert audit is not None
    return audit.verdict


def test_a_slice_waits_for_its_auditor_who_is_told_all_that_the_reducer_told() -> None:
    scene = scene_of("a", "b", "c")
    reducer = slice_0(scene).slice.reducer_id
    scene.reduce(reducer, 0, RESULT)
    (asked,) = scene.asked(AuditAsked)
    assert (asked.reducer_id, asked.reduced.digest) == (reducer, RESULT)
    assert {c.node_id for c in asked.reduced.contributors} == set(scene.state.members)
    assert 0 < asked.seconds < scene.round.commit_deadline - scene.now
    assert asked_of(scene.actions, AuditAsked) != [reducer]
    for name in "abc":
        scene.hold(name, 0, RESULT)
    assert "slice 0 audited by" in scene.reason
    auditor = asked_of(scene.log, AuditAsked)[0]
    find(scene, auditor, RESULT)
    assert verdict(scene) is Verdict.AGREED
    assert "slice 0 audited" not in scene.reason


def test_nobody_foresees_the_draw_who_does_not_know_the_secret() -> None:
    def drawn(secret: bytes, result: str) -> bool:
        scene = scene_of("a", "b", "c", share=0.5, secret=secret)
        scene.reduce(slice_0(scene).slice.reducer_id, 0, digest_of(result))
        return bool(scene.asked(AuditAsked))

    by_secret = [drawn(bytes([n]), "same") for n in range(40)]
    by_result = [drawn(b"secret", f"result {n}") for n in range(40)]
    assert 8 < sum(by_secret) < 32 and 8 < sum(by_result) < 32
    assert drawn(b"secret", "result 1") == drawn(b"secret", "result 1"), "a restart changes nothing"


def test_auditors_of_the_reducers_own_invite_are_asked_only_where_there_is_no_other() -> None:
    for secret in range(12):
        scene = Scene(min_nodes=3)
        rules = replace(scene.state.rules, audited_share=1.0)
        scene.state = replace(scene.state, rules=rules, audit_secret=bytes([secret]))
        scene.attach("a", "b", invite="one")
        scene.attach("c", invite="another")
        scene.train("a")
        scene.reduce("a", 0, RESULT)
        assert asked_of(scene.actions, AuditAsked) == ["c"]


def test_who_is_found_false_by_most_of_the_weight_is_convicted_and_its_slice_is_void() -> None:
    scene = scene_of("a", "b", "c", "d")
    reducer, first = slice_0(scene).slice.reducer_id, reduce_0(scene)
    find(scene, first, OTHER)
    jury = asked_of(scene.actions, AuditAsked)
    assert {*jury, first, reducer} == set(scene.state.members)
    for name in jury:
        assert verdict(scene) is None
        find(scene, name, OTHER)
    assert verdict(scene) is Verdict.CONVICTED
    (asked,) = scene.asked(QuarantineAsked)
    assert asked.node_id == reducer and "found another result" in asked.reason
    scene.wait_until(scene.round.commit_deadline)
    outcome = scene.state.recent[-1].commit.slices[0]
    assert outcome.digest is None and "is convicted" in outcome.void_reason


def test_different_findings_convict_nobody() -> None:
    scene = scene_of("a", "b", "c", "d")
    first = reduce_0(scene)
    find(scene, first, OTHER)
    for place, name in enumerate(asked_of(scene.actions, AuditAsked)):
        find(scene, name, digest_of(f"yet another {place}"))
    assert verdict(scene) is Verdict.VOID
    assert not [each for each in scene.log if isinstance(each, QuarantineAsked)]


def test_who_contradicts_most_of_the_weight_twice_has_no_say_any_more_and_audits_nothing() -> None:
    scene = scene_of("a", "b", "c", "d")
    first = reduce_0(scene)
    scene.state = _with_work(scene, dict.fromkeys("abcd", 100))
    find(scene, first, OTHER)
    for name in asked_of(scene.actions, AuditAsked):
        find(scene, name, RESULT)
    assert verdict(scene) is Verdict.AGREED
    member = scene.member(first)
    assert (member.audits.num_contradicted, bool(member.work.by_stretch)) == (1, True)
    # The same again, in another round:
    audit = slice_0(scene).audit
    assert audit is not None
    again = replace(audit, verdict=None, findings=audit.findings[:1], is_contested=True)
    slices = (replace(slice_0(scene), audit=again), *scene.round.slices[1:])
    scene.state = replace(scene.state, open_round=replace(scene.round, slices=slices))
    for name in audit.auditor_ids[1:]:
        find(scene, name, RESULT)
    member = scene.member(first)
    assert (member.audits.num_contradicted, member.work) == (2, Work())


def _with_work(scene: Scene, tokens: dict[str, int]):  # type: ignore[no-untyped-def]
    members = {
        n: replace(m, work=Work(by_stretch=((0, tokens[n]),)))
        for n, m in scene.state.members.items()
    }
    return replace(scene.state, members=members)


def test_a_dispute_between_two_makes_the_slice_void_and_lets_neither_reduce_or_audit_for_a_while() -> (
    None
):
    scene = scene_of("a", "b")
    reducer, first = slice_0(scene).slice.reducer_id, reduce_0(scene)
    find(scene, first, b"", "it does not give its error")
    assert verdict(scene) is Verdict.VOID
    for name in (reducer, first):
        assert scene.member(name).audits.back_at_round == 3
        assert scene.member(name).state is MemberState.READY
    audit = slice_0(scene).audit
    assert audit is not None and "it does not give its error" in audit.why


def test_a_round_never_waits_for_an_auditor_longer_than_to_its_deadline() -> None:
    scene = scene_of("a", "b", "c")
    deadline = scene.round.commit_deadline
    auditor = reduce_0(scene)
    for progress in scene.round.slices[1:]:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
    scene.wait_until(deadline)
    commit = scene.state.recent[-1].commit
    assert commit.slices[0].digest == RESULT, "it costs the audit alone"
    assert "unanswered" in scene.state.recent[-1].reason
    assert scene.member(auditor).audits.audits_from_round == 3


def test_an_auditor_that_leaves_is_not_waited_for() -> None:
    scene = scene_of("a", "b", "c")
    auditor = reduce_0(scene)
    scene.leave(auditor)
    assert verdict(scene) is Verdict.UNANSWERED


@pytest.mark.parametrize("name", ["the reducer", "nobody"])
def test_a_finding_of_who_was_not_asked_changes_nothing(name: str) -> None:
    scene = scene_of("a", "b", "c")
    reducer, auditor = slice_0(scene).slice.reducer_id, reduce_0(scene)
    (third,) = set(scene.state.members) - {reducer, auditor}
    find(scene, reducer if name == "the reducer" else third, OTHER)
    audit = slice_0(scene).audit
    assert audit is not None and not audit.findings


def test_a_reducer_adds_only_the_error_that_its_last_committed_result_has_left() -> None:
    """Else it could add whatever it likes, and every auditor would find the same."""
    scene = scene_of("a", "b", share=1e-9)
    reducer = slice_0(scene).slice.reducer_id

    def reported(before: bytes, after: bytes) -> None:
        scene.reduce(reducer, 0, digest_of(f"result {scene.round.number}"))
        progress = slice_0(scene)
        assert progress.reduced is not None
        told = replace(progress.reduced, error_before=before, error_after=after)
        scene.state = replace(
            scene.state,
            open_round=replace(
                scene.round,
                slices=(
                    replace(progress, digest=None, reduced=None, audit=None, contributors=()),
                    *scene.round.slices[1:],
                ),
            ),
        )
        scene.do(Reported(node_id=reducer, round=scene.round.number, report=told))

    def commit() -> str:
        index, digest = 0, digest_of(f"result {scene.round.number}")
        number = scene.round.number
        for name in ("a", "b"):
            scene.hold(name, index, digest)
        for progress in scene.round.slices[1:]:
            scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
        assert scene.state.committed_round == number, scene.reason
        reason = scene.state.recent[-1].commit.slices[0].void_reason
        scene.apply(digest_of(f"state {number}"), "a", "b")
        for name in ("a", "b"):
            if scene.state.open_round is not None:
                scene.train(name)
        return reason

    assert INITIAL
    made_up, first, second = (digest_of(text) for text in ("made up", "first", "second"))
    reported(b"", first)
    assert commit() == ""
    reported(first, second)
    assert commit() == ""
    reported(b"", second)  # a reducer may forget
    assert commit() == ""
    reported(made_up, made_up)
    assert "adds an error that no committed result" in commit()
