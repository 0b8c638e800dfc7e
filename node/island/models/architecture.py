"""The interface between training and a model: what engine and trainer ask of any architecture.

Rooms beside this one answer for the decoder that comes with Atoll, for models of transformers and for
modules that a function returns. Without torch nothing here works; what the daemon must know of a model
stands in the run's description (protocol.run.models), by which mesh_shape refuses meshes.
"""

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import blake3
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from node.island.data.dataset import Tree
from node.island.models.running_statistics import statistics_of
from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import LossScale
from node.outer_state import Vector
from protocol.errors import BadDataError, ConfigError, ProtocolMismatchError
from protocol.run.models import Layout, TensorShape
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.parallel.pipeline import Pipeline


class Counted(NamedTuple):
    """What an objective gives that knows only as it computes how much it counts: a sum, and a number."""

    total: Tensor
    number: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What the inner optimizers do with parameters beyond a plain step."""

    matrices: frozenset[nn.Parameter]
    """Those that Muon takes."""

    tables: frozenset[nn.Parameter]
    """Embeddings: their rows are looked up, so they do not decay."""


class Architecture(Protocol):
    """One run's model. All ranks make the same calls in the same order.

    What is written out here is so where an architecture says nothing else.
    """

    draws: bool
    """Whether training draws random numbers, as dropout does."""

    has_metric: bool
    """Whether evaluation has a metric beside the loss."""

    divides_by_all: bool
    """Whether its mean is over all targets, counted or not, for the trainer to set right."""

    may_leave_parameters_out: bool
    """Whether a batch may leave parameters without a gradient."""

    def part(self, mesh: Mesh, stage: int) -> nn.Module:
        """A stage of the model, or all of it, whose parameters hold nothing yet; buffers may be real."""

    def cut_by_tensor(self, part: nn.Module, devices: DeviceMesh) -> None:
        """Spreads matrices over the ranks of a tensor group."""

    def cut_by_context(self, part: nn.Module, mesh: Mesh) -> None:
        """Has attention ask the other ranks of a context group for their keys and values."""
        raise AssertionError("check_shape has refused it")

    def gathered_together(
        self, part: nn.Module, dtype: torch.dtype
    ) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
        """Modules whose shards travel together, inner ones first, and the precision they travel in."""

    def fill_buffers(self, part: nn.Module, mesh: Mesh, device: torch.device) -> None:
        """Computes the buffers that the part was built without."""
        return

    def layers(self, part: nn.Module) -> Sequence[nn.Module]:
        """What is recomputed and compiled one by one."""

    def objective(self, part: nn.Module) -> nn.Module:
        """Inputs to a mean loss, or to a Counted one."""

    def pipeline(
        self,
        parts: list[nn.Module],
        mesh: Mesh,
        device: torch.device,
        *,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> "Pipeline":
        """The parts under a pipeline's schedule."""

    def inputs(self, batch: Tree) -> tuple[Tree, ...]:
        """What the objective takes of a batch."""

    def padded(self, inputs: tuple[Tree, ...], rows: int) -> tuple[Tree, ...]:
        """Inputs of at least one and at most `rows` samples for a measure that all ranks make alike."""

    def measured(
        self, mean: Tensor | Counted, inputs: tuple[Tree, ...], num_samples: int
    ) -> tuple[Tensor, Tensor | float]:
        """A sum and its weight of an objective's answer; `num_samples` of the inputs are no padding."""

    def metric(self, part: nn.Module, inputs: tuple[Tree, ...]) -> Tensor | None:
        """A mean over the inputs that people asked for beside the loss."""
        return None

    def frozen_values(self, names: Iterable[str], base: Path | None) -> dict[str, Tensor]:
        """Values of what is not trained, whole and on the CPU; raises AtollError.

        `names` are of parameters, and of buffers that checkpoints have. The latter may be left out where
        each node makes them alike.
        """
        raise AssertionError("all of it is trained")

    def roles(self, part: nn.Module) -> Roles:
        """What the inner optimizers do with its parameters."""

    def copies(self, part: nn.Module) -> frozenset[nn.Parameter]:
        """Parameters whose first use is in another stage."""

    def tied(self, part: nn.Module) -> nn.Parameter | None:
        """What the first and the last stage have in common, if this is one of them."""


def architecture_of(spec: RunSpec) -> Architecture:
    """The room that knows the run's model; only that one is imported."""
    match spec.model.source:
        case "decoder":
            from node.island.models.decoder import DecoderArchitecture

            return DecoderArchitecture(spec)
        case "transformers":
            from node.island.models.transformers import TransformersArchitecture

            return TransformersArchitecture(spec)
        case "function":
            from node.island.models.function import FunctionArchitecture

            return FunctionArchitecture(spec)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are built within it have parameters on the meta device, and real buffers.

    A parameter takes its memory for a moment at most, and none where nothing is written into it.
    Buffers are constants more often than not, which nobody could compute again from outside.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]  # put back below
    try:
        with warnings.catch_warnings():
            # Code that loads a checkpoint does so in vain here, which torch tells of each parameter.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_memory(part: nn.Module, *, parameters_on: torch.device, buffers_on: torch.device) -> None:
    """Gives parameters memory that nobody has written to, and moves real buffers to their device.

    Parameters that are one stay one: torch would make as many of them as modules have them.
    """
    shared = shared_names(part)

    def placed(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=parameters_on) if tensor.is_meta else tensor
        return (
            torch.empty_like(tensor, device=buffers_on) if tensor.is_meta else tensor.to(buffers_on)
        )

    part._apply(placed)  # type: ignore[no-untyped-call]  # private, and what to_empty() is made of
    tie(part, shared)


def shared_names(part: nn.Module) -> list[list[str]]:
    """Names of parameters that are one, in the module's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(part: nn.Module, shared: Iterable[list[str]]) -> None:
    """Makes parameters one again that were one."""
    for first, *others in shared:
        parameter = part.get_parameter(first)
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(part.get_submodule(owner), own, parameter)


@torch.no_grad()
def copy_parameters(module: nn.Module, layout: Layout, parameters: Vector) -> None:
    """Gives a module on the CPU the weights of a canonical vector, in the types that its own have."""
    named = dict(module.named_parameters())
    for place in layout.places:
        own = named[place.name]
        part = parameters[place.offset : place.offset + place.num_elements].reshape(own.shape)
        # Of a copy: a snapshot's vector cannot be written, and torch warns.
        own.copy_(torch.from_numpy(part.copy()))


def container_of_layers(module: nn.Module) -> tuple[str, list[str]]:
    """The name of what holds the layers, and their names in it; ("", []) where no modules are alike.

    Of lists, sequences and dictionaries of modules of one class, that with the most parameters, and
    then modules: experts of a layer are alike as well, and have fewer than all layers together.
    """
    most, found = (0, 0), ("", list[str]())
    for name, candidate in module.named_modules():
        if not isinstance(candidate, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = dict(candidate.named_children())
        if len({type(child) for child in children.values()}) != 1:
            continue
        if len(children) < 2 and isinstance(candidate, nn.Sequential):
            continue
        size = sum(p.numel() for p in candidate.parameters() if p.requires_grad)
        if size and (size, len(children)) > most:
            most, found = (size, len(children)), (name, list(children))
    return found


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers that container_of_layers finds."""
    name, keys = container_of_layers(module)
    children = dict(module.get_submodule(name).named_children())
    return [children[key] for key in keys]


def tensors_of(module: nn.Module) -> list[TensorShape]:
    """What is trained, in the module's order, with the layer of each; what is one counts once.

    Raises ConfigError for a parameter without values.
    """
    container, keys = container_of_layers(module)
    layer_of = {key: index for index, key in enumerate(keys)}
    prefix = f"{container}." if container else ""
    shapes = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.numel():
            raise ConfigError(
                f"the parameter {name} of shape {list(parameter.shape)} has no values to train",
                next_step="remove it, or set its requires_grad to False",
            )
        key = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        # pydantic wants positive sizes, and a scalar is one value
        shape = tuple(parameter.shape) or (1,)
        shapes.append(TensorShape(name=name, shape=shape, layer=layer_of.get(key)))
    return shapes


def roles_of(part: nn.Module) -> Roles:
    """By kind of module: tables are embeddings', matrices all others of two dimensions within layers.

    Where no modules are alike, all matrices but those of the last module that has one: the head's.
    """
    tables = {
        parameter
        for module in part.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    layers = layers_of(part)
    within = (
        [p for layer in layers for p in layer.parameters()] if layers else list(part.parameters())
    )
    matrices = [p for p in within if p.ndim == 2 and p.requires_grad and p not in tables]
    return Roles(
        matrices=frozenset(matrices if layers else matrices[:-1]), tables=frozenset(tables)
    )


def kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of a module's checkpoints, by their names."""
    return {
        f"{name}.{own}" if name else own: buffer
        for name, each in module.named_modules()
        for own, buffer in each.named_buffers(recurse=False)
        if own not in each._non_persistent_buffers_set
    }


def digest_of_values(values: Mapping[str, Tensor]) -> str:
    """BLAKE3, in hex, of names, shapes and fp32 values in their order: by it nodes prove what is frozen."""
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for name, value in values.items():
        hasher.update(f"{name}:{tuple(value.shape)};".encode())
        in_bytes: Any = value.to(torch.float32).contiguous().reshape(-1).view(torch.uint8).numpy()
        hasher.update(in_bytes)
    return hasher.hexdigest()


FEW, MOST_COMPARED = 8, 256
"""Values of a frozen parameter, and how many parameters, that a run's description tells."""

SUMS, MOST_SUMMED = " sums", 4096
"""Behind a name: sums of all values of the parameter; and of how many parameters there are some."""

_ROW, _NUM_SUMS, _ROWS_AT_ONCE = 1024, 4, 1 << 10


def few_values_of(values: Mapping[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """A few values of what is frozen, and sums of all, by which a loop's are known that may be rounded.

    The few are from the middles of equal parts, as atoll.frozen takes them; of many tensors, of some. Sums
    stand behind the name with SUMS: packages of loops from before there were any do not look there.
    """
    names = [name for name, value in values.items() if value.is_floating_point() and value.numel()]
    few = {}
    of_few = -(-len(names) // MOST_COMPARED) or 1
    for number, name in enumerate(names[:: -(-len(names) // MOST_SUMMED) or 1]):
        flat = values[name].detach().reshape(-1)
        sums = sums_of(flat)
        if not all(map(math.isfinite, sums)):
            continue
        count = FEW if number % of_few == 0 else 1
        places = [(2 * place + 1) * len(flat) // (2 * count) for place in range(count)]
        found = flat[places].to(torch.float64)
        few[name] = tuple(float(f"{value:.6g}") for value in found.tolist())
        few[name + SUMS] = tuple(float(f"{value:.9g}") for value in sums)
    return few


def sums_of(flat: Tensor) -> tuple[float, ...]:
    """Of all values with signs in a fixed lot, as atoll.frozen takes them, which says why."""
    columns, rows = _signs("places", _ROW), _signs("rows", -(-len(flat) // _ROW))
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = flat[first * _ROW : (first + _ROWS_AT_ONCE) * _ROW].to("cpu", torch.float32)
        part = nn.functional.pad(part, (0, -len(part) % _ROW)).view(-1, _ROW)
        sums += ((part @ columns) * rows[first : first + len(part)]).sum(0, dtype=torch.float64)
    return tuple(sums.tolist())


def _signs(of: str, count: int) -> Tensor:
    drawn = hashlib.shake_256(f"atoll frozen {of}".encode()).digest(-(-count * _NUM_SUMS // 8))
    octets = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
    bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[: count * _NUM_SUMS].view(count, _NUM_SUMS).float() * 2 - 1


def check_frozen(values: Mapping[str, Tensor], theirs: str | None, *, base: Path | None) -> None:
    """Raises BadDataError when what is not trained is not the run's, whose digest is `theirs`.

    It is of the model in `base`; with None the run's function makes it.
    """
    if (ours := digest_of_values(values)) == theirs:
        return
    digests = f"its digest is {ours[:12]}…, and the run's is {(theirs or 'not known')[:12]}…"
    if base is None:
        raise BadDataError(
            f"what the run's function makes and does not train is not the same here: {digests}",
            next_step="install the torch that the run's owner has, and let the function load the same files",
        )
    raise BadDataError(
        f"the model in {base} is not the one that this run adapts: {digests}",
        next_step="name the folder of the very model that the run was made from, with --base or as base in "
        "node.toml; another revision of it is another model",
    )


def check_tensors(module: nn.Module, spec: RunSpec) -> None:
    """Raises ProtocolMismatchError when a module is not the one that the run describes."""
    described = {tensor.name: tensor.shape for tensor in spec.tensors}
    built = {tensor.name: tensor.shape for tensor in tensors_of(module)}
    for name in [*described, *built]:
        theirs, ours = described.get(name), built.get(name)
        if theirs != ours:
            raise ProtocolMismatchError(
                f"the run's model has {_words(name, theirs)}, and the one that is built here "
                f"{_words(name, ours, again=True)}",
                next_step="install the versions that the run was made with, or have its owner describe "
                "it anew: 'atoll node describe DIR --force'",
            )
    if [tensor.name for tensor in spec.tensors] != list(built):
        raise ProtocolMismatchError(
            "the run's model has the same tensors as the one that is built here, in another order",
            next_step="have the run's owner describe it anew: 'atoll node describe DIR --force'",
        )


def _words(name: str, shape: tuple[int, ...] | None, *, again: bool = False) -> str:
    whose = "it" if again else name
    if shape is None:
        return f"no {name}"
    return f"{whose} of {' × '.join(map(str, shape))}"


class BufferWatch:
    """Refuses modules whose training changes buffers of their checkpoints, but for what norms remember.

    They are in no exchange, so every node would go on with its own, and say nothing of it. What no checkpoint
    has (`persistent=False`) is no part of the model: nodes may differ in it.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._parts = list(parts)
        self._statistics = statistics_of(self._parts).keys()  # which are computed anew
        self._before = {
            place: (_owner_kind(self._parts[place[0]], place[1]), each, each._version, each.clone())
            for place, each in self._buffers()
        }

    def check(self) -> None:
        """Raises ConfigError with the name of the first buffer that was written to, or has other values.

        What writes to `.data`, as codebooks do, is not in torch's own counter of changes.
        """
        now = dict(self._buffers())
        for place, (kind, was, version, value) in self._before.items():
            buffer = now.get(place)
            if buffer is not was or buffer._version != version or not holds(buffer, value):
                raise changed_buffer(place[1], kind)

    def _buffers(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """By the number of their part and their name: stages of one rank have the same names."""
        for number, part in enumerate(self._parts):
            for name, buffer in kept_buffers(part).items():
                if name not in self._statistics:
                    yield (number, name), buffer


def holds(buffer: Tensor, was: Tensor) -> bool:
    """Whether a buffer of the same shape has these values; what is no number is one."""
    if buffer.layout is not torch.strided:  # sparse, as the edges of a graph
        return buffer.layout is was.layout and all(
            own.shape == other.shape and holds(own, other)
            for own, other in zip(_parts_of(buffer), _parts_of(was), strict=True)
        )
    return torch.equal(buffer, was) or (
        buffer.is_floating_point() and torch.allclose(buffer, was, rtol=0, atol=0, equal_nan=True)
    )


def _parts_of(sparse: Tensor) -> tuple[Tensor, ...]:
    """Where a sparse tensor has values, and the values."""
    if sparse.layout is torch.sparse_coo:
        sparse = sparse.coalesce()
        return sparse.indices(), sparse.values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def _owner_kind(part: nn.Module, name: str) -> str:
    return type(part.get_submodule(name.rpartition(".")[0])).__name__


def changed_buffer(name: str, kind: str) -> ConfigError:
    """What to say of a buffer that training changes."""
    return ConfigError(
        f"training changes the buffer {name} of a {kind}, and buffers are not exchanged: nodes would "
        "end with different models",
        next_step="make it a parameter, or compute it from the batch; where nodes may differ in it, register "
        "it with persistent=False",
    )


@contextmanager
def keeping_parameters(module: nn.Module) -> Iterator[None]:
    """Raises ConfigError where what is computed within it has changed a parameter in its place.

    As a model does that scales its weights to evaluate, and back to train: other weights come between.
    """
    before = {name: each._version for name, each in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        if parameter._version != before[name]:
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"{type(module).__name__} changes the parameter {name} of a {kind} as it is evaluated: it "
                "would change it back after other weights have come",
                next_step="leave parameters alone there; an RWKV does so with rescale_every = 0 in its "
                "config.json",
            )


def refuse_shared_memory(module: nn.Module) -> None:
    """Raises ConfigError for two parameters over the same values, as `.data` of one given to another.

    What is one in torch would be two here, trained apart.
    """
    places: dict[tuple[int, int], str] = {}
    for name, parameter in module.named_parameters():
        if not parameter.numel():
            continue
        other = places.setdefault((parameter.data_ptr(), parameter.numel()), name)
        if other != name:
            raise ConfigError(
                f"the parameters {other} and {name} are two over the same values: they would be trained "
                "apart",
                next_step="tie them as one parameter, as head.weight = table.weight does",
            )
