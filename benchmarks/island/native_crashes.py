"""How often native code ends a rank, in loops that tell its suspects apart.

Four ranks, tensor parallel with sharded or context-parallel weights, layers recomputed in full: where
torch over gloo was seen to end a rank by SIGSEGV or SIGABRT. Each training builds model and optimizer
anew in the same four processes, `PER_LAUNCH` times, and takes `STEPS` inner steps; then new processes.

    python -m benchmarks.island.native_crashes --variant untraced --trainings 2000 --minutes 60

Counts are appended to `--output`, a line for each launch, and a command that was cut goes on from them.
`--report` prints what all lines say. A variant is one change of what a node does:

    as-is          one step of a training is traced now and then, as nodes do
    traced         every step is traced, which makes a fault of tracing a hundred times as frequent
    untraced       no step is traced
    no-early-stop  recomputing goes to a layer's end; traced as-is
    perturbed      freed memory is overwritten, and not kept by threads; traced as-is
    checked        glibc's checked malloc (libc6-dbg's libc_malloc_debug.so); traced as-is
"""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from benchmarks.measurement import Rows, add_results, parser_of, read_rows
from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import read_corpus
from node.island.measuring import LocalCommunication
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.island.training.trainer import Trainer
from protocol.run.models import DecoderModel
from protocol.run.run_spec import DataSection, InnerSection, RunSpec

STEPS = 5
PER_LAUNCH = 50
PATIENCE_SECONDS = 600.0  # for a hang only

SHAPES = (MeshShape(shard=2, tensor=2), MeshShape(context=2, tensor=2))

ENVIRONMENTS = {
    "perturbed": {"GLIBC_TUNABLES": "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"},
    "checked": {
        "LD_PRELOAD": "libc_malloc_debug.so.0",
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
    },
}
VARIANTS = ("as-is", "traced", "untraced", "no-early-stop", *ENVIRONMENTS)

SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=24, num_layers=5, num_heads=4, num_kv_heads=2, ffn_size=40, context=16
    ),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=8, learning_rate=1e-2, schedule="constant", warmup_tokens=0),
)


def train_again_and_again(
    pipe: Connection, shape: MeshShape, rank: int, place: Path, variant: str, num_trainings: int
) -> None:
    """A rank's process: says after each training that it is done."""
    faulthandler.enable(file=2)
    torch.set_num_threads(1)
    mesh = Mesh.joined(shape=shape, rank=rank, device=torch.device("cpu"), meeting=place / "store")
    corpus = read_corpus(SPEC.data, context=SPEC.model.context, batch=8, folder=place)
    first = initial_parameters(SPEC)
    with _varied(variant):
        for _ in range(num_trainings):
            trainer = Trainer(
                spec=SPEC,
                corpus=corpus,
                device=torch.device("cpu"),
                mesh=mesh,
                clock=lambda: 0.0,
                local=LocalTraining(activation_checkpointing="full"),
            )
            trainer.adopt(first)
            for _ in range(STEPS if variant == "traced" else 1):
                trainer.train(lone_work(SPEC, 1 if variant == "traced" else STEPS), unseen)
            pipe.send(None)


@contextlib.contextmanager
def _varied(variant: str) -> Iterator[None]:
    with contextlib.ExitStack() as changes:
        if variant == "no-early-stop":
            changes.enter_context(set_checkpoint_early_stop(False))
        if variant in ("traced", "untraced"):
            place = 0 if variant == "traced" else None
            changes.enter_context(
                mock.patch.object(LocalCommunication, "step_to_trace", lambda *_: place)
            )
        else:
            changes.enter_context(
                mock.patch.object(LocalCommunication, "step_to_trace", lambda *_: 1)
            )
        yield


def launched(shape: MeshShape, variant: str) -> tuple[int, list[int | None]]:
    """Trainings that all ranks ended, and how the ranks ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Trainer.__module__])  # as nodes do: ranks start at once
    with tempfile.TemporaryDirectory() as folder:
        for name in range(10):  # so that some are held out
            (Path(folder) / f"{name}.txt").write_text(f"So it goes on, {name} and on. " * 100)
        pipes, processes = [], []
        for rank in range(shape.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=train_again_and_again,
                args=(theirs, shape, rank, Path(folder), variant, PER_LAUNCH),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        done = 0
        with contextlib.suppress(EOFError):
            while done < PER_LAUNCH:
                for pipe in pipes:
                    if not pipe.poll(PATIENCE_SECONDS):
                        raise TimeoutError(f"{shape} hangs after {done} trainings")
                    pipe.recv()
                done += 1
        for process in processes:
            process.join(60)
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
        if done < PER_LAUNCH and min(code or 0 for code in codes) >= 0:
            raise RuntimeError(f"ranks ended with {codes}: see what they printed")
        return done, codes


def run(variant: str, *, num_trainings: int, seconds: float, output: Path) -> None:
    """Appends a line for each launch until as many trainings are counted, or the time is over."""
    began = time.monotonic()
    launches = 0
    while counted(output)[variant] < num_trainings and time.monotonic() - began < seconds:
        shape = SHAPES[launches % len(SHAPES)]
        done, codes = launched(shape, variant)
        launches += 1
        Rows(output, is_printed=False).add(
            {"variant": variant, "mesh": str(shape), "trainings": done, "codes": codes}
        )


def counted(output: Path) -> Counter[str]:
    """Trainings by variant so far."""
    counts: Counter[str] = Counter()
    for row in read_rows(output):
        counts[row["variant"]] += row["trainings"]
    return counts


def report(output: Path) -> str:
    """A line for each variant: trainings, and launches in which a signal ended a rank."""
    crashes: Counter[str] = Counter()
    for row in read_rows(output):
        crashes[row["variant"]] += any(code is None or code < 0 for code in row["codes"])
    return "\n".join(
        f"{variant:<14} {trainings:>6,} trainings, {crashes[variant]} ended by native code"
        for variant, trainings in sorted(counted(output).items())
    )


def main() -> None:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="as-is")
    parser.add_argument("--trainings", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60)
    add_results(parser, Path("docs/results/native-crashes.jsonl"))
    parser.add_argument("--report", action="store_true")
    chosen = parser.parse_args()
    if chosen.report:
        print(report(chosen.results))
        return
    wanted = ENVIRONMENTS.get(chosen.variant, {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # glibc reads them as a process begins, so this one begins again.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.island.native_crashes", *sys.argv[1:]],
            {**os.environ, **wanted},
        )
    run(
        chosen.variant,
        num_trainings=chosen.trainings,
        seconds=60 * chosen.minutes,
        output=chosen.results,
    )
    print(report(chosen.results))


if __name__ == "__main__":
    main()
