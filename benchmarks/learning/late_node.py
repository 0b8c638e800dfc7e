"""What becomes of the held-out loss when a node's contributions come too late for many rounds, and then land.

    python -m benchmarks.learning.late_node [--late 8 30] [--most-owed 0 1 2 3 inf] [--seeds 0 1]

Three nodes of lab.simulation.plain_calls, of which the first is late from round 11 on for so many rounds.
After that its contributions are in time again, with what it owes. Settings differ in how many rounds' pseudo-
gradients it may owe (node.exchange.error_feedback; 0 drops all late work, inf keeps all of it) and in the
outer momentum. "before" is the loss after its last late round, "landed" the highest of the next four rounds.
"""

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import structlog
import torch

from benchmarks.convergence.settings import BASE, outer
from benchmarks.measurement import Rows, add_results, parser_of
from lab.simulation.plain_calls import LocalNode, spec_of, swarm_at_end
from node.exchange.error_feedback import MOST_OWED
from node.island.data.dataset import read_corpus

FIRST_LATE_ROUND = 11
ROUNDS_AFTER = 8
WATCHED_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run; losses in nats per byte."""

    late_rounds: int
    momentum: float
    uplink: str
    most_owed: float
    seed: int
    before: float
    landed: float
    end: float
    let_go_rounds: float


def outcome_of(
    *, late_rounds: int, momentum: float, uplink: str, most_owed: float, seed: int
) -> Outcome:
    """Trains one swarm."""
    last_late_round = FIRST_LATE_ROUND + late_rounds - 1
    rounds = last_late_round + ROUNDS_AFTER
    is_sparse = uplink.startswith("topk")
    setting = BASE.changed(
        "late node",
        run={"rounds": rounds, "min_nodes": 3},
        inner={"steps": 10},
        exchange={
            "uplink": uplink,
            "downlink": "int4",
            "residual_decay": 0.95 if is_sparse else 1.0,
        },
        **outer(momentum=momentum, learning_rate=1.0 if is_sparse else 0.7),
    )
    spec = spec_of(setting.tables, seed=seed)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    losses: dict[int, float] = {}

    def watch(round: int, nodes: list[LocalNode]) -> None:
        if round == 0:
            for node in nodes:
                node.outer.owing.residual.most_owed = most_owed
        if round >= last_late_round:
            trainer = nodes[1].trainer  # which adopts the same before it trains on
            trainer.adopt(nodes[1].parameters)
            losses[round] = trainer.evaluate().loss

    nodes = swarm_at_end(
        setting,
        spec,
        corpus,
        is_late=lambda place, round: place == 0 and FIRST_LATE_ROUND <= round <= last_late_round,
        watch=watch,
    )
    landed = range(last_late_round + 1, last_late_round + 1 + WATCHED_ROUNDS)
    return Outcome(
        late_rounds=late_rounds,
        momentum=momentum,
        uplink=uplink,
        most_owed=most_owed,
        seed=seed,
        before=losses[last_late_round],
        landed=max(losses[round] for round in landed),
        end=losses[rounds],
        let_go_rounds=nodes[0].outer.owing.let_go_rounds,
    )


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Means over the seeds."""
    yield "| late rounds | momentum | uplink | most owed | before | landed | jump | end |"
    yield "|---|---|---|---|---|---|---|---|"
    rows: dict[tuple[int, float, str, float], list[Outcome]] = {}
    for each in outcomes:
        key = each.late_rounds, each.momentum, each.uplink, each.most_owed
        rows.setdefault(key, []).append(each)
    for (late_rounds, momentum, uplink, most_owed), runs in rows.items():
        before, landed, end = (
            statistics.mean(getattr(run, name) for run in runs)
            for name in ("before", "landed", "end")
        )
        yield (
            f"| {late_rounds} | {momentum:g} | {uplink} | {most_owed:g} | {before:.3f} | {landed:.3f} | "
            f"{landed - before:+.3f} | {end:.3f} |"
        )


def main() -> None:
    """Prints each run as JSON, then the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--late", type=int, nargs="+", default=[8, 30])
    parser.add_argument("--momentum", type=float, nargs="+", default=[0.3, 0.9])
    parser.add_argument("--uplinks", nargs="+", default=["int4"])
    parser.add_argument("--most-owed", type=float, nargs="+", default=[0, MOST_OWED, math.inf])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    outcomes, results = [], Rows(chosen.results)
    for late_rounds, momentum, uplink, most_owed, seed in product(
        chosen.late, chosen.momentum, chosen.uplinks, chosen.most_owed, chosen.seeds
    ):
        outcome = outcome_of(
            late_rounds=late_rounds,
            momentum=momentum,
            uplink=uplink,
            most_owed=most_owed,
            seed=seed,
        )
        outcomes.append(outcome)
        results.add(asdict(outcome))
    print("\n".join(table(outcomes)))


if __name__ == "__main__":
    main()
