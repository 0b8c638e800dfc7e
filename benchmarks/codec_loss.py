"""Held-out loss of the demo's swarm against what its contributions cost: a curve over codecs.

    python -m benchmarks.codec_loss [--uplinks fp32 int4 …] [--downlink int4] [--rounds 40]
        [--seeds 0] [--nodes 3] [--results codec-loss.jsonl]

The whole swarm in virtual time (benchmarks.simulation), with error feedback; only the codec of the
contributions differs. Bits are counted from the bytes that crossed the simulated network, headers
included. Each run is one line of the results, written as soon as it is there.
"""

import argparse
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import torch

from benchmarks.data_parallel import demo_spec
from benchmarks.simulation import Life, simulate
from node.exchange.codecs.registry import CODECS
from node.island.corpus import Corpus, read_corpus
from node.island.layout import layout_of
from protocol.run_spec import RunSpec, validated


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run gave."""

    uplink: str
    downlink: str
    seed: int
    rounds: int
    nodes: int
    loss: float  # nats per byte
    uplink_bits: float  # of each value of a contribution
    downlink_bits: float


def spec_of(uplink: str, downlink: str, *, seed: int, rounds: int, num_nodes: int) -> RunSpec:
    """The demo's run with these codecs."""
    tables = demo_spec(seed=seed, rounds=rounds, num_nodes=num_nodes, codec=downlink).model_dump(
        mode="json"
    )
    tables["exchange"]["uplink"] = uplink
    return validated(tables, origin="the demo's run file")


def outcome_of(spec: RunSpec, corpus: Corpus) -> Outcome:
    """Trains the swarm to its end."""
    num_nodes, rounds = spec.run.min_nodes, spec.run.rounds
    run = simulate(spec, lives=[Life()] * num_nodes, corpus=corpus)
    # Every node reduces one of as many slices, which does not travel.
    values = layout_of(spec.model).num_elements * rounds * (num_nodes - 1)
    return Outcome(
        uplink=spec.exchange.uplink,
        downlink=spec.exchange.downlink,
        seed=spec.run.seed,
        rounds=rounds,
        nodes=num_nodes,
        loss=run.held_out[-1].loss,
        uplink_bits=8 * run.bytes_of_kind["contribution"] / values,
        downlink_bits=8 * run.bytes_of_kind["result"] / values,
    )


def main() -> None:
    """Runs every codec with every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [codec.name.partition("/")[0] for codec in CODECS]
    parser.add_argument("--uplinks", nargs="+", default=names)
    parser.add_argument("--downlink", default="int4")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--results", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    some = demo_spec(seed=0, rounds=1, num_nodes=1, codec="int4")
    corpus = read_corpus(
        some.data, context=some.model.context, batch=some.inner.batch, folder=Path.cwd()
    )
    for seed in chosen.seeds:
        for uplink in chosen.uplinks:
            outcome = outcome_of(
                spec_of(
                    uplink, chosen.downlink, seed=seed, rounds=chosen.rounds, num_nodes=chosen.nodes
                ),
                corpus,
            )
            print(
                f"{uplink:8} seed {seed}: {outcome.loss:.4f} nats per byte, "
                f"{outcome.uplink_bits:.3f} bits up, {outcome.downlink_bits:.3f} down",
                flush=True,
            )
            if chosen.results is not None:
                with chosen.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    main()
