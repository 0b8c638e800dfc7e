"""Ranks that are started again go on with the inner optimizer's state, on the same mesh or another."""

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from node.duties.lasting_island import LastingIsland
from node.island.checkpoints.folder import CheckpointFolder
from node.island.island import InnerWork, Progress
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.faults import RankDiedError, RankHungError
from node.outer_state import SharedVectors
from protocol.run.models import DecoderModel, layout_of
from protocol.run.run_spec import DataSection, EvaluationSection, InnerSection, RunSpec
from tests.islands.rank_scene import island_of, started, with_texts, work_of

# 24 × 40 matrices and 5 layers, so that parts differ in size.
SPEC = RunSpec(
    model=DecoderModel(
        hidden_size=24, num_layers=5, num_heads=4, num_kv_heads=2, ffn_size=40, context=16
    ),
    data=DataSection(source="text", paths=("*.txt",), held_out=0.2),
    inner=InnerSection(batch=8, learning_rate=1e-2, schedule="constant", warmup_tokens=0),
    evaluation=EvaluationSection(samples=8),
)
ENDLESS = 1_000_000


pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return with_texts(tmp_path)


@pytest.fixture
def folder(place: Path) -> CheckpointFolder:
    return CheckpointFolder(
        path=place / "inner",
        run_digest=SPEC.digest(),
        layout_digest=layout_of(SPEC).summary().digest,
        every_rounds=1,
    )


def work(round_: int, inner_steps: int = 3) -> InnerWork:
    return work_of(SPEC, round_, inner_steps=inner_steps)


def ignore(progress: Progress) -> None:
    pass


def tensors_of(folder: CheckpointFolder) -> list[dict[str, torch.Tensor]]:
    """The whole state in each checkpoint, the newest first."""
    return [_load_state_dict_from_keys(checkpoint_id=str(c.path)) for c in folder.whole()]


EACH_KIND = [
    MeshShape(tensor=2),
    MeshShape(shard=2, zero=1),
    MeshShape(pipeline=2, schedule="zbv"),
    MeshShape(shard=2),
]
MORE = [MeshShape(), MeshShape(pipeline=2), MeshShape(shard=2, tensor=2), MeshShape(shard=2)]


@pytest.mark.timeout(900)  # ten processes, one island after the other
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(EACH_KIND, id="each kind"),
        pytest.param(MORE, id="more", marks=pytest.mark.nightly),
    ],
)
async def test_the_state_is_bit_for_bit_the_same_from_mesh_to_mesh(
    meshes: list[MeshShape], vectors: SharedVectors, place: Path, folder: CheckpointFolder
) -> None:
    async with started(
        island_of(SPEC, vectors, place, shape=MeshShape(shard=2), checkpoints=folder)
    ) as island:
        await island.train(work(1), ignore)
        await island.keep(1, is_last=True)
    (first,) = tensors_of(folder)
    names = [placed.name for placed in layout_of(SPEC).places]
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert sorted(first) == sorted(f"{kind}/{name}" for kind in kinds for name in names)
    assert all(bool(tensor.any()) for tensor in first.values())
    for round_, shape in enumerate(meshes, start=2):
        async with started(
            island_of(SPEC, vectors, place, shape=shape, checkpoints=folder)
        ) as island:
            await island.keep(round_, is_last=True)
        newest, before = folder.whole()
        assert (newest.about.round, before.about.round) == (round_, round_ - 1)
        assert newest.about.mesh == str(shape)
        found = tensors_of(folder)[0]
        assert found.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(found[name], tensor), (name, str(shape))


async def test_empty_shards_are_kept_as_well(
    vectors: SharedVectors, place: Path, folder: CheckpointFolder
) -> None:
    # Two of the four shards of a norm with 2 values are empty, and 3 rows make others differ.
    model = SPEC.model.model_copy(
        update={"hidden_size": 2, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 3}
    )
    spec = SPEC.model_copy(update={"model": model})
    small = SharedVectors.create(layout_of(RunSpec(model=model)).num_elements)
    try:
        small.parameters[:] = initial_parameters(RunSpec(model=model))
        kept = CheckpointFolder(
            path=folder.path,
            run_digest=spec.digest(),
            layout_digest=layout_of(RunSpec(model=model)).summary().digest,
            every_rounds=1,
        )
        for round_, shape in enumerate([MeshShape(shard=4), MeshShape()], start=1):
            async with started(
                island_of(spec, small, place, shape=shape, checkpoints=kept)
            ) as island:
                if round_ == 1:
                    await island.train(work(1), ignore)
                await island.keep(round_, is_last=True)
        of_one, of_four = tensors_of(kept)
        assert all(torch.equal(of_one[name], of_four[name]) for name in of_four)
    finally:
        small.close()


async def test_on_another_mesh_training_goes_on_as_if_nothing_had_happened(
    vectors: SharedVectors, place: Path, folder: CheckpointFolder
) -> None:
    async with started(island_of(SPEC, vectors, place, shape=MeshShape())) as island:
        for round_ in (1, 2):
            await island.train(work(round_), ignore)
        await island.publish(0)
    uninterrupted = vectors.published.copy()
    async with started(
        island_of(SPEC, vectors, place, shape=MeshShape(shard=2), checkpoints=folder)
    ) as island:
        await island.train(work(1), ignore)
        await island.publish(0)
        await island.keep(1, is_last=True)
    vectors.parameters[:] = vectors.published
    shape = MeshShape(pipeline=2, schedule="zbv")  # one rank has both ends of the tied embedding
    for kept in (folder, None):
        async with started(
            island_of(SPEC, vectors, place, shape=shape, checkpoints=kept)
        ) as island:
            await island.train(work(2), ignore)
            await island.publish(0)
        apart = np.abs(vectors.published - uninterrupted).max()
        # Only sums in another order; without the state, steps are of another size.
        assert apart < 1e-4 if kept else apart > 1e-3


async def test_a_killed_rank_costs_no_more_than_the_round_in_flight(
    vectors: SharedVectors, place: Path, folder: CheckpointFolder
) -> None:
    island = island_of(SPEC, vectors, place, shape=MeshShape(replicate=2), checkpoints=folder)
    lasting = LastingIsland(island)
    try:
        await lasting.start()
        lasting.come_up()
        await lasting.adopt()
        await lasting.train_and_publish(work(1), 0, ignore)
        await island.keep(1, is_last=True)
        with capture_logs() as lines:
            seen = asyncio.Event()
            training = asyncio.create_task(
                lasting.train_and_publish(work(2, ENDLESS), 0, lambda progress: seen.set())
            )
            await seen.wait()
            seen.clear()
            os.kill(island.process_ids[1], signal.SIGKILL)
            await seen.wait()  # of the ranks that took their place
            lasting.cut_short()
            assert (await training).tokens > 0
        events = [line["event"] for line in lines]
        assert "inner optimizer goes on from its checkpoint" in events
        assert not any(event.startswith("re-warm-up") for event in events)
    finally:
        await lasting.stop()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
async def test_a_rank_that_is_stopped_is_found_out_and_the_ranks_start_again(
    victim: int, vectors: SharedVectors, place: Path
) -> None:
    island = island_of(SPEC, vectors, place, shape=MeshShape(replicate=2), hang_seconds=3600)
    lasting = LastingIsland(island)
    try:
        await lasting.start()
        lasting.come_up()
        await lasting.adopt()
        with capture_logs() as lines:
            at_work: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
            training = asyncio.create_task(
                lasting.train_and_publish(
                    work(1, ENDLESS), 0, lambda progress: at_work.put_nowait(island.process_ids)
                )
            )
            before = await at_work.get()
            told = island._watch._on_hang

            def be_patient_again(why: str) -> None:
                island._watch.silence.patience_seconds = 3600
                told(why)

            island._watch._on_hang = be_patient_again
            island._watch.silence.patience_seconds = 0.5
            os.kill(before[victim], signal.SIGSTOP)
            while await at_work.get() == before:
                pass
            lasting.cut_short()
            assert (await training).tokens > 0
        (why,) = [line["why"] for line in lines if line["event"].startswith("rank died")]
        assert why.startswith("the ranks on cpu gave no sign of life for ")
        assert not set(before) & set(island.process_ids)
        assert len(multiprocessing.active_children()) == 2  # the one that was stopped is no more
    finally:
        await lasting.stop()


async def test_a_hang_is_a_death_with_its_own_reason(vectors: SharedVectors, place: Path) -> None:
    island = island_of(SPEC, vectors, place, shape=MeshShape(), hang_seconds=3600)
    async with started(island):
        os.kill(island.process_ids[0], signal.SIGSTOP)
        island._watch.silence.patience_seconds = 0.5
        with pytest.raises(RankHungError, match=r"in evaluate .*the first time") as caught:
            await island.evaluate()
        assert isinstance(caught.value, RankDiedError)
        assert "raise hang_seconds" in caught.value.next_step
