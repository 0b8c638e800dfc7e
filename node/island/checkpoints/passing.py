"""Reads a checkpoint that lies in parts on the disks of several hosts, for whatever mesh they have now.

torch.distributed.checkpoint works out which box of what was written a rank wants. What its own host
has, a rank reads by itself; any other box a rank of a host that has it reads and sends to it.
Nothing is written.

Values go from rank to rank, and what each has and wants, as JSON. torch's own ways of telling
(all_gather_object, plans of DCP) are pickles, which would run another host's code, and the links between
hosts of an island authenticate nobody. So nothing is read but numbers and names, sizes have bounds, and each
rank has torch plan for itself alone.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from node.island.checkpoints.folder import NoCheckpointError
from node.island.parallel.mesh import Mesh

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


Tensors = dict[str, TensorStorageMetadata]
"""What a host has: of tensors by name, where its boxes lie in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What all hosts have together, and which of them have which box."""

    tensors: Tensors
    holders: dict[MetadataIndex, list[int]]


def joined(parts: Sequence[Tensors]) -> Joined:
    """Of each host what it has. Raises NoCheckpointError when that contradicts itself or is not all.

    Copies lie on several hosts: of replicas, and of a tied embedding at the ends of a pipeline. Empty
    boxes, of ranks without rows of a small tensor, may lie where others do, and are left out.
    """
    whole: Tensors = {}
    sizes: dict[MetadataIndex, torch.Size] = {}
    holders: dict[MetadataIndex, list[int]] = {}
    for host, part in enumerate(parts):
        for name, tensor in part.items():
            known = whole.setdefault(name, replace(tensor, chunks=[]))
            if (known.size, known.properties.dtype) != (tensor.size, tensor.properties.dtype):
                raise NoCheckpointError(
                    f"its parts contradict each other: {name} is another on host {host}"
                )
            for chunk in tensor.chunks:
                if 0 in chunk.sizes:
                    continue
                index = MetadataIndex(name, chunk.offsets)
                if index not in sizes:
                    sizes[index] = chunk.sizes
                    known.chunks.append(chunk)
                elif sizes[index] != chunk.sizes:
                    raise NoCheckpointError(
                        f"its parts contradict each other: at {tuple(chunk.offsets)} of {name} host "
                        f"{host} has {tuple(chunk.sizes)}, another has {tuple(sizes[index])}"
                    )
                holders.setdefault(index, []).append(host)
    for name, tensor in whole.items():
        found = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if found != math.prod(tensor.size):
            raise NoCheckpointError(
                f"its parts are not all: {found:,} of {math.prod(tensor.size):,} values of {name}"
            )
    return Joined(tensors=whole, holders=holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One box, from the rank that reads it to the rank that wants it."""

    item: ReadItem
    num_bytes: int
    sender: int
    receiver: int


class PassingReader(filesystem.FileSystemReader):
    """Reads for DCP, which plans for this rank alone; all ranks of the island make the same calls.

    A rank that cannot read or copy goes on, with zeros where others wait for it, and raises at the
    end. One that cannot plan calls `give_up`, and all raise; all call `end`.
    """

    def __init__(self, path: Path | None, mesh: Mesh, group: dist.ProcessGroup) -> None:
        """Learns what hosts have; `path` is this one's part, if it has one.

        Raises NoCheckpointError on all ranks alike.
        """
        super().__init__(path or Path())
        self._mesh = mesh
        self._group = group
        self._own = Metadata({}, storage_data={})
        self.received_bytes = 0
        failure = ""
        if path is not None:
            try:
                self._own = super().read_metadata()
            # torch unpickles it, which raises whatever it likes.
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        self._has_told_wants = False
        has_to_tell = mesh.is_first_of_host and not failure
        has = self._own.state_dict_metadata if has_to_tell else {}
        tensors = {name: t for name, t in has.items() if isinstance(t, TensorStorageMetadata)}
        told = self._told_by_all(Told(what=has_in_json(tensors), failure=failure))
        self._joined = joined([has_of_json(what) for what in told[:: mesh.ranks_per_host]])

    def read_metadata(self) -> Metadata:
        """See StorageReader: what all hosts have, and in which files what this one has."""
        return Metadata(dict(self._joined.tensors), storage_data=self._own.storage_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader: tells the others what this rank wants, and gives it its passes.

        Their order is one that all ranks share. Each sends or receives the first that it has not: so of
        all that are left, the first can always be done.
        """
        (plan,) = plans
        own = self._mesh.rank
        wanted = [
            item for item in plan.items if 0 not in item.lengths and not self._is_at(own, item)
        ]
        told = self._tell_wants(Told(what=[want_in_json(item) for item in wanted], failure=""))
        items = [
            (receiver, item)
            for receiver, wants in enumerate(told)
            for item in (wanted if receiver == own else map(box_wanted, wants))
        ]
        for receiver, item in items:
            if item.storage_index not in self._joined.holders:
                raise NoCheckpointError(f"rank {receiver} wants what no host has")
        passes = sorted(
            (self._pass_of(item, receiver) for receiver, item in items),
            key=lambda each: (each.item.storage_index.fqn, each.item.storage_index.offset or ()),
        )
        mine = [each for each in passes if own in (each.sender, each.receiver)]
        return [replace(plan, storage_data=mine)]

    def give_up(self, why: str) -> None:
        """Has all ranks raise, where they wait to be told what this one wants; else does nothing."""
        if not self._has_told_wants:
            self._tell_wants(Told(what=[], failure=why))

    def end(self, failure: str) -> None:
        """Raises NoCheckpointError on all ranks where one has failed in reading."""
        self._told_by_all(Told(what=[], failure=failure))

    def _tell_wants(self, wants: Told) -> list[list[Any]]:
        self._has_told_wants = True
        return self._told_by_all(wants)

    def _told_by_all(self, told: Told) -> list[list[Any]]:
        """What each rank tells, in their order; raises NoCheckpointError on all where one has failed."""
        everybody = told_by_all(told, self._group, num_ranks=self._mesh.num_ranks)
        for rank, one in enumerate(everybody):
            if one.failure:
                raise NoCheckpointError(f"rank {rank}: {one.failure}")
        return [one.what for one in everybody]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See StorageReader. One box at a time is in memory, beside what it was cut from."""
        passes: list[_Pass] = plan.storage_data
        failure: Exception | None = None
        carrier = self._carrier(max((each.num_bytes for each in passes), default=0))
        for each in passes:
            carried = carrier[: each.num_bytes]
            dtype = self._joined.tensors[each.item.storage_index.fqn].properties.dtype
            box = carried.view(dtype).view(each.item.lengths)
            try:
                if each.sender == self._mesh.rank:
                    carried.zero_()
                    super().read_data(LoadPlan([each.item]), _Into(box))
            except Exception as error:  # as above, and files that are gone
                failure = failure or error
            if each.sender == self._mesh.rank:
                dist.send(carried, group=self._group, group_dst=each.receiver)
                continue
            dist.recv(carried, group=self._group, group_src=each.sender)
            self.received_bytes += each.num_bytes
            try:
                target = planner.resolve_tensor(each.item).detach()
                target.copy_(box)
                planner.commit_tensor(each.item, target)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        here = [item for item in plan.items if self._is_at(self._mesh.rank, item)]
        return super().read_data(replace(plan, items=here), planner)

    def _carrier(self, num_bytes: int) -> Tensor:
        """Memory for the largest box; raises on all ranks when one has none, as others would wait."""
        has_failed = torch.zeros(1)
        try:
            carrier = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError:
            has_failed += 1
        dist.all_reduce(has_failed, group=self._group)
        if has_failed.item() > 0:
            raise MemoryError("a rank has not the memory for what ranks pass to each other")
        return carrier

    def _pass_of(self, item: ReadItem, receiver: int) -> _Pass:
        """Spread over the ranks of the hosts that have the box, as any can read its host's disk."""
        holders = self._joined.holders[item.storage_index]
        each = self._mesh.ranks_per_host
        dtype = self._joined.tensors[item.storage_index.fqn].properties.dtype
        return _Pass(
            item=item,
            num_bytes=math.prod(item.lengths) * dtype.itemsize,
            sender=holders[receiver % len(holders)] * each + receiver % each,
            receiver=receiver,
        )

    def _is_at(self, rank: int, item: ReadItem) -> bool:
        """Whether the host of a rank has what it wants."""
        host = rank // self._mesh.ranks_per_host
        return host in self._joined.holders[item.storage_index]


class _Into(DefaultLoadPlanner):
    """Has torch read a box to where it is sent from."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """See LoadPlanner."""
        return self._box
