"""Who sits out because most of the others point against it, and who does not."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from coordinator.driver import Driver, LoopClock
from coordinator.journal import news_of
from coordinator.services.status import StatusDesk
from coordinator.store import Store
from coordinator.streams import Telemetry
from coordinator.swarm.members import PRESENT, Against, Member, MemberState
from coordinator.swarm.penalties import (
    FEWEST_ROUNDS_OUT,
    IN_FAVOUR,
    MOST_AGAINST,
    without_rounds_undone,
)
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.standing import MOST_ROUNDS_OUT
from coordinator.swarm.transition import Transition
from protocol.run.run_spec import RunSpec
from protocol.v1 import status_pb2
from protocol.wire.rounds import WHOLE, NodeId
from tests.unit.swarm_scene import LAYOUT, Scene, digest_of

NAMES = "abcdef"
WRONG = "f"
ALL_OTHERS = dict.fromkeys("abcde", WRONG)


def scene_of(names: str = NAMES, *, min_nodes: int = 2, helpers: str = "") -> Scene:
    """Members with a round's work each, of an invite each; round 2 is open."""
    layout = replace(LAYOUT, fragment_elements=(1024 * len(names),))
    scene = Scene(min_nodes=len(names), rounds=1000, layout=layout)
    for name in names:
        scene.attach(name, invite=name)
    for name in helpers:
        scene.attach(name, is_helper=True)
    go_on(scene, {})
    scene.amend(min_nodes=min_nodes)
    return scene


def go_on(scene: Scene, left_out_by: Mapping[str, Collection[str]], *, times: int = 1) -> None:
    """Rounds in which all train, and reducers take nothing of some."""
    for _ in range(times):
        names = [str(a.node_id) for a in scene.round.assignments if a.trains]
        tokens = {str(a.node_id): a.num_samples * 8 for a in scene.round.assignments if a.trains}
        for name in names:
            scene.train(name)
        scene.commit(*names, tokens=tokens, left_out_by=left_out_by)
        here = [n for n, member in scene.state.members.items() if member.state in PRESENT]
        scene.apply(digest_of(f"after {scene.state.committed_round}"), *here)


def give_work(scene: Scene, names: str) -> None:
    """Much more than a round's."""

    def with_work(member: Member) -> Member:
        return replace(member, work=replace(member.work, by_stretch=((0, 10**5),)))

    members = {n: with_work(m) if n in names else m for n, m in scene.state.members.items()}
    scene.state = replace(scene.state, members=members)


def sits_out(scene: Scene) -> bool:
    """Whether the round that is open now counts on it, which is ready."""
    assert scene.member(WRONG).state is MemberState.READY
    return WRONG not in [a.node_id for a in scene.round.assignments]


def test_whom_most_reducers_leave_out_round_after_round_sits_out_and_it_is_said() -> None:
    scene = scene_of()
    go_on(scene, ALL_OTHERS, times=MOST_AGAINST - 1)
    assert not sits_out(scene)
    before = scene.state
    go_on(scene, ALL_OTHERS)
    assert sits_out(scene)
    number = MOST_AGAINST + 1
    back_at = number + 1 + FEWEST_ROUNDS_OUT
    assert f"; without {WRONG} (until round {back_at}), as most of the others" in scene.round.reason
    (news,) = [n for n in news_of(before, transition_to(scene)) if n.what == "node sits out"]
    assert (news.facts["node"], news.facts["until_round"]) == (WRONG, back_at)
    go_on(scene, {}, times=FEWEST_ROUNDS_OUT - 1)
    assert sits_out(scene)
    go_on(scene, {})
    assert not sits_out(scene) and scene.round.number == back_at


async def test_who_sits_out_is_told_until_when_and_what_to_look_at() -> None:
    scene = scene_of()
    go_on(scene, ALL_OTHERS, times=MOST_AGAINST)
    clock = LoopClock(starts_at=scene.now)
    driver = Driver(state=scene.state, store=Store.in_memory(), clock=clock)
    status = StatusDesk(driver, Telemetry(), RunSpec(), swarm_id="swarm")
    nodes = status.get_status(status_pb2.GetStatusRequest()).nodes
    told = {node.node_name: node.standing for node in nodes}
    back_at = MOST_AGAINST + 2 + FEWEST_ROUNDS_OUT
    assert told.pop(WRONG).startswith(
        f"waits until round {back_at}: most of the others point against"
    )
    assert not any(told.values())


def transition_to(scene: Scene) -> Transition:
    return Transition(state=scene.state, actions=(), at=scene.now)


def test_who_goes_on_so_sits_out_for_longer_and_who_agrees_is_as_before() -> None:
    scene = scene_of()
    go_on(scene, ALL_OTHERS, times=MOST_AGAINST)
    for out in (FEWEST_ROUNDS_OUT, 2 * FEWEST_ROUNDS_OUT, MOST_ROUNDS_OUT, MOST_ROUNDS_OUT):
        assert sits_out(scene)
        go_on(scene, {}, times=out)
        assert not sits_out(scene), "it has one round"
        go_on(scene, ALL_OTHERS)
    go_on(scene, {}, times=MOST_ROUNDS_OUT)
    go_on(scene, {}, times=MOST_AGAINST // IN_FAVOUR)
    assert scene.member(WRONG).against == Against()


def test_who_is_left_out_now_and_then_stays() -> None:
    scene = scene_of()
    for _ in range(3 * MOST_AGAINST):
        go_on(scene, ALL_OTHERS, times=IN_FAVOUR)
        go_on(scene, {})
    assert not sits_out(scene) and not scene.member(WRONG).against.num_times_out


@pytest.mark.parametrize("liars", ["a", "ab"])
def test_reducers_without_most_of_the_weight_have_nobody_sit_out(liars: str) -> None:
    scene = scene_of()
    go_on(scene, dict.fromkeys(liars, WRONG), times=2 * MOST_AGAINST)
    assert not sits_out(scene) and not scene.member(WRONG).against.num_times_out


def test_a_few_slices_of_a_reducer_say_nothing() -> None:
    """It leaves the member out of one of its two slices."""
    scene = scene_of()
    scene.amend(slice_elements=256)
    go_on(scene, {})
    slices = [progress.slice for progress in scene.round.slices]
    assert len(slices) > len(NAMES)
    firsts = {part.reducer_id: part.index for part in reversed(slices)}
    for _ in range(2 * MOST_AGAINST):
        tokens = {str(a.node_id): a.num_samples * 8 for a in scene.round.assignments}
        number = scene.round.number
        for name in NAMES:
            scene.train(name)
        for part in slices:
            result = digest_of(f"result {number}/{part.index}")
            left_out = WRONG if firsts[part.reducer_id] == part.index else ""
            scene.reduce(part.reducer_id, part.index, result, tokens, left_out=left_out)
            for name in NAMES:
                if scene.state.committed_round < number:
                    scene.hold(name, part.index, result)
        scene.apply(digest_of(f"after {number}"), *NAMES)
    assert not sits_out(scene) and not scene.member(WRONG).against.num_times_out


def test_plans_tell_what_each_word_counts_and_that_of_a_newcomer_counts_nothing() -> None:
    scene = scene_of()
    scene.attach("g", invite="g", at=1, digest=digest_of("after 1"))
    give_work(scene, "ab")
    go_on(scene, {})
    plan = plan_of(scene.round, scene.now)
    votes = dict(zip(plan.participants, plan.votes, strict=True))
    a, b, c, g = (votes[NodeId(name)] for name in "abcg")
    assert a == pytest.approx(b, abs=1) and a > 100 * c > 0
    assert not g and sum(plan.votes) == WHOLE


def test_a_round_with_many_late_speaks_against_nobody() -> None:
    """Of those whose contributions came a few liars may be most."""
    scene = scene_of()
    for left, counted in (("ab", 0), ("a", 1)):
        here = [name for name in NAMES if name not in left]
        number = scene.round.number
        for name in NAMES:
            scene.train(name)
        tokens = {
            n: a.num_samples * 8 for a in scene.round.assignments if (n := str(a.node_id)) in here
        }
        for progress in scene.round.slices:
            reducer, index = progress.slice.reducer_id, progress.slice.index
            result = digest_of(f"result {number}/{index}")
            scene.reduce(reducer, index, result, tokens, left_out="" if reducer == WRONG else WRONG)
            for name in NAMES:
                if scene.state.committed_round < number:
                    scene.hold(name, index, result)
        assert scene.member(WRONG).against.rounds == counted
        scene.apply(digest_of(f"after {number}"), *NAMES)


def test_who_keeps_its_contributions_is_not_excused_by_it() -> None:
    scene = scene_of()
    go_on(scene, ALL_OTHERS, times=6)
    for name in NAMES:
        scene.train(name)
    tokens = {str(a.node_id): a.num_samples * 8 for a in scene.round.assignments}
    number = scene.round.number
    for progress in scene.round.slices:
        reducer, index = progress.slice.reducer_id, progress.slice.index
        here = tokens if reducer == WRONG else {n: t for n, t in tokens.items() if n != WRONG}
        scene.reduce(reducer, index, digest_of(f"result {number}/{index}"), here)
        for name in NAMES:
            if scene.state.committed_round < number:
                scene.hold(name, index, digest_of(f"result {number}/{index}"))
    assert scene.member(WRONG).against.rounds == 6
    scene.apply(digest_of("after it"), *NAMES)
    go_on(scene, {})
    assert scene.member(WRONG).against.rounds == 6 - IN_FAVOUR


def test_no_run_stands_still_because_somebody_sits_out() -> None:
    """It comes back sooner where too few are left."""
    scene = scene_of(min_nodes=len(NAMES) - 1)
    go_on(scene, ALL_OTHERS, times=MOST_AGAINST)
    assert sits_out(scene)
    scene.leave("a")
    go_on(scene, dict.fromkeys("bcde", WRONG))
    assert not sits_out(scene)


@pytest.mark.parametrize("helpers", ["xy", "x"])
def test_helpers_that_made_most_of_a_round_are_believed_where_they_are_two(helpers: str) -> None:
    """They weigh nothing, and the run owner vouches for them; one of them may be broken."""
    scene = scene_of(helpers=helpers)
    go_on(scene, dict.fromkeys(helpers, WRONG), times=MOST_AGAINST)
    made = [p.slice.num_elements for p in scene.round.slices if p.slice.reducer_id in helpers]
    is_most = 2 * sum(made) > sum(p.slice.num_elements for p in scene.round.slices)
    assert sits_out(scene) == (is_most and len(helpers) > 1)


def test_a_new_session_forgets_nothing() -> None:
    scene = scene_of()
    go_on(scene, ALL_OTHERS, times=3)
    scene.attach(WRONG, invite=WRONG, at=4, digest=digest_of("after 4"))
    assert scene.member(WRONG).against.rounds == 3


def test_going_back_takes_the_undone_rounds_from_what_is_known_and_no_others() -> None:
    scene = scene_of()
    known = {scene.state.committed_round: scene.member(WRONG).against}
    for _ in range(MOST_AGAINST + FEWEST_ROUNDS_OUT + 2):
        go_on(scene, ALL_OTHERS)
        known[scene.state.committed_round] = scene.member(WRONG).against
    assert {each.num_times_out for each in known.values()} == {0, 1, 2}
    for newest, later in known.items():
        for after, expected in known.items():
            if after <= newest and later.num_times_out < 2:
                assert without_rounds_undone(later, after=after, newest=newest) == expected
    newest = max(known)
    left = without_rounds_undone(known[newest], after=newest - 2, newest=newest)
    assert (left.num_times_out, left.rounds) == (1, MOST_AGAINST - 1)
    assert left.back_at_round <= newest - 1, "it has its round again"
