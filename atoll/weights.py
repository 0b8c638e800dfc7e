"""A model's way to and from the outer state: which tensors, which part of each, in which arithmetic.

The outer state is fp32, and a model's parameters may be anything. Write g for the global value in fp32,
x for the local one, and r for rounding to the parameter's type. Adopting sets x = r(g), and publishing
must tell what was trained, not what was rounded away: it publishes g + (x − b), where b is the local
value that stands for g alone. After adopting b = r(g). Where adopting keeps a part of what was trained
("keep" and "blend" of the run's overlap), the local value should be t and is x = r(t), so b = x − (t − g),
which is kept in fp32. For fp32 parameters r changes nothing, and x itself is published.

All of it is computed where the parameter is, mostly on a GPU, and in pieces, for there is little room beside
it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from atoll.errors import ModelMismatchError

Overlap = Literal["none", "blend", "keep"]

_WRAPPERS = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module"}
    | {"_forward_module", "_original_module"}  # of Lightning Fabric
)
_PEFT = "base_model.model."
"""What a PeftModel puts before the names of the model within it."""
_NAMED_AT_MOST = 3

PIECE_ELEMENTS = 1 << 23
"""32 MiB in fp32, of which a device holds five at once."""

FEW = 64
"""Values of a tensor, at most, by which it is known again."""

_EXACT = (torch.float32, torch.float64)
"""Types that hold every value of the outer state."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor's place in the outer state."""

    name: str
    shape: tuple[int, ...]
    offset: int  # elements

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of a tensor: its own values, and where they lie in the whole."""

    place: Place
    local: Tensor
    start: tuple[int, ...]
    publishes: bool  # whether this rank does, of those that hold the same
    copies: tuple[Tensor, ...] = ()  # of `local`, that an optimizer keeps for itself

    def within(self, vector: Tensor, first: int = 0) -> Tensor:
        """The part within a vector that begins with this element of the canonical one.

        It is a view with the shape of `local`.
        """
        place = self.place
        begin = place.offset - first
        tensor = vector[begin : begin + place.num_elements].view(place.shape)
        for dim, (start, size) in enumerate(zip(self.start, self.local.shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def pieces(self) -> Iterator["Held"]:
        """The same, some rows at a time."""
        of_row = max(1, math.prod(self.local.shape[1:]))
        rows = max(1, PIECE_ELEMENTS // of_row)
        if not self.start or len(self.local) <= rows:
            yield self
            return
        first, *others = self.start
        for at in range(0, len(self.local), rows):
            yield replace(
                self,
                local=self.local[at : at + rows],
                start=(first + at, *others),
                copies=tuple(copy[at : at + rows] for copy in self.copies),
            )

    def put(self, values: Tensor) -> None:
        """Sets the values, and moves the copies by as much."""
        before = self.local.clone() if self.copies else self.local
        self.local.copy_(values)
        for copy in self.copies:
            moved = copy + (self.local.to(copy) - before.to(copy))
            # What was the same stays so, to the last bit.
            copy.copy_(torch.where(copy == before.to(copy), self.local.to(copy), moved))

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """By which what is remembered of it is found again."""
        return self.place.name, self.start


@dataclass(slots=True, kw_only=True)
class Weights:
    """A rank's model beside the two vectors of the outer state, in shared memory.

    Call it only between the model's steps: it reads and writes parameters in place.
    """

    model: nn.Module
    places: Sequence[Place]
    fragments: Sequence[tuple[int, int]]  # first element and number of elements of each
    overlap: Overlap
    local_share: float
    rank: int
    parameters: Tensor  # global, read-only
    published: Tensor  # local, of the fragment that was published last; it begins with that
    copies_of: Callable[[Tensor], Iterable[Tensor]] = lambda _: ()  # that an optimizer keeps
    # By the keys of pieces: b, where it is not r(g), in memory of the CPU …
    _bases: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)
    # … and x when it was published, of inexact types.
    _at_publish: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def adopt(self, fragment: int | None, *, is_taken: bool) -> None:
        """Takes over global parameters: of a fragment by the run's overlap, or all, and nothing stays."""
        for held in self._held(fragment):
            self._bases.pop(held.key, None)
            if fragment is None or self.overlap == "none":
                held.put(self._global(held))
            elif self.overlap == "keep" or not is_taken:
                # What was not taken is all still owed.
                share = self.local_share if is_taken else 0.0
                self._rebase(held, self.fragments[fragment][0], share)
            else:
                self._blend(held)

    @torch.no_grad()
    def publish(self, fragment: int) -> None:
        """Copies what this rank publishes of a fragment to shared memory."""
        for held in self._held(fragment):
            is_exact = held.local.dtype in _EXACT
            self._at_publish.pop(held.key, None)
            if not is_exact and self.overlap != "none":
                self._at_publish[held.key] = held.local.clone()
            if not held.publishes:
                continue
            target = held.within(self.published, self.fragments[fragment][0])
            if is_exact:
                target.copy_(held.local)
            else:
                new = self._global(held)
                target.copy_(new + (_fp32(held.local) - self._base_of(held, new)))

    @torch.no_grad()
    def aside(self) -> list[Tensor]:
        """Copies of all local values, in memory of the CPU."""
        return [held.local.to("cpu", copy=True) for held in self._held(None)]

    @torch.no_grad()
    def put_back(self, values: Iterable[Tensor]) -> None:
        """Undoes what was done to the model since `aside`."""
        for held, value in zip(self._held(None), values, strict=True):
            held.local.copy_(value)

    @torch.no_grad()
    def show_global(self) -> None:
        """Lets the model have the global parameters for a while; `put_back` ends it."""
        for held in self._held(None):
            held.local.copy_(self._global(held))

    @torch.no_grad()
    def bits(self) -> dict[str, tuple[int, ...]]:
        """Sums of the bits that are held of each tensor, by which is seen what a step has changed."""
        found: dict[str, tuple[int, ...]] = {}
        for held in self._held(None):
            if held.local.numel():
                name = held.place.name
                found[name] = (*found.get(name, ()), bits_of(held.local))
        return found

    @torch.no_grad()
    def few(self, of: nn.Module | None = None) -> Tensor:
        """A few values of each tensor of the model, or of a copy of it, by which they are known again."""
        model = self.model if of is None else of  # some have a length, and may be false
        reshard(model)
        tensors = tensors_of(model, self.places)
        return few_of_all(tensors[place.name] for place in self.places)

    @torch.no_grad()
    def flat(self) -> set[str]:
        """Tensors whose values here are all the same, by a few of them: norms before they are trained."""
        reshard(self.model)
        few = {name: _few(tensor) for name, tensor in tensors_of(self.model, self.places).items()}
        return {name for name, each in few.items() if len(each) and bool((each == each[0]).all())}

    def types_of(self, model: nn.Module) -> set[torch.dtype]:
        """Types of what the run trains of the model, or of a copy of it."""
        return {tensor.dtype for tensor in tensors_of(model, self.places).values()}

    @torch.no_grad()
    def are_finite(self) -> bool:
        """Whether all values held are numbers."""
        return all(bool(held.local.isfinite().all().item()) for held in self._held(None))

    def _rebase(self, held: Held, first: int, share: float) -> None:
        """Keeps what was trained since publishing: local + (1 − share) · (global − published)."""
        new = self._global(held)
        published = held.within(self.published, first).to(held.local.device)
        if held.local.dtype in _EXACT:
            rest = held.local.sub(published.to(held.local), alpha=1 - share)
            held.put(rest.add_(new.to(held.local), alpha=1 - share))
            return
        # Of a model whose type has changed since, what it published says what it held then.
        then = self._at_publish.get(held.key, published).to(held.local.device)
        since = _fp32(held.local) - _fp32(then)
        self._settle(held, new + since + share * (published - new), new)

    def _blend(self, held: Held) -> None:
        """Mixes: local = share · local + (1 − share) · global."""
        new = self._global(held)
        if held.local.dtype in _EXACT:
            held.put(held.local.lerp(new.to(held.local), 1 - self.local_share))
            return
        self._settle(held, _fp32(held.local).lerp(new, 1 - self.local_share), new)

    def _settle(self, held: Held, target: Tensor, new: Tensor) -> None:
        """Sets a parameter to `target`, rounded, and remembers what then stands for global alone."""
        held.put(target)
        self._bases[held.key] = (_fp32(held.local) - (target - new)).to("cpu")

    def _base_of(self, held: Held, new: Tensor) -> Tensor:
        base = self._bases.get(held.key)
        return _fp32(new.to(held.local.dtype)) if base is None else base.to(held.local.device)

    def _global(self, held: Held) -> Tensor:
        """The global values in fp32, where the parameter is."""
        return held.within(self.parameters).to(held.local.device)

    def _held(self, fragment: int | None) -> Iterator[Held]:
        """What the rank holds of a fragment, or of all, in pieces, to be read or changed in place."""
        reshard(self.model)
        first, past = 0, len(self.parameters)
        if fragment is not None:
            first, num_elements = self.fragments[fragment]
            past = first + num_elements
        tensors = tensors_of(self.model, self.places)
        check_shapes(tensors, self.places)
        for place in self.places:
            if first <= place.offset < past:
                tensor = tensors[place.name]
                held = held_of(place, tensor, rank=self.rank)
                copies = tuple(
                    held_of(place, copy, rank=self.rank).local for copy in self.copies_of(tensor)
                )
                yield from replace(held, copies=copies).pieces()


def check_model(model: nn.Module, places: Sequence[Place], *, may_be_frozen: bool = False) -> None:
    """Raises ModelMismatchError unless what the model trains is what the run trains, name by name.

    A loop that has trained `may_be_frozen` in part for now, as one network of a GAN while the other trains.
    """
    tensors = tensors_of(model, places)
    check_shapes(tensors, places, besides=_trained_besides(model, tensors))
    own: dict[tuple[int, int], str] = {}
    for place in places:
        tensor = tensors[place.name]
        if (other := own.setdefault(_memory_of(tensor), place.name)) != place.name:
            raise ModelMismatchError(
                f"the run trains {other} and {place.name} apart, and in this model they are tied: one tensor "
                "cannot hold the values of both",
                next_step="build it as the run's, for transformers with tie_word_embeddings=False",
            )
        if isinstance(tensor, nn.Parameter) and not (tensor.requires_grad or may_be_frozen):
            raise ModelMismatchError(
                f"the run trains {place.name}, and it is frozen in this model",
                next_step="call requires_grad_(True) on it, and freeze it after join if it is to rest then; "
                "or bring what the run freezes too",
            )
    check_trains_no_more(model, places)


def check_shapes(
    tensors: Mapping[str, Tensor],
    places: Iterable[Place],
    *,
    besides: Sequence[tuple[str, tuple[int, ...]]] = (),
) -> None:
    """Raises ModelMismatchError where the model lacks a tensor of the run, or has one of another shape.

    Also in mid-run: a weight that is parametrized, pruned or merged has another name, and embeddings are
    resized.
    """
    absent = [place for place in places if place.name not in tensors]
    if absent:
        raise ModelMismatchError(
            f"the run trains {listed((p.name, p.shape) for p in absent)}, and this model has no such tensor"
            + (f"; what it trains is {listed(besides)}" if besides else ""),
            next_step=_AS_THE_RUN_ADAPTS
            if all(_is_of_adapter(place.name) for place in absent)
            else "bring the model that the run was made for, and let it have those tensors until the "
            "loop has left",
        )
    for place in places:
        shape = tuple(tensors[place.name].shape)
        if (shape or _SCALAR) != place.shape:
            raise ModelMismatchError(
                f"{place.name} is {list(shape)} in this model and {list(place.shape)} in the run",
                next_step=_AS_THE_RUN_ADAPTS
                if _is_of_adapter(place.name)
                else "bring a model of the run's sizes, and do not change them until the loop has left",
            )


_AS_THE_RUN_ADAPTS = (
    "call get_peft_model as the run does, by the rank and the targets under [lora] in its run.toml "
    '(target_modules="all-linear" where it has none) and with the adapter\'s usual name'
)


def _is_of_adapter(name: str) -> bool:
    """Whether peft gives such a name."""
    return ".lora_" in name


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """By which two parameters over the same values are found, as `.data` of one given to another.

    Of one that is sharded, or has no values here, the tensor itself.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.data_ptr():
        return id(tensor), -1
    return tensor.data_ptr(), tensor.numel()


def check_trains_no_more(model: nn.Module, places: Sequence[Place]) -> None:
    """Raises ModelMismatchError where the model trains what the run does not.

    As one does whose layers are unfrozen, or added, while the loop goes on: each node would have its own.
    """
    if more := _trained_besides(model, tensors_of(model, places)):
        raise ModelMismatchError(
            f"this model trains {listed(more)}, which the run does not",
            next_step="freeze it with requires_grad_(False), or leave out of LoraConfig what the run's has "
            "not, as use_dora, bias or modules_to_save"
            if any(_is_of_adapter(place.name) for place in places)
            else "freeze it with requires_grad_(False), or bring the run's model; "
            "load_state_dict(assign=True) unties what was tied",
        )


def _trained_besides(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> list[tuple[str, tuple[int, ...]]]:
    known = {id(tensor) for tensor in tensors.values()}
    return [
        (canonical(name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]


def check_scaling(model: nn.Module, scaling: float | None) -> None:
    """Raises ModelMismatchError where adapters add another multiple of their product than in the run.

    No shape shows that: nodes would train the same adapters for different models. None: no such run.
    """
    for name, adapter, found in scalings_of(model):
        if scaling is not None and not math.isclose(found, scaling, rel_tol=1e-6):
            raise ModelMismatchError(
                f"the adapter {adapter!r} of {canonical(name)} is scaled by {found:g}, and the run's by "
                f"{scaling:g}, which is alpha / rank of its [lora]",
                next_step="give LoraConfig the run's lora_alpha, and leave use_rslora out",
            )


def scalings_of(model: nn.Module) -> Iterator[tuple[str, str, float]]:
    """Modules with adapters of peft, each adapter, and by what it is scaled."""
    for name, module in model.named_modules():
        own = getattr(module, "scaling", None)
        if isinstance(own, dict) and hasattr(module, "lora_A"):
            for adapter, scaling in own.items():
                yield name, adapter, scaling


def tensors_of(model: nn.Module, places: Iterable[Place]) -> dict[str, Tensor]:
    """The model's tensors under the run's names; those of a tied one may all be given.

    Parameters, and buffers that the run names.
    """
    wanted = {place.name for place in places}
    found: dict[str, Tensor] = {}
    for named in (model.named_buffers, model.named_parameters):
        for name, tensor in named(remove_duplicate=False):
            for known in spellings(name):
                if known in wanted:
                    found[known] = tensor
    return found


def spellings(name: str) -> tuple[str, str, str]:
    """What a run may call a tensor: as the model does, or without its wrappers, or without peft's too."""
    bare = canonical(name)
    return name, bare, bare.removeprefix(_PEFT)


def canonical(name: str) -> str:
    """A tensor's name without what wrappers of torch and of Lightning Fabric put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def held_of(place: Place, tensor: Tensor, *, rank: int) -> Held:
    """What this rank holds of a tensor, which may be spread over ranks as a DTensor.

    Of ranks that hold the same the first one publishes: where nothing is spread, rank 0.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    values = tensor.detach()  # with grad mode on, to_local() of a parameter refuses edits
    if not isinstance(values, DTensor):
        start = (0,) * len(place.shape)
        local = values if values.ndim else values.view(_SCALAR)
        return Held(place=place, local=local, start=start, publishes=rank == 0)
    mesh, placements = values.device_mesh, values.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise ModelMismatchError(
            f"{place.name} is a sum over ranks that nobody holds: {placements}"
        )
    size, offset = compute_local_shape_and_global_offset(values.shape, mesh, placements)
    if 0 in size:  # torch gives an empty shard a start behind the end
        offset = (0,) * len(size)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    is_first = all(
        at == 0
        for at, placement in zip(coordinate, placements, strict=True)
        if isinstance(placement, Replicate)
    )
    assert all(isinstance(placement, (Replicate, Shard)) for placement in placements), placements
    return Held(place=place, local=values.to_local(), start=tuple(offset), publishes=is_first)


def reshard(model: nn.Module) -> None:
    """After a forward without a backward FSDP2's parameters are whole, and edits of them vanish."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_SCALAR = (1,)
"""The shape of a scalar in the run's description."""


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32)


def local_of(tensor: Tensor) -> Tensor:
    """The values that this rank holds of it."""
    from torch.distributed.tensor import DTensor

    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def few_of_all(tensors: Iterable[Tensor]) -> Tensor:
    """Some values that this rank holds of each tensor, evenly chosen, in fp32: it costs one copy of them."""
    few = [_few(tensor) for tensor in tensors]
    if not few:
        return torch.empty(0)
    return _fp32(torch.cat([each.to(few[0].device) for each in few]))


def parts_of(local: Tensor) -> tuple[Tensor, ...]:
    """What is stored of it: values, and of a sparse one, as a graph's edges, after where they are."""
    match local.layout:
        case torch.sparse_coo:
            return local._indices(), local._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return local.crow_indices(), local.col_indices(), local.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return local.ccol_indices(), local.row_indices(), local.values()
    return (local.resolve_conj().resolve_neg(),)


def _few(tensor: Tensor) -> Tensor:
    *_, local = parts_of(local_of(tensor))
    if local.is_complex():
        local = torch.view_as_real(local)
    step = local.numel() // FEW + 1
    if local.is_contiguous():
        return local.view(-1)[::step]
    chosen = torch.arange(0, local.numel(), step, device=local.device)
    return local[torch.unravel_index(chosen, local.shape)]


def bits_of(local: Tensor) -> int:
    """A sum of the bits of its values, the same on every device: no order of adding changes it."""
    bits = 0
    for part in parts_of(local):
        own = torch.view_as_real(part) if part.is_complex() else part
        bits += int(own.view(_BITS[own.element_size()]).sum().item())
    return bits


def listed(named: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """The first few names with their shapes, and how many more."""
    all_named = list(named)
    told = ", ".join(f"{name} {list(shape)}" for name, shape in all_named[:_NAMED_AT_MOST])
    more = len(all_named) - _NAMED_AT_MOST
    return f"{told} and {more} more" if more > 0 else told
