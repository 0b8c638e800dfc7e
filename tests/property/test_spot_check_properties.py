"""Spot checks with liars among checkers and freeloaders among members."""

import random
from dataclasses import replace

from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.swarm.actions import QuarantineAsked, Tell
from coordinator.swarm.events import Reported
from coordinator.swarm.state import Member, Work
from protocol.wire.messages import SpotCheckAsked, SpotChecked
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import Scene, digest_of

NAMES = tuple("abcdefg")
STEPS, SAMPLES, ROUNDS = 20, 40, 40
MUCH = 1_000_000  # beside what a round earns
MEAN = 4.0  # of scores of who trains


@settings(examples(12))
@given(
    tokens=st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    lying=st.sets(st.integers(0, 6)),
    freeloading=st.integers(0, 6),
    seed=st.integers(0, 1 << 32),
    is_praising=st.booleans(),
)
def test_liars_with_less_than_half_of_the_weight_of_the_others_convict_nobody_that_trains(
    tokens: list[int], lying: set[int], freeloading: int, seed: int, is_praising: bool
) -> None:
    """And save none that does not, where the honest ones that may check it have most of the weight."""
    names = NAMES[: len(tokens)]
    liars = {names[i] for i in lying if i < len(names)}
    freeloaders = {names[freeloading]} if freeloading < len(names) else set[str]()
    work = {n: MUCH * t for n, t in zip(names, tokens, strict=True)}
    for name in names:  # of all the others, whoever is accused
        rest = sum(work.values()) - work[name]
        assume(2 * sum(work[n] for n in liars - {name}) < rest)
    rng = random.Random(seed)

    scene = Scene(min_nodes=len(names), rounds=1000, inner_steps=STEPS)
    rules = replace(scene.state.rules, audited_share=1.0)
    scene.state = replace(scene.state, rules=rules, audit_secret=seed.to_bytes(8, "little"))
    for name in names:
        scene.attach(name, invite=name)

    def score(checker: str, contributor: str) -> float:
        if checker in liars:
            is_friend = contributor in liars | freeloaders
            return (1e9 if is_praising else MEAN) if is_friend else -1e9
        return rng.gauss(0.0 if contributor in freeloaders else MEAN, 1.0)

    convicted: set[NodeId] = set()
    for _ in range(ROUNDS):
        members = {n: _weighing(scene, n, work[str(n)]) for n in scene.state.members}
        scene.state = replace(scene.state, members=members)
        before = len(scene.log)
        for name in names:
            scene.train(name, tokens=SAMPLES * 8, inner_steps=STEPS)
        scene.commit(*names)
        number = scene.state.committed_round
        scene.apply(digest_of(f"state {number}"), *names)
        for action in scene.log[before:]:
            if (
                not _convicted(scene)
                and isinstance(action, Tell)
                and isinstance(action.message, SpotCheckAsked)
            ):
                assert action.to is not None
                (checker,), asked = action.to, action.message
                told = score(str(checker), str(asked.contributor_id))
                found = SpotChecked(
                    contributor_id=asked.contributor_id, num_samples=SAMPLES, gap=0.0, score=told
                )
                scene.do(Reported(node_id=checker, round=number, report=found))
        convicted = _convicted(scene)
        if convicted:
            break  # the others' shares are different ones from here on
    assert convicted <= freeloaders, "liars convict nobody that trains, and chance does not"
    honest = {n for n in names if n not in liars} - freeloaders
    weights = [work[n] for n in honest]
    if freeloaders and not liars and len(honest) > 1 and _is_even(weights):
        assert convicted == freeloaders


def _convicted(scene: Scene) -> set[NodeId]:
    return {a.conviction.node_id for a in scene.log if isinstance(a, QuarantineAsked)}


def _weighing(scene: Scene, node_id: NodeId, tokens: int) -> Member:
    """The member with so much confirmed work, whatever it has just earned."""
    return replace(scene.state.members[node_id], work=Work(by_stretch=((0, tokens),)))


def _is_even(weights: list[int]) -> bool:
    """Whether each of them is drawn often enough to be heard in so many rounds."""
    return min(weights) * 4 >= max(weights)
