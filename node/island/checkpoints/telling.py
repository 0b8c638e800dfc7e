"""What ranks of several hosts tell each other of a checkpoint: what each has, and what each wants. As JSON.

torch's own ways of telling (all_gather_object, plans of DCP) are pickles, and the links between hosts of an
island authenticate nobody. Here nothing is read but numbers and names, and sizes have bounds.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from node.island.checkpoints.folder import NoCheckpointError

MOST_BYTES = 256 << 20
"""Of what one rank tells: a hundred bytes for each box of some hundred thousand tensors."""

_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
}

Whole = Annotated[int, Field(ge=0, strict=True)]
Place = tuple[Whole, ...]

_HAS = TypeAdapter(list[tuple[str, str, Place, list[tuple[Place, Place]]]])
_WANT = TypeAdapter(tuple[str, Place, Place, Place, Place, Place])


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank tells, or why it cannot."""

    what: list[Any]
    failure: str


def told_by_all(told: Told, group: dist.ProcessGroup, *, num_ranks: int) -> list[Told]:
    """What all ranks of the group tell, in their order; all of them call it.

    Raises NoCheckpointError on all alike where one tells too much, or nonsense.
    """
    text = json.dumps([told.what, told.failure]).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    most = max(int(size.item()) for size in sizes)
    if most > MOST_BYTES:
        raise NoCheckpointError(f"a rank tells {most:,} bytes of its checkpoint")
    own = torch.zeros(most, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros(most, dtype=torch.uint8) for _ in range(num_ranks)]
    dist.all_gather(texts, own, group=group)
    return [
        _read(bytes(text[: int(size.item())].numpy()))
        for text, size in zip(texts, sizes, strict=True)
    ]


def _read(text: bytes) -> Told:
    try:
        what, failure = json.loads(text)
        if not isinstance(what, list) or not isinstance(failure, str):
            raise TypeError
        return Told(what=what, failure=failure)
    except (ValueError, TypeError, RecursionError) as error:
        raise NoCheckpointError("a rank tells what is not of ours") from error


def has_in_json(tensors: dict[str, TensorStorageMetadata]) -> list[Any]:
    """Tensors by name, with the boxes of them that there are."""
    return [
        [
            name,
            str(tensor.properties.dtype),
            list(tensor.size),
            [[list(chunk.offsets), list(chunk.sizes)] for chunk in tensor.chunks],
        ]
        for name, tensor in tensors.items()
    ]


def has_of_json(told: list[Any]) -> dict[str, TensorStorageMetadata]:
    """Reads `has_in_json`; raises NoCheckpointError for what it never gives."""
    try:
        return {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[dtype]),
                size=torch.Size(size),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                    for offsets, sizes in chunks
                ],
            )
            for name, dtype, size, chunks in _HAS.validate_python(told)
        }
    except (ValidationError, KeyError) as error:
        raise NoCheckpointError("a rank has tensors that cannot be") from error


def want_in_json(item: ReadItem) -> list[Any]:
    """A box that a rank wants."""
    return [
        item.storage_index.fqn,
        list(item.storage_index.offset or ()),
        list(item.storage_offsets),
        list(item.lengths),
        list(item.dest_index.offset or ()),
        list(item.dest_offsets),
    ]


def box_wanted(told: Any) -> ReadItem:
    """Reads `want_in_json`; raises NoCheckpointError for what it never gives."""
    try:
        name, offset, storage_offsets, lengths, dest, dest_offsets = _WANT.validate_python(told)
    except ValidationError as error:
        raise NoCheckpointError("a rank wants what cannot be") from error
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size(dest)),
        dest_offsets=torch.Size(dest_offsets),
        storage_index=MetadataIndex(name, torch.Size(offset)),
        storage_offsets=torch.Size(storage_offsets),
        lengths=torch.Size(lengths),
    )
