"""Audits with liars among reducers and auditors: with less than half of the weight they convict nobody."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.swarm.events import QuarantineAsked, Reported
from coordinator.swarm.members import Member, Verdict, Work
from coordinator.swarm.weighing import say_of, weight_of
from protocol.wire.findings import Audited
from protocol.wire.messages import AuditAsked
from protocol.wire.rounds import NodeId, RoundSpan
from tests.property.effort import examples
from tests.unit.swarm_scene import Scene, asked_of, digest_of

NAMES = tuple("abcdefg")
CLAIMED, RIGHT, MADE_UP = (digest_of(t) for t in ("claimed", "right", "made up"))


def weighed(
    names: Sequence[str], tokens: Sequence[int], *, secret: bytes, audited_share: float
) -> tuple[Scene, Callable[[], Mapping[NodeId, Member]]]:
    """A round that confirmed work decides, and the members with that work, whatever they have just earned."""
    scene = Scene(min_nodes=len(names))
    scene.amend(audited_share=audited_share)
    scene.state = replace(scene.state, audit_secret=secret)
    for name in names:
        scene.attach(name, invite=name)
    work = dict(zip(names, tokens, strict=True))

    def with_work() -> Mapping[NodeId, Member]:
        members = scene.state.members.items()
        return {n: replace(m, work=Work(by_stretch=((0, work[n]),))) for n, m in members}

    say = say_of(with_work().values(), 1)
    scene.state = replace(scene.state, open_round=replace(scene.round, say=say))
    return scene, with_work


@settings(examples(60))
@given(
    tokens=st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    lying=st.sets(st.integers(0, 6)),
    is_reducer_lying=st.booleans(),
    secret=st.binary(min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
    tells=st.sampled_from([CLAIMED, MADE_UP, b""]),
)
def test_liars_with_less_than_half_of_the_weight_convict_nobody_and_no_false_result_outlives_an_honest_look(
    tokens: list[int],
    lying: set[int],
    is_reducer_lying: bool,
    secret: bytes,
    order: Random,
    tells: bytes,
) -> None:
    names = NAMES[: len(tokens)]
    scene, with_work = weighed(names, tokens, secret=secret, audited_share=1.0)
    say = scene.round.say
    assert say is not None
    reducer = scene.round.slices[0].slice.reducer_id
    liars = {NodeId(names[i]) for i in lying if i < len(names)} - {reducer}
    if is_reducer_lying:
        liars.add(reducer)
    assume(2 * weight_of(say, liars) < weight_of(say, say.weights))

    result = CLAIMED if is_reducer_lying else RIGHT
    for name in names:
        scene.train(name)
    for progress in scene.round.slices[1:]:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
    scene.reduce(reducer, 0, result)
    for name in names:
        if scene.state.committed_round == 0:
            scene.hold(name, 0, result)

    scene.state = replace(scene.state, members=with_work())

    def answer(asked: list[NodeId]) -> None:
        order.shuffle(asked)
        for name in asked:
            found = tells if name in liars else RIGHT
            report = Audited(slice_index=0, digest=result, found=found, why="")
            scene.do(Reported(node_id=name, round=1, report=report))

    (first,) = asked_of(scene.log, AuditAsked)
    answer([first])
    answer([n for n in asked_of(scene.log, AuditAsked) if n != first])
    (audit,) = scene.state.audits
    verdict = audit.verdict
    convicted = {a.conviction.node_id for a in scene.log if isinstance(a, QuarantineAsked)}
    is_undone = scene.state.alarm is not None
    contradicted = {n for n, m in scene.state.members.items() if m.audits.num_contradicted}
    assert convicted <= liars
    assert contradicted <= liars
    assert is_reducer_lying or not is_undone, "liars undo nothing"
    if is_reducer_lying and first not in liars:
        assert verdict in (Verdict.DISPUTED, Verdict.UNPROVEN, Verdict.CONVICTED)
        honest = [NodeId(n) for n in names if n not in liars]
        if len(honest) > 1:
            assert convicted == {reducer}, "all that are honest looked, and they are most"
            assert is_undone
    is_seen_honestly = any(n not in liars for n in audit.auditor_ids)
    if not is_reducer_lying and is_seen_honestly:
        assert verdict is Verdict.AGREED, "liars make nothing disputed that an honest auditor sees"


@settings(examples(40))
@given(
    num_nodes=st.integers(3, 7),
    secret=st.binary(min_size=4, max_size=4),
    is_restarted=st.booleans(),
    num_answers=st.integers(0, 6),
    tells=st.sampled_from([MADE_UP, b""]),
)
def test_a_liar_that_leaves_before_most_have_made_its_result_again_has_it_undone(
    num_nodes: int, secret: bytes, is_restarted: bool, num_answers: int, tells: bytes
) -> None:
    """However many have answered by then: with fewer than convict it, leaving is no way out."""
    names = NAMES[:num_nodes]
    scene = Scene(min_nodes=num_nodes)
    scene.state = replace(scene.state, audit_secret=secret)
    for name in names:
        scene.attach(name, invite=name)
    for number in (1, 2):
        for name in names:
            scene.train(name)
        if number == 2:
            scene.amend(audited_share=1.0, min_nodes=2)
        scene.commit(*names)
        if number == 1:
            scene.apply(digest_of("state 1"), *names)
    audit = scene.state.audits[0]
    reducer, result = audit.slice.reducer_id, audit.reduced.digest
    assert result is not None
    spans = (RoundSpan(first=1, last=2),)
    scene.change(reach_back=spans)
    index = audit.slice.index
    told = Audited(slice_index=index, digest=result, found=tells, why="")
    answered = 0
    while answered < num_answers and scene.state.alarm is None:
        (now,) = [a for a in scene.state.audits if a.slice.index == index]
        asked = [n for n in now.auditor_ids if n not in {f.node_id for f in now.findings}]
        if now.verdict is not None or not asked:
            break
        scene.do(Reported(node_id=asked[0], round=2, report=told))
        answered += 1
    if is_restarted:
        scene.attach(reducer, at=1, digest=digest_of("state 1"), invite=str(reducer))
    else:
        scene.leave(reducer)
    (after,) = [a for a in scene.state.audits if a.slice.index == index]
    if after.verdict is None:
        scene.wait_until(after.until)
        (after,) = [a for a in scene.state.audits if a.slice.index == index]
    assert after.verdict in (Verdict.UNPROVEN, Verdict.CONVICTED)
    assert scene.state.alarm is not None and scene.state.alarm.round == 1
    struck = {n for n, m in scene.state.members.items() if m.audits.num_disputed}
    assert struck == {reducer}


@settings(examples(60))
@given(
    tokens=st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    lying=st.sets(st.integers(0, 6)),
    is_reducer_lying=st.booleans(),
    secret=st.binary(min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
    tells=st.sampled_from([CLAIMED, RIGHT, MADE_UP, b""]),
    silent=st.sets(st.integers(0, 6)),
)
def test_who_is_said_to_send_nonsense_goes_when_most_of_the_weight_finds_it_and_else_stays(
    tokens: list[int],
    lying: set[int],
    is_reducer_lying: bool,
    secret: bytes,
    order: Random,
    tells: bytes,
    silent: set[int],
) -> None:
    """No slice is drawn by lot here: the accusation alone has it made again."""
    names = NAMES[: len(tokens)]
    scene, with_work = weighed(names, tokens, secret=secret, audited_share=1e-12)
    say = scene.round.say
    assert say is not None
    reducer = scene.round.slices[0].slice.reducer_id
    accused = next(NodeId(n) for n in reversed(names) if n != reducer)
    liars = {NodeId(names[i]) for i in lying if i < len(names)} - {reducer, accused}
    liars.add(reducer if is_reducer_lying else accused)
    assume(2 * weight_of(say, liars) < weight_of(say, say.weights))
    mute = {NodeId(names[i]) for i in silent if i < len(names)} - liars

    result = CLAIMED if is_reducer_lying else RIGHT
    for name in names:
        scene.train(name)
    for progress in scene.round.slices[1:]:
        scene.reduce(progress.slice.reducer_id, progress.slice.index, None)
    scene.reduce(reducer, 0, result, undecodable=[accused])
    for name in names:
        if scene.state.committed_round == 0:
            scene.hold(name, 0, result)
    scene.state = replace(scene.state, members=with_work())

    answered: set[NodeId] = set()
    while asked := [n for n in asked_of(scene.log, AuditAsked) if n not in answered]:
        order.shuffle(asked)
        for name in (n for n in asked if n not in mute):
            found = tells if name in liars else RIGHT
            report = Audited(slice_index=0, digest=result, found=found, why="")
            scene.do(Reported(node_id=name, round=1, report=report))
        answered.update(asked)
    scene.wait_until(max((audit.until for audit in scene.state.audits), default=scene.now))
    assert accused not in answered
    convicted = {a.conviction.node_id for a in scene.log if isinstance(a, QuarantineAsked)}
    assert convicted <= liars
    if mute:
        return  # then it may be that nobody is sure
    honest = [NodeId(n) for n in names if n not in liars and n != accused]
    if not is_reducer_lying and 2 * weight_of(say, honest) > weight_of(say, say.weights):
        assert convicted == {accused}, "all that are honest looked, and they are most"
    if is_reducer_lying and len(honest) > 1:
        right = weight_of(say, honest)
        if 2 * right > weight_of(say, say.weights):
            assert convicted == {reducer}


def test_nothing_is_made_again_for_whom_no_audit_can_convict_twice() -> None:
    scene = Scene(min_nodes=5)
    scene.amend(audited_share=1e-12)
    scene.state = replace(scene.state, audit_secret=b"secret")
    for name in NAMES[:5]:
        scene.attach(name, invite=name)
    for name in NAMES[:5]:
        scene.train(name)
    for progress in scene.round.slices:
        index, reducer = progress.slice.index, progress.slice.reducer_id
        others = sorted(n for n in NAMES[:5] if n != reducer)
        accused = "e" if reducer != "e" else others[0]
        scene.reduce(reducer, index, digest_of(f"result {index}"), undecodable=[accused])
    slices = [(p.slice.index, p.slice.reducer_id) for p in scene.round.slices]
    for index, _ in slices:
        for name in NAMES[:5]:
            if scene.state.committed_round == 0:
                scene.hold(name, index, digest_of(f"result {index}"))
    about = [n for audit in scene.state.audits for n in audit.accused]
    assert len(about) == len(set(about)) and "e" in about, "one audit for each accused"
