"""Where each tensor of the model lies in the canonical vector: what all nodes of a run must agree on.

From names and shapes alone (protocol.run.models), so the coordinator knows it before any node comes, and
the daemon without torch. Ranks compare it with the module that they have built.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import blake3

from protocol.run.run_spec import RunSpec
from protocol.wire.rounds import Digest, LayoutSummary

NamedShape = tuple[str, tuple[int, ...]]
"""A tensor's name and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor's place in the canonical vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A contiguous run of whole tensors that is synchronised together."""

    index: int
    start: int  # elements
    num_elements: int

    @property
    def span(self) -> slice:
        """Where the fragment lies in the canonical vector."""
        return slice(self.start, self.start + self.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every tensor's place, and the fragments that cover them."""

    places: tuple[TensorPlace, ...]
    fragments: tuple[Fragment, ...]

    @classmethod
    def of(cls, *fragments: Sequence[NamedShape]) -> "Layout":
        """Lays fragments out one after the other, and so the tensors of each, in the order given."""
        places: list[TensorPlace] = []
        spans: list[Fragment] = []
        offset = 0
        for index, shapes in enumerate(fragments):
            start = offset
            for name, shape in shapes:
                num_elements = math.prod(shape)
                places.append(
                    TensorPlace(name=name, shape=shape, offset=offset, num_elements=num_elements)
                )
                offset += num_elements
            spans.append(Fragment(index=index, start=start, num_elements=offset - start))
        return cls(places=tuple(places), fragments=tuple(spans))

    @property
    def num_elements(self) -> int:
        """Elements of the whole model."""
        return sum(fragment.num_elements for fragment in self.fragments)

    @property
    def largest_fragment(self) -> int:
        """Elements of the largest fragment: what a vector must have that holds any one of them."""
        return max(fragment.num_elements for fragment in self.fragments)

    def span_of(self, fragment: int, start: int, num_elements: int) -> slice:
        """Where a slice of a fragment lies in the canonical vector."""
        start += self.fragments[fragment].start
        return slice(start, start + num_elements)

    def summary(self) -> LayoutSummary:
        """What the coordinator compares between nodes."""
        hasher = blake3.blake3()
        for place in self.places:
            shape = ",".join(map(str, place.shape))
            hasher.update(f"{place.name}:{shape}@{place.offset};".encode())
        for fragment in self.fragments:
            hasher.update(f"fragment {fragment.start}+{fragment.num_elements};".encode())
        return LayoutSummary(
            digest=Digest(hasher.digest()),
            fragment_elements=tuple(fragment.num_elements for fragment in self.fragments),
        )


def layout_of(spec: RunSpec) -> Layout:
    """The run's layout: fragment by fragment, each in the model's own order.

    Strided (Streaming DiLoCo, Douillard et al. 2025, section 2.1): fragment k of F holds layers
    k, k + F, …, so that every round touches the model in all depths. What belongs to no layer goes,
    the largest first, to the fragment that is smallest by then. Raises ConfigError for a model
    without its description.
    """
    tensors, num_fragments = spec.tensors, spec.exchange.fragments
    sizes = [0] * num_fragments
    fragment_of: dict[str, int] = {}
    for tensor in tensors:
        if tensor.layer is not None:
            fragment_of[tensor.name] = tensor.layer % num_fragments
            sizes[tensor.layer % num_fragments] += tensor.num_elements
    outside_layers = [tensor for tensor in tensors if tensor.layer is None]
    for tensor in sorted(outside_layers, key=lambda each: each.num_elements, reverse=True):
        smallest = sizes.index(min(sizes))
        fragment_of[tensor.name] = smallest
        sizes[smallest] += tensor.num_elements
    return Layout.of(
        *(
            [(tensor.name, tensor.shape) for tensor in tensors if fragment_of[tensor.name] == index]
            for index in range(num_fragments)
        )
    )
