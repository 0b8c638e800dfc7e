"""Wall 2: sent + kept = accumulated, through the real Outer and its reducers, whatever the codec.

Judged in float64, which holds the exact sum of what was sent and what was kept whenever that sum is
the fp32 number that it must be: with fp32, int8 and int4. With others what is kept is rounded once, for
it may be many times what was sent.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.disk.snapshots import Snapshot
from node.exchange.reduction import Merging, Reduction, Sender
from node.outer_state import Vector
from protocol.wire.payload import CONTRIBUTION, Payload
from protocol.wire.rounds import BLOCK, Commit, NodeId, Plan, SliceOutcome, cut_into_slices
from tests.property.effort import examples
from tests.unit.exchange_scene import NUM_ELEMENTS, RUN, TOKENS, A, B, C, outer_of, plan_for
from tests.unit.payload_scene import sealed

IDS = (A, B, C)
SLICES = cut_into_slices(NUM_ELEMENTS, IDS)

EXACT = ["fp32", "int8", "int4"]
ROUNDED_ONCE = ["bf16", "ec3", "ec2", "int2", "ec1", "sign", "topk256", "topk64"]

# What a node does in a round: "late" contributes and nobody takes it, "restarts" dies after it has
# contributed and comes back with what was saved after the round before.
ACT = st.sampled_from(["trains", "trains", "late", "skips", "restarts"])
FATE = st.sampled_from(["commits", "commits", "void", "taken over"])
ROUND = st.fixed_dictionaries(
    {
        "acts": st.fixed_dictionaries(dict.fromkeys(IDS, ACT)),
        "tokens": st.fixed_dictionaries({node_id: st.integers(1, TOKENS) for node_id in IDS}),
        "reducers": st.lists(st.sampled_from(IDS), min_size=3, max_size=3),
        "fates": st.lists(FATE, min_size=3, max_size=3),
    }
)


def work_of(place: int, round_number: int) -> Vector:
    """Of every size, so that subtractions do round where they may."""
    rng = np.random.default_rng((place, round_number))
    sizes = np.float32(2) ** rng.integers(-12, 4, NUM_ELEMENTS).astype(np.float32)
    return rng.standard_normal(NUM_ELEMENTS, dtype=np.float32) * sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a node owed in a round, and the bodies that it made of it, by slice."""

    accumulated: Vector
    bodies: dict[int, bytes]


class World:
    """Three replicas, and a round as plain calls."""

    def __init__(self, codec: str, *, decay: float, rule: Any) -> None:
        self._arguments = {
            "codec": codec,
            "decay": decay,
            "reducer_error": rule,
            "most_owed": math.inf,  # how much late work is kept: tests/unit/test_owing.py
        }
        self.outers = {node_id: outer_of(node_id, **self._arguments) for node_id in IDS}
        self.is_kept = rule == "keep"
        self.is_exact = codec in EXACT
        self.decay = np.float32(decay)
        self.exact_mean = np.zeros(NUM_ELEMENTS)  # of all that was committed, before it was rounded
        self.lost = np.zeros(NUM_ELEMENTS)

    def play_all(self, rounds: list[dict[str, Any]]) -> None:
        """One round after the other, from the first."""
        for number, drawn in enumerate(rounds, start=1):
            self.play(number, drawn)

    def play(self, number: int, drawn: dict[str, Any]) -> None:
        """One round, and what must be so after it."""
        plan = plan_for(
            *IDS,
            round=number,
            base_digest=self.outers[A].digest,
            slices=cut_into_slices(NUM_ELEMENTS, tuple(drawn["reducers"])),
        )
        saved = {n: (outer.snapshot(), outer.owed()) for n, outer in self.outers.items()}
        pendings = self.contribute(plan, drawn)
        commit, results = self.reduce(plan, drawn, pendings)
        for node_id, act in drawn["acts"].items():
            if act == "restarts":
                self.restart(node_id, *saved[node_id])
                del pendings[node_id]
        before = {n: outer.owed() for n, outer in self.outers.items()}
        for outer in self.outers.values():
            outer.apply(commit, results)
        assert len({outer.digest for outer in self.outers.values()}) == 1
        for outcome in commit.slices:
            span = slice(outcome.start, outcome.start + outcome.num_elements)
            for node_id in IDS:
                self.check_residual(node_id, outcome, span, before, pendings.get(node_id))

    def contribute(self, plan: Plan, drawn: dict[str, Any]) -> dict[NodeId, Sent]:
        pendings: dict[NodeId, Sent] = {}
        for place, (node_id, outer) in enumerate(self.outers.items()):
            if drawn["acts"][node_id] == "skips":
                continue
            outer.owing._published[:] = outer._parameters - work_of(place, plan.round)
            outer.owing.accumulate(round=plan.round, fragment=0)
            tokens = drawn["tokens"][node_id]
            pendings[node_id] = Sent(
                accumulated=outer.owing.accumulated(0, NUM_ELEMENTS),
                bodies={
                    part.index: outer.owing.contribution_to(
                        part, samples=TOKENS, tokens=tokens
                    ).body
                    for part in plan.slices
                },
            )
        return pendings

    def reduce(
        self, plan: Plan, drawn: dict[str, Any], pendings: dict[NodeId, Sent]
    ) -> tuple[Commit, dict[int, Payload]]:
        outcomes, results = [], {}
        for part, fate in zip(plan.slices, drawn["fates"], strict=True):
            outcome = SliceOutcome(
                index=part.index, start=part.start, num_elements=part.num_elements, digest=None
            )
            reducers = [part.reducer_id]
            if fate == "taken over":  # the first result is handed out and not committed
                reducers.append(IDS[(IDS.index(part.reducer_id) + 1) % 3])
            for reducer in reducers:
                tokens = drawn["tokens"]
                contributions = {
                    n: contribution(plan, part.index, n, pending.bodies[part.index], tokens[n])
                    for n, pending in pendings.items()
                    if drawn["acts"][n] != "late"
                }
                reduction = Reduction(
                    plan=plan,
                    slice=part,
                    contributions=contributions,
                    late=frozenset(plan.participants) - contributions.keys(),
                    uplink=self.outers[reducer].uplink,
                    context=1,
                )
                result = self.outers[reducer].result_of(reduction, 0)
                if result is not None:
                    self.outers[reducer].owing.note_result(result)
            if result is not None and fate != "void":
                results[part.index] = result.payload
                outcome = SliceOutcome(
                    index=part.index,
                    start=part.start,
                    num_elements=part.num_elements,
                    digest=result.payload.digest,
                    contributors=result.made_of.contributors,
                    contributions=result.made_of.contributions,
                )
                self.note_mean(part.start, part.num_elements, reduction, reducers[-1], drawn)
            outcomes.append(outcome)
        return (
            Commit(
                round=plan.round, fragment=0, base_digest=plan.base_digest, slices=tuple(outcomes)
            ),
            results,
        )

    def note_mean(
        self, start: int, num_elements: int, reduction: Reduction, reducer: NodeId, drawn: Any
    ) -> None:
        span = slice(start, start + num_elements)
        bare = Reduction.result(
            reduction,
            downlink=outer_of(A).downlink,
            sender=Sender(run_digest=RUN, node_id=A),
            by=Merging(is_screened=False),
        )
        assert bare is not None
        self.exact_mean[span] += outer_of(A).downlink.decode(bare.payload.body, num_elements)
        if drawn["acts"][reducer] == "restarts":  # what its result left out dies with it
            outer = self.outers[reducer]
            staged = outer.owing.reducer_error._staged
            if outer.owing.reducer_error.rule == "keep":
                (error,) = [entry.error for key, entry in staged.items() if key[1] * BLOCK == start]
                self.lost[span] += error

    def restart(self, node_id: NodeId, snapshot: Snapshot, owed: Any) -> None:
        self.outers[node_id] = outer_of(node_id, **self._arguments)
        self.outers[node_id].restore(snapshot, owed)

    def check_residual(
        self,
        node_id: NodeId,
        outcome: SliceOutcome,
        span: slice,
        before: dict[NodeId, Any],
        pending: Sent | None,
    ) -> None:
        outer = self.outers[node_id]
        residual = outer.owed().residual[span]
        is_taken = any(c.node_id == node_id for c in outcome.contributors)
        if pending is None:
            expected = np.zeros_like(residual) if is_taken else before[node_id].residual[span]
            np.testing.assert_array_equal(residual, expected)
            return
        accumulated = pending.accumulated[span]
        if not is_taken:
            assert residual.tobytes() == accumulated.tobytes()
            return
        sent = outer.uplink.decode(pending.bodies[outcome.index], outcome.num_elements)
        exactly_kept = accumulated.astype(np.float64) - sent
        if self.decay == 1 and not self.is_exact:
            np.testing.assert_array_equal(residual, exactly_kept.astype(np.float32))
        elif self.decay == 1:
            np.testing.assert_array_equal(residual.astype(np.float64) + sent, accumulated)
        else:
            np.testing.assert_array_equal(residual, (accumulated - sent) * self.decay)


def contribution(plan: Plan, index: int, sender: NodeId, body: bytes, tokens: int) -> Payload:
    part = plan.slices[index]
    return sealed(
        CONTRIBUTION,
        sender,
        body=body,
        run_digest=RUN,
        round=plan.round,
        slice_index=index,
        start=part.start,
        num_elements=part.num_elements,
        codec="",
        samples=TOKENS,
        tokens=tokens,
    )


@pytest.mark.parametrize("codec", EXACT)
@pytest.mark.parametrize("decay", [1.0, 0.95])
@examples(20)
@given(rounds=st.lists(ROUND, min_size=1, max_size=6))
def test_sent_and_kept_are_what_was_accumulated_to_the_last_bit(
    codec: str, decay: float, rounds: list[dict[str, Any]]
) -> None:
    world = World(codec, decay=decay, rule="drop")
    world.play_all(rounds)


@pytest.mark.parametrize("codec", ROUNDED_ONCE)
@examples(5)
@given(rounds=st.lists(ROUND, min_size=1, max_size=6))
def test_what_is_kept_beside_a_coarse_codec_is_rounded_once(
    codec: str, rounds: list[dict[str, Any]]
) -> None:
    world = World(codec, decay=1.0, rule="drop")
    world.play_all(rounds)


@pytest.mark.parametrize(("codec", "most"), [("int8", 5e-4), ("int4", 6e-3)])
@examples(60)
@given(rounds=st.lists(ROUND, min_size=1, max_size=8))
def test_what_results_rounded_away_is_applied_or_kept_or_declared_lost(
    codec: str, most: float, rounds: list[dict[str, Any]]
) -> None:
    """Whoever reduces, and whatever becomes of results: the means are all there, each once.

    `most` is what eight rounds can lose of the errors' last bits, which are kept in bf16.
    """
    world = World(codec, decay=1.0, rule="keep")
    world.play_all(rounds)
    kept = np.zeros(NUM_ELEMENTS)
    for outer in world.outers.values():
        for start, values in (outer.owed().reducer_error or {}).items():
            kept[start : start + values.size] += values
    applied = -world.outers[A].snapshot().parameters.astype(np.float64)
    np.testing.assert_allclose(applied + kept + world.lost, world.exact_mean, atol=most)
