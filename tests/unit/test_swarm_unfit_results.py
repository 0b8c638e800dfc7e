"""Results of slices that do not decode, or that few come to hold: another one makes them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from coordinator.swarm.events import QuarantineAsked, RefusalSeen, Reported, Ruled
from coordinator.swarm.members import AuditRecord, MemberState
from coordinator.swarm.standing import MOST_ROUNDS_OUT
from coordinator.swarm.takeover import UNMADE_ROUNDS
from protocol.trust.evidence import proven_by
from protocol.trust.identity import Identity
from protocol.trust.rulings import RulingKind
from protocol.wire.findings import ResultRefused
from protocol.wire.messages import ResultOffered, ResultsSilent, SliceTakenOver
from protocol.wire.payload import PayloadHeader
from protocol.wire.rounds import Digest, NodeId
from tests.unit.payload_scene import header_of_result
from tests.unit.rulings_scene import quarantine
from tests.unit.swarm_scene import RUN, TOKENS, Scene, digest_of, of_kind


@cache
def key(number: int) -> Identity:
    return Identity.generate()


def keyed(num: int) -> Scene:
    """Nodes that can sign, each of an invite of its own; all have trained."""
    scene = Scene(min_nodes=num)
    for number in range(num):
        node_id = str(key(number).node_id)
        scene.attach(node_id, node_name=f"node-{number}", invite=str(number))
    for number in range(num):
        scene.train(str(key(number).node_id))
    return scene


def header_of(scene: Scene, index: int, body: str = "nonsense") -> PayloadHeader:
    """A result of the slice as its present reducer signs it."""
    part = scene.round.slices[index].slice
    by = next(key(n) for n in range(9) if key(n).node_id == part.reducer_id)
    return header_of_result(
        part,
        run_digest=RUN,
        round=scene.round.number,
        body_digest=Digest(digest_of(body)),
        attempt=scene.round.slices[index].attempt,
    ).signed(by)


def refused(header: PayloadHeader, by: Identity) -> RefusalSeen:
    told = ResultRefused(
        slice_index=header.slice_index, digest=header.digest, header=header.encode()
    )
    return RefusalSeen(
        node_id=by.node_id,
        refused=told.signed(by, run_digest=RUN, round=header.round),
        result=header,
    )


def others_than(scene: Scene, index: int, num: int) -> list[Identity]:
    reducer = scene.round.slices[index].slice.reducer_id
    return [key(n) for n in range(num) if key(n).node_id != reducer]


def test_a_result_that_most_cannot_decode_convicts_its_reducer_and_another_makes_the_slice() -> (
    None
):
    scene = keyed(5)
    header, others = header_of(scene, 0), others_than(scene, 0, 5)
    scene.reduce(header.sender_id, 0, header.digest)
    for by in others[:3]:
        scene.do(refused(header, by))
        assert not scene.asked(QuarantineAsked)
    scene.do(refused(header, others[3]))
    (asked,) = scene.asked(QuarantineAsked)
    assert asked.conviction.node_id == header.sender_id
    assert "slice 0 of round 1 that does not decode, as node-" in asked.conviction.reason
    (takeover,) = scene.asked(SliceTakenOver)
    assert takeover.reducer_id in {by.node_id for by in others} and takeover.attempt == 1
    progress = scene.round.slices[0]
    assert not progress.refused and not progress.refusals and progress.digest is None
    ruling = quarantine(header.sender_id, asked.conviction.evidence)
    proof = proven_by(ruling, run_digest=RUN)
    assert proof == "its signed result, which 4 members signed that it does not decode"


def test_refusals_may_come_before_the_report_of_the_result() -> None:
    scene = keyed(5)
    header = header_of(scene, 0)
    for by in others_than(scene, 0, 5):
        scene.do(refused(header, by))
    assert not of_kind(scene.log, QuarantineAsked)
    scene.reduce(header.sender_id, 0, header.digest)
    assert len(scene.asked(QuarantineAsked)) == 1 and scene.asked(SliceTakenOver)


def test_a_few_that_refuse_what_most_hold_change_nothing_and_lose_their_own_say() -> None:
    """Two of seven, in round after round."""
    scene = keyed(7)
    nodes = [str(key(n).node_id) for n in range(7)]
    for number in (1, 2):
        headers = [header_of(scene, i, f"round {number}") for i in range(len(scene.round.slices))]
        liars = [key(0), key(1)]
        for header in headers:
            for by in liars:
                scene.do(refused(header, by))
            scene.reduce(header.sender_id, header.slice_index, header.digest)
        for header in headers:
            for node in nodes[2:]:
                if scene.state.committed_round < number:
                    scene.hold(node, header.slice_index, header.digest)
        assert scene.state.committed_round == number, scene.reason
        closed = scene.state.recent[-1].commit
        assert all(outcome.digest is not None for outcome in closed.slices)
        scene.apply(digest_of(f"state {number}"), *nodes)
        for node in nodes if number == 1 else ():
            scene.train(node)
    assert not of_kind(scene.log, QuarantineAsked) and not of_kind(scene.log, SliceTakenOver)
    for number, node in enumerate(nodes):
        member = scene.member(node)
        assert bool(member.work.by_stretch) == (number > 1)
        assert member.audits.num_disputed == member.audits.num_void == 0


def test_of_two_one_that_refuses_the_others_result_convicts_nobody_and_nobody_waits() -> None:
    scene = keyed(2)
    header = header_of(scene, 0)
    (other,) = others_than(scene, 0, 2)
    scene.reduce(header.sender_id, 0, header.digest)
    scene.do(refused(header, other))
    second = header_of(scene, 1, "honest")
    scene.reduce(second.sender_id, 1, second.digest)
    scene.hold(header.sender_id, 1, second.digest)
    assert scene.state.committed_round == 1
    outcome = scene.state.recent[-1].commit.slices[0]
    assert outcome.digest is None and "1 say that it does not decode" in outcome.void_reason
    assert not of_kind(scene.log, QuarantineAsked)


def test_who_was_given_another_result_than_was_reported_is_offered_the_reported_one() -> None:
    """It has both signatures then."""
    for is_reported_first in (True, False):
        scene = keyed(4)
        reported, nonsense = (header_of(scene, 0, body) for body in ("good", "nonsense"))
        deceived = others_than(scene, 0, 4)[0]
        event = refused(nonsense, deceived)
        if not is_reported_first:
            scene.do(event)
        scene.reduce(reported.sender_id, 0, reported.digest)
        if is_reported_first:
            scene.do(event)
        (offered,) = scene.asked(ResultOffered)
        assert offered.digest == reported.digest
        assert not of_kind(scene.log, QuarantineAsked)


@pytest.mark.parametrize("what", ["itself", "a stranger", "another's slice", "an older round"])
def test_refusals_that_say_nothing_change_nothing(what: str) -> None:
    scene = keyed(4)
    header, by = header_of(scene, 0), others_than(scene, 0, 4)[0]
    scene.reduce(header.sender_id, 0, header.digest)
    if what == "itself":
        by = next(key(n) for n in range(4) if key(n).node_id == header.sender_id)
    elif what == "a stranger":
        by = key(8)
    event = refused(header, by)
    if what == "another's slice":
        event = replace(event, result=replace(header, sender_id=key(8).node_id))
    elif what == "an older round":
        event = replace(event, refused=replace(event.refused, round=7))
    before = scene.state
    scene.do(event)
    assert scene.state == before and not scene.actions


def test_a_convicted_reducer_is_no_backup_and_its_other_slices_go_when_it_is_put_out() -> None:
    scene = keyed(5)
    for _ in range(2):  # the backup makes nonsense too
        header = header_of(scene, 0)
        scene.reduce(header.sender_id, 0, header.digest)
        for by in others_than(scene, 0, 5):
            if header.sender_id == scene.round.slices[0].slice.reducer_id:
                scene.do(refused(header, by))
        (asked,) = scene.asked(QuarantineAsked)
        assert scene.round.slices[0].slice.reducer_id != header.sender_id
        out, kind = asked.conviction.node_id, RulingKind.QUARANTINED
        scene.do(Ruled(kind=kind, by="x", unix_seconds=0.0, node_id=out))
        assert header.sender_id not in {p.slice.reducer_id for p in scene.round.slices}


# Results that few hold


def made_and_held(
    scene: Scene, index: int, holders: Iterable[int], tokens: dict[str, int] | None = None
) -> None:
    made = header_of(scene, index)
    scene.reduce(made.sender_id, index, made.digest, tokens)
    for number in holders:
        scene.hold(str(key(number).node_id), index, made.digest)


def all_but_one_are_held(scene: Scene, tokens: dict[str, int] | None = None) -> None:
    for index in range(1, len(scene.round.slices)):
        made_and_held(scene, index, range(7), tokens)


def seven_of_which_one_keeps_its_result(*, holders: int = 0) -> tuple[Scene, PayloadHeader]:
    """After 4 s all slices are made; that of one reducer is held by so many others."""
    scene = keyed(7)
    scene.now += 4
    kept = header_of(scene, 0)
    all_but_one_are_held(scene)
    scene.reduce(kept.sender_id, 0, kept.digest)
    for by in others_than(scene, 0, 7)[:holders]:
        scene.hold(str(by.node_id), 0, kept.digest)
    assert scene.state.committed_round == 0
    return scene, kept


def test_a_result_that_its_reducer_keeps_is_made_by_another_one_long_before_the_deadline() -> None:
    scene, kept = seven_of_which_one_keeps_its_result()
    scene.wait(29)
    assert scene.round.slices[0].slice.reducer_id == kept.sender_id
    scene.wait(1)
    (takeover,) = of_kind(scene.log, SliceTakenOver)
    assert takeover.slice_index == 0 and takeover.reducer_id != kept.sender_id
    record = scene.member(kept.sender_id).audits
    assert (record.num_void, record.back_at_round) == (1, 3)
    made = header_of(scene, 0, "anew")
    scene.reduce(made.sender_id, 0, made.digest)
    for number in range(7):
        if scene.state.committed_round == 0:
            scene.hold(str(key(number).node_id), 0, made.digest)
    assert scene.state.committed_round == 1
    assert all(o.digest is not None for o in scene.state.recent[-1].commit.slices)
    assert scene.member(kept.sender_id).audits.num_void == 1, "it rests once for it"


def test_a_result_that_some_hold_is_fetched_from_them_first() -> None:
    scene, kept = seven_of_which_one_keeps_its_result(holders=2)
    scene.wait(30)
    (offered,) = of_kind(scene.log, ResultOffered)
    assert offered.digest == kept.digest and kept.sender_id not in offered.holder_ids
    assert not of_kind(scene.log, SliceTakenOver)
    scene.wait(18)  # half as long again as the 34 s
    assert len(of_kind(scene.log, SliceTakenOver)) == 1, "they do not give it"


def test_where_half_of_the_results_are_stuck_it_is_the_network() -> None:
    scene = keyed(4)
    for index in range(4):
        made_and_held(scene, index, range(4) if index < 2 else ())
    scene.wait(69)
    assert not of_kind(scene.log, SliceTakenOver) and scene.state.committed_round == 0


def seven_of_which_one_makes_no_result(*, after: float) -> tuple[Scene, NodeId]:
    scene = keyed(7)
    scene.now += after
    late = scene.round.slices[0].slice.reducer_id
    all_but_one_are_held(scene)
    return scene, late


def test_who_has_made_no_result_loses_its_slice_and_not_its_place() -> None:
    """It may wait for somebody's slow link."""
    scene, late = seven_of_which_one_makes_no_result(after=12)
    scene.wait(5.3)
    assert not of_kind(scene.log, SliceTakenOver)
    scene.wait(0.2)  # less than half as long again
    (taken_over,) = of_kind(scene.log, SliceTakenOver)
    assert taken_over.slice_index == 0 and taken_over.reducer_id != late
    assert (scene.member(late).audits.num_void, scene.member(late).audits.back_at_round) == (0, 0)
    scene.wait(8.5)
    assert len(of_kind(scene.log, SliceTakenOver)) == 1
    scene.wait(0.3)  # the backup makes none either: half as long again as 17.4 s
    assert len(of_kind(scene.log, SliceTakenOver)) == 2


def test_who_makes_no_result_again_soon_loses_its_slice_almost_at_once() -> None:
    for lately, seconds in ((1, 1.2), (0, 5.4)):
        scene = keyed(7)
        late = scene.round.slices[0].slice.reducer_id
        scene.change(late, audits=replace(scene.member(late).audits, unmade_round=lately))
        current = replace(scene.round, number=1 + UNMADE_ROUNDS)
        scene.state = replace(scene.state, open_round=current, committed_round=UNMADE_ROUNDS)
        scene.now += 12
        all_but_one_are_held(scene)
        scene.wait(seconds - 0.1)
        assert not of_kind(scene.log, SliceTakenOver)
        scene.wait(0.2)
        assert len(of_kind(scene.log, SliceTakenOver)) == 1


@pytest.mark.parametrize("is_made", [False, True])
def test_who_kept_its_contributions_too_has_been_waited_for_already(is_made: bool) -> None:
    scene = keyed(7)
    kept = header_of(scene, 0)
    scene.now += 20
    tokens = {str(a.node_id): TOKENS for a in scene.round.assignments}
    others = {name: tokens[name] for name in tokens if name != kept.sender_id}
    all_but_one_are_held(scene, others)
    if is_made:
        scene.reduce(kept.sender_id, 0, kept.digest)
        says_silent(scene, range(7), 0)
    scene.wait(0.9)
    assert not of_kind(scene.log, SliceTakenOver)
    scene.wait(1.2)
    assert len(of_kind(scene.log, SliceTakenOver)) == 1


def says_silent(scene: Scene, numbers: Iterable[int], *indexes: int) -> None:
    for number in numbers:
        told, round = ResultsSilent(slice_indexes=indexes), scene.round.number
        scene.do(Reported(node_id=key(number).node_id, round=round, report=told))


def test_a_result_of_which_nothing_comes_to_most_is_made_by_another_one_at_once() -> None:
    scene, kept = seven_of_which_one_keeps_its_result()
    others = [n for n in range(7) if key(n).node_id != kept.sender_id]
    says_silent(scene, others[:4], 0)
    scene.wait(2.5)
    assert not of_kind(scene.log, SliceTakenOver), "nobody has work: four of seven decide nothing"
    says_silent(scene, others[4:5], 0)
    (taken_over,) = of_kind(scene.log, SliceTakenOver)
    assert taken_over.slice_index == 0 and taken_over.reducer_id != kept.sender_id
    record = scene.member(kept.sender_id).audits
    assert (record.num_void, record.back_at_round) == (1, 3)
    assert not any(scene.round.silent.values()), "of the other's result nobody has said anything"


def test_a_result_that_comes_late_but_comes_is_waited_for() -> None:
    """Members say that nothing comes before it is made. Then it comes by a slow link, and they say so."""
    scene, kept = seven_of_which_one_makes_no_result(after=12)
    others = [n for n in range(7) if key(n).node_id != kept]
    says_silent(scene, others, 0)
    scene.wait(4)
    made = header_of(scene, 0)
    scene.reduce(made.sender_id, 0, made.digest)
    scene.wait(2.9)  # it is given as long as others' results, from when it is made
    assert not of_kind(scene.log, SliceTakenOver)
    says_silent(scene, others)
    scene.wait(40)
    assert not of_kind(scene.log, SliceTakenOver)
    assert scene.member(made.sender_id).audits.num_void == 0


def test_where_nobody_decides_most_results_are_with_nobody() -> None:
    """Two of seven that hold most of them early do not have others' slices given up early."""
    scene = keyed(7)
    made = [header_of(scene, index) for index in range(1, len(scene.round.slices))]
    for header in made:
        scene.reduce(header.sender_id, header.slice_index, header.digest)
    for number in range(5):
        assert scene.round.most_held_at is None
        for header in made:
            scene.hold(str(key(number).node_id), header.slice_index, header.digest)
    assert scene.round.most_held_at == scene.now


def test_who_kept_a_result_lately_is_given_up_sooner_and_makes_no_others_slice() -> None:
    """A slow link loses its slice once; who keeps results costs the others a quarter from then on."""
    scene = keyed(7)
    kept = header_of(scene, 0)
    liars = [key(n) for n in range(7) if key(n).node_id == kept.sender_id]
    reducing = {progress.slice.reducer_id for progress in scene.round.slices}
    liars += [key(n) for n in range(7) if key(n).node_id not in reducing]
    for liar in liars:
        audits = scene.member(liar.node_id).audits
        lately = replace(audits, num_void=1, void_round=0, back_at_round=2)
        scene.change(liar.node_id, audits=lately)
    scene.now += 12
    theirs = {liar.node_id for liar in liars}
    for index, progress in enumerate(scene.round.slices):
        is_theirs = progress.slice.reducer_id in theirs
        made_and_held(scene, index, () if is_theirs else range(7))
    scene.wait(2.9)
    assert not of_kind(scene.log, SliceTakenOver)
    scene.wait(0.2)  # 15 s after the plan
    taken_over = of_kind(scene.log, SliceTakenOver)
    assert [told.slice_index for told in taken_over] == [0]
    assert taken_over[0].reducer_id not in theirs, "though these have nothing to do"
    assert scene.member(str(kept.sender_id)).audits.num_void == 2


# Results that reach too few, round after round


def long_scene_of(*names: str) -> Scene:
    """The first round of a long run; each is of an invite of its own."""
    scene = Scene(min_nodes=len(names), rounds=1000)
    for name in names:
        scene.attach(name, invite=name)
    return scene


def void_once(scene: Scene, *loners: str) -> None:
    """A round in which nobody gets the results of these, and everybody those of the others."""
    names = [str(a.node_id) for a in scene.round.assignments]
    number = scene.round.number
    for name in names:
        scene.train(name)
    for progress in scene.round.slices:
        index, reducer = progress.slice.index, progress.slice.reducer_id
        result = digest_of(f"result {number}/{index}")
        scene.reduce(reducer, index, result)
        for name in names:
            if reducer not in loners and scene.state.committed_round < number:
                scene.hold(name, index, result)
    scene.wait_until(scene.round.commit_deadline)
    assert scene.state.committed_round == number, scene.reason
    scene.apply(digest_of(f"state {number}"), *scene.state.members)


def reducers_of(scene: Scene) -> set[str]:
    return {str(progress.slice.reducer_id) for progress in scene.round.slices}


def test_a_reducer_whose_results_reach_too_few_reduces_more_and_more_rarely() -> None:
    scene = long_scene_of("a", "b", "c", "d")
    void = []
    while scene.round.number <= 24:
        if "d" in reducers_of(scene):
            void.append(scene.round.number)
        void_once(scene, "d")
    assert void == [1, 3, 6, 11, 20]
    assert scene.member("d").state is MemberState.READY, "it trains on"


def test_where_as_many_results_get_lost_as_not_nobody_is_kept_from_reducing() -> None:
    scene = long_scene_of("a", "b", "c", "d")
    void_once(scene, "c", "d")
    assert reducers_of(scene) == {"a", "b", "c", "d"}


def test_a_result_that_is_lost_once_in_a_long_while_costs_one_round_each_time() -> None:
    scene = long_scene_of("a", "b", "c", "d")
    lost = AuditRecord(num_void=5, void_round=scene.round.number - 2 * MOST_ROUNDS_OUT - 1)
    scene.change("d", audits=lost)
    void_once(scene, "d")
    assert "d" not in reducers_of(scene)
    void_once(scene)
    assert "d" in reducers_of(scene)
