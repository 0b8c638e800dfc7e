"""Parts of a checkpoint on several disks make one, and no rank waits for one that cannot read."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from node.island.checkpoints import passing
from node.island.checkpoints.folder import NoCheckpointError
from node.island.checkpoints.inner_state import PartPlanner
from node.island.checkpoints.passing import PassingReader, joined
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import MeshShape

PATIENCE_SECONDS = 120.0  # for a hang only

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it lies, and its sizes."""


def tensor_of(
    size: tuple[int, ...], *boxes: Box, dtype: torch.dtype = torch.float32
) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(size),
        chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes],
    )


def test_boxes_of_all_hosts_are_joined_and_copies_counted_once() -> None:
    upper, lower = ((0, 0), (2, 3)), ((2, 0), (1, 3))
    found = joined(
        [
            {"matrix": tensor_of((3, 3), upper), "step": tensor_of((), ((), ()))},
            {},
            {"matrix": tensor_of((3, 3), lower, upper), "step": tensor_of((), ((), ()))},
        ]
    )
    assert found.tensors["matrix"] == tensor_of((3, 3), upper, lower)
    assert found.holders == {
        MetadataIndex("matrix", (0, 0)): [0, 2],
        MetadataIndex("matrix", (2, 0)): [2],
        MetadataIndex("step", ()): [0, 2],
    }


def test_boxes_without_values_are_left_out_wherever_they_lie() -> None:
    nothing, all_of_it = ((0,), (0,)), ((0,), (2,))
    found = joined([{"norm": tensor_of((2,), nothing)}, {"norm": tensor_of((2,), all_of_it)}])
    assert found.holders == {MetadataIndex("norm", (0,)): [1]}


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (
            tensor_of((4,), ((0,), (2,))),
            tensor_of((4,), ((3,), (1,))),
            "its parts are not all: 3 of 4 values of norm",
        ),
        (
            tensor_of((4,), ((0,), (2,))),
            tensor_of((4,), ((0,), (4,))),
            r"at \(0,\) of norm host 1 has \(4,\), another has \(2,\)",
        ),
        (
            tensor_of((4,), ((0,), (4,))),
            tensor_of((5,), ((4,), (1,))),
            "norm is another on host 1",
        ),
        (
            tensor_of((4,), ((0,), (2,))),
            tensor_of((4,), ((2,), (2,)), dtype=torch.float64),
            "norm is another on host 1",
        ),
    ],
)
def test_parts_that_are_no_whole_are_refused_with_the_reason(
    one: TensorStorageMetadata, other: TensorStorageMetadata, why: str
) -> None:
    with pytest.raises(NoCheckpointError, match=why):
        joined([{"norm": one}, {"norm": other}])


class Table:
    """What torch.distributed is to the ranks, with a thread for each and no network.

    As with gloo, who sends waits until the other has begun to receive.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_SECONDS)
        self._said: list[Any] = [None] * num_ranks
        pairs = [(sender, receiver) for sender in range(num_ranks) for receiver in range(num_ranks)]
        self._mail: dict[tuple[int, int], SimpleQueue[Tensor]] = {p: SimpleQueue() for p in pairs}
        self._taken: dict[tuple[int, int], SimpleQueue[None]] = {p: SimpleQueue() for p in pairs}

    def all_gather(self, into: list[Tensor], own: Tensor, *, group: int) -> None:
        self._said[group] = own.clone()
        self._barrier.wait()
        for place, said in zip(into, self._said, strict=True):
            place.copy_(said)
        self._barrier.wait()

    def all_reduce(self, values: Tensor, *, group: int) -> None:
        said = [torch.empty_like(values) for _ in range(self.num_ranks)]
        self.all_gather(said, values, group=group)
        values.copy_(torch.stack(said).sum(dim=0))

    def send(self, values: Tensor, *, group: int, group_dst: int) -> None:
        self._mail[group, group_dst].put(values.clone())
        self._taken[group, group_dst].get(timeout=PATIENCE_SECONDS)

    def recv(self, values: Tensor, *, group: int, group_src: int) -> None:
        values.copy_(self._mail[group_src, group].get(timeout=PATIENCE_SECONDS))
        self._taken[group_src, group].put(None)

    def no_mail_is_left(self) -> bool:
        return all(mail.empty() for mail in self._mail.values())


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Two hosts with two ranks each; a rank's group is its number."""
    table = Table(4)
    monkeypatch.setattr(passing, "dist", table)
    monkeypatch.setattr(passing, "dist", table)
    return table


OF_FIRST = {"early": torch.arange(6.0).view(2, 3), "both": torch.tensor([7.0, 8.0])}
OF_SECOND = {"late": torch.arange(10.0, 15.0), "both": torch.tensor([7.0, 8.0])}
WHOLE = OF_FIRST | OF_SECOND


@pytest.fixture
def parts(tmp_path: Path) -> list[Path | None]:
    """Of a pipeline's ends, with a tensor that both have."""
    found: list[Path | None] = []
    for host, tensors in enumerate((OF_FIRST, OF_SECOND)):
        path = tmp_path / str(host)
        state_dict_saver.save(
            dict(tensors),
            storage_writer=filesystem.FileSystemWriter(path),
            planner=PartPlanner(),
            no_dist=True,
        )
        found.append(path)
    return found


class Outcome:
    """What a rank came to."""

    def __init__(self) -> None:
        self.state = {name: torch.full_like(tensor, torch.nan) for name, tensor in WHOLE.items()}
        self.received_bytes = 0
        self.error: Exception | None = None


def nothing(rank: int, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
    pass


def read(
    table: Table,
    parts: list[Path | None],
    harm: Callable[[int, LoadPlan, DefaultLoadPlanner], object] = nothing,
) -> list[Outcome]:
    """Has all ranks read everything, in the order in which DCP calls them.

    `harm` comes after they have planned, and before they read.
    """
    outcomes = [Outcome() for _ in range(table.num_ranks)]

    def run(rank: int) -> None:
        outcome = outcomes[rank]
        mesh = Mesh(shape=MeshShape(replicate=4), rank=rank, num_hosts=2)
        try:
            reader = PassingReader(parts[mesh.host], mesh, rank)  # type: ignore[arg-type]
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, rank == 0)
            planner = DefaultLoadPlanner()
            planner.set_up_planner(dict(outcome.state), metadata, rank == 0)
            (own,) = reader.prepare_global_plan([planner.create_local_plan()])
            harm(rank, own, planner)
            reader.read_data(own, planner).wait()
            outcome.received_bytes = reader.received_bytes
        except Exception as error:
            outcome.error = error

    with ThreadPoolExecutor(table.num_ranks) as ranks:
        list(ranks.map(run, range(table.num_ranks)))
    assert table.no_mail_is_left()
    return outcomes


def has_all(outcome: Outcome) -> bool:
    return all(torch.equal(outcome.state[name], tensor) for name, tensor in WHOLE.items())


def test_every_rank_gets_what_its_own_host_has_not_and_no_more(
    table: Table, parts: list[Path | None]
) -> None:
    outcomes = read(table, parts)
    assert all(outcome.error is None and has_all(outcome) for outcome in outcomes)
    assert [outcome.received_bytes for outcome in outcomes] == [5 * 4, 5 * 4, 6 * 4, 6 * 4]


def test_a_host_without_a_part_gets_all_of_it(table: Table, tmp_path: Path) -> None:
    state_dict_saver.save(
        dict(WHOLE), storage_writer=filesystem.FileSystemWriter(tmp_path), no_dist=True
    )
    outcomes = read(table, [tmp_path, None])
    assert all(outcome.error is None and has_all(outcome) for outcome in outcomes)
    assert [outcome.received_bytes for outcome in outcomes] == [0, 0, 13 * 4, 13 * 4]


def test_who_cannot_read_says_so_after_all_others_have_what_they_waited_for(
    table: Table, parts: list[Path | None]
) -> None:
    def lose(rank: int, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
        if rank == 2:
            for file in Path(parts[1] or "").glob("*.distcp"):
                file.unlink()
        table.all_reduce(torch.zeros(1), group=rank)  # nobody reads before it is gone

    outcomes = read(table, parts, lose)
    assert [type(outcome.error) for outcome in outcomes[2:]] == [FileNotFoundError] * 2
    for outcome in outcomes[:2]:  # DCP tells them of the others' failure
        assert outcome.error is None
        assert not outcome.state["late"].any()
        assert torch.equal(outcome.state["early"], WHOLE["early"])


def test_who_cannot_copy_says_so_after_it_has_sent_what_others_wait_for(
    table: Table, parts: list[Path | None]
) -> None:
    def shrink(rank: int, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
        if rank == 0:
            planner.state_dict["late"] = torch.zeros(3)

    one, *others = read(table, parts, shrink)
    assert one.error is not None
    assert all(outcome.error is None and has_all(outcome) for outcome in others)


def test_a_rank_without_memory_for_what_it_gets_stops_all_before_they_wait_for_it(
    table: Table, parts: list[Path | None]
) -> None:
    def ask_too_much(rank: int, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
        if rank == 3:
            plan.storage_data[0] = replace(plan.storage_data[0], num_bytes=1 << 62)

    assert {type(outcome.error) for outcome in read(table, parts, ask_too_much)} == {MemoryError}


def test_a_part_whose_index_is_lost_is_refused_on_all_ranks_with_the_same_words(
    table: Table, parts: list[Path | None]
) -> None:
    Path(parts[1] or "", ".metadata").unlink()
    (why,) = {str(outcome.error) for outcome in read(table, parts)}
    assert why.startswith("rank 2: FileNotFoundError: ")
