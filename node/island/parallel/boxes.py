"""Which part of which tensor a rank holds, and its way to and from the canonical vector.

Whatever the mesh, what a rank holds of a tensor is one n-dimensional box. Boxes of all ranks
together cover the canonical vector exactly once, so contributions do not depend on the mesh.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import Copies, copy_in_turn
from node.outer_state import Vector
from protocol.run.layout import Layout, TensorPlace


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
    if mesh.shape.is_fully_sharded:
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
            values = parameter.detach()
            yield Held(
                box=box,
                local=values.to_local() if isinstance(values, DTensor) else values,
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
    values = parameter.detach()
    local = values.to_local() if isinstance(values, DTensor) else values
    local.copy_(box.of(whole.reshape(-1)))


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
