"""What ranks tell each other of a checkpoint is read as it was told, and never run."""

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from node.island.checkpoints import passing
from node.island.checkpoints.folder import NoCheckpointError
from node.island.checkpoints.passing import box_wanted, has_in_json, has_of_json, want_in_json

HAS = {
    "exp_avg/a": TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size([4, 2]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size([2, 0]), sizes=torch.Size([2, 2])),
        ],
    ),
    "step/a": TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.bfloat16),
        size=torch.Size([]),
        chunks=[ChunkStorageMetadata(offsets=torch.Size([]), sizes=torch.Size([]))],
    ),
}
WANT = ReadItem(
    type=LoadItemType.TENSOR,
    dest_index=MetadataIndex("exp_avg/a", torch.Size([0, 0])),
    dest_offsets=torch.Size([1, 0]),
    storage_index=MetadataIndex("exp_avg/a", torch.Size([2, 0])),
    storage_offsets=torch.Size([0, 0]),
    lengths=torch.Size([1, 2]),
)


def test_what_a_rank_has_and_wants_is_read_as_it_was_told() -> None:
    assert has_of_json(has_in_json(HAS)) == HAS
    assert box_wanted(want_in_json(WANT)) == WANT


@pytest.mark.parametrize(
    "told",
    [
        {},
        [["a", "torch.quint8", [1], []]],
        [["a", "torch.float32", [-1], []]],
        [["a", "torch.float32", [1.5], []]],
        [["a", "torch.float32", [1]]],
        [[1, "torch.float32", [1], []]],
        "nonsense",
    ],
)
def test_tensors_that_cannot_be_are_refused(told: Any) -> None:
    with pytest.raises(NoCheckpointError, match="tensors that cannot be"):
        has_of_json(told)
    with pytest.raises(NoCheckpointError, match="wants what cannot be"):
        box_wanted(told)


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was run",)


@pytest.mark.parametrize(
    "text", [pickle.dumps(Bomb()), b"", b"[" * 100_000, b"[[], 1]", b"{}", b"[1, 2, 3]", b"\xff"]
)
def test_a_pickle_and_other_nonsense_is_refused(text: bytes) -> None:
    with pytest.raises(NoCheckpointError, match="not of ours"):
        passing._read(text)


def test_ranks_of_an_island_pass_no_pickles_to_each_other() -> None:
    """By name: torch's calls that unpickle what another rank sends occur nowhere here."""
    from pathlib import Path

    import node

    calls = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    root = Path(node.__file__).parent
    found = [
        (path.name, call)
        for path in root.rglob("*.py")
        for call in (*calls, "send_object_list", "recv_object_list")
        if f"{call}(" in path.read_text()
    ]
    assert found == []
