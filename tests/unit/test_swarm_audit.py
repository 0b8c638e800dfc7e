"""Which slices are audited and by whom, and what the coordinator makes of what is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from coordinator.store import Store
from coordinator.streams import what_holds_for
from coordinator.swarm.events import (
    GoBack,
    QuarantineAsked,
    Reported,
    Ruled,
    RulingsLearned,
    Started,
    Ticked,
)
from coordinator.swarm.members import Audit, AuditRecord, MemberState, Verdict, Work
from coordinator.swarm.state import SeenNorm, SeenNorms
from coordinator.swarm.transition import initial_state
from protocol.trust.rulings import RulingKind
from protocol.trust.rulings import digest_of as digest_of_rulings
from protocol.wire.findings import Audited
from protocol.wire.messages import AuditAsked
from protocol.wire.rounds import Digest, LayoutSummary, NodeId, RoundSpan
from tests.unit.rulings_scene import ruling_of
from tests.unit.swarm_scene import LAYOUT, RUN, Scene, asked_of, digest_of, of_kind

OTHER = digest_of("another result")
RESULT = digest_of("result 1/0")
STATE = digest_of("state 1")


def scene_of(
    *names: str, share: float = 1.0, secret: bytes = b"secret", layout: LayoutSummary = LAYOUT
) -> Scene:
    """A round in which all have trained; each is of an invite of its own."""
    scene = Scene(min_nodes=len(names), layout=layout)
    scene.amend(audited_share=share)
    scene.state = replace(scene.state, audit_secret=secret)
    for name in names:
        scene.attach(name, invite=name)
    for name in names:
        scene.train(name)
    return scene


def reducer_of(scene: Scene) -> NodeId:
    return scene.round.slices[0].slice.reducer_id


def commit_slice_0(scene: Scene, result: Digest, *, undecodable: Sequence[str] = ()) -> None:
    """The round commits with slice 0 alone."""
    number, reducer = scene.round.number, reducer_of(scene)
    for progress in scene.round.slices[1:]:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
    scene.reduce(reducer, 0, result, undecodable=undecodable)
    assert not asked_of(scene.log, AuditAsked), "who reduces cannot know it before"
    for name in scene.state.members:
        if scene.state.committed_round < number:
            scene.hold(name, 0, result)
    assert scene.state.committed_round == number, scene.reason


def commit_1(scene: Scene) -> tuple[NodeId, list[NodeId]]:
    """Round 1 commits with slice 0 alone; returns that one's reducer, and who audits."""
    reducer = reducer_of(scene)
    commit_slice_0(scene, RESULT)
    return reducer, asked_of(scene.log, AuditAsked)


def committed(scene: Scene) -> tuple[NodeId, NodeId]:
    """The same where it is audited; all apply it, and round 2 begins."""
    reducer, (auditor,) = commit_1(scene)
    scene.apply(digest_of("state 1"), *scene.state.members)
    assert scene.round.number == 2
    return reducer, auditor


def reach_back(scene: Scene, *rounds: int) -> None:
    """Nodes say that they can go back to the states after these rounds."""
    spans = tuple(RoundSpan(first=round, last=round) for round in rounds)
    scene.change(reach_back=spans)


def find(scene: Scene, name: str, found: bytes, why: str = "") -> None:
    report = Audited(slice_index=0, digest=RESULT, found=found, why=why)
    scene.do(Reported(node_id=NodeId(name), round=1, report=report))


def audit_of(scene: Scene) -> Audit:
    (audit,) = [audit for audit in scene.state.audits if audit.round == 1]
    return audit


def test_a_round_commits_and_the_next_one_goes_on_while_its_slice_is_audited() -> None:
    scene = scene_of("a", "b", "c")
    reducer, (auditor,) = commit_1(scene)
    (asked,) = of_kind(scene.log, AuditAsked)
    assert (asked.round, asked.reducer_id, asked.reduced.digest) == (1, reducer, RESULT)
    assert {c.node_id for c in asked.reduced.contributors} == set(scene.state.members)
    assert asked.seconds > 0
    assert auditor != reducer
    scene.apply(digest_of("state 1"), "a", "b", "c")
    assert scene.round.number == 2 and audit_of(scene).verdict is None
    find(scene, auditor, RESULT)
    assert audit_of(scene).verdict is Verdict.AGREED
    scene.train("a")
    scene.commit("a", "b", "c")
    assert f"slice 0 of round 1 audited by {auditor}: agreed" in scene.state.recent[-1].reason
    assert all(audit.round == 2 for audit in scene.state.audits)


def test_nobody_foresees_the_draw_who_does_not_know_the_secret() -> None:
    def drawn(secret: bytes, result: Digest = RESULT) -> bool:
        scene = scene_of("a", "b", "c", share=0.5, secret=secret)
        commit_slice_0(scene, result)
        return bool(scene.state.audits)

    by_secret = [drawn(bytes([n])) for n in range(40)]
    by_result = [drawn(b"secret", digest_of(f"result {n}")) for n in range(40)]
    assert 8 < sum(by_secret) < 32 and 8 < sum(by_result) < 32
    assert drawn(b"secret") == drawn(b"secret"), "a restart changes nothing"


def commit_told(scene: Scene, told: Callable[[str, NodeId], float | None]) -> None:
    """Round 1 commits with all slices, and ends; `told(name, reducer)` is how far that one's result agrees.

    Who lies is the first to tell, and the others tell after the commit.
    """
    parts = [progress.slice for progress in scene.round.slices]
    for part in parts:
        scene.reduce(part.reducer_id, part.index, digest_of(f"result 1/{part.index}"))
    for name in scene.state.members:
        for part in parts:
            if name != part.reducer_id:
                result = digest_of(f"result 1/{part.index}")
                agreement = told(name, part.reducer_id)
                scene.hold(name, part.index, result, agreement=agreement)
    assert scene.state.committed_round == 1 and not scene.state.audits, scene.reason
    scene.apply(digest_of("state 1"), *scene.state.members)
    assert scene.round.number == 2


NAMES = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize("found", [-1.0, 0.0, 0.2])
def test_a_result_that_leads_elsewhere_than_its_contributions_is_audited_without_a_lot(
    found: float,
) -> None:
    scene = scene_of(*NAMES, share=1e-12)
    commit_told(scene, lambda name, reducer: found if reducer == "c" else 0.9)
    (audit,) = scene.state.audits
    assert audit.slice.reducer_id == "c" and audit.leads_elsewhere
    assert audit.auditor_ids == tuple(asked_of(scene.actions, AuditAsked))


def test_what_leads_elsewhere_is_audited_in_the_order_of_slices() -> None:
    """A set of 1 and 8 is gone through as 8, 1; so a copy of the coordinator could ask in another order."""
    layout = replace(LAYOUT, fragment_elements=(9 * 1024,))
    scene = scene_of(*"abcdefghi", share=1e-12, layout=layout)
    places = [progress.slice.reducer_id for progress in scene.round.slices]
    assert len(places) == 9
    commit_told(scene, lambda name, reducer: -1.0 if reducer in (places[1], places[8]) else 0.9)
    assert [audit.slice.index for audit in scene.state.audits] == [1, 8]


def test_no_few_members_draw_an_audit_or_avert_it() -> None:
    lies = {"a": -1e9, "b": -1e9}
    scene = scene_of(*NAMES, share=1e-12)
    commit_told(scene, lambda name, reducer: lies.get(name, 0.9))
    assert not scene.state.audits
    scene = scene_of(*NAMES, share=1e-12)
    commit_told(scene, lambda name, _: None if name in "de" else 0.9)
    assert not scene.state.audits, "who has contributed nothing says nothing"
    scene = scene_of(*NAMES, share=1e-12)
    accomplice = {"a": 1e9}
    commit_told(scene, lambda name, r: accomplice.get(name, -0.5 if r == "c" else 0.9))
    assert [audit.slice.reducer_id for audit in scene.state.audits] == ["c"]


def by_one_alone(scene: Scene) -> Scene:
    one = scene.round.slices[0].slice.reducer_id
    slices = tuple(replace(p, slice=replace(p.slice, reducer_id=one)) for p in scene.round.slices)
    scene.state = replace(scene.state, open_round=replace(scene.round, slices=slices))
    return scene


def test_a_fragments_first_results_of_one_reducer_are_held_against_their_contributions_alone() -> (
    None
):
    """All of them were as much too long, and agreed with each other."""
    scene = by_one_alone(scene_of(*NAMES, share=1e-12))
    indexes = [progress.slice.index for progress in scene.round.slices]
    commit_told(scene, lambda name, reducer: 0.2)
    assert [audit.slice.index for audit in scene.state.audits] == indexes
    honest = by_one_alone(scene_of(*NAMES, share=1e-12))
    commit_told(honest, lambda name, reducer: 0.5)
    assert not honest.state.audits
    by_several = scene_of(*NAMES, share=1e-12)
    commit_told(by_several, lambda name, reducer: 0.2)
    assert not by_several.state.audits, "they say what is usual"
    later = by_one_alone(scene_of(*NAMES, share=1e-12))
    seen = SeenNorm(start=0, num_elements=LAYOUT.fragment_elements[0], norm=1.0)
    norms = (SeenNorms(round=0, fragment=0, slices=(seen,), stride=1.0),)
    later.state = replace(later.state, norms=norms)
    commit_told(later, lambda name, reducer: 0.2)
    assert not later.state.audits, "what a reducer keeps makes it less"


def test_where_nobody_audits_no_finding_draws_one() -> None:
    scene = scene_of(*NAMES, share=0.0)
    commit_told(scene, lambda name, reducer: -1.0)
    assert not scene.state.audits


def test_auditors_of_the_reducers_own_invite_are_asked_only_where_there_is_no_other() -> None:
    for secret in range(12):
        scene = scene_of("a", "b", "c", secret=bytes([secret]))
        scene.change("a", "b", invite_id="one")
        scene.change("c", invite_id="another")
        reducer, (auditor,) = commit_1(scene)
        assert (auditor == "c") or reducer == "c"


def test_who_is_found_false_by_most_of_the_weight_is_convicted_and_the_run_goes_back() -> None:
    scene = scene_of("a", "b", "c", "d")
    reducer, first = committed(scene)
    find(scene, first, OTHER)
    jury = asked_of(scene.actions, AuditAsked)
    assert {*jury, first, reducer} == set(scene.state.members)
    for name in jury:
        assert audit_of(scene).verdict is None
        find(scene, name, OTHER)
    assert audit_of(scene).verdict is Verdict.CONVICTED
    (asked,) = scene.asked(QuarantineAsked)
    assert asked.conviction.node_id == reducer
    assert "found another result" in asked.conviction.reason
    put_out(scene, reducer)
    (wish,) = scene.asked(GoBack)
    assert wish.alarm.round is None, "before round 1 is nothing that nodes keep"
    assert "is convicted" in wish.alarm.reason and "can go back" in wish.alarm.reason


STATE_2 = digest_of("state 2")


def audited_round_2() -> Scene:
    """All slices of round 2 are audited, and none of round 1."""
    scene = scene_of("a", "b", "c", "d", share=0.0)
    for number in (1, 2):
        for name in "abcd" if number > 1 else ():
            scene.train(name)
        scene.commit("a", "b", "c", "d")
        scene.apply(digest_of(f"state {number}"), *"abcd")
        scene.amend(audited_share=1.0)
    return scene


def convicted_of_round_2() -> Scene:
    """Its reducer of slice 0 is convicted and put out; no node has yet said how far it reaches back."""
    scene = audited_round_2()
    audit = scene.state.audits[0]
    digest = audit.reduced.digest
    assert digest is not None
    told = Audited(slice_index=audit.slice.index, digest=digest, found=OTHER, why="")
    for name in "abcd":
        scene.do(Reported(node_id=NodeId(name), round=2, report=told))
    scene.do(Reported(node_id=audit.auditor_ids[0], round=2, report=told))
    for name in "abcd":
        scene.do(Reported(node_id=NodeId(name), round=2, report=told))
    assert scene.state.audits[0].verdict is Verdict.CONVICTED
    (conviction,) = scene.state.convicted
    reach_back(scene, 1)
    scene.do(Ticked())
    assert not of_kind(scene.log, GoBack), "it may be the convicted one that says so"
    reach_back(scene)
    put_out(scene, conviction.node_id)
    return scene


def put_out(scene: Scene, node_id: NodeId) -> None:
    scene.do(Ruled(kind=RulingKind.QUARANTINED, by="x", unix_seconds=0.0, node_id=node_id))


def test_the_run_goes_back_to_before_the_lie_once_nodes_say_that_they_reach_so_far() -> None:
    scene = convicted_of_round_2()
    reach_back(scene, 2)
    scene.do(Ticked())
    assert not of_kind(scene.log, GoBack)
    reach_back(scene, 1, 2)
    scene.do(Ticked())
    (wish,) = scene.asked(GoBack)
    assert wish.alarm.round == 1 and wish.alarm.until is None
    assert scene.state.open_round is None or scene.round.number == 3


@pytest.mark.parametrize(("went_to", "is_met"), [(2, False), (1, True)])
def test_a_lie_further_back_than_the_run_has_just_gone_is_not_forgotten(
    went_to: int, is_met: bool
) -> None:
    scene = convicted_of_round_2()
    before = digest_of_rulings(scene.state.rulings).hex()
    ruling = ruling_of(
        RulingKind.ROLLED_BACK, 2, before=before, from_round=went_to + 1, incarnation=1
    )
    scene.do(RulingsLearned(rulings=(ruling,), rules=scene.state.rules, undone={}))
    assert scene.state.rolled_back == (ruling,)
    assert (scene.state.alarm is None) is is_met


def test_a_conviction_outlives_a_coordinator_that_dies_before_it_has_ruled() -> None:
    scene = scene_of("a", "b", "c", "d")
    reducer, first = committed(scene)
    find(scene, first, OTHER)
    for name in asked_of(scene.actions, AuditAsked):
        find(scene, name, OTHER)
    store = Store.in_memory()
    store.save(initial_state(scene.state.rules, RUN), scene.state, now=scene.now)
    scene.state = store.load(scene.state.rules, RUN)
    scene.do(Started())
    for other in "abcd":
        if other != reducer:
            scene.attach(other, at=1, digest=digest_of("state 1"), invite=other)
    scene.wait(1000)
    asked = of_kind(scene.log, QuarantineAsked)
    assert len(asked) == 2, "once more after the start"
    put_out(scene, reducer)
    assert not scene.state.convicted
    assert len(of_kind(scene.log, GoBack)) == 1


def test_different_findings_convict_nobody_and_as_nobody_can_make_it_again_it_is_undone() -> None:
    scene = scene_of("a", "b", "c", "d")
    reducer, first = committed(scene)
    find(scene, first, OTHER, "another result comes out")
    for place, name in enumerate(asked_of(scene.actions, AuditAsked)):
        find(scene, name, digest_of(f"yet another {place}"))
    assert audit_of(scene).verdict is Verdict.UNPROVEN
    assert not of_kind(scene.log, QuarantineAsked)
    (wish,) = scene.asked(GoBack)
    assert "another result comes out" in wish.alarm.reason
    assert scene.member(reducer).audits.back_at_round == 4


def test_who_contradicts_most_of_the_weight_twice_has_no_say_any_more_and_audits_nothing() -> None:
    scene = scene_of("a", "b", "c", "d")
    _, first = committed(scene)
    scene.change(work=Work(by_stretch=((0, 100),)))
    find(scene, first, OTHER)
    for name in asked_of(scene.actions, AuditAsked):
        find(scene, name, RESULT)
    audit = audit_of(scene)
    assert audit.verdict is Verdict.AGREED
    member = scene.member(first)
    assert (member.audits.num_contradicted, bool(member.work.by_stretch)) == (1, True)
    # The same again, of another slice:
    again = replace(audit, verdict=None, findings=audit.findings[:1], is_contested=True)
    scene.state = replace(scene.state, audits=(again,))
    for name in audit.auditor_ids[1:]:
        find(scene, name, RESULT)
    member = scene.member(first)
    assert (member.audits.num_contradicted, member.work) == (2, Work())


def test_a_dispute_between_two_undoes_nothing_and_lets_neither_reduce_or_audit_for_a_while() -> (
    None
):
    scene = scene_of("a", "b")
    reducer, first = committed(scene)
    find(scene, first, b"", "it does not give its error")
    audit = audit_of(scene)
    assert audit.verdict is Verdict.DISPUTED and "it does not give its error" in audit.why
    assert not of_kind(scene.log, GoBack)
    for name in (reducer, first):
        assert scene.member(name).audits.back_at_round == 4
        assert scene.member(name).state is MemberState.READY


def test_an_auditor_that_is_silent_costs_the_audit_alone() -> None:
    scene = scene_of("a", "b", "c")
    scene.wait(5)
    reducer, auditor = committed(scene)
    scene.wait(11)
    assert audit_of(scene).verdict is Verdict.UNANSWERED
    assert scene.member(auditor).audits.audits_from_round == 4
    assert scene.member(reducer).audits.back_at_round == 0


def test_an_auditor_that_leaves_is_not_waited_for() -> None:
    scene = scene_of("a", "b", "c")
    _, auditor = committed(scene)
    scene.leave(auditor)
    assert audit_of(scene).verdict is Verdict.UNANSWERED


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    "goes",
    [Scene.leave, lambda scene, name: scene.attach(name, at=2, digest=STATE_2, invite=name)],
)
def test_what_a_reducer_made_that_leaves_or_begins_anew_is_undone_and_nobody_is_convicted(
    goes: Callable[[Scene, NodeId], None], is_kept: bool
) -> None:
    """Nobody can know what it made its result of: a machine may fail, and a liar may leave in time."""
    scene = audited_round_2()
    audit = scene.state.audits[0]
    reducer = audit.slice.reducer_id
    if is_kept:
        reach_back(scene, 1)
    goes(scene, reducer)
    assert scene.member(reducer).audits.back_at_round == 5
    assert not [a for a in scene.log if isinstance(a, QuarantineAsked)]
    found = next(a for a in scene.state.audits if a.slice == audit.slice)
    if is_kept:
        assert found.verdict is Verdict.UNPROVEN
        assert scene.state.alarm is not None and scene.state.alarm.round == 1
        assert f"{reducer} is gone, or began anew" in scene.state.alarm.reason
    else:  # a run does not pause because a machine fails
        assert found.verdict is Verdict.UNANSWERED and scene.state.alarm is None


def test_a_reducer_whose_result_was_found_right_takes_nothing_with_it() -> None:
    scene = scene_of("a", "b", "c", "d")
    reducer, auditor = committed(scene)
    find(scene, auditor, RESULT)
    scene.leave(reducer)
    assert audit_of(scene).verdict is Verdict.AGREED and scene.state.alarm is None


def test_a_reducer_that_is_silent_for_a_while_may_come_back_and_answer() -> None:
    scene = scene_of("a", "b", "c", "d")
    scene.wait(5)  # so that an audit may take longer than a lease
    reducer, auditor = committed(scene)
    scene.change(reducer, state=MemberState.LOST)
    scene.wait(0)
    assert audit_of(scene).verdict is None
    find(scene, auditor, RESULT)
    assert audit_of(scene).verdict is Verdict.AGREED and scene.state.alarm is None


def test_what_a_reducer_made_that_leaves_one_other_behind_stays() -> None:
    """Of two nobody is independent of both."""
    scene = scene_of("a", "b")
    reducer, _ = committed(scene)
    scene.leave(reducer)
    assert audit_of(scene).verdict is Verdict.UNANSWERED and scene.state.alarm is None


@pytest.mark.parametrize("name", ["the reducer", "nobody"])
def test_a_finding_of_who_was_not_asked_changes_nothing(name: str) -> None:
    scene = scene_of("a", "b", "c")
    reducer, auditor = committed(scene)
    (third,) = set(scene.state.members) - {reducer, auditor}
    find(scene, reducer if name == "the reducer" else third, OTHER)
    assert not audit_of(scene).findings


def test_an_auditor_that_comes_back_is_told_again_what_it_was_asked() -> None:
    scene = scene_of("a", "b", "c")
    _, auditor = committed(scene)
    told = what_holds_for(scene.state, scene.member(auditor), scene.now)
    assert [m.round for m in told if isinstance(m, AuditAsked)] == [1]
    find(scene, auditor, RESULT)
    told = what_holds_for(scene.state, scene.member(auditor), scene.now)
    assert not [m for m in told if isinstance(m, AuditAsked)]


def test_a_reducer_adds_only_the_error_that_its_last_committed_result_has_left() -> None:
    """Else it could add whatever it likes, and every auditor would find the same."""
    scene = scene_of("a", "b", share=1e-9)
    reducer = reducer_of(scene)

    def reported(before: bytes, after: bytes) -> None:
        scene.reduce(reducer, 0, digest_of(f"result {scene.round.number}"))
        progress = scene.round.slices[0]
        assert progress.reduced is not None
        told = replace(progress.reduced, error_before=before, error_after=after)
        anew = replace(progress, digest=None, reduced=None, contributors=())
        current = replace(scene.round, slices=(anew, *scene.round.slices[1:]))
        scene.state = replace(scene.state, open_round=current)
        scene.do(Reported(node_id=reducer, round=scene.round.number, report=told))

    def commit() -> str:
        index, digest = 0, digest_of(f"result {scene.round.number}")
        number = scene.round.number
        for progress in scene.round.slices[1:]:
            scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
        for name in ("a", "b"):
            if scene.state.committed_round < number:
                scene.hold(name, index, digest)
        assert scene.state.committed_round == number, scene.reason
        reason = scene.state.recent[-1].commit.slices[0].void_reason
        scene.apply(digest_of(f"state {number}"), "a", "b")
        for name in ("a", "b"):
            if scene.state.open_round is not None:
                scene.train(name)
        return reason

    made_up, first, second = (digest_of(text) for text in ("made up", "first", "second"))
    reported(b"", first)
    assert commit() == ""
    reported(first, second)
    assert commit() == ""
    reported(b"", second)  # a reducer may forget
    assert commit() == ""
    reported(made_up, made_up)
    assert "adds an error that no committed result" in commit()
    # After history was taken back reducers keep what an earlier round has left, and nobody is at fault.
    faults = scene.member(reducer).audits.num_disputed
    scene.state = replace(scene.state, incarnation=scene.state.incarnation + 1)
    scene.change(audits=AuditRecord())
    assert faults == 1 and scene.round.slices[0].slice.reducer_id != reducer
    reducer = reducer_of(scene)
    reported(first, second)
    assert scene.round.slices[0].digest is not None and not scene.round.slices[0].refused
    assert scene.member(reducer).audits == AuditRecord()


def accusing(scene: Scene, accused: str) -> NodeId:
    """Round 1 commits with slice 0 alone, whose reducer says that one contribution does not decode."""
    commit_slice_0(scene, RESULT, undecodable=[accused])
    (first,) = asked_of(scene.log, AuditAsked)
    return first


def test_an_accusation_that_two_of_six_uphold_while_the_others_are_silent_convicts_nobody() -> None:
    scene = scene_of("a", "b", "c", "d", "e", "f", share=1e-12)
    accused = next(n for n in scene.state.members if n != reducer_of(scene))
    first = accusing(scene, accused)
    find(scene, first, RESULT)
    jury = asked_of(scene.actions, AuditAsked)
    assert {*jury, first, reducer_of(scene), accused} == set(scene.state.members)
    scene.wait_until(audit_of(scene).until)
    assert audit_of(scene).verdict is Verdict.AGREED
    assert not of_kind(scene.log, QuarantineAsked) and not scene.state.convicted


def test_an_accusation_that_most_of_the_weight_upholds_convicts() -> None:
    scene = scene_of("a", "b", "c", "d", share=1e-12)
    accused = next(n for n in scene.state.members if n != reducer_of(scene))
    first = accusing(scene, accused)
    find(scene, first, RESULT)  # with the reducer it has two thirds: the accused has no work yet
    (asked,) = of_kind(scene.log, QuarantineAsked)
    assert asked.conviction.node_id == accused
    assert "slice 0 of round 1 that does not decode, as " in asked.conviction.reason
    assert scene.state.alarm is None, "nothing of it counted, so nothing is undone"
