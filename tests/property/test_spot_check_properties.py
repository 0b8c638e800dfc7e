"""Spot checks with liars among checkers and freeloaders among members."""

import random
from collections.abc import Mapping, Set
from dataclasses import replace

import pytest
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
STEPS, SAMPLES, ROUNDS = 32, 32, 60  # of two samples; who checks another has half of the steps
MUCH = 1_000_000  # beside what a round earns


@settings(examples(12))
@given(
    tokens=st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    lying=st.sets(st.integers(0, 6)),
    freeloading=st.integers(0, 6),
    seed=st.integers(0, 1 << 32),
    is_praising=st.booleans(),
    mean=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
)
def test_liars_with_less_than_half_of_the_weight_of_the_others_convict_nobody_that_trains(
    tokens: list[int],
    lying: set[int],
    freeloading: int,
    seed: int,
    is_praising: bool,
    mean: float,
) -> None:
    """And save none that does not, where the honest ones that may check it have most of the weight."""
    names = NAMES[: len(tokens)]
    liars = {names[i] for i in lying if i < len(names)}
    freeloaders = {names[freeloading]} if freeloading < len(names) else set[str]()
    work = {n: MUCH * t for n, t in zip(names, tokens, strict=True)}
    for name in names:  # of all the others, whoever is accused
        rest = sum(work.values()) - work[name]
        assume(2 * sum(work[n] for n in liars - {name}) < rest)
    convicted = convicted_of(
        work, liars, freeloaders, seed=seed, is_praising=is_praising, mean=mean
    )
    assert convicted <= freeloaders, "liars convict nobody that trains, and chance does not"
    honest = {n for n in names if n not in liars} - freeloaders
    weights = [work[n] for n in honest]
    if freeloaders and not liars and len(honest) > 1 and _is_even(weights) and mean == 4:
        assert convicted == freeloaders


@pytest.mark.parametrize(
    ("names", "liars", "mean", "seed"),
    [
        ("abcde", "a", 0.5, 7),
        ("abcde", "a", 0.5, 10),
        ("abcdefg", "abc", 1.0, 4),
        ("abcdefg", "abc", 1.0, 8),
        ("abcdefg", "abc", 2.0, 4),
        ("abcd", "a", 1.0, 1),
    ],
)
def test_liars_and_honest_ones_that_are_out_of_luck_do_not_convict_together(
    names: str, liars: str, mean: float, seed: int
) -> None:
    """Liars supply most of the evidence, so each honest accuser must have much by itself."""
    work = {n: MUCH * (9 if n in liars else 10) for n in names}

    assert not convicted_of(
        work, set(liars), set(), seed=seed, is_praising=False, mean=mean, victim="d"
    )


def convicted_of(
    work: Mapping[str, int],
    liars: Set[str],
    freeloaders: Set[str],
    *,
    seed: int,
    is_praising: bool,
    mean: float,
    victim: str = "",
) -> set[NodeId]:
    """Who is convicted first in so many rounds in which everybody is checked.

    `work` is what each weighs; `mean` is the score of who trains, where an honest one checks. Liars accuse
    all but their friends, or one victim alone: then what they tell of the others is true.
    """
    names, rng = tuple(work), random.Random(seed)
    scene = Scene(min_nodes=len(names), rounds=1000, inner_steps=STEPS)
    rules = replace(scene.state.rules, audited_share=1.0)
    scene.state = replace(scene.state, rules=rules, audit_secret=seed.to_bytes(8, "little"))
    for name in names:
        scene.attach(name, invite=name)

    def score(checker: str, contributor: str) -> float:
        if checker in liars and victim and contributor != victim:
            return rng.gauss(mean, 1.0)
        if checker in liars:
            is_friend = contributor in liars | freeloaders
            return (1e9 if is_praising else mean) if is_friend else -1e9
        return rng.gauss(0.0 if contributor in freeloaders else mean, 1.0)

    convicted: set[NodeId] = set()
    for _ in range(ROUNDS):
        members = {n: _weighing(scene, n, work[str(n)]) for n in scene.state.members}
        scene.state = replace(scene.state, members=members)
        before = len(scene.log)
        for name in names:
            (steps,) = (a.inner_steps for a in scene.round.assignments if a.node_id == name)
            scene.train(name, tokens=2 * steps * 8, inner_steps=steps, seconds=steps / 20)
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
    return convicted


def _convicted(scene: Scene) -> set[NodeId]:
    return {a.conviction.node_id for a in scene.log if isinstance(a, QuarantineAsked)}


def _weighing(scene: Scene, node_id: NodeId, tokens: int) -> Member:
    """The member with so much confirmed work, whatever it has just earned."""
    return replace(scene.state.members[node_id], work=Work(by_stretch=((0, tokens),)))


def _is_even(weights: list[int]) -> bool:
    """Whether each of them is drawn often enough to be heard in so many rounds."""
    return min(weights) * 4 >= max(weights)
