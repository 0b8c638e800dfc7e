"""Reads a checkpoint that lies in parts on the disks of several hosts, for whatever mesh they have now.

torch.distributed.checkpoint works out which box of what was written a rank wants. What its own host
has, a rank reads by itself; any other box a rank of a host that has it reads and sends to it.
Nothing is written. Values go from rank to rank, and what each has and wants, as JSON: torch's own plans go as
pickles, which would run another host's code, and so each rank has torch plan for itself alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from node.island.checkpoints.folder import NoCheckpointError
from node.island.checkpoints.telling import (
    Told,
    box_wanted,
    has_in_json,
    has_of_json,
    told_by_all,
    want_in_json,
)
from node.island.parallel.mesh import Mesh

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
