"""What an island costs: speed beside loops without Atoll, copies beside memcpy, memory of each rank.

    python -m benchmarks.island [--parts speed copies memory] [--loops plain ddp fsdp2]
        [--models small middle wide] [--chunks 12] [--device cuda --precision bf16 --compile]
        [--results FILE] [--figure FILE]

Speed: islands and torch's own loops (plain, DDP, FSDP2) train the same samples in turns; ratios of
time, and of the cores' time, which other work on the machine hardly moves. Copies: adopt and publish
of all parameters, beside a copy of as many bytes. Memory: what each rank of copies and of ZeRO 1 to 3
holds, and its peak in an inner step. The widest model, of 85 million parameters and 16,384 tokens
a step, is for a GPU.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import torch

from benchmarks.island.loops import Kind
from benchmarks.island.memory import drawn, memory_of
from benchmarks.island.speed import Spread, compare, copy_speeds
from benchmarks.measurement import Row, Rows, add_results, machine, parser_of
from node.island.parallel.mesh_shape import LocalTraining, MeshShape
from node.island.ranks.devices import devices_of
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver
from protocol.run.models import DecoderModel
from protocol.run.run_spec import InnerSection, RunSpec

SMALL = DecoderModel()  # the demo's
MIDDLE = DecoderModel(
    hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_size=704, context=128
)
LARGE = DecoderModel(
    hidden_size=768, num_layers=6, num_heads=12, num_kv_heads=12, ffn_size=2048, context=64
)
WIDE = DecoderModel(
    hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, ffn_size=2048, context=1024
)
MODELS = {"small": (SMALL, 30, 16), "middle": (MIDDLE, 4, 8), "wide": (WIDE, 10, 16)}
"""Each with the inner steps of a chunk, and the samples of a step."""

LOOPS: dict[Kind, MeshShape] = {
    "plain": MeshShape(),
    "ddp": MeshShape(replicate=2),
    "fsdp2": MeshShape(shard=2),
}
"""Loops without Atoll, each with the mesh of the island beside it."""


def spec_of(model: DecoderModel, *, steps: int, batch: int = 16) -> RunSpec:
    """A run whose learning rate stays: the loops have no schedule."""
    return RunSpec(
        model=model,
        inner=InnerSection(
            steps=steps, batch=batch, schedule="constant", warmup_tokens=0, learning_rate=1e-3
        ),
    )


async def speed(chosen: argparse.Namespace, local: LocalTraining) -> AsyncIterator[Row]:
    """Islands against loops, model by model."""
    for name in chosen.models:
        model, steps, batch = MODELS[name]
        spec = spec_of(model, steps=steps, batch=batch)
        for kind in chosen.loops:
            shape = LOOPS[kind]
            devices = devices_of(chosen.device, shape.num_ranks)
            row = await compare(spec, shape, kind, devices, local, chunks=chosen.chunks)
            row = {"part": "speed", "parameters": RunSpec(model=model).num_parameters, **row}
            print(
                f"{row['parameters']:,} parameters, {shape} against {kind}: "
                f"{row['island_tokens_per_second']:,.0f} and {row['loop_tokens_per_second']:,.0f} "
                f"tokens/s; time × {_of(row, 'time_ratio')}, without copies × "
                f"{_of(row, 'training_time_ratio')}, cores' time × {_of(row, 'cpu_ratio')}",
                flush=True,
            )
            yield row


async def copies(chosen: argparse.Namespace, local: LocalTraining) -> AsyncIterator[Row]:
    """Adopt and publish against memcpy."""
    for shape in LOOPS.values():
        devices = devices_of(chosen.device, shape.num_ranks)
        spec = spec_of(LARGE, steps=1, batch=2)
        row = await copy_speeds(spec, shape, devices, local, repeats=chosen.chunks)
        print(
            f"{shape}, {row['gigabytes']:.2f} GB: GB/s of memcpy "
            f"{_of(row, 'memcpy_gb_per_second')}, adopt {_of(row, 'adopt_gb_per_second')}, "
            f"publish {_of(row, 'publish_gb_per_second')}; of memcpy: adopt "
            f"{_of(row, 'adopt_of_memcpy')}, publish {_of(row, 'publish_of_memcpy')}",
            flush=True,
        )
        yield {"part": "copies", **row}


def _of(row: Row, key: str) -> str:
    return str(Spread(**row[key]))


async def memory(chosen: argparse.Namespace, local: LocalTraining) -> AsyncIterator[Row]:
    """What each rank holds under copies, the stages of ZeRO, and other meshes."""
    spec = spec_of(MIDDLE, steps=3, batch=8)
    for num_ranks in (1, 2, 4):
        for shape in _layouts(num_ranks):
            devices = devices_of(chosen.device, num_ranks)
            row = await asyncio.to_thread(memory_of, spec, shape, devices, local)
            kinds = ("parameters", "gradients", "moments", "peak", "estimated")
            held = ", ".join(f"{row[kind] / 1e6:.2f} MB {kind}" for kind in kinds)
            print(f"{shape}: {held}", flush=True)
            yield {"part": "memory", **row}


def _layouts(num_ranks: int) -> Iterator[MeshShape]:
    yield MeshShape(replicate=num_ranks)
    if num_ranks > 1:
        yield from (MeshShape(shard=num_ranks, zero=zero) for zero in (1, 2, 3))
    if num_ranks == 2:
        yield from (MeshShape(tensor=2), MeshShape(pipeline=2), MeshShape(context=2))


def main() -> None:
    """Measures the parts asked for, and prints; writes results and figure where it is told to."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=tuple(LOOPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=("small", "middle"))
    parser.add_argument("--chunks", type=int, default=12, help="of each contender (default 12)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compile", action="store_true")
    add_results(parser)
    parser.add_argument("--figure", type=Path, help="the memory of each rank, as SVG")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are forked with it
    torch.set_num_threads(1)
    local = LocalTraining(precision=chosen.precision, compile=chosen.compile)
    prepare_forkserver()
    about = {
        "part": "machine",
        **machine(),
        "torch": torch.__version__,
        "chosen": {key: str(value) for key, value in vars(chosen).items() if key != "results"},
    }
    try:
        rows = asyncio.run(measured(chosen, local, about))
    finally:
        end_forkserver()
    if chosen.figure:
        chosen.figure.write_text(drawn([row for row in rows if row["part"] == "memory"]))


async def measured(chosen: argparse.Namespace, local: LocalTraining, about: Row) -> list[Row]:
    """All rows; each is written as soon as it is there."""
    results = Rows(chosen.results, is_printed=False)
    results.add(about)
    for name in chosen.parts:
        async for row in PARTS[name](chosen, local):
            results.add(row)
    return results.rows


PARTS = {"speed": speed, "copies": copies, "memory": memory}
