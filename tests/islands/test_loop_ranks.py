"""A loop's ranks that share a model: whatever its mesh, the outer state sees the same values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # is public
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]  # likewise

from atoll.log_file import LoopLog
from atoll.moments import Moments
from atoll.optimizers import Optimizers
from atoll.ranks import Ranks
from atoll.running_statistics import RunningStatistics
from atoll.watch import Watch
from atoll.weights import Weights, local_of, tensors_of
from node.island.ranks.forkserver import prepare_forkserver
from tests.unit.test_loop_weights import places_of

SIZES = (7, 10, 3)  # of which 10 alone is a multiple of a number of ranks here


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide, narrow = SIZES[1], SIZES[0]
        self.up = nn.Linear(narrow, wide)
        self.down = nn.Linear(wide, narrow)
        self.head = nn.Linear(narrow, SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.down(self.up(x).relu()))
        return hidden


def _fsdp(model: Small) -> None:
    fully_shard(model.up)
    fully_shard(model)


def _hsdp(model: Small) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.down, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Small) -> None:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _copies(model: Small) -> None:
    """As DistributedDataParallel has it: every rank the whole model."""


MESHES: dict[str, tuple[int, Callable[[Small], None]]] = {
    "fsdp": (3, _fsdp),
    "hsdp": (4, _hsdp),
    "tensor parallel": (2, _tensor_parallel),
    "copies": (2, _copies),
}


def live(rank: int, mesh: str, store: str, parameters: Tensor, published: Tensor) -> None:
    """A rank: adopts, trains by doubling, publishes."""
    torch.set_num_threads(1)
    num_ranks, shard = MESHES[mesh]
    dist.init_process_group(
        "gloo", store=FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    model = Small()
    places = places_of(model)
    shard(model)
    ranks = Ranks.of(model)
    weights = Weights(
        model=model,
        places=places,
        fragments=[(0, len(parameters))],
        overlap="none",
        local_share=0.5,
        rank=ranks.rank,
        parameters=parameters,
        published=published,
    )
    if mesh != "tensor parallel":
        with torch.no_grad():
            model(
                torch.ones(2, SIZES[0])
            )  # leaves FSDP2's root whole, and edits of it would vanish
    weights.adopt(None, is_taken=True)
    if mesh != "tensor parallel":
        model(torch.ones(2, SIZES[0])).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    weights.publish(0)
    watch_steps(model, weights, ranks)
    go_on(model, weights, ranks, Path(store).parent)
    assert ranks.said_by_first(lambda: 17 if rank == 0 else 99) == 17
    assert ranks.same_for_all(f"rank {rank}") == "rank 0"
    dist.barrier()
    dist.destroy_process_group()


def watch_steps(model: Small, weights: Weights, ranks: Ranks) -> None:
    """An optimizer that keeps copies of the weights steps, and what it keeps is adopted too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = Optimizers(optimizer)
    weights.copies_of = optimizers.copies_of
    for parameter in model.parameters():
        optimizer.state[parameter]["slow"] = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
    watch = Watch(model, places=weights.places, optimizers=optimizers, ranks=ranks)
    watch.given(weights.bits(), None)
    optimizer.step()
    watch.took_a_step(is_first=True, counts=True)
    watch.ends(1, weights.bits)
    assert watch.has_moved and not watch.advice(follows=False)
    weights.adopt(None, is_taken=True)
    for parameter in model.parameters():
        (slow,) = optimizers.copies_of(parameter)
        torch.testing.assert_close(local_of(slow), local_of(parameter) + 0.1)
    watch.close()


def go_on(model: Small, weights: Weights, ranks: Ranks, folder: Path) -> None:
    """An optimizer takes up what another has left of the same shards, and where ranks differ none does."""
    tensors = tensors_of(model, weights.places)
    log = LoopLog(folder, rank=ranks.rank)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2)]
    kept, new = (
        Moments(folder, optimizers=Optimizers(each), ranks=ranks, log=log) for each in optimizers
    )
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizers[0].step()
    kept.keep(tensors, "run", round=3, steps=4 + ranks.rank)
    assert not new.take_up(tensors, "run")
    kept.keep(tensors, "run", round=3, steps=4)
    assert new.take_up(tensors, "run")
    for parameter in model.parameters():
        before, now = (each.state[parameter] for each in optimizers)
        assert before.keys() == now.keys()
        for key, value in before.items():
            assert type(value) is type(now[key])
            torch.testing.assert_close(local_of(now[key]), local_of(value), rtol=0, atol=0)
    optimizers[1].step()


@pytest.mark.parametrize("mesh", MESHES)
def test_boxes_of_all_ranks_are_the_whole_model_bit_by_bit(mesh: str, tmp_path: Path) -> None:
    places = places_of(Small())
    num_elements = sum(place.num_elements for place in places)
    parameters = torch.randn(num_elements, generator=torch.Generator().manual_seed(3))
    parameters.share_memory_()
    published = torch.full((num_elements,), torch.nan).share_memory_()
    arguments = (mesh, str(tmp_path / "store"), parameters, published)
    prepare_forkserver()  # it imports torch once
    num_ranks = MESHES[mesh][0]
    start_processes(live, args=arguments, nprocs=num_ranks, start_method="forkserver")
    assert torch.equal(published, 2 * parameters)


def normalise(rank: int, store: str, found: Tensor) -> None:
    """A rank of a sharded model with batch norm, which sees samples of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    fully_shard(model)
    draws = torch.Generator().manual_seed(rank)

    def see() -> None:
        for _ in range(2):
            model(torch.randn(8, 3, generator=draws))

    RunningStatistics(model, averaged=(), compute=see, ranks=Ranks.of(model)).settle()
    norm: Any = model[1]
    found[rank, 0], found[rank, 1] = norm.running_mean, norm.running_var
    dist.barrier()
    dist.destroy_process_group()


def test_running_statistics_are_means_over_what_all_ranks_have_seen(tmp_path: Path) -> None:
    found = torch.full((2, 2, 3), torch.nan).share_memory_()
    prepare_forkserver()
    arguments = (str(tmp_path / "store"), found)
    start_processes(normalise, args=arguments, nprocs=2, start_method="forkserver")
    torch.manual_seed(1)
    linear = nn.Linear(3, 3)
    seen = [
        linear(torch.randn(8, 3, generator=draws)).detach()
        for draws in (torch.Generator().manual_seed(rank) for rank in range(2))
        for _ in range(2)
    ]
    expected = torch.stack(
        [torch.stack([getattr(s, of)(0) for s in seen]).mean(0) for of in ("mean", "var")]
    )
    torch.testing.assert_close(found, torch.stack([expected, expected]), rtol=1e-4, atol=1e-5)
