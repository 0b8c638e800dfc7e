"""Spot checks with liars among checkers and freeloaders among members."""

import random
from collections.abc import Mapping, Set
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.swarm.events import QuarantineAsked, Reported, Tell
from coordinator.swarm.members import Member, Work
from coordinator.swarm.spot_checks import evidence
from coordinator.swarm.state import Say
from coordinator.swarm.weighing import cap_of
from protocol.wire.findings import SpotChecked
from protocol.wire.messages import SpotCheckAsked
from protocol.wire.rounds import NodeId
from tests.property.effort import examples
from tests.unit.swarm_scene import Scene, digest_of

NAMES = tuple("abcdefg")
STEPS, SAMPLES, ROUNDS = 64, 32, 60  # of two samples; who checks others has a quarter of the steps
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
        cap = cap_of([work[n] for n in names if n != name])
        rest = {n: min(work[n], cap) for n in names if n != name}
        assume(2 * sum(rest[n] for n in liars - {name}) < sum(rest.values()))
    convicted = convicted_of(
        work, liars, freeloaders, seed=seed, is_praising=is_praising, mean=mean
    )
    assert convicted <= freeloaders, "liars convict nobody that trains, and chance does not"
    honest = {n for n in names if n not in liars} - freeloaders
    weights = [work[n] for n in honest]
    if freeloaders and not liars and len(honest) > 1 and _is_even(weights) and mean == 4:
        assert convicted == freeloaders


@pytest.mark.parametrize("seed", range(12))
def test_liars_that_accuse_one_member_and_are_honest_otherwise_need_more_than_one_with_bad_luck(
    seed: int,
) -> None:
    """Three of seven, of whom an honest accuser more would be most: each is convicted by others alone."""
    work = {n: MUCH * (9 if n in "abc" else 10) for n in "abcdefg"}

    assert not convicted_of(work, set("abc"), set(), seed=seed, mean=1.0, victim="d")


def test_a_freeloader_goes_out_though_another_one_of_its_kind_praises_it() -> None:
    work = dict.fromkeys("abcdefgh", MUCH)
    assert convicted_of(work, {"h"}, {"g"}, seed=3, is_praising=True, mean=4.0) == {"g"}


@given(
    weights=st.lists(st.integers(0, 1000), min_size=2, max_size=9),
    balances=st.lists(st.floats(-1000.0, 50.0), min_size=9, max_size=9),
    lying=st.sets(st.integers(0, 8)),
    silent=st.sets(st.integers(0, 8)),
)
def test_what_is_counted_is_no_more_than_what_those_say_that_are_no_liars(
    weights: list[int], balances: list[float], lying: set[int], silent: set[int]
) -> None:
    """For any liars that have less than half of the weight, whoever they are."""
    names = [NodeId(name) for name in "abcdefghi"[: len(weights)]]
    liars = {n for place, n in enumerate(names) if place in lying}
    say = Say(weights=dict(zip(names, weights, strict=True)), is_confirmed=True)
    assume(2 * sum(say.weights[n] for n in liars) < sum(weights))
    told = enumerate(zip(names, balances, strict=False))
    by_checker = {n: balance for place, (n, balance) in told if place not in silent}

    counted = evidence(say, by_checker, names)

    by_others = sum(min(0.0, b) for n, b in by_checker.items() if n not in liars)
    assert by_others - 1e-6 <= counted <= 0.0


def test_half_of_those_that_accuse_alike_is_counted() -> None:
    four = Say(weights=dict.fromkeys(map(NodeId, "abcd"), 5), is_confirmed=True)
    three = Say(weights=dict.fromkeys(map(NodeId, "abc"), 5), is_confirmed=True)
    for say, counted in ((four, -20.0), (three, -15.0)):
        assert evidence(say, dict.fromkeys(say.weights, -10.0), list(say.weights)) == counted


def convicted_of(
    work: Mapping[str, int],
    liars: Set[str],
    freeloaders: Set[str],
    *,
    seed: int,
    mean: float,
    is_praising: bool = False,
    victim: str = "",
) -> set[NodeId]:
    """Who is convicted first in so many rounds in which everybody is checked.

    `work` is what each weighs; `mean` is the score of who trains, where an honest one checks. Liars accuse
    all but their friends, or one victim alone: then what they tell of the others is true.
    """
    names, rng = tuple(work), random.Random(seed)
    scene = Scene(min_nodes=len(names), rounds=1000, inner_steps=STEPS)
    scene.amend(audited_share=1.0)
    scene.state = replace(scene.state, audit_secret=seed.to_bytes(8, "little"))
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
