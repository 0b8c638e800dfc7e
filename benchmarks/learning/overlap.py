"""What fragments and overlap cost in loss, at the same tokens, and what they save of the waiting.

    python -m benchmarks.learning.overlap [--seeds 0 1] [--rounds 24] [--delays 3 8] [--out FILE]

Three nodes with real training in virtual time (lab.simulation.swarm): an inner step takes a second,
and an exchange as many seconds as `--delays` says, whatever its bytes. With overlap that is also how
many inner steps later a result is adopted. A small model, the demo's optimizers and codecs; all runs
of a seed take the same steps on equally many samples. Each run's line goes to `--out` as JSON.
"""

import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import structlog
import torch

from benchmarks.learning.data_parallel import demo_spec
from benchmarks.measurement import Rows, add_results, parser_of
from lab.simulation.memory_transport import MemoryNetwork
from lab.simulation.swarm import Life, SimulatedNode, SimulatedRun, simulate
from node.island.data.corpus import Corpus, read_corpus
from protocol.run.run_spec import RunSpec, validated

NUM_NODES = 3
OVERLAPS = ("none", "keep", "blend")
FRAGMENTS = (1, 3)
MODEL = {
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 96,
    "context": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    overlap: str
    fragments: int
    delay_seconds: float
    seed: int
    loss: float  # held out, at the end, nats per byte
    compute_share: float  # of the time from the first plan to the end, mean of the nodes
    seconds: float  # virtual
    tokens: int
    sent_bytes: int  # by the busiest node


def spec_of(overlap: str, fragments: int, *, seed: int, rounds: int) -> RunSpec:
    """The demo's run with a smaller model."""
    demo = demo_spec(seed=seed, rounds=rounds, num_nodes=NUM_NODES, codec="int4")
    tables = demo.model_dump(mode="json")
    tables["model"] |= MODEL
    tables["inner"] |= {"steps": 10}
    tables["exchange"] |= {"overlap": overlap, "fragments": fragments}
    return validated(tables, origin="the benchmark's run file")


def run_with(spec: RunSpec, corpus: Corpus | None, *, delay_seconds: float) -> SimulatedRun:
    """A swarm of equal nodes whose exchange takes so long: half for contributions, half for results."""

    async def slow_down(network: MemoryNetwork, nodes: Sequence[SimulatedNode]) -> None:
        network.latency_seconds = delay_seconds / 2

    lives = [Life(seconds_per_inner_step=1.0)] * spec.run.min_nodes
    return simulate(spec, lives=lives, corpus=corpus, script=slow_down)


def outcome_of(spec: RunSpec, corpus: Corpus, *, delay_seconds: float) -> Outcome:
    """Runs it, and takes its figures."""
    run = run_with(spec, corpus, delay_seconds=delay_seconds)
    shares = [seconds / (run.seconds - run.begins[0]) for seconds in run.compute_seconds.values()]
    return Outcome(
        overlap=spec.exchange.overlap,
        fragments=spec.exchange.fragments,
        delay_seconds=delay_seconds,
        seed=spec.run.seed,
        loss=run.held_out[-1].loss,
        compute_share=statistics.mean(shares),
        seconds=run.seconds,
        tokens=run.final.token_clock,
        sent_bytes=max(run.bytes_sent.values()),
    )


def outcomes_of(seeds: Sequence[int], delays: Sequence[float], rounds: int) -> Iterator[Outcome]:
    """All combinations, seed by seed."""
    some = spec_of("none", 1, seed=0, rounds=rounds)
    corpus = read_corpus(
        some.data, context=some.model.context, batch=some.inner.batch, folder=Path.cwd()
    )
    for seed, fragments, overlap in product(seeds, FRAGMENTS, OVERLAPS):
        spec = spec_of(overlap, fragments, seed=seed, rounds=rounds)
        # Without overlap a delay is only waited for, and changes no loss.
        for delay in delays[:1] if overlap == "none" else delays:
            yield outcome_of(spec, corpus, delay_seconds=delay)


def main() -> None:
    """Prints a line for each run, then the means."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--delays", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--rounds", type=int, default=24)
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results = Rows(chosen.results)
    found: dict[tuple[int, str, float], list[Outcome]] = {}
    for outcome in outcomes_of(chosen.seeds, chosen.delays, chosen.rounds):
        results.add(asdict(outcome))
        key = (outcome.fragments, outcome.overlap, outcome.delay_seconds)
        found.setdefault(key, []).append(outcome)
    print("fragments  overlap  delay  loss    ± half range  in inner steps")
    for (fragments, overlap, delay), outcomes in found.items():
        losses = [outcome.loss for outcome in outcomes]
        share = statistics.mean(outcome.compute_share for outcome in outcomes)
        print(
            f"{fragments:<10} {overlap:<8} {delay:<6g} {statistics.mean(losses):.4f}  "
            f"{(max(losses) - min(losses)) / 2:.4f}        {share:.1%}"
        )


if __name__ == "__main__":
    main()
