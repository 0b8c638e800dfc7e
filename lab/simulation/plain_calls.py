"""Rounds of a swarm as plain calls in one process: to see what codecs and outer rules do to the loss.

What touches a number is real: the trainer, Outer with its residual and optimizer, codecs, Reduction
and the mean. What moves messages is not there: no coordinator, no transport, no clock
(lab.simulation.swarm has those). Deterministic: the same setting and seed give the same loss.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from node.exchange.outer import Outer
from node.exchange.reduction import Reduction
from node.island.data.dataset import Corpus
from node.island.island import InnerWork
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import PLAIN, LocalTraining
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.run.models import layout_of
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec
from protocol.wire.payload import Payload
from protocol.wire.rounds import Assignment, Commit, NodeId, Plan, SliceOutcome, cut_into_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run file and what happens to the swarm that trains by it."""

    name: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)  # over the benchmark's own
    drop_rate: float = 0.0  # of a node's contribution in a round: it comes too late everywhere
    own_text: bool = False  # each node trains on a part of the text that no other has
    late_steps: int = 0  # inner steps that nodes train on before they take a round's results over

    def changed(self, name: str, **tables: dict[str, Any]) -> "Setting":
        """The same with another name and other values in some tables."""
        both = {key: self.tables.get(key, {}) | tables.get(key, {}) for key in self.tables | tables}
        return replace(self, name=name, tables=both)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run came to."""

    loss: float  # held out, nats per byte
    bits_up: float | None  # that a parameter took in contributions; None where there are none
    bits_down: float | None  # … and in results
    seconds: float


class LocalNode:
    """One node's island and replica of the outer state."""

    def __init__(
        self,
        spec: RunSpec,
        place: int,
        corpus: Corpus,
        *,
        device: str = "cpu",
        local: LocalTraining = PLAIN,
        first: Vector | None = None,
    ) -> None:
        self.node_id = NodeId(f"node-{place + 1:02}")
        self.contributed_bytes = 0  # bodies only, its own slice included
        self.reduced_bytes = 0
        self.layout = layout_of(spec)
        self.parameters = initial_parameters(spec) if first is None else first.copy()
        self.published = self.parameters[: self.layout.largest_fragment].copy()
        self.outer = Outer.of_run(
            spec,
            layout=self.layout,
            parameters=self.parameters,
            published=self.published,
            node_id=self.node_id,
        )
        self.trainer = Trainer(
            spec=spec,
            corpus=corpus,
            device=torch.device(device),
            mesh=Mesh(),
            clock=time.monotonic,
            local=local,
        )
        self.trainer.adopt(self.parameters)
        self._not_adopted: int | None = None  # the fragment whose results are on their way
        self._is_taken = True  # whether they hold what this node published of it

    def train(self, work: InnerWork, *, fragment: int, late_steps: int) -> None:
        """The inner steps of a round, and the round's results before it after so many of them."""
        trained_ahead = late_steps * (work.num_samples // work.inner_steps)
        rest = replace(
            work,
            inner_steps=work.inner_steps - late_steps,
            first_sample=work.first_sample + trained_ahead,
            num_samples=work.num_samples - trained_ahead,
            steps_before=late_steps,
        )
        self._take_steps(work, halted_after=late_steps)
        if self._not_adopted is not None:
            self.trainer.merge(
                self.parameters, self.published, self._not_adopted, is_taken=self._is_taken
            )
        self._take_steps(rest)
        self.trainer.publish(self.published, fragment)

    def _take_steps(self, work: InnerWork, *, halted_after: int | None = None) -> None:
        if work.inner_steps and halted_after != 0:
            asked = itertools.count(1)  # after each inner step
            self.trainer.train(work, lambda progress: None, lambda: next(asked) == halted_after)

    def apply(self, commit: Commit, results: dict[int, Payload], *, is_taken: bool) -> None:
        """Moves the outer state; the ranks have it later."""
        self.outer.apply(commit, results)
        self._not_adopted, self._is_taken = commit.fragment, is_taken

    def contributions(self, plan: Plan, *, samples: int, tokens: int) -> dict[int, Payload]:
        """What it owes, as it is sent, by slice."""
        self.outer.owing.accumulate(round=plan.round, fragment=plan.fragment)
        owing = self.outer.owing
        sent = {
            p.index: owing.contribution_to(p, samples=samples, tokens=tokens) for p in plan.slices
        }
        self.contributed_bytes += sum(len(payload.body) for payload in sent.values())
        return sent


def train_swarm(
    setting: Setting,
    spec: RunSpec,
    corpus: Corpus,
    *,
    device: str = "cpu",
    local: LocalTraining = PLAIN,
    first: Vector | None = None,
) -> Trained:
    """Trains a swarm of [run] min_nodes to the end of its run; all nodes take turns on one device.

    It begins with the weights in `first`, or with those that the seed gives.
    """
    began = time.monotonic()
    nodes = swarm_at_end(setting, spec, corpus, device=device, local=local, first=first)
    nodes[0].trainer.adopt(nodes[0].parameters)
    parameters = sum(
        nodes[0].layout.fragments[fragment_of(round, spec)].num_elements
        for round in range(1, spec.run.rounds + 1)
    )
    return Trained(
        loss=nodes[0].trainer.evaluate().loss,
        bits_up=8 * sum(node.contributed_bytes for node in nodes) / (len(nodes) * parameters),
        bits_down=8 * sum(node.reduced_bytes for node in nodes) / parameters,
        seconds=time.monotonic() - began,
    )


def swarm_at_end(
    setting: Setting,
    spec: RunSpec,
    corpus: Corpus,
    *,
    is_late: Callable[[int, int], bool] = lambda place, round: False,
    watch: Callable[[int, list[LocalNode]], None] = lambda round, nodes: None,
    device: str = "cpu",
    local: LocalTraining = PLAIN,
    first: Vector | None = None,
) -> list[LocalNode]:
    """All rounds of the run; the nodes' outer states are equal to the bit.

    `is_late(place, round)` tells whose contributions come too late besides, and `watch(round, nodes)`
    sees the swarm after each round, and once before the first.
    """
    num_nodes, steps, batch = spec.run.min_nodes, spec.inner.steps, spec.inner.batch
    if setting.late_steps > (steps if spec.exchange.overlap != "none" else 0):
        raise ValueError(f"{setting.name}: results cannot be {setting.late_steps} inner steps late")
    texts = parts_of(corpus, num_nodes) if setting.own_text else [corpus] * num_nodes
    nodes = [
        LocalNode(spec, place, text, device=device, local=local, first=first)
        for place, text in enumerate(texts)
    ]
    rng = random.Random(f"drops of seed {spec.run.seed}")
    watch(0, nodes)
    for round in range(1, spec.run.rounds + 1):
        plan = plan_of(spec, round, nodes)
        for node, assignment in zip(nodes, plan.assignments, strict=True):
            # Each node's own text has an order of its own.
            places = (round - 1) * steps * batch if setting.own_text else assignment.first_sample
            node.train(
                replace(work_of(plan, assignment), first_sample=places),
                fragment=plan.fragment,
                late_steps=setting.late_steps,
            )
        draws = {node.node_id: rng.random() for node in nodes}
        late = {node_id for node_id, draw in draws.items() if draw < setting.drop_rate}
        if len(late) == num_nodes:  # a round in which nobody contributes would only shorten the run
            late.remove(max(late, key=draws.__getitem__))
        late |= {node.node_id for place, node in enumerate(nodes) if is_late(place, round)}
        exchange(plan, nodes, context=spec.model.context, late=late)
        watch(round, nodes)
    if len({node.outer.digest for node in nodes}) != 1:
        raise AssertionError(f"{setting.name}: the nodes' outer states differ")
    return nodes


def work_of(plan: Plan, assignment: Assignment) -> InnerWork:
    """What a plan asks of one of its participants, however long it takes."""
    return InnerWork(
        round=plan.round,
        inner_steps=assignment.inner_steps,
        first_sample=assignment.first_sample,
        num_samples=assignment.num_samples,
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        max_seconds=float("inf"),
        num_participants=len(plan.assignments),
    )


def exchange(
    plan: Plan, nodes: Sequence[LocalNode], *, context: int, late: set[NodeId]
) -> dict[NodeId, dict[int, Payload]]:
    """One round's exchange; the contributions of those who are late reach nobody in time.

    Returns what each node sent, by slice.
    """
    by_id = {node.node_id: node for node in nodes}
    samples = {assignment.node_id: assignment.num_samples for assignment in plan.assignments}
    sent = {
        n: node.contributions(plan, samples=samples[n], tokens=samples[n] * context)
        for n, node in by_id.items()
    }
    outcomes: list[SliceOutcome] = []
    results: dict[int, Payload] = {}
    for part in plan.slices:
        outer = by_id[part.reducer_id].outer
        reduction = Reduction(
            plan=plan,
            slice=part,
            contributions={n: sent[n][part.index] for n in sent.keys() - late},
            late=sent.keys() & late,
            uplink=outer.rules_in(plan.round).uplink,
            context=context,
        )
        result = outer.result_of(reduction, plan.fragment)
        assert result is not None, "somebody is in time"
        outer.owing.note_result(result)
        by_id[part.reducer_id].reduced_bytes += len(result.payload.body)
        results[part.index] = result.payload
        outcomes.append(
            SliceOutcome(
                index=part.index,
                start=part.start,
                num_elements=part.num_elements,
                digest=result.payload.digest,
                contributors=result.made_of.contributors,
                contributions=result.made_of.contributions,
                factors=result.made_of.factors,
                norm=result.payload.header.norm,
            )
        )
    commit = Commit(
        round=plan.round,
        fragment=plan.fragment,
        base_digest=plan.base_digest,
        slices=tuple(outcomes),
        assignments=plan.assignments,
    )
    for node in nodes:
        node.apply(commit, results, is_taken=node.node_id not in late)
    return sent


def fragment_of(round: int, spec: RunSpec) -> int:
    """The one that a round synchronises."""
    return round % spec.exchange.fragments


def parts_of(corpus: Corpus, num_parts: int) -> list[Corpus]:
    """The text in as many runs of neighbouring files: topics, as files are sorted by folder."""
    size = len(corpus.training) // num_parts
    return [
        replace(corpus, training=corpus.training[place * size : (place + 1) * size])
        for place in range(num_parts)
    ]


def spec_of(tables: dict[str, dict[str, Any]], *, seed: int) -> RunSpec:
    """A run file with this seed."""
    seeded = tables | {"run": tables.get("run", {}) | {"seed": seed}}
    return validated(seeded, origin="the benchmark's run file")


def plan_of(spec: RunSpec, round: int, nodes: Sequence[LocalNode]) -> Plan:
    """A round in which all take part alike."""
    samples = spec.inner.steps * spec.inner.batch
    round_tokens = len(nodes) * spec.inner.steps * spec.tokens_per_inner_step
    ids = tuple(node.node_id for node in nodes)
    fragment = fragment_of(round, spec)
    return Plan(
        round=round,
        fragment=fragment,
        base_digest=nodes[0].outer.digest,
        assignments=tuple(
            Assignment(
                node_id=node_id,
                inner_steps=spec.inner.steps,
                first_sample=((round - 1) * len(ids) + place) * samples,
                num_samples=samples,
            )
            for place, node_id in enumerate(ids)
        ),
        slices=cut_into_slices(nodes[0].layout.fragments[fragment].num_elements, ids),
        token_clock=(round - 1) * round_tokens,
        round_tokens=round_tokens,
        train_seconds=1.0,
        contribute_seconds=2.0,
        commit_seconds=3.0,
        reason="",
    )
