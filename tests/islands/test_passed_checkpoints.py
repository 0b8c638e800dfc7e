"""An island of several hosts takes up its inner optimizer's state on another mesh, or with more hosts."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lab.simulation.inline_island import InlineIsland
from node.hosts.leading import HostDesk
from node.island.data.places import DataPlaces
from node.island.island import Island
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.launcher import ProcessIsland, RanksHere
from node.outer_state import SharedVectors
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec
from tests.islands.rank_scene import initial_vectors
from tests.islands.test_hosts import PATIENCE_SECONDS, folder_of, following, island_of, open_desk
from tests.islands.test_restarts_of_ranks import SPEC as RESTARTED
from tests.islands.test_restarts_of_ranks import ignore, work

SPEC = RESTARTED.model_copy(  # a batch that three hosts can share as well as two
    update={"inner": RESTARTED.inner.model_copy(update={"batch": 12})}
)
SHARDS, STAGES, TRIPLE = MeshShape(shard=2), MeshShape(pipeline=2), MeshShape(shard=3)
FOUR = MeshShape(shard=2, tensor=2)
GOES_ON = "inner optimizer goes on from its checkpoint"

Lines = list[dict[str, Any]]


pytestmark = pytest.mark.usefixtures("forkserver")


class Scene:
    """Islands on the same disks, one after the other."""

    def __init__(self, desk: HostDesk, vectors: SharedVectors, folder: Path, spec: RunSpec) -> None:
        self._desk = desk
        self._spec = spec
        self._vectors = vectors
        self._folder = folder
        self.lines: Lines = []  # of the last start

    def island(self, shape: MeshShape, num_hosts: int, *, keeps: bool = True) -> Any:
        """One of several hosts, or of one alone."""
        path = self._folder / "inner"
        kept = folder_of(path, self._spec, num_hosts=num_hosts) if keeps else None
        if num_hosts > 1:
            return island_of(
                self._desk,
                self._vectors,
                self._folder,
                shape,
                spec=self._spec,
                checkpoints=kept,
                num_hosts=num_hosts,
            )
        return ProcessIsland(
            ranks=RanksHere(
                devices=("cpu",) * shape.num_ranks,
                shape=shape,
                num_threads=1,
            ),
            spec=self._spec,
            names=self._vectors.names,
            data=DataPlaces(folder=self._folder),
            checkpoints=kept,
        )

    @contextlib.asynccontextmanager
    async def started(self, island: Island) -> AsyncIterator[Island]:
        try:
            with capture_logs() as lines:
                await island.start()
            self.lines = [dict(line) for line in lines]
            await island.adopt()
            yield island
        finally:
            await island.stop()

    def passed_bytes(self, round_: int) -> tuple[int, ...]:
        """What each host says of the start that went on from a round."""
        return tuple(
            line.get("passed_bytes", 0)
            for line in self.lines
            if (line["event"], line.get("round")) == (GOES_ON, round_)
        )

    def whys(self) -> list[str]:
        """Why checkpoints were left out."""
        return [line["why"] for line in self.lines if line["event"] == "checkpoint left out"]

    def state(self, round_: int) -> dict[str, torch.Tensor]:
        """What is on all disks of a round, put together by other means than those under test."""
        whole: dict[str, torch.Tensor] = {}
        for part in self._folder.glob(f"inner*/round-{round_}"):
            metadata = FileSystemReader(part).read_metadata()
            for index, place in metadata.storage_data.items():
                with (part / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    values = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
                described = metadata.state_dict_metadata[index.fqn]
                assert isinstance(described, TensorStorageMetadata)
                tensor = whole.setdefault(index.fqn, torch.full(described.size, torch.nan))
                box = tensor[
                    tuple(
                        slice(at, at + length)
                        for at, length in zip(index.offset, values.shape, strict=True)
                    )
                ]
                # Copies, also of the tied embedding, are alike.
                assert torch.equal(box, values) or bool(box.isnan().all())
                box.copy_(values)
        return whole


@contextlib.asynccontextmanager
async def scene(vectors: SharedVectors, folder: Path, spec: RunSpec = SPEC) -> AsyncIterator[Scene]:
    """With two hosts that follow; with one of them the first that came does."""
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        open_desk(folder) as (desk, token),
        following(token, folder),
    ):
        await desk.hosts(1, within_seconds=PATIENCE_SECONDS)
        async with following(token, folder, name="three"):
            yield Scene(desk, vectors, folder, spec)


@pytest.mark.timeout(900)  # ten ranks, one island after the other
@pytest.mark.parametrize(
    "later",
    [
        pytest.param([(STAGES, 2), (MeshShape(shard=3, zero=1), 3)], id="by day"),
        pytest.param([(FOUR, 2), (TRIPLE, 3)], id="more", marks=pytest.mark.nightly),
    ],
)
async def test_the_state_is_bit_for_bit_the_same_on_other_meshes_and_more_hosts(
    later: list[tuple[MeshShape, int]], vectors: SharedVectors, folder: Path
) -> None:
    async with scene(vectors, folder) as disks:
        async with disks.started(disks.island(SHARDS, 1)) as island:
            await island.train(work(1), ignore)
            await island.keep(1, is_last=True)
        first = disks.state(1)
        places = layout_of(SPEC).places
        kinds = ("step", "exp_avg", "exp_avg_sq")
        assert sorted(first) == sorted(f"{kind}/{each.name}" for kind in kinds for each in places)
        assert all(bool(tensor.any()) and not tensor.isnan().any() for tensor in first.values())

        for round_, (shape, num_hosts) in enumerate([(SHARDS, 2), *later], start=2):
            async with disks.started(disks.island(shape, num_hosts)) as island:
                await island.keep(round_, is_last=True)
            sizes = disks.passed_bytes(round_ - 1)
            assert len(sizes) == num_hosts
            assert len(set(sizes)) == 1
            assert sizes[0] > 0
            if round_ == 2:  # the second host has nothing: its half of both moments, and all counts
                halves = [
                    each.shape[0] // 2 * each.num_elements // each.shape[0] for each in places
                ]
                assert sizes[0] == 8 * sum(halves) + 4 * len(places)
            found = disks.state(round_)
            assert found.keys() == first.keys()
            for name, tensor in first.items():
                assert torch.equal(found[name], tensor), (name, str(shape))


@pytest.mark.timeout(900)  # eight ranks
async def test_ranks_without_rows_of_a_tensor_have_nothing_to_pass(folder: Path) -> None:
    # Two of the four shards of a norm with 2 values are empty, and 3 rows make others differ.
    model = SPEC.model.model_copy(
        update={"hidden_size": 2, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 3}
    )
    spec = SPEC.model_copy(update={"model": model})
    with initial_vectors(model) as small:
        async with scene(small, folder, spec) as disks:
            for round_, (shape, num_hosts) in enumerate(
                [(SHARDS, 1), (MeshShape(shard=4), 2), (SHARDS, 2)], start=1
            ):
                async with disks.started(disks.island(shape, num_hosts)) as island:
                    if round_ == 1:
                        await island.train(work(1), ignore)
                    await island.keep(round_, is_last=True)
                if round_ == 1:
                    first = disks.state(1)
                    continue
                assert min(disks.passed_bytes(round_ - 1)) > 0
                found = disks.state(round_)
                assert all(torch.equal(found[name], tensor) for name, tensor in first.items())


@pytest.mark.timeout(900)  # six ranks
async def test_on_another_mesh_hosts_train_on_as_if_nothing_had_happened(
    vectors: SharedVectors, folder: Path
) -> None:
    plain = (vectors.parameters.copy(), np.zeros_like(vectors.parameters))
    inline = InlineIsland(spec=SPEC, parameters=plain[0], published=plain[1], folder=folder)
    await inline.start()
    await inline.adopt()
    async with scene(vectors, folder) as disks:
        for round_, (shape, num_hosts) in enumerate([(SHARDS, 2), (STAGES, 2)], start=1):
            await inline.train(work(round_), ignore)
            await inline.publish(0)
            if round_ == 2:  # from zero, steps are of another size
                async with disks.started(disks.island(shape, num_hosts, keeps=False)) as island:
                    await island.train(work(round_), ignore)
                    await island.publish(0)
                assert np.abs(vectors.published - plain[1]).max() > 1e-3
            async with disks.started(disks.island(shape, num_hosts)) as island:
                await island.train(work(round_), ignore)
                await island.publish(0)
                await island.keep(round_, is_last=True)
            assert len(disks.passed_bytes(round_ - 1)) == (num_hosts if round_ > 1 else 0)
            # Only sums in another order.
            np.testing.assert_allclose(vectors.published, plain[1], rtol=0, atol=1e-4)
            vectors.parameters[:] = vectors.published


def cut_short(part: Path) -> None:
    """A file that torch cannot make sense of; `part` is a folder."""
    for file in part.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_index(part: Path) -> None:
    (part / ".metadata").unlink()


@pytest.mark.timeout(900)  # eight ranks
async def test_what_is_damaged_as_it_is_read_is_taken_by_no_rank_and_the_one_before_is(
    vectors: SharedVectors, folder: Path
) -> None:
    async with scene(vectors, folder) as disks:
        async with disks.started(disks.island(SHARDS, 2)) as island:
            for round_ in (1, 2):
                await island.train(work(round_), ignore)
                await island.keep(round_, is_last=True)
        async with disks.started(disks.island(STAGES, 2, keeps=False)) as island:
            await island.train(work(3), ignore)
            await island.publish(0)
        from_zero = vectors.published.copy()

        async def started_after(harm: Callable[[Path], None], *parts: str) -> float:
            """How far training is from that which begins at zero."""
            island = disks.island(STAGES, 2)
            bring_up = island._own.bring_up

            async def harmed() -> Any:
                for part in parts:
                    harm(folder / part)
                return await bring_up()

            island._own.bring_up = harmed  # hosts have told what they have, and ranks will read it
            async with disks.started(island):
                await island.train(work(3), ignore)
                await island.publish(0)
            return float(np.abs(vectors.published - from_zero).max())

        assert await started_after(lose_index, "inner-two/round-2") > 1e-3
        (why,) = disks.whys()
        assert why.startswith("rank 1: FileNotFoundError")
        assert len(disks.passed_bytes(1)) == 2

        # Now the second host's is known to be damaged, and nobody has the one before whole.
        assert await started_after(cut_short, "inner-two/round-1") == 0
        of_two, of_one = disks.whys()[-2:]
        assert of_two == "host 1's part of it is not here"
        assert of_one.startswith("rank 1: ")
        begins = [line["why"] for line in disks.lines if line["event"].endswith("begins at zero")]
        assert begins == ["no checkpoint of this run can be loaded"]
