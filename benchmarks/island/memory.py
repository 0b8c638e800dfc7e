"""What a rank holds, counted from its tensors, and the most that an inner step takes besides.

Between backward and the optimizer's step: bytes of parameters, gradients and moments, each storage
once. The peak of a step: what was held before it, and the running sum of all that torch's CPU
allocator gave and took back meanwhile (its own profiler tells each); on a GPU, torch's own peak.

    python -m benchmarks.island.memory RESULTS FIGURE   # draws what benchmarks.island has measured
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import Stack, stacked_bars
from benchmarks.measurement import read_rows
from lab.simulation.inline_island import lone_work, unseen
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.auto_mesh import need_of
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.island.training.trainer import Trainer
from protocol.files.leftovers import TemporaryFolder
from protocol.run.run_spec import RunSpec

PATIENCE_SECONDS = 600.0  # for a hang only


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    moments: int
    peak: int
    """The most at any moment of an inner step, the three above included."""


def memory_of(
    spec: RunSpec, shape: MeshShape, devices: tuple[str, ...], local: LocalTraining
) -> dict[str, Any]:
    """What the fullest rank of a mesh holds, and what node.island.parallel.auto_mesh thinks that it needs."""
    held = held_by_ranks(spec, shape, devices, local)
    need = need_of(shape, spec, local)
    fullest = {name: max(asdict(one)[name] for one in held) for name in asdict(held[0])}
    return {
        "mesh": str(shape),
        "ranks": shape.num_ranks,
        "zero": shape.zero if shape.shard > 1 else 0,  # 0: nothing is spread over shards
        "model_parameters": spec.num_parameters,
        **fullest,
        "estimated": need.num_bytes - need.process,
        "estimate": {
            name: getattr(need, name)
            for name in ("parameters", "gradients", "moments", "activations")
        },
        "ranks_held": [asdict(one) for one in held],
    }


def held_by_ranks(
    spec: RunSpec, shape: MeshShape, devices: tuple[str, ...], local: LocalTraining
) -> list[Held]:
    """Trains some steps in processes, one for each rank, and asks each what it holds."""
    context = multiprocessing.get_context("forkserver")
    temporary = TemporaryFolder("benchmark")
    meeting = temporary.path
    members = []
    try:
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(theirs, spec, shape, rank, device, local, meeting / "store"),
                daemon=True,
            )
            process.start()
            theirs.close()
            members.append((process, ours))
        held = []
        for _, pipe in members:
            if not wait([pipe], timeout=PATIENCE_SECONDS):
                raise TimeoutError(f"{shape} hangs")
            held.append(pipe.recv())
        return held
    finally:
        for process, pipe in members:
            pipe.close()
            process.join()
        (meeting / "store").unlink(missing_ok=True)
        meeting.rmdir()


def _run_rank(
    pipe: "Connection[Held, None]",
    spec: RunSpec,
    shape: MeshShape,
    rank: int,
    device_name: str,
    local: LocalTraining,
    meeting: Path,
) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = Mesh.joined(shape=shape, rank=rank, device=device, meeting=meeting)
    inner = spec.inner
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=inner.batch, folder=Path.cwd()
    )
    trainer = Trainer(
        spec=spec, corpus=corpus, device=device, mesh=mesh, clock=time.monotonic, local=local
    )
    trainer.adopt(initial_parameters(spec))
    engine = trainer._engine
    parameters = [p for part in engine.parts for p in part.parameters()]
    seen: dict[str, int] = {}
    clip = engine.clip

    def counted(max_norm: float) -> Tensor:
        seen["parameters"] = _bytes_of(parameters)
        seen["gradients"] = _bytes_of(p.grad for p in parameters)
        return clip(max_norm)

    engine.clip = counted  # type: ignore[method-assign]  # to look in between

    def train(inner_steps: int) -> None:
        trainer.train(lone_work(spec, inner_steps), unseen)

    train(2)  # the optimizers' state and DDP's final buckets are made in the first
    moments = _bytes_of(_moments_of(trainer._optimizers))
    kept = seen["parameters"] + moments
    if not shape.is_fully_sharded and shape.num_ranks > 1:
        kept += seen["gradients"]  # DDP's buckets stay when gradients are forgotten
    most = (
        _most_on_gpu(device, train)
        if device.type == "cuda"
        else kept + most_taken(lambda: train(1))
    )
    pipe.send(
        Held(
            parameters=seen["parameters"],
            gradients=seen["gradients"],
            moments=moments,
            peak=most,
        )
    )
    mesh.decided_by_first(True)  # nobody leaves before all are done
    pipe.close()


def _most_on_gpu(device: torch.device, train: Any) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    train(1)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def most_taken(step: Callable[[], object]) -> int:
    """The most that a step has at once of what it takes itself."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results: Any = profiled.profiler
    roots = results.kineto_results.experimental_event_tree()
    taken = sorted(
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in _all(roots)
        if hasattr(event.extra_fields, "alloc_size")
    )
    now = most = 0
    for _, num_bytes in taken:
        now += num_bytes
        most = max(most, now)
    return most


def _all(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def _moments_of(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        # ZeRO 1's wrapper has the optimizer of the rank's own part inside.
        state = getattr(optimizer, "optim", optimizer).state
        for of_parameter in state.values():
            yield from (value for value in of_parameter.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor | None]) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = own.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


_SHORT = {"replicate": "copies", "tensor": "tp", "pipeline": "pp", "context": "cp"}


def _label(row: dict[str, Any]) -> str:
    if row["zero"]:
        return f"ZeRO {row['zero']}"
    return "whole" if row["ranks"] == 1 else _SHORT[row["mesh"].split()[0]]


def drawn(rows: list[dict[str, Any]]) -> str:
    """The figure: what each rank holds, by mesh, and its peak."""
    megabyte = 1e6
    stacks = [
        Stack(
            group=f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}",
            label=_label(row),
            parts=(
                row["parameters"] / megabyte,
                row["gradients"] / megabyte,
                row["moments"] / megabyte,
                (row["peak"] - row["parameters"] - row["gradients"] - row["moments"]) / megabyte,
            ),
        )
        for row in rows
    ]
    count = rows[0]["model_parameters"]
    return stacked_bars(
        title=f"Memory of a rank, {count / 1e6:.1f} M parameters, fp32, AdamW",
        unit="MB",
        names=("parameters", "gradients", "moments", "more at the peak of a step"),
        stacks=stacks,
    )


def rows_of(results: Path) -> list[dict[str, Any]]:
    """The rows about memory among the JSON lines of a file."""
    return [row for row in read_rows(results) if row["part"] == "memory"]


if __name__ == "__main__":
    _, results_name, figure_name = sys.argv
    Path(figure_name).write_text(drawn(rows_of(Path(results_name))))
