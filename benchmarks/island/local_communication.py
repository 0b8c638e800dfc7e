"""What tracing inner steps costs, and what it tells: blocks of steps with and without, in turns.

    python -m benchmarks.island.local_communication

Two ranks on CPUs, for each kind of mesh. A block "with" traces one of its inner steps, which is far
more often than an island does: `cost` is what that adds to the block, in inner steps, and `in an
island` what it comes to at the rate that an island keeps to.
"""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.measurement import parser_of
from lab.processes.family import SOURCES, nothing_left
from lab.simulation.inline_island import lone_work, unseen
from node.island import measuring
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.forkserver import prepare_forkserver
from node.island.training.trainer import Trainer
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

SHAPES = {
    "ddp": MeshShape(replicate=2),
    "fsdp": MeshShape(shard=2),
    "tensor": MeshShape(tensor=2),
    "pipeline": MeshShape(pipeline=2),
    "context": MeshShape(context=2),
}

Timed = tuple[list[float], list[float], float | None]
"""Seconds of blocks without and with a trace, and the share of local communication."""


def spec_of(hidden_size: int) -> RunSpec:
    """A model of some layers, trained on Atoll's own source."""
    return RunSpec(
        model=DecoderModel(
            hidden_size=hidden_size,
            num_layers=4,
            num_heads=4,
            num_kv_heads=4,
            ffn_size=3 * hidden_size,
            context=128,
        ),
        data=DataSection(source="text", paths=("*.py",), held_out=0.05),
        inner=InnerSection(batch=8, schedule="constant"),
    )


def run_rank(
    pipe: Connection,
    shape: MeshShape,
    rank: int,
    spec: RunSpec,
    place: Path,
    steps: int,
    pairs: int,
) -> None:
    """Times blocks of inner steps as a rank of the mesh."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    mesh = Mesh.joined(shape=shape, rank=rank, device=device, meeting=place / "store")
    corpus = read_corpus(
        spec.data,
        context=spec.model.context,
        batch=spec.inner.batch,
        folder=SOURCES / "node" / "island",
    )
    trainer = Trainer(spec=spec, corpus=corpus, device=device, mesh=mesh, clock=time.perf_counter)
    trainer.adopt(initial_parameters(spec))

    def block(least_steps_between: float) -> float:
        measuring.LEAST_STEPS_BETWEEN = least_steps_between  # of this process
        report = trainer.train(lone_work(spec, steps), unseen)
        share[0] = report.communication_seconds
        share[0] = None if share[0] is None else share[0] / report.seconds
        return report.seconds

    share: list[float | None] = [None]
    trainer.know_peak()
    block(0.0)
    block(0.0)
    without, traced = [], []
    for _ in range(pairs):
        without.append(block(1e12))
        traced.append(block(0.0))
    pipe.send((without, traced, share[0]))
    pipe.close()


def timed(shape: MeshShape, spec: RunSpec, *, steps: int, pairs: int) -> Timed:
    """Runs both ranks; rank 0's times."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as place:
        pipes, processes = [], []
        for rank in range(shape.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(theirs, shape, rank, spec, Path(place), steps, pairs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            first: Timed = pipes[0].recv()
            return first
        finally:
            for process in processes:
                process.kill()


def line_of(name: str, times: Timed, steps: int) -> str:
    """The medians of pairs, as they were side by side."""
    without, traced, share = times
    step = statistics.median(without) / steps
    cost = statistics.median(t - w for w, t in zip(without, traced, strict=True)) / step
    # An island traces once in so many of the times that the traced step took, with all around it.
    often = 1 / (measuring.LEAST_STEPS_BETWEEN * max(1.0, 1.0 + cost))
    return (
        f"{name:9} {step * 1e3:8.1f} ms a step   a trace costs {cost:6.2f} steps   "
        f"in an island {cost * often:7.3%}   local communication "
        + ("not measured" if share is None else f"{share:.1%}")
    )


def main() -> None:
    """Prints one line for each mesh."""
    parser = parser_of(__doc__)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="inner steps of a block")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mesh", choices=SHAPES, action="append")
    arguments = parser.parse_args()
    prepare_forkserver()
    spec = spec_of(arguments.hidden_size)
    for name in arguments.mesh or SHAPES:
        times = timed(SHAPES[name], spec, steps=arguments.steps, pairs=arguments.pairs)
        print(line_of(name, times, arguments.steps), flush=True)


if __name__ == "__main__":
    with nothing_left():
        main()
