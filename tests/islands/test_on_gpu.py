"""An island on a GPU does what it does on the CPU. Left out where CUDA shows no GPU, so also in CI."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from node.island.checkpoints.folder import CheckpointFolder
from node.island.island import InnerReport
from node.island.measuring import peak_of
from node.island.models.describing import first_vector
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import PLAIN, LocalTraining, MeshShape
from node.island.ranks.accelerator import copies_of, pin
from node.island.ranks.devices import usable_devices
from node.island.ranks.faults import OutOfMemoryError, RankDiedError
from node.machine.gpus import LIBRARY, gpus_of
from node.outer_state import SharedVectors, Vector
from protocol.run.models import DecoderModel, layout_of
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.islands.any_model_scene import text_run
from tests.islands.rank_scene import island_of, started, with_texts, work_of
from tests.transformers_configs import CONFIGS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA shows no GPU here"),
    pytest.mark.usefixtures("forkserver"),
]

STEPS = 5
SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=48, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=80, context=32
    ),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=8, learning_rate=1e-2, schedule="constant", warmup_tokens=0, clip=0.5),
    evaluation=EvaluationSection(samples=11),
)
GPU = MeshShape()
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return with_texts(tmp_path)


def first_of(spec: RunSpec) -> Vector:
    return initial_parameters(spec) if spec.description is None else first_vector(spec)


@contextlib.contextmanager
def vectors_of(spec: RunSpec) -> Iterator[SharedVectors]:
    vectors = SharedVectors.create(layout_of(spec).num_elements)
    vectors.parameters[:] = first_of(spec)
    try:
        yield vectors
    finally:
        vectors.close()


async def trained(
    spec: RunSpec,
    place: Path,
    *,
    kind: str = "cuda",
    shape: MeshShape = GPU,
    local: LocalTraining = PLAIN,
) -> tuple[InnerReport, float, Vector]:
    """What one round comes to: its report, the held-out loss, and the weights."""
    with vectors_of(spec) as vectors:
        island = island_of(spec, vectors, place, kind=kind, shape=shape, local=local)
        async with started(island):
            report = await island.train(work_of(spec, inner_steps=STEPS), lambda progress: None)
            await island.publish(0)
            vectors.parameters[:] = vectors.published
            evaluation = await island.evaluate()
        return report, evaluation.loss, vectors.published.copy()


async def test_weights_come_back_from_the_gpu_as_they_went_there(place: Path) -> None:
    # A matrix of more than one buffer of the ferry, and tensors of a few values.
    wide = SPEC.model.model_copy(update={"ffn_size": 100_000})
    spec = SPEC.model_copy(update={"model": wide})
    with vectors_of(spec) as vectors:
        async with started(island_of(spec, vectors, place, kind="cuda")) as island:
            for seed in (0, 1):
                vectors.parameters[:] = np.random.default_rng(seed).standard_normal(
                    vectors.parameters.size, dtype=np.float32
                )
                await island.adopt()
                await island.publish(0)
                assert vectors.published.tobytes() == vectors.parameters.tobytes()


LOCALS = {
    "plain": PLAIN,
    "parts": LocalTraining(micro_batch=2),
    "recomputed": LocalTraining(activation_checkpointing="full"),
    "some recomputed": LocalTraining(activation_checkpointing="selective"),
    "compiled": LocalTraining(compile=True),
    "deterministic": LocalTraining(deterministic=True),
}


@pytest.mark.parametrize("name", LOCALS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_training_comes_to_what_the_cpu_comes_to(
    place: Path, optimizer: str, name: str
) -> None:
    inner = SPEC.inner.model_copy(update={"optimizer": optimizer})
    spec = SPEC.model_copy(update={"inner": inner})
    report, held_out, weights = await trained(spec, place, local=LOCALS[name])
    on_cpu, held_out_on_cpu, weights_on_cpu = await trained(spec, place, kind="cpu")
    assert report.tokens == on_cpu.tokens and report.skipped_steps == 0
    assert report.loss == pytest.approx(on_cpu.loss, abs=2e-4)
    assert held_out == pytest.approx(held_out_on_cpu, abs=1e-3)
    moved = np.linalg.norm(weights_on_cpu - first_of(spec))
    # Muon's iteration is bf16 on a GPU, and Adam's first steps go by signs.
    assert (
        np.linalg.norm(weights - weights_on_cpu) < (0.05 if optimizer == "muon" else 0.01) * moved
    )
    assert report.peak_memory_bytes > 4 * weights.size


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16", "tf32"])
async def test_lower_precision_trains_as_well_and_names_the_gpus_peak(
    place: Path, precision: str
) -> None:
    report, held_out, weights = await trained(SPEC, place, local=LocalTraining(precision=precision))  # type: ignore[arg-type]
    _, held_out_on_gpu, weights_of_fp32 = await trained(SPEC, place)
    assert held_out == pytest.approx(held_out_on_gpu, abs=0.05)
    assert not np.array_equal(weights, weights_of_fp32)
    known = peak_of(torch.cuda.get_device_name(0), torch.bfloat16)
    expected = known and (known / 2 if precision == "tf32" else known)
    assert report.is_peak_measured == (known is None)
    assert report.peak_flops_per_second == expected or known is None


async def test_the_same_work_gives_the_same_bits_where_it_is_asked_for(place: Path) -> None:
    local = LocalTraining(deterministic=True, precision="bf16")
    (_, _, once), (_, _, again) = [await trained(SPEC, place, local=local) for _ in range(2)]
    assert once.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
async def test_models_of_transformers_train_on_it(place: Path, name: str) -> None:
    spec = text_run(CONFIGS[name], place)
    report, held_out, weights = await trained(spec, place)
    on_cpu, held_out_on_cpu, _ = await trained(spec, place, kind="cpu")
    assert report.loss == pytest.approx(on_cpu.loss, abs=5e-4)
    assert held_out == pytest.approx(held_out_on_cpu, abs=2e-3)
    assert not np.array_equal(weights, first_of(spec))


async def test_a_killed_rank_goes_on_where_its_checkpoint_is(place: Path) -> None:
    local = LocalTraining(deterministic=True)

    def folder(name: str) -> CheckpointFolder:
        return CheckpointFolder(
            path=place / name,
            run_digest=SPEC.digest(),
            layout_digest=layout_of(SPEC).summary().digest,
            every_rounds=1,
        )

    ends = []
    for is_killed in (False, True):
        with vectors_of(SPEC) as vectors:
            checkpoints = folder(f"killed-{is_killed}")
            first = island_of(
                SPEC, vectors, place, kind="cuda", local=local, checkpoints=checkpoints
            )
            async with started(first):
                await first.train(work_of(SPEC, 1, inner_steps=STEPS), lambda progress: None)
                await first.publish(0)
                await first.keep(1, is_last=is_killed)
                if not is_killed:
                    await first.train(work_of(SPEC, 2, inner_steps=STEPS), lambda progress: None)
                    await first.publish(0)
                else:
                    (process_id,) = first.process_ids
                    os.kill(process_id, signal.SIGKILL)
                    with pytest.raises(RankDiedError):
                        await first.evaluate()
            if is_killed:
                vectors.parameters[:] = vectors.published
                again = island_of(
                    SPEC, vectors, place, kind="cuda", local=local, checkpoints=checkpoints
                )
                async with started(again):
                    await again.train(work_of(SPEC, 2, inner_steps=STEPS), lambda progress: None)
                    await again.publish(0)
            ends.append(vectors.published.copy())
    assert ends[0].tobytes() == ends[1].tobytes()


@pytest.mark.parametrize("left_bytes", [100 << 20, 1500 << 20], ids=["none", "too little"])
async def test_a_gpu_that_others_have_filled_is_refused_in_one_sentence(
    place: Path, left_bytes: int
) -> None:
    # Without a context of its own, or with one and without room for a batch of a gigabyte's logits.
    inner = SPEC.inner.model_copy(update={"batch": 1 << 15})
    spec = SPEC.model_copy(update={"inner": inner, "data": DataSection()})
    free, _ = torch.cuda.mem_get_info(0)
    others = torch.empty(free - left_bytes, dtype=torch.uint8, device="cuda:0")
    try:
        with vectors_of(spec) as vectors:
            island = island_of(spec, vectors, place, kind="cuda")
            with pytest.raises(OutOfMemoryError, match=r"no memory left on cuda:0") as refused:
                async with started(island):
                    work = replace(work_of(spec, inner_steps=STEPS), inner_steps=1)
                    await island.train(work, lambda progress: None)
        assert "micro_batch" in str(refused.value.next_step)
    finally:
        del others
        torch.cuda.empty_cache()


async def test_gpus_and_their_memory_are_found_by_torch_and_by_the_driver_alike() -> None:
    usable = await usable_devices("auto")
    assert usable.names == tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    gpus = gpus_of(ctypes.CDLL(LIBRARY))
    assert [gpu.name for gpu in gpus] == [torch.cuda.get_device_name(i) for i in range(len(gpus))]
    assert usable.bytes_per_rank == pytest.approx(min(g.free_bytes for g in gpus), rel=0.1)


@TWO
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(replicate=2),
        MeshShape(shard=2),
        MeshShape(shard=2, zero=1),
        MeshShape(tensor=2),
        MeshShape(pipeline=2),
        MeshShape(context=2),
    ],
    ids=str,
)
async def test_meshes_of_two_gpus_come_to_what_one_process_comes_to(
    place: Path, shape: MeshShape
) -> None:
    report, held_out, weights = await trained(SPEC, place, shape=shape)
    on_cpu, held_out_on_cpu, weights_on_cpu = await trained(SPEC, place, kind="cpu")
    assert report.loss == pytest.approx(on_cpu.loss, abs=2e-4)
    assert held_out == pytest.approx(held_out_on_cpu, abs=1e-3)
    np.testing.assert_allclose(weights, weights_on_cpu, rtol=0, atol=3e-3)


def test_the_driver_pins_shared_memory_and_a_refusal_does_no_harm() -> None:
    device = torch.device("cuda:0")
    made = SharedVectors.create(5_000)
    seen = SharedVectors.attach(made.names)
    values = torch.randn(50, 100, device=device)
    copies = copies_of(device)
    assert pin(seen.parameters, device)
    whole = torch.from_numpy(seen.parameters).view(50, 100)
    assert whole.is_pinned()
    copies([(whole, values)])
    assert torch.equal(torch.from_numpy(made.parameters).view(50, 100), values.cpu())
    back = torch.zeros_like(values)
    copies([(back[:, 30:60], whole[:, 30:60])])
    assert torch.equal(back[:, 30:60], values[:, 30:60])

    assert not pin(seen.parameters, device)  # a second time
    assert torch.equal(values + 1, values + 1)  # the next kernel is not told of it
    assert torch.cuda.cudart().cudaHostUnregister(seen.parameters.ctypes.data) == 0
    del whole
    seen.close()
    made.close()
