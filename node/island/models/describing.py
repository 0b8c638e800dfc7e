"""What building a run's model shows, for its description; and the weights that it begins with.

The model is built without memory for its parameters, and computes nothing: operations and what backward
keeps are counted on shapes alone, where the model allows it.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from node.island.data.dataset import Tree
from node.island.models.architecture import (
    changed_buffer,
    copy_parameters,
    kept_buffers,
    tensors_of,
)
from node.island.models.running_statistics import (
    num_norms_of,
    spectral_vectors_of,
    statistics_of,
)
from node.outer_state import Vector
from protocol.errors import AtollError, ConfigError, UsageError
from protocol.run.models import Description, TensorShape, layout_of
from protocol.run.run_spec import RunSpec

log = structlog.get_logger()


def describe(spec: RunSpec, folder: Path | None) -> Description:
    """Builds the run's model on shapes alone, and says what coordinator and nodes must know of it.

    `folder` is that of a transformers model, or where a run's functions are found beside what is
    installed. Raises AtollError.
    """
    match spec.model.source:
        case "decoder":
            return Description()
        case "transformers":
            from node.island.models.transformers_described import described, how_to_train_less

            assert folder is not None
            model, found = described(spec, folder)
            loss, batch = _loss_of_tokens(model, spec)
            to_leave_out = how_to_train_less(model, spec)
        case "function":
            from node.island.models.function_described import described_function

            model, found, loss, batch = described_function(spec, folder)
            to_leave_out = "remove it, or set its requires_grad to False"
    tensors = tensors_of(model)
    if not tensors:
        raise ConfigError(
            "the model has no parameter that is trained",
            next_step="leave requires_grad at True for those that are",
        )
    _refuse_other_types(model)
    is_known = loss is not None and batch is not None
    # What loops compute, and of what, is theirs.
    counted = _counted(model, loss, batch, to_leave_out) if is_known else None
    if is_known and counted is None and spec.model.source == "function":
        from node.island.models.function_described import compute_once

        compute_once(spec, batch)
    flops, activation_bytes = (_formula(model, tensors, spec), None) if counted is None else counted
    return found.model_copy(
        update={
            "tensors": tuple(tensors),
            "num_running_statistics": num_norms_of(model),
            "num_frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
            "flops_per_token": max(1, flops // spec.model.context),
            "activation_bytes": activation_bytes,
        }
    )


def first_vector(spec: RunSpec, folder: Path | None = None) -> Vector:
    """The state that a run begins with, fp32 in canonical order: as torch draws it from the run's seed.

    With `folder` the weights of that transformers model instead. The model is in memory twice for it.
    Raises AtollError where they do not fit the run's description.
    """
    from node.island.models.architecture import check_tensors, refuse_shared_memory
    from node.island.models.transformers import built, random_model, saved_model
    from node.island.models.transformers_described import (
        check_buffers,
        check_looks_back,
        check_loss,
    )

    model: nn.Module
    if spec.adapters is not None:
        from node.island.models.adapters import first_values

        assert spec.description is not None
        model = built(spec.description.config, spec.adapters)
        check_tensors(model, spec)
        return _vector_of_values(first_values(model, spec), spec)
    if spec.model.source == "function":
        from node.island.models.function import random_module
        from node.island.models.function_described import refuse_unknown_tokens

        model = random_module(spec)
        refuse_shared_memory(model)
        refuse_unknown_tokens(spec, model)
    else:
        assert spec.description is not None
        model = of_transformers = random_model(spec) if folder is None else saved_model(folder)
        check_looks_back(of_transformers, spec.model.context)
        check_loss(of_transformers)
        if folder is not None:
            check_buffers(of_transformers, spec.description.config)
    check_tensors(model, spec)
    return vector_of(model, spec)


def has_loaded(spec: RunSpec, vector: Vector) -> bool:
    """Whether the run's function has loaded most of what is trained, as from a checkpoint.

    What it draws is other with another seed, also where it calls torch.manual_seed itself. Values of a
    tensor that are all the same, as ones and zeros, say nothing. `vector` is what the run begins with.
    """
    from node.island.models.function import random_module

    other_seed = spec.run.model_copy(update={"seed": spec.run.seed ^ 1})
    other = random_module(spec.model_copy(update={"run": other_seed}), moves_seeds=True)
    places = {place.name: place for place in layout_of(spec).places}
    num_loaded = num_drawn = 0
    for name, parameter in other.named_parameters():
        if (place := places.get(name)) is None:
            continue
        ours = vector[place.offset : place.offset + place.num_elements]
        if not np.array_equal(ours, parameter.detach().to(torch.float32).reshape(-1).numpy()):
            num_drawn += place.num_elements
        elif (ours != ours[0]).any():
            num_loaded += place.num_elements
    return num_loaded > num_drawn


def vector_of(model: nn.Module, spec: RunSpec) -> Vector:
    """A module's trained parameters as a canonical vector."""
    return _vector_of_values(((n, p.detach()) for n, p in model.named_parameters()), spec)


def _vector_of_values(values: Iterable[tuple[str, Tensor]], spec: RunSpec) -> Vector:
    layout = layout_of(spec)
    vector = np.empty(layout.num_elements, np.float32)
    places = {place.name: place for place in layout.places}
    for name, value in values:
        if (place := places.get(name)) is not None:
            span = slice(place.offset, place.offset + place.num_elements)
            vector[span] = value.to(torch.float32).reshape(-1).numpy()
    return vector


def export_state(
    spec: RunSpec,
    vector: Vector,
    out: Path,
    *,
    base: Path | None = None,
    base_name: str = "",
    dtype: str = "float32",
) -> None:
    """Writes a folder that transformers loads, of a run's state.

    Adapters are written alone, as peft loads them; with `base`, the model that they belong to, they are
    added to its matrices and the whole is written. `base_name` is where those who load adapters look for
    that model. Raises UsageError for values that the type of torch named `dtype` cannot hold.
    """
    from node.island.models.adapters import export_adapter
    from node.island.models.transformers import built, export_model

    assert spec.description is not None
    if spec.adapters is not None and base is None:
        adapted = built(spec.description.config, spec.adapters)
        values = {n: narrowed(n, v, dtype) for n, v in _values_of(spec, vector).items()}
        export_adapter(adapted, values, out, base_name=base_name)
    else:
        model = model_with(spec, vector, base=base)
        for name, parameter in model.named_parameters():
            parameter.data = narrowed(name, parameter.data, dtype)
        export_model(model, out)  # buffers as they are: a router's corrections want all their bits


def only_read(values: Vector) -> Tensor:
    """A tensor over values that nobody may write to, as a snapshot's: torch has no such tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


def narrowed(name: str, values: Tensor, dtype: str) -> Tensor:
    """Values in a type of torch, rounded to nearest; raises UsageError where it cannot hold them."""
    found = values.to(getattr(torch, dtype))
    if not torch.isfinite(found).all() and torch.isfinite(values).all():
        raise UsageError(
            f"{name} has values up to {values.abs().max():.3g}, and {dtype} does not hold them",
            next_step="write the model with --dtype fp32",
        )
    return found


def model_with(spec: RunSpec, vector: Vector, *, base: Path | None = None) -> Any:
    """A run's model of transformers with the values of a state, in memory; adapters are added to `base`.

    Raises NoInputError for a run of adapters without their base.
    """
    from node.island.models.transformers import merged_model, random_model

    if spec.adapters is not None:
        return merged_model(spec, base, _values_of(spec, vector))
    model = random_model(spec)
    copy_parameters(model, layout_of(spec), vector)
    for each in spectral_vectors_of(model):
        each.settle()
    return model


def _values_of(spec: RunSpec, vector: Vector) -> dict[str, Tensor]:
    return {
        place.name: torch.from_numpy(
            np.array(vector[place.offset : place.offset + place.num_elements])
        ).reshape(place.shape)
        for place in layout_of(spec).places
    }


def _loss_of_tokens(model: nn.Module, spec: RunSpec) -> tuple[Callable[[Tree], Tensor], Tree]:
    """A loss over one sample, as shapes alone allow it."""
    length = spec.model.context

    def loss(tokens: Tensor) -> Tensor:
        # A mask of its own: what models make of none, they look into, and shapes cannot be looked into.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
        output = model(input_ids=tokens, attention_mask=mask, use_cache=False)
        logits: Tensor = output.logits
        return logits.sum()

    return loss, torch.zeros(1, length, dtype=torch.int64)


def _counted(
    model: nn.Module, loss: Callable[[Tree], Tensor], batch: Tree, to_leave_out: str
) -> tuple[int, int] | None:
    """Operations and bytes kept of a sample, on shapes; None where values are looked at.

    Raises ConfigError for parameters that get no gradient, with `to_leave_out` as the next step, and for
    buffers that change.
    """
    buffers = {name: (b.to("meta"), b._version) for name, b in model.named_buffers()}
    for name, (on_meta, _) in buffers.items():
        _set_buffer(model, name, on_meta)
    versions = {name: (b, b._version) for name, b in model.named_buffers()}
    own = {_memory_of(each) for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory = _memory_of(tensor)
        if memory is not None and memory not in own:  # views of weights are kept too
            kept[memory] = tensor  # held, so that no other gets its address
        return tensor

    try:
        on_shapes = tree_map(lambda each: each.to("meta"), batch)
        with FlopCounterMode(display=False) as counter, _EachRowByOneExpert():
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                result = loss(on_shapes)
            result.backward()  # type: ignore[no-untyped-call]  # torch declares no types
    except AtollError:  # of a loss that is none
        raise
    except Exception as error:  # whatever a model does with values that are not there
        log.info(
            "operations are not counted on shapes but estimated, and activations not at all",
            why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200],
        )
        return None
    statistics = statistics_of([model]).keys()
    for name, buffer in kept_buffers(model).items():
        if name in statistics:
            continue
        was, version = versions[name]
        if buffer is not was or buffer._version != version:
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise changed_buffer(name, kind)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise ConfigError(
                f"the loss does not depend on the parameter {name}: it would never be trained",
                next_step=to_leave_out,
            )
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    num_samples = len(tree_flatten(batch)[0][0])
    return counter.get_total_flops() // num_samples, num_bytes // num_samples


class _EachRowByOneExpert(TorchFunctionMode):
    """Lets rows that go to experts be counted on shapes: each is multiplied by one expert's matrix.

    torch's grouped product takes nothing but bf16 where there are no values, and which rows go to which
    expert is a value. The operations and the sizes are the same whichever it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.nn.functional.grouped_mm, torch._grouped_mm):
            rows, experts = args[:2]
            if rows.ndim == 2 and experts.ndim == 3:
                return rows @ experts[0]
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: Tensor) -> int | None:
    """What tensors that are views of one another have in common; on shapes alone there is no address.

    None for a sparse one.
    """
    if tensor.layout is not torch.strided:
        return None
    address: int = tensor.untyped_storage()._cdata
    return address


def _set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner)._buffers[own] = buffer


def _refuse_other_types(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ConfigError(
                f"the parameter {name} is {parameter.dtype}: what is trained is fp32 here, and computed "
                "in what each node's precision says",
                next_step="keep its real and imaginary parts as float32, and use torch.view_as_complex"
                if parameter.is_complex()
                else "make it float32, as module.float() does",
            )


def _formula(model: nn.Module, tensors: list[TensorShape], spec: RunSpec) -> int:
    """Operations of one sample where nobody could count them: 6 for each weight that a token meets.

    Of experts, tensors of three dimensions here, a token meets as many as the config says (PaLM,
    Chowdhery et al., 2022, appendix B, with the weights that are active).
    """
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    weights = 0
    for tensor in tensors:
        met = tensor.num_elements
        if isinstance(chosen, int) and len(tensor.shape) == 3:
            met = met * chosen // tensor.shape[0]
        weights += met
    return 6 * weights * spec.model.context
