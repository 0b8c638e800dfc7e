"""One rank among the ranks of its island: its place, its process groups, and what they agree on.

Sizes and what they fit are node.island.parallel.mesh_shape's; what is done with the groups is
node.island.parallel.modules's.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from node.island.parallel.mesh_shape import AXES, Axis, MeshShape, Place
from node.island.ranks.accelerator import collectives_of
from node.island.ranks.commands import MeetingPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's place among the ranks; with a single rank nothing is ever sent."""

    shape: MeshShape = field(default_factory=MeshShape)
    rank: int = 0
    num_hosts: int = 1
    devices: DeviceMesh | None = None  # where parameters are cut: see _device_mesh
    shard_group: dist.ProcessGroup | None = None  # over which ZeRO 1 spreads the optimizer's state
    context_group: dist.ProcessGroup | None = None
    ends_group: dist.ProcessGroup | None = None  # of the pipeline's ends, where weights are tied
    num_ranks: int = field(init=False)  # of the island
    place: Place = field(init=False)  # the rank's coordinates
    stages: tuple[int, ...] = field(init=False)  # the parts of the pipeline that this rank holds
    has_loss: bool = field(init=False)  # whether this rank holds the end of the model

    def __post_init__(self) -> None:
        place = self.shape.place_of(self.rank)
        stages = self.shape.stages_of(place.pipeline)
        object.__setattr__(self, "num_ranks", self.shape.num_ranks)
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "has_loss", self.shape.num_stages - 1 in stages)

    @classmethod
    def joined(
        cls,
        *,
        shape: MeshShape,
        rank: int,
        device: torch.device,
        meeting: Path | MeetingPoint,
    ) -> "Mesh":
        """Waits for the other ranks at a file that only this attempt uses.

        A file, not a TCP store: those listen on all addresses, and one of an earlier attempt hands
        out dead ones. Ranks of several hosts meet at a store that listens on one.
        """
        if shape.num_ranks == 1 and not shape.has_offload:
            return cls(shape=shape)
        interface = meeting.interface if isinstance(meeting, MeetingPoint) else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        # Its ranks find each other over TCP also where all are on one machine: there on loopback.
        os.environ["NCCL_SOCKET_IFNAME"] = interface
        dist.init_process_group(
            backend=collectives_of(device),
            store=_store_at(meeting, shape.num_ranks),
            rank=rank,
            world_size=shape.num_ranks,
            device_id=device if device.type != "cpu" else None,
        )
        return cls(
            shape=shape,
            rank=rank,
            num_hosts=meeting.num_hosts if isinstance(meeting, MeetingPoint) else 1,
            devices=_device_mesh(shape, device) if shape.is_fully_sharded else None,
            shard_group=_group(shape, rank, "shard") if shape.zero == 1 else None,
            context_group=_group(shape, rank, "context"),
            ends_group=_ends_group(shape, rank),
        )

    @property
    def ranks_per_host(self) -> int:
        """Each host has as many: neighbours."""
        return self.num_ranks // self.num_hosts

    @property
    def host(self) -> int:
        """Which of the hosts this one is; the leader is 0."""
        return self.rank // self.ranks_per_host

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank does what is done once on each host."""
        return self.rank % self.ranks_per_host == 0

    @property
    def speaks(self) -> bool:
        """Whether this rank tells progress: the first of those that have the loss."""
        return self.rank == min(
            rank
            for rank in range(self.num_ranks)
            if self.shape.num_stages - 1 in self.shape.stages_of(self.shape.place_of(rank).pipeline)
        )

    def new_group(self, *axes: Axis) -> dist.ProcessGroup:
        """A group of the ranks along some axes, more than one; all ranks ask together."""
        group = _group(self.shape, self.rank, *axes)
        assert group is not None
        return group

    def new_host_group(self, *, backend: str) -> dist.ProcessGroup | None:
        """A group of this host's ranks, None for a single one; all ranks of the island ask together."""
        each = self.ranks_per_host
        hosts = [range(first, first + each) for first in range(0, self.num_ranks, each)]
        return _own_of(hosts, self.rank, backend=backend)

    def share(self, count: int) -> slice:
        """The rank's part of `count` samples. Ranks of one replica and shard have the same."""
        place = self.place
        part = place.replicate * self.shape.shard + place.shard
        num_parts = self.shape.num_data
        return slice(part * count // num_parts, (part + 1) * count // num_parts)

    def decided_by_first(self, decision: bool) -> bool:
        """What rank 0 decided, so that all ranks do the same."""
        return bool(self.said_by_first(int(decision)))

    def said_by_first(self, number: int) -> int:
        """The number that rank 0 has; what the others have is ignored."""
        if self.num_ranks == 1:
            return number
        said = torch.tensor(number)
        dist.broadcast(said, src=0)
        return int(said)

    def added(self, values: Tensor) -> Tensor:
        """Sum over all ranks of CPU values."""
        if self.num_ranks > 1:
            dist.all_reduce(values)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The largest that any rank has of each of some CPU values; what is no number is beyond all."""
        values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if self.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks of CPU values that tensor-parallel ranks have alike, counted once."""
        return self.added(values) / self.shape.tensor


def _device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh:
    """Dimensions pipeline, replicate, shard and tensor, but for those with one rank; shard is always there.

    Each dimension is a process group with threads of its own, which wake up a hundred times a second.

    The context axis is folded into the shard axis: its ranks see other positions of the same
    samples, so their gradients are averaged, and parameters spread, just as those of shards.
    """
    sizes = {
        "pipeline": shape.pipeline,
        "replicate": shape.replicate,
        "shard": shape.num_shards,
        "tensor": shape.tensor,
    }
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return DeviceMesh(
        device.type,
        torch.arange(shape.num_ranks).view(tuple(kept.values())),
        mesh_dim_names=tuple(kept),
    )


def _store_at(meeting: Path | MeetingPoint, num_ranks: int) -> Any:
    if isinstance(meeting, MeetingPoint):
        return dist.TCPStore(meeting.host, meeting.port, wait_for_workers=False)  # type: ignore[attr-defined]  # is public
    return dist.FileStore(str(meeting), num_ranks)  # type: ignore[attr-defined]  # likewise


def _group(shape: MeshShape, rank: int, *axes: Axis) -> dist.ProcessGroup | None:
    """The rank's group along some axes; None when it is alone in it."""
    return _own_of(list(shape.groups_along(*axes)), rank)


def _ends_group(shape: MeshShape, rank: int) -> dist.ProcessGroup | None:
    """The two ranks that hold the first and the last stage of the rank's own pipeline."""
    ends = (shape.pipeline_of(0), shape.pipeline_of(shape.num_stages - 1))
    pairs = [
        tuple(sorted({pipeline[end] for end in ends}))
        for pipeline in shape.groups_along("pipeline")
    ]
    return _own_of(pairs, rank)


def _own_of(
    groups: Sequence[Sequence[int]], rank: int, *, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Makes all groups, as every rank must, in the same order, and returns the rank's own."""
    own: dist.ProcessGroup | None = None
    for members in groups:
        if len(members) == 1:
            continue
        group = dist.new_group(
            list(members),
            backend=backend,
            # Beside a default group that is bound to a GPU, torch has who is no member of a group of
            # gloo take part in splitting NCCL's, which members do not: all would hang.
            use_local_synchronization=backend == "gloo",
        )
        if rank in members:
            own = group
    return own


assert AXES.index("shard") + 1 == AXES.index("context"), "folding needs them to be neighbours"
