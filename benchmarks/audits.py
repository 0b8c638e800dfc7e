"""What audits cost a swarm of honest nodes, and how soon they find who reduces falsely.

    python -m benchmarks.audits [--shares 0 0.05 1] [--rounds 24]

Eight nodes in virtual time (lab.simulation.swarm) over links of 20 Mbit/s: the coordinator's core, store and
desks, and the nodes' daemons, exchange and codecs are those of production. Each row is one share of audited
slices, with the bytes and the time of the run over those of the first share, and whether all ended at the
same bits as there.

A chance is a table of its own: what a reducer that lies in every slice is seen by, by the first round that
one of its slices is drawn in. It follows from the share and the slices that it reduces in a round.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
import torch

from benchmarks.attacks import TABLES
from benchmarks.measurement import markdown
from lab.simulation.memory_transport import QueuedNetwork
from lab.simulation.plain_calls import spec_of
from lab.simulation.swarm import Life, SimulatedRun, simulate
from node.island.data.dataset import Corpus, read_corpus

NODES = 8
SECONDS_A_STEP = 0.05  # virtual
BYTES_A_SECOND = 2.5e6
MOST_SECONDS = 3600.0  # virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one share of audits came to."""

    share: float
    num_audits: int
    run: SimulatedRun

    @property
    def num_bytes(self) -> int:
        """Sent by all nodes."""
        return sum(self.run.bytes_sent.values())

    def beside(self, first: "Cost") -> tuple[str, ...]:
        """A row of the table."""
        is_same = set(self.run.digests.values()) == set(first.run.digests.values())
        return (
            f"{self.share:g}",
            f"{self.num_audits}",
            f"{self.num_bytes / 1e6:.1f}",
            f"{self.num_bytes / first.num_bytes:.3f}",
            f"{self.run.seconds:.1f}",
            f"{self.run.seconds / first.run.seconds:.3f}",
            "yes" if is_same else "no",
        )


def cost_of(share: float, *, rounds: int, corpus: Corpus) -> Cost:
    """A whole run of honest nodes with one share."""
    run = TABLES["run"] | {"rounds": rounds, "min_nodes": NODES}
    spec = spec_of(TABLES | {"run": run, "outer": TABLES["outer"] | {"audit": share}}, seed=0)
    with TemporaryDirectory() as folder:
        done = simulate(
            spec,
            lives=[Life(seconds_per_inner_step=SECONDS_A_STEP)] * NODES,
            corpus=corpus,
            disks=Path(folder),
            network=QueuedNetwork(bytes_per_second=BYTES_A_SECOND, latency_seconds=0.02),
            within_seconds=MOST_SECONDS,
        )
    return Cost(share=share, num_audits=done.num_audits, run=done)


def rounds_until_seen(share: float, *, slices: int, chance: float) -> int:
    """After so many rounds a reducer that lies in each of its slices is drawn with this chance."""
    rounds, unseen = 0, 1.0
    while unseen > 1 - chance:
        rounds, unseen = rounds + 1, unseen * (1 - share) ** slices
    return rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.05, 1.0])
    parser.add_argument("--rounds", type=int, default=24)
    asked = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    spec = spec_of(TABLES, seed=0)
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    costs = [cost_of(share, rounds=asked.rounds, corpus=corpus) for share in asked.shares]
    columns = ("share", "audits", "MB sent", "times", "seconds", "times", "same bits")
    print(markdown(columns, [cost.beside(costs[0]) for cost in costs]))
    print()
    chances = [0.5, 0.9]
    rows = [
        (f"{share:g}", *(rounds_until_seen(share, slices=4, chance=each) for each in chances))
        for share in asked.shares
        if share > 0
    ]
    heads = [f"rounds until seen with chance {each:g}" for each in chances]
    print(markdown(("share, with 4 slices a reducer", *heads), rows))


if __name__ == "__main__":
    main()
