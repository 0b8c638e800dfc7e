"""One rank among the ranks of its island: its place, its process groups, and its boxes of every tensor.

Sizes and what they fit are node.island.parallel.mesh_shape's; what is done with the groups is
node.island.parallel.modules's.

A box is the part of a tensor that a rank holds; here is its way to and from the canonical vector. Whatever
the mesh, what a rank holds of a tensor is one n-dimensional box. Boxes of all ranks together cover the
canonical vector exactly once, so contributions do not depend on the mesh.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from node.island.parallel.mesh_shape import AXES, Axis, MeshShape, Place
from node.island.ranks.accelerator import Copies, collectives_of, copy_in_turn
from node.island.ranks.commands import MeetingPoint
from node.outer_state import Vector
from protocol.run.models import Layout, TensorPlace


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
    num_data: int = field(init=False)  # parts of a batch
    is_fully_sharded: bool = field(init=False)
    place: Place = field(init=False)  # the rank's coordinates
    stages: tuple[int, ...] = field(init=False)  # the parts of the pipeline that this rank holds
    has_loss: bool = field(init=False)  # whether this rank holds the end of the model

    def __post_init__(self) -> None:
        place = self.shape.place_of(self.rank)
        stages = self.shape.stages_of(place.pipeline)
        object.__setattr__(self, "num_ranks", self.shape.num_ranks)
        object.__setattr__(self, "num_data", self.shape.num_data)
        object.__setattr__(self, "is_fully_sharded", self.shape.is_fully_sharded)
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

    def new_host_group(self) -> dist.ProcessGroup | None:
        """Ranks of this host, by gloo; None for a single one. All ranks of the island ask together."""
        each = self.ranks_per_host
        hosts = [range(first, first + each) for first in range(0, self.num_ranks, each)]
        return _own_of(hosts, self.rank, backend="gloo")

    def share(self, count: int) -> slice:
        """The rank's part of `count` samples. Ranks of one replica and shard have the same."""
        place = self.place
        part = place.replicate * self.shape.shard + place.shard
        num_parts = self.num_data
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor: where it begins along each dimension, and how long it is there."""

    place: TensorPlace
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """0 for a rank that got nothing of a tensor with fewer rows than ranks."""
        return int(torch.Size(self.size).numel())

    def of(self, vector: Tensor, first: int = 0) -> Tensor:
        """The box within a vector that begins with this element of the canonical one, as a view."""
        place = self.place
        begin = place.offset - first
        tensor = vector[begin : begin + place.num_elements].view(place.shape)
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A box, the rank's own values of it, and whether this rank publishes them for its replicas."""

    box: Box
    local: Tensor
    publishes: bool


def places_of_ranks(places: tuple[TensorPlace, ...], num_ranks: int) -> list[list[TensorPlace]]:
    """Deals tensors out to the ranks that publish them, about as many elements to each."""
    turns = dealt([place.num_elements for place in places], num_ranks)
    return [[places[i] for i in turn] for turn in turns]


def dealt(sizes: list[int], num_ranks: int) -> list[list[int]]:
    """Deals things of these sizes out to ranks, the largest first, to whoever has least."""
    turns: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    for i in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        least = sums.index(min(sums))
        turns[least].append(i)
        sums[least] += sizes[i]
    return turns


def published_by(mesh: Mesh, layout: Layout) -> frozenset[str]:
    """The names of the tensors that the rank publishes its part of.

    Ranks that hold the same publish in turn: those of the replicate axis, or all ranks where every
    one has the whole model.
    """
    if mesh.is_fully_sharded:
        turns = places_of_ranks(layout.places, mesh.shape.replicate)[mesh.place.replicate]
    else:
        turns = places_of_ranks(layout.places, mesh.num_ranks)[mesh.rank]
    return frozenset(place.name for place in turns)


def held_by(
    parts: Iterable[nn.Module],
    places: Mapping[str, TensorPlace],
    *,
    published: frozenset[str],
    copies: frozenset[nn.Parameter],
) -> Iterator[Held]:
    """What the rank holds of what is trained, part by part; `places` are the layout's, by name.

    Of the tensors that it publishes the end of a pipeline leaves a tied embedding, one of `copies`, to its
    start.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                continue
            box, is_first = _box_of(places[name], parameter)
            # With grad mode on, to_local() of a parameter refuses edits.
            local = local_of(parameter.detach())
            yield Held(
                box=box,
                local=local if local.ndim else local.view(1),  # as the run describes a scalar
                publishes=name in published and is_first and parameter not in copies,
            )


def _box_of(place: TensorPlace, parameter: Tensor) -> tuple[Box, bool]:
    """The box, and whether this is the first of the tensor-parallel ranks that hold it alike."""
    if not isinstance(parameter, DTensor):
        return Box(place=place, start=(0,) * len(place.shape), size=place.shape), True
    start, size = extent_of(parameter)
    mesh = parameter.device_mesh
    assert mesh.mesh_dim_names is not None
    is_first = all(
        not isinstance(placement, Replicate)
        or name == "replicate"
        or mesh.get_local_rank(name) == 0
        for name, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True)
    )
    return Box(place=place, start=start, size=size), is_first


def local_of(tensor: Tensor | None) -> Tensor:
    """The rank's own part of a tensor, which may be spread over ranks."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def extent_of(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the rank's part of a tensor that is spread over ranks begins, and its size."""
    assert isinstance(parameter, DTensor)
    size, start = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 in size:  # torch gives an empty shard a start behind the end
        start = (0,) * len(start)
    return tuple(start), tuple(size)


def fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Gives a rank's part of a tensor its values, from the whole of it on the CPU."""
    place = TensorPlace(name="", shape=tuple(whole.shape), offset=0, num_elements=whole.numel())
    box, _ = _box_of(place, parameter)
    local_of(parameter.detach()).copy_(box.of(whole.reshape(-1)))


WHOLE = slice(0, sys.maxsize)
"""The span of the whole canonical vector."""


def adopt_boxes(
    held: Iterable[Held],
    parameters: Vector,
    span: slice = WHOLE,
    *,
    copies: Copies = copy_in_turn,
) -> None:
    """Copies the rank's boxes of the canonical vector into its parameters."""
    whole = torch.from_numpy(parameters)
    copies((part.local, part.box.of(whole)) for part in _within(held, span))


def blend_boxes(
    held: Iterable[Held],
    parameters: Vector,
    span: slice,
    *,
    local_share: float,
    copies: Copies = copy_in_turn,
) -> None:
    """Mixes global parameters into the rank's own (Streaming DiLoCo, section 2.3).

    local = share · local + (1 - share) · global
    """
    whole = torch.from_numpy(parameters)
    for part in _within(held, span):
        part.local.lerp_(_beside(part, whole, copies), 1 - local_share)


def rebase_boxes(
    held: Iterable[Held],
    parameters: Vector,
    published: Vector,
    span: slice,
    *,
    local_share: float = 0.0,
    copies: Copies = copy_in_turn,
) -> None:
    """Moves the rank's own by what lies between what it published and the global parameters, or a part.

    local = local + (1 - share) · (global - published), where `published` begins with the span. So all that
    was trained since publishing stays.
    """
    whole, before = torch.from_numpy(parameters), torch.from_numpy(published)
    for part in _within(held, span):
        way = 1 - local_share
        part.local.sub_(_beside(part, before, copies, first=span.start), alpha=way)
        part.local.add_(_beside(part, whole, copies), alpha=way)


def _beside(part: Held, vector: Tensor, copies: Copies, *, first: int = 0) -> Tensor:
    """The box of a vector on the device of the rank's own values, one tensor at a time."""
    values = part.box.of(vector, first)
    if part.local.device == values.device:
        return values
    moved = torch.empty_like(part.local)
    copies([(moved, values)])
    return moved


def publish_boxes(
    held: Iterable[Held], into: Vector, span: slice, *, copies: Copies = copy_in_turn
) -> None:
    """Copies the boxes that this rank publishes to their places in a vector that begins with the span."""
    fragment = torch.from_numpy(into)
    copies(
        (part.box.of(fragment, span.start), part.local)
        for part in _within(held, span)
        if part.publishes
    )


def _within(held: Iterable[Held], span: slice) -> Iterator[Held]:
    """The boxes of the tensors that lie in a span; fragments hold whole tensors."""
    return (part for part in held if span.start <= part.box.place.offset < span.stop)
