"""Wall 2: a pseudo-gradient is either in a commit or still in its node's residual.

Each node works on elements of its own, so that what a commit took of it shows in the parameters. How much
late work may be owed is not bounded here: that rule is tried in tests/unit/test_owing.py.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.exchange import giving
from node.exchange.codecs.registry import codec_named
from node.exchange.outer import Outer
from node.exchange.outer_optimizer import OuterRules
from node.exchange.screening import COUNTED_ROUNDS
from node.exchange.state import on_disk
from node.outer_state import Vector
from protocol.wire.rounds import Commit, NodeId, Plan
from tests.property.effort import examples
from tests.unit.exchange_scene import (
    COMMIT_SECONDS,
    NUM_ELEMENTS,
    TOKENS,
    A,
    B,
    C,
    Scene,
    in_virtual_time,
)

OWN = {node_id: np.arange(NUM_ELEMENTS) % 3 == place for place, node_id in enumerate((A, B, C))}

# "late": nothing gets through until the commit; "away": does not hear of the commit until later.
STEADY = st.sampled_from(["trains", "late"])
FICKLE = st.sampled_from(["trains", "late", "away", "away", "skips"])
ROUND = st.fixed_dictionaries(
    {
        "acts": st.fixed_dictionaries({A: STEADY, B: FICKLE, C: FICKLE}),
        "tokens": st.fixed_dictionaries({n: st.integers(1, TOKENS) for n in OWN}),
        "void": st.sets(st.integers(0, 2), max_size=2),
        "dies": st.sets(st.sampled_from([A, B, C]), max_size=2),
        "cut": st.sets(st.sampled_from([(A, B), (A, C), (B, C)]), max_size=1),  # until the commit
    }
)


def work_of(node_id: NodeId, round_number: int) -> Vector:
    """Whole numbers, different in each round: losing or doubling any shows."""
    return np.where(OWN[node_id], np.float32(1 + round_number**2), np.float32(0))


class Counts:
    """In how many rounds in a row each node's results lacked the work of others, by what it was told.

    Of its own slices, where it has reduced some and got the commit with their results. All that is asked of
    a node is which commits it took in, and in which of the two ways.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._told: list[tuple[Outer, int, bool]] = []
        self._plans: dict[int, tuple[Plan, Commit]] = {}
        count = Outer.count_missed

        def noting(outer: Outer, commit: Commit, own_slices: Collection[int] = ()) -> None:
            self._told.append((outer, commit.round, bool(own_slices)))
            count(outer, commit, own_slices)

        patch.setattr(Outer, "count_missed", noting)

    def close(self, plan: Plan, commit: Commit) -> None:
        self._plans[plan.round] = plan, commit

    def of(self, outer: Outer) -> dict[NodeId, int]:
        counts: Counter[NodeId] = Counter()
        for who, number, has_own in self._told:
            if who is not outer:
                continue
            plan, commit = self._plans[number]
            there = [each for each in commit.slices if each.digest is not None]
            own = [o for o in there if plan.slices[o.index].reducer_id == outer.node_id]
            for node_id in plan.participants if there else ():
                seen = own if has_own and own else there
                is_in = any(node_id in {c.node_id for c in each.contributors} for each in seen)
                counts[node_id] = 0 if is_in else counts[node_id] + 1
        return counts


MISSED = {
    "acts": {A: "late", B: "trains", C: "trains"},
    "tokens": dict.fromkeys(OWN, 1),
    "void": set(),
    "dies": set(),
    "cut": set(),
}
"""In the fourth such round in a row the tokens of A count no more, though all that it owes is kept here."""

MISSED_BY_ONE = {**MISSED, "acts": dict.fromkeys(OWN, "trains"), "cut": {(A, B)}}
"""Likewise, but only in the slices that these two reduce."""


def taken_by_last(
    scene: Scene,
    plan: Plan,
    change: Vector,
    node_id: NodeId,
    missed: dict[NodeId, dict[NodeId, int]],
) -> Vector:
    """What the newest commit took of a node, from how it changed the parameters.

    `missed` is in how many rounds in a row each reducer, before this one, lacked the work of others.
    """
    taken = np.zeros(NUM_ELEMENTS, np.float32)
    for outcome in scene.commits[-1].slices:
        span = slice(outcome.start, outcome.start + outcome.num_elements)
        own = np.where(OWN[node_id][span], -change[span], 0)
        tokens = {c.node_id: c.tokens for c in outcome.contributors}
        if node_id in tokens:
            counts = missed[plan.slices[outcome.index].reducer_id]
            late = [  # theirs counts as assigned
                n
                for n in set(plan.participants) - tokens.keys()
                if counts.get(n, 0) < COUNTED_ROUNDS
            ]
            weighed = sum(tokens.values()) + TOKENS * len(late)
            taken[span] = own * weighed / tokens[node_id]
        else:
            assert not own.any()  # nobody's work is in a slice that does not name them
    return taken


@pytest.mark.parametrize(
    "kept_rounds", [pytest.param(0, marks=pytest.mark.nightly), 16]
)  # who comes back takes a snapshot, or replays
@examples(150)
@given(rounds=st.lists(ROUND, min_size=1, max_size=6))
@example(rounds=[MISSED] * 4)
@example(rounds=[MISSED_BY_ONE] * 4)
@in_virtual_time
async def test_what_was_taken_and_what_is_owed_are_all_that_was_done(
    monkeypatch: pytest.MonkeyPatch, kept_rounds: int, rounds: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", kept_rounds)
    await live(await Scene.of(A, B, C, most_owed=math.inf), rounds)


@examples(75)
@given(
    rounds=st.lists(ROUND, min_size=1, max_size=6),
    uplinks=st.lists(st.sampled_from(["fp32", "int8", "int4", "topk256"]), min_size=7, max_size=7),
)
@in_virtual_time
async def test_so_they_are_where_contributions_are_encoded_otherwise_in_each_round(
    rounds: list[dict[str, Any]], uplinks: list[str]
) -> None:
    """What one codec left out is owed on, and goes with the next one."""
    scene = await Scene.of(A, B, C, most_owed=math.inf)
    for node in scene.nodes.values():
        own = replace(node.outer.rules_in(1), downlink=codec_named("fp32"))
        node.outer.go_by(partial(by_uplink, own, uplinks))
    await live(scene, rounds)


@pytest.mark.parametrize("kept_rounds", [0, 16])
@examples(75)
@given(rounds=st.lists(ROUND, min_size=1, max_size=6))
@in_virtual_time
async def test_so_they_are_where_nodes_are_killed_that_write_snapshots_only_where_they_must(
    monkeypatch: pytest.MonkeyPatch, kept_rounds: int, rounds: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(giving, "KEPT_ROUNDS", kept_rounds)
    monkeypatch.setattr(on_disk, "rounds_between", lambda **_: 1 << 20)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        await live(await Scene.of(A, B, C, folder=Path(folder), most_owed=math.inf), rounds)


def by_uplink(rules: OuterRules, uplinks: Sequence[str], round: int) -> OuterRules:
    return replace(rules, uplink=codec_named(uplinks[round]))


async def live(scene: Scene, rounds: list[dict[str, Any]]) -> None:
    """Goes through the rounds, and adds up. Where there are disks, nodes die once a round is saved."""
    with pytest.MonkeyPatch.context() as patch:
        await _live(scene, rounds, Counts(patch))


async def _live(scene: Scene, rounds: list[dict[str, Any]], counts: Counts) -> None:
    nodes = scene.nodes
    done = {n: np.zeros(NUM_ELEMENTS) for n in nodes}
    taken = {n: np.zeros(NUM_ELEMENTS) for n in nodes}
    for number, drawn in enumerate(rounds, start=1):
        acts = drawn["acts"]
        gone = {n for n in nodes if nodes[n].outer.round < number - 1 and acts[n] == "away"}
        for n in sorted(nodes.keys() - gone):
            await nodes[n].exchange.catch_up(number - 1)
        participants = sorted(n for n in nodes if n not in gone and acts[n] != "skips")
        plan = await scene.open_round(number, *participants)
        cuts = [
            pair
            for pair in combinations(nodes, 2)
            if "late" in {acts[n] for n in pair} or pair in drawn["cut"]
        ]
        for pair in cuts:
            scene.network.cut(*pair)
        before = nodes[A].parameters
        for n in participants:
            await nodes[n].contribute(work_of(n, number), tokens=drawn["tokens"][n])
            done[n] += work_of(n, number)
        await asyncio.sleep(COMMIT_SECONDS)
        for pair in cuts:
            scene.network.mend(*pair)
        missed = {n: counts.of(node.outer) for n, node in nodes.items()}
        commit = scene.close_round(plan, void=drawn["void"])
        counts.close(plan, commit)
        await nodes[A].exchange.apply(commit)
        scene.settle(A)
        for n in sorted(nodes.keys() - {A} - gone):
            if acts[n] == "away":
                nodes[n].exchange._held._payloads.clear()  # it needs the others
            else:
                await nodes[n].exchange.apply(commit)
        for n in nodes:
            taken[n] += taken_by_last(scene, plan, nodes[A].parameters - before, n, missed)
        for n, node in sorted(nodes.items()):
            if node.disk is not None and node.outer.round == number:
                await node.saved()
                if n in drawn["dies"]:
                    assert (await scene.add(n)).outer.digest == node.outer.digest
    for n in nodes:
        await nodes[n].exchange.catch_up(len(rounds))
    assert len({node.outer.digest for node in nodes.values()}) == 1
    for n, node in nodes.items():
        np.testing.assert_allclose(taken[n] + node.residual, done[n], atol=0.01)
    await scene.stop()
