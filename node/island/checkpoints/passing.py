"""Reads a checkpoint that lies in parts on the disks of several hosts, for whatever mesh they have now.

torch.distributed.checkpoint works out which box of what was written each rank wants. What its own
host has, a rank reads by itself; any other box a rank of a host that has it reads and sends to it.
Nothing is written, and only values go from rank to rank, but for what torch passes of its plans.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from node.island.checkpoints.folder import NoCheckpointError
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
    """Reads for DCP what ranks of all hosts want; all ranks of the island make the same calls.

    A rank that cannot read or copy goes on, with zeros where others wait for it, and raises at the
    end: DCP then has all ranks raise.
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
        told: list[tuple[Tensors, str]] = [({}, "")] * mesh.num_ranks
        has_to_tell = mesh.is_first_of_host and not failure
        tensors = self._own.state_dict_metadata if has_to_tell else {}
        dist.all_gather_object(told, (tensors, failure), group=group)
        for rank, (_, why) in enumerate(told):
            if why:
                raise NoCheckpointError(f"rank {rank}: {why}")
        self._joined = joined([tensors for tensors, _ in told[:: mesh.ranks_per_host]])

    def read_metadata(self) -> Metadata:
        """See StorageReader: what all hosts have, and in which files what this one has."""
        return Metadata(dict(self._joined.tensors), storage_data=self._own.storage_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See StorageReader: gives each rank its passes, in an order that all ranks share.

        Each sends or receives the first that it has not: so of all that are left, the first can
        always be done.
        """
        passes = sorted(
            (
                self._pass_of(item, receiver)
                for receiver, plan in enumerate(plans)
                for item in plan.items
                if 0 not in item.lengths and not self._is_at(receiver, item)
            ),
            key=lambda each: (each.item.storage_index.fqn, each.item.storage_index.offset or ()),
        )
        return [
            replace(
                plan, storage_data=[each for each in passes if rank in (each.sender, each.receiver)]
            )
            for rank, plan in enumerate(plans)
        ]

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
