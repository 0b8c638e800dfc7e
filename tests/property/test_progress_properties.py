"""How far the run has come, as nodes see it: whatever joins, leaves and fails, it never goes back.

The core plans and commits; each node's inner steps are those that its plans ask of it, with what it is
leased ahead, as the daemon orders them.
"""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from node.duties.work import work_ahead_of, work_of
from node.island.island import InnerWork
from protocol.run.models import DecoderModel
from protocol.run.run_spec import InnerSection, RunSection, RunSpec
from protocol.wire.messages import RoundOpened
from protocol.wire.rounds import NodeId, Plan
from tests.property.effort import examples
from tests.unit.swarm_scene import Scene, digest_of, of_kind

ROUNDS = 6
NAMES = ("node-a", "node-b", "node-c", "node-d")

WHO = st.sets(st.sampled_from(NAMES))
"""Of the nodes: those that are here in a round, or those whose work its commit takes."""

SECONDS = st.sampled_from([0.5, 1.0, 4.0, 30.0])


def run_of(scene: Scene, *, has_total: bool, full_round: int) -> RunSpec:
    rules = scene.state.rules
    inner = InnerSection(
        steps=rules.inner_steps,
        batch=rules.batch,
        total_tokens=full_round * ROUNDS // 2 if has_total else None,
    )
    model = DecoderModel(context=rules.context)
    return RunSpec(run=RunSection(rounds=ROUNDS), model=model, inner=inner)


def positions(spec: RunSpec, work: InnerWork, num_steps: int | None = None) -> list[float]:
    steps = work.inner_steps if num_steps is None else num_steps
    return [work.position(spec, step).progress for step in range(steps)]


def go(scene: Scene, taken: set[str], seconds: dict[str, float], stay: set[str]) -> Plan:
    """A round: all train, its commit takes the work of some, and then others leave and come."""
    plan = of_kind(scene.log, RoundOpened)[-1].plan
    assert plan.round == scene.round.number
    tokens = {}
    for a in plan.assignments:
        count = a.num_samples * scene.state.rules.context
        scene.train(a.node_id, tokens=count, inner_steps=a.inner_steps, seconds=seconds[a.node_id])
        if a.node_id in taken:
            tokens[str(a.node_id)] = count
    if not tokens:
        scene.wait_until(scene.round.commit_deadline)  # void, and the next opens at once
        return plan
    here = [str(a.node_id) for a in plan.assignments]
    scene.commit(*here, tokens=tokens)
    after = digest_of(f"after {plan.round}")
    if scene.state.committed_round < ROUNDS:
        for name in sorted(stay - set(here)):
            scene.attach(name, at=plan.round, digest=after)
        for name in sorted(set(here) - stay):
            scene.leave(name)
            here.remove(name)
    scene.apply(after, *here)
    scene.wait_until(scene.now + 40)  # where some who could report have left, or never do
    return plan


@examples(200)
@given(
    rounds=st.lists(st.tuples(WHO.filter(bool), WHO), min_size=ROUNDS, max_size=ROUNDS),
    seconds=st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)),
    has_overlap=st.booleans(),
    has_total=st.booleans(),
    round_steps=st.none() | st.integers(1, 30),
    late_share=st.floats(0, 1),
)
def test_progress_never_goes_back_and_ends_with_the_run(
    rounds: list[tuple[set[str], set[str]]],
    seconds: dict[str, float],
    has_overlap: bool,
    has_total: bool,
    round_steps: int | None,
    late_share: float,
) -> None:
    scene = Scene(rounds=ROUNDS, has_overlap=has_overlap, round_steps=round_steps)
    spec = run_of(scene, has_total=has_total, full_round=4 * 80)
    seen: dict[str, list[float]] = {name: [0.0] for name in NAMES}
    leased: dict[str, InnerWork] = {}
    scene.attach(*sorted(rounds[0][0]))
    for taken, stay in zip(
        [t for _, t in rounds], [*(h for h, _ in rounds[1:]), set()], strict=True
    ):
        plan = go(scene, taken, seconds, stay)
        for assignment in plan.assignments:
            name = str(assignment.node_id)
            work, ahead = work_of(plan, assignment), leased.pop(name, None)
            if ahead is not None and ahead.round == plan.round:
                assert ahead.inner_steps == work.inner_steps, "another than was leased is asked"
                done = int(late_share * ahead.inner_steps)
                if not has_total:  # with tokens what is trained ahead goes by a forecast
                    seen[name] += positions(spec, ahead, done)
                rest = work.inner_steps - done
                work = replace(work, inner_steps=rest, steps_before=done)
            seen[name] += positions(spec, work)
            if (more := work_ahead_of(plan, NodeId(name))) is not None:
                leased[name] = more
    for progress in seen.values():
        assert progress == sorted(progress)
        assert all(0 <= p <= 1 for p in progress)
    assert scene.state.committed_round == ROUNDS
    last = plan.assignments[0]
    if not has_total:
        step = 1 / last.inner_steps / ROUNDS
        assert abs(seen[str(last.node_id)][-1] - (1 - step / 2)) < 1e-12
        after = work_of(replace(plan, round=ROUNDS), last)
        assert after.position(spec, last.inner_steps - 0.5).progress == 1.0


@examples(100)
@given(
    taken=st.lists(WHO, min_size=ROUNDS, max_size=ROUNDS),
    seconds=st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)),
)
def test_the_token_clock_of_plans_leads_what_is_counted_by_a_round_at_most(
    taken: list[set[str]], seconds: dict[str, float]
) -> None:
    scene = Scene(rounds=ROUNDS, min_nodes=len(NAMES))
    scene.attach(*NAMES)
    ends, most = 0, 0
    for who in taken:
        plan = go(scene, who, seconds, set(NAMES))
        assert plan.token_clock >= ends, "a schedule goes back"
        ends = plan.token_clock + plan.round_tokens
        most = max(most, sum(a.num_samples for a in plan.assignments) * 8)
        assert ends - scene.state.token_clock <= most
