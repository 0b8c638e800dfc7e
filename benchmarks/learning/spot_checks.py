"""Whether the loss on what was leased tells who trained it from who did not.

    python -m benchmarks.learning.spot_checks [--settings NAME ...] [--seeds 0] [--rounds 12] [--results FILE]
    python -m benchmarks.learning.spot_checks --report --results FILE

A checker has what a member contributed to a round, the mean of all contributions, and the samples that the
member was leased. It compares losses of n leased samples, and of n that nobody was leased, at two states:
"before" takes that before the round and that after the contribution alone; "mean" that after the mean of all
and that after the contribution alone; "later" the state after the round, with half of the difference of
contribution and mean added and subtracted. Who trained on its lease has learned more of it than of other
samples. Lidin et al. 2025 ("Incentivizing Permissionless Distributed Learning of LLMs", arXiv 2505.21684)
score peers by the first gap.

The swarm is lab.simulation.plain_calls: trainer, error feedback, codecs and outer optimizer are real. In
each round that is checked, each member checked is honest, and besides that each kind of freeloader is tried
in its place. A row has the gap and its standard score for each kind and n: by means, and by ranks, which a
few samples learned by heart do not move. The report has how many checks separate.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from benchmarks.measurement import Row, Rows, add_results, markdown, parser_of, read_rows
from benchmarks.race import TRAINED
from lab.simulation.inline_island import unseen
from lab.simulation.plain_calls import LocalNode, exchange, plan_of, spec_of, work_of
from node.exchange.codecs.registry import codec_named
from node.island.data.dataset import Corpus, SampleOrder, read_corpus
from node.island.models.architecture import copy_parameters
from node.island.models.decoder_modules import Decoder
from node.outer_state import Vector
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Assignment, Plan

NODES = 4
NUM_SAMPLES = (32, 64, 128)
CHECKED_NODES = 2  # of each round that is checked
FAR = 1 << 16
"""Places of the sample order from here on are leased to nobody; freeloaders train on others far beyond."""

TABLES: dict[str, dict[str, Any]] = {
    "run": {"min_nodes": NODES},
    "model": TRAINED["model"],
    "outer": {"learning_rate": 0.7, "momentum": 0.3},
}


def setting_of(
    *, optimizer: str, codec: str, steps: int, batch: int = 8
) -> dict[str, dict[str, Any]]:
    """A run file's tables."""
    rates = {"learning_rate": 3e-3}
    return TABLES | {
        "inner": {"optimizer": optimizer, "steps": steps, "batch": batch} | rates,
        "exchange": {"uplink": codec, "downlink": codec},
    }


SETTINGS: Mapping[str, dict[str, dict[str, Any]]] = {
    "adamw, int4, 16 × 8": setting_of(optimizer="adamw", codec="int4", steps=16),
    "adamw, ec2, 64 × 8": setting_of(optimizer="adamw", codec="ec2", steps=64),
    "muon, ec2, 16 × 8": setting_of(optimizer="muon", codec="ec2", steps=16),
    "muon, int4, 64 × 8": setting_of(optimizer="muon", codec="int4", steps=64),
    "adamw, int4, 16 × 32": setting_of(optimizer="adamw", codec="int4", steps=16, batch=32),
}
"""By inner optimizer, codec, and inner steps × batch."""

Losses = npt.NDArray[np.float64]


class Measured:
    """Losses of single samples at any state."""

    def __init__(self, spec: RunSpec, corpus: Corpus) -> None:
        self._layout, self._corpus = layout_of(spec), corpus
        self._decoder = Decoder(spec.decoder).eval()
        self._order = SampleOrder(seed=spec.run.seed, num_samples=corpus.num_samples)

    def losses(self, parameters: Vector, places: npt.NDArray[np.int64]) -> Losses:
        """Mean nats of a token, of each sample [n] at these places of the sample order."""
        copy_parameters(self._decoder, self._layout, parameters)
        indices = np.concatenate([self._order.indices(int(place), 1) for place in places])
        windows = torch.from_numpy(self._corpus.windows(self._corpus.training, indices))
        with torch.no_grad():
            logits = self._decoder(windows[:, :-1])
            nats = functional.cross_entropy(
                logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none"
            )
        return nats.view(len(places), -1).mean(dim=1).numpy().astype(np.float64)


class Freeloaders:
    """What others would have sent in an honest member's place."""

    def __init__(self, spec: RunSpec, corpus: Corpus, *, seed: int) -> None:
        self._tenth = LocalNode(spec, NODES, corpus)
        self._elsewhere = LocalNode(spec, NODES + 1, corpus)
        self._codec = codec_named(spec.exchange.uplink)
        self._rng = np.random.default_rng(seed)

    def of(
        self, plan: Plan, place: int, base: Vector, honest: Sequence[Vector]
    ) -> dict[str, Vector]:
        """By kind; `honest` has what all members contributed, and `place` is whose place it is."""
        own = honest[place]
        assignment = plan.assignments[place]
        others = [values for other, values in enumerate(honest) if other != place]
        steps = max(1, assignment.inner_steps // 10)
        batch = assignment.num_samples // assignment.inner_steps
        few = replace(assignment, inner_steps=steps, num_samples=steps * batch)
        tenth = self._trained(self._tenth, plan, few, base)
        elsewhere = replace(assignment, first_sample=2 * FAR + assignment.first_sample)
        noise = self._rng.standard_normal(own.size, dtype=np.float32)
        middle = mean_of(others)
        sent = {
            "copies the mean": middle,
            "copies one": others[0],
            "a tenth": tenth,
            "a tenth, scaled": stretched(tenth, own),
            "mean and a tenth": stretched(middle + tenth, own),
            "mean and a tenth, scaled": stretched(middle + stretched(tenth, middle), own),
            "other samples": self._trained(self._elsewhere, plan, elsewhere, base),
            "noise": stretched(noise, own),
        }
        return {
            kind: self._codec.decode(self._codec.encode(values), values.size)
            for kind, values in sent.items()
        }

    @staticmethod
    def _trained(node: LocalNode, plan: Plan, assignment: Assignment, base: Vector) -> Vector:
        node.trainer.adopt(base)
        node.trainer.train(work_of(plan, assignment), unseen)
        node.trainer.publish(node.published, 0)
        return base - node.published


def mean_of(vectors: Sequence[Vector]) -> Vector:
    """Of vectors [n] alike."""
    middle: Vector = np.mean(vectors, axis=0, dtype=np.float32)
    return middle


def stretched(values: Vector, other: Vector) -> Vector:
    """The values with the norm of others."""
    return values * np.float32(np.linalg.norm(other) / np.linalg.norm(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How much more was learned of what was leased, in nats, and how sure that is."""

    nats: float
    score: float  # standard normal where there is no gap
    rank_score: float  # likewise, by the ranks of samples


def gap_between(leased: Losses, unleased: Losses) -> Gap:
    """Of the drops of n samples each [n]."""
    n = len(leased)
    nats = float(leased.mean() - unleased.mean())
    error = math.sqrt((leased.var(ddof=1) + unleased.var(ddof=1)) / n)
    above = float((leased[:, None] > unleased[None, :]).mean())
    above += float((leased[:, None] == unleased[None, :]).mean()) / 2
    return Gap(
        nats=nats,
        score=nats / error if error else 0.0,
        # Mann and Whitney 1947: above · n² has the mean n² / 2 and the variance n² (2n + 1) / 12.
        rank_score=(above - 0.5) * math.sqrt(12 * n * n / (2 * n + 1)),
    )


def rows_of(name: str, *, seed: int, rounds: int, every: int) -> Iterator[Row]:
    """Trains a swarm by a setting, and checks two members of every so many rounds."""
    tables = SETTINGS[name] | {"run": TABLES["run"] | {"rounds": rounds}}
    spec = spec_of(tables, seed=seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    nodes = [LocalNode(spec, place, corpus) for place in range(NODES)]
    freeloaders = Freeloaders(spec, corpus, seed=seed)
    measured = Measured(spec, corpus)
    rng = np.random.default_rng([seed, 1])
    for round in range(1, rounds + 1):
        plan = plan_of(spec, round, nodes)
        base = nodes[0].parameters.copy()
        for node, assignment in zip(nodes, plan.assignments, strict=True):
            node.train(work_of(plan, assignment), fragment=0, late_steps=0)
        sent = exchange(plan, nodes, context=spec.model.context, late=set())
        if round % every:
            continue
        honest = [
            np.concatenate(
                [
                    nodes[0].outer.uplink.decode(payload.body, payload.header.num_elements)
                    for _, payload in sorted(sent[node.node_id].items())
                ]
            )
            for node in nodes
        ]
        unleased = FAR + rng.choice(FAR, max(NUM_SAMPLES), replace=False)
        for place in range(CHECKED_NODES):
            kinds = {"honest": honest[place]} | freeloaders.of(plan, place, base, honest)
            lease = plan.assignments[place]
            leased = lease.first_sample + rng.choice(
                lease.num_samples, max(NUM_SAMPLES), replace=False
            )
            both = (leased, unleased)
            before = [measured.losses(base, places) for places in both]
            state = nodes[0].parameters
            others = [values for other, values in enumerate(honest) if other != place]
            for kind, contribution in kinds.items():
                middle = mean_of([contribution, *others])
                by_mean = [measured.losses(base - middle, places) for places in both]
                after = [measured.losses(base - contribution, places) for places in both]
                half = np.float32(0.5) * (contribution - middle)
                with_less = [measured.losses(state + half, places) for places in both]
                with_more = [measured.losses(state - half, places) for places in both]
                for n in NUM_SAMPLES:
                    for reference, losses, less in (
                        ("before", before, after),
                        ("mean", by_mean, after),
                        ("later", with_less, with_more),
                    ):
                        drops = [(a - b)[:n] for a, b in zip(losses, less, strict=True)]
                        gap = gap_between(*drops)
                        yield {
                            "setting": name,
                            "seed": seed,
                            "round": round,
                            "place": place,
                            "kind": kind,
                            "n": n,
                            "against": reference,
                            "gap": round_to(gap.nats),
                            "score": round_to(gap.score),
                            "rank_score": round_to(gap.rank_score),
                            "loss": round_to(float(before[1].mean())),
                        }


def round_to(value: float) -> float:
    """Five digits are more than enough."""
    return float(f"{value:.5g}")


def report(rows: Sequence[Row], *, n: int, against: str, score: str) -> str:
    """For each setting and kind the mean and the deviation of the score of one check."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if (row["n"], row["against"]) == (n, against):
            groups.setdefault((row["setting"], row["kind"]), []).append(row)
    lines = []
    for (setting, kind), checks in groups.items():
        scores = [row[score] for row in checks]
        lines.append(
            (
                f"{setting}: {kind}",
                len(checks),
                f"{mean(row['gap'] for row in checks):.4f}",
                f"{mean(scores):.2f}",
                f"{pstdev(scores):.2f}",
                f"{min(scores):.2f} to {max(scores):.2f}",
            )
        )
    return markdown(("who", "checks", "gap, nats", score, "deviation", "range"), lines)


def main() -> None:
    """Measures the settings, or prints what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="rounds from check to check")
    parser.add_argument("--report", action="store_true", help="of the results, measuring nothing")
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(chosen.results, is_printed=False)
    known = [] if chosen.results is None else read_rows(chosen.results)
    done = {(row["setting"], row["seed"]) for row in known}
    began = time.monotonic()
    for name in [] if chosen.report else chosen.settings:
        for seed in chosen.seeds:
            if (name, seed) in done:
                continue
            for row in rows_of(name, seed=seed, rounds=chosen.rounds, every=chosen.every):
                rows.add(row)
            print(f"{name}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    for against in ("before", "mean", "later"):
        for score in ("score", "rank_score"):
            print(f"\nn = {max(NUM_SAMPLES)}, against {against}\n")
            print(report([*known, *rows.rows], n=max(NUM_SAMPLES), against=against, score=score))


if __name__ == "__main__":
    main()
