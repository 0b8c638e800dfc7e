"""The arithmetic of a round at one node, stage by stage, against memcpy: no network, no training.

    python -m benchmarks.outer_arithmetic [--values 8388608 33554432] [--nodes 2 4] [--fragments 1]
        [--codec int4] [--merge agreeing] [--agreement] [--repeats 7] [--threads 1] [--label numpy]
        [--output outer-arithmetic.jsonl]

One node of a swarm goes through rounds of a fragment with so many values: it forms what it owes,
encodes it, reduces its own slice, checks the results of the others, and applies the commit. "Apply"
is without what the node settles and without the digest, which have lines of their own. The digest
covers the whole state, which is `fragments` times as large as the fragment.

With `--merge agreeing` "reduce" compares contributions with each other, and with `--agreement` "check" finds
how far results agree with this node's contribution, as runs with audits do. Each has a line of its own: it is
a part of its stage.

In each repeat memcpy of the fragment's values takes its turn, and ratios are to that turn. With one
thread the time is the thread's own on the processor, so that other work on the machine counts less;
with more it is the clock's. `--output` appends one line of JSON for each setting.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from benchmarks.codec.command import Spread
from benchmarks.measurement import Rows, add_results, machine, parser_of
from coordinator.swarm.opening import least_elements_of_a_slice
from node.exchange import outer as outer_room
from node.exchange import reduction as reducing_room
from node.exchange.codecs.codec import Tiles
from node.exchange.mean import norm_of
from node.exchange.outer import Outer
from node.exchange.reduction import Reduction
from protocol.run.models import Layout, NamedShape
from protocol.run.run_spec import ExchangeSection, Merge, OuterSection, RunSpec
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload
from protocol.wire.rounds import (
    Assignment,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    Plan,
    Slice,
    SliceOutcome,
    cut_into_slices,
)

TOKENS = 1000
USUAL_ELEMENTS = 1 << 21  # of a slice: a megabyte with int4
RUN = Digest(bytes(32))
STAGES = ("accumulate", "encode", "reduce", "check", "apply", "settle", "digest")
PARTS = ("of reduce: comparisons", "of check: agreement")
"""Of stages, where they are asked for."""


class Stages:
    """How long each stage of one round took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What runs inside belongs to the stage; a stage may come more than once."""
        began = self._clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Makes a stage of every call of a function or method."""
        function = getattr(owner, attribute)

        def watched(*args: Any, **named: Any) -> Any:
            with self.stage(name):
                return function(*args, **named)

        setattr(owner, attribute, watched)


class RoundsOfOneNode:
    """The first of some nodes, and what the others send it: always the same bytes."""

    def __init__(
        self,
        *,
        codec: str,
        values: int,
        nodes: int,
        fragments: int,
        tiles: Tiles,
        rules: OuterSection | None = None,
        finds_agreement: bool = False,
    ) -> None:
        spec = RunSpec(
            exchange=ExchangeSection(uplink=codec, downlink=codec),  # type: ignore[arg-type]
            outer=rules or OuterSection(),
        )
        self.run_digest = spec.digest()
        rng = np.random.default_rng(0)
        shapes: list[list[NamedShape]] = [[(f"w{index}", (values,))] for index in range(fragments)]
        layout = Layout.of(*shapes)
        parameters = rng.standard_normal(layout.num_elements, dtype=np.float32)
        self._published = np.empty(values, dtype=np.float32)
        self.ids = tuple(NodeId(f"{index:032}") for index in range(nodes))
        self.outer = Outer.of_run(
            spec,
            layout=layout,
            parameters=parameters,
            published=self._published,
            node_id=self.ids[0],
            tiles=tiles,
        )
        self.outer.compile_kernels()
        least = least_elements_of_a_slice(values, nodes, USUAL_ELEMENTS)
        self.slices = cut_into_slices(values, self.ids, least_elements=least)
        others = rng.standard_normal(values, dtype=np.float32) * np.float32(1e-3)
        self._norms: dict[int, float] = {}  # of what comes, by slice
        # What comes of the others: their contributions to our slices, and results of theirs.
        self._arriving = {
            part.index: self.outer.uplink.encode(
                others[part.start : part.start + part.num_elements]
            )
            for part in self.slices
        }
        for part in self.slices:
            body = self._arriving[part.index]
            self._norms[part.index] = norm_of(self.outer.downlink.decode(body, part.num_elements))
        self._fragments = fragments
        self._finds_agreement = finds_agreement

    def run(self, stages: Stages) -> tuple[Commit, dict[int, Payload]]:
        """One round; returns its commit, and the results by slice."""
        outer, ids = self.outer, self.ids
        plan = self._plan(outer.round + 1)
        self._train(plan.fragment)
        with stages.stage("accumulate"):
            outer.owing.accumulate(round=plan.round, fragment=plan.fragment)
        sent: dict[int, Payload] = {}
        for part in self.slices:
            with stages.stage("encode"):
                sent[part.index] = outer.owing.contribution_to(part, samples=TOKENS, tokens=TOKENS)
        results: dict[int, Payload] = {}
        for part in self.slices:
            others = self._arriving[part.index]
            if part.reducer_id == ids[0]:
                here = {n: sent[part.index].body if n == ids[0] else others for n in ids}
                reduction = Reduction(
                    plan=plan,
                    slice=part,
                    contributions={
                        sender: _sealed(CONTRIBUTION, plan, part, sender, body, outer.uplink.name)
                        for sender, body in here.items()
                    },
                    uplink=outer.uplink,
                    context=1,
                )
                with stages.stage("reduce"):
                    reduced = outer.result_of(reduction, plan.fragment)
                assert reduced is not None
                outer.owing.note_result(reduced)
                results[part.index] = reduced.payload
                continue
            name = outer.downlink.name
            payload = _sealed(
                RESULT, plan, part, part.reducer_id, others, name, norm=self._norms[part.index]
            )
            own = sent[part.index] if self._finds_agreement else None
            with stages.stage("check"):
                outer.check_result(payload, own, drawn=plan.round)
            results[part.index] = payload
        commit = self._commit(plan, results)
        with stages.stage("apply"):
            outer.apply(commit, results)
        return commit, results

    def _train(self, fragment: int) -> None:
        """Always the same from where it is: what is owed would else pull back what the others have moved."""
        first = fragment * self._published.size
        np.random.default_rng(1).standard_normal(out=self._published, dtype=np.float32)
        self._published *= np.float32(1e-3)
        self._published += self.outer._parameters[first : first + self._published.size]

    def _plan(self, round: int) -> Plan:
        return Plan(
            round=round,
            fragment=round % self._fragments,
            base_digest=self.outer.digest,
            assignments=tuple(
                Assignment(node_id=node_id, inner_steps=1, first_sample=0, num_samples=TOKENS)
                for node_id in self.ids
            ),
            slices=self.slices,
            token_clock=0,
            round_tokens=1,
            train_seconds=1.0,
            contribute_seconds=2.0,
            commit_seconds=3.0,
            reason="",
        )

    def _commit(self, plan: Plan, results: dict[int, Payload]) -> Commit:
        pending = self.outer.owing.pending
        assert pending is not None
        sent = pending.sent
        contributors = tuple(
            Contributor(node_id=each, samples=TOKENS, tokens=TOKENS) for each in self.ids
        )
        return Commit(
            round=plan.round,
            fragment=plan.fragment,
            base_digest=plan.base_digest,
            slices=tuple(
                SliceOutcome(
                    index=part.index,
                    start=part.start,
                    num_elements=part.num_elements,
                    digest=results[part.index].digest,
                    contributors=contributors,
                    contributions=(
                        sent[part.index].contribution,
                        *(ContributionDigest(bytes(16)) for _ in self.ids[1:]),
                    ),
                )
                for part in self.slices
            ),
        )


def _sealed(
    kind: int,
    plan: Plan,
    part: Slice,
    sender: NodeId,
    body: bytes,
    codec: str,
    *,
    norm: float = 0.0,
) -> Payload:
    return Payload.seal(
        kind=kind,  # type: ignore[arg-type]
        run_digest=RUN,
        round=plan.round,
        fragment=plan.fragment,
        slice_index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        codec=codec,
        samples=TOKENS,
        tokens=TOKENS,
        sender_id=sender,
        body=body,
        norm=norm,
    )


@contextmanager
def _parts_watched(stages: Stages) -> Iterator[None]:
    names = (reducing_room, "cosines_among"), (outer_room, "agreement")
    before = [getattr(room, name) for room, name in names]
    for (room, name), part in zip(names, PARTS, strict=True):
        stages.watch(room, name, part)
    try:
        yield
    finally:
        for (room, name), function in zip(names, before, strict=True):
            setattr(room, name, function)


def measured(rounds: RoundsOfOneNode, *, values: int, repeats: int, threads: int) -> list[Stages]:
    """Some rounds, with the time of a memcpy of the fragment in each; the first round is not counted."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    source, target = np.ones(values, dtype=np.float32), np.zeros(values, dtype=np.float32)
    stages = Stages(clock)
    stages.watch(rounds.outer.owing, "settle", "settle")
    stages.watch(rounds.outer._digest, "renew", "digest")
    found = []
    for _ in range(repeats + 1):
        stages.seconds = {}
        with stages.stage("memcpy"):
            np.copyto(target, source)
        with _parts_watched(stages):
            rounds.run(stages)
        stages.seconds["apply"] -= stages.seconds["settle"] + stages.seconds["digest"]
        found.append(Stages(clock))
        found[-1].seconds = stages.seconds
    return found[1:]


def report(found: list[Stages], setting: dict[str, object]) -> dict[str, object]:
    """Prints a table of one setting; returns it as one line of results."""
    wholes = [sum(one.seconds[name] for name in STAGES) for one in found]
    memcpy = Spread.of([one.seconds["memcpy"] for one in found])
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    print(f"memcpy of the fragment: {1e3 * memcpy.median:.1f} ms")
    print("stage | ms | times memcpy | share of the whole")
    lines: dict[str, object] = {}
    parts = [name for name in PARTS if name in found[0].seconds]
    for name in (*STAGES, "whole", *parts):
        seconds = wholes if name == "whole" else [one.seconds[name] for one in found]
        ratio = Spread.of(
            [own / one.seconds["memcpy"] for own, one in zip(seconds, found, strict=True)]
        )
        share = Spread.of([own / whole for own, whole in zip(seconds, wholes, strict=True)])
        took = 1e3 * Spread.of(seconds).median
        print(f"{name} | {took:.1f} | {ratio} | {share.median:.0%}", flush=True)
        lines[name] = {
            "seconds": asdict(Spread.of(seconds)),
            "of_memcpy": asdict(ratio),
            "share": asdict(share),
        }
    return {**setting, "memcpy_seconds": asdict(memcpy), "stages": lines}


def main() -> None:
    """Measures every setting, prints a table of each and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, nargs="+", default=[8 << 20, 32 << 20])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--merge", default="mean", choices=get_args(Merge))
    parser.add_argument("--agreement", action="store_true", help="of results and contributions")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--label", default="")
    add_results(parser)
    asked = parser.parse_args()
    results = Rows(asked.results, about=machine(), is_printed=False)
    for values in asked.values:
        for nodes in asked.nodes:
            rounds = RoundsOfOneNode(
                codec=asked.codec,
                values=values,
                nodes=nodes,
                fragments=asked.fragments,
                tiles=Tiles(asked.threads),
                rules=OuterSection(merge=asked.merge),
                finds_agreement=asked.agreement,
            )
            found = measured(rounds, values=values, repeats=asked.repeats, threads=asked.threads)
            line = report(
                found,
                {
                    "label": asked.label,
                    "codec": rounds.outer.uplink.name,
                    "merge": asked.merge,
                    "values": values,
                    "nodes": nodes,
                    "fragments": asked.fragments,
                    "threads": asked.threads,
                    "repeats": asked.repeats,
                },
            )
            results.add(line)


if __name__ == "__main__":
    main()
