"""A torch module with its loss, from a function of the run: source = "function".

The function returns (module, loss), (module, loss, metric) or (module, loss, metric, plan). `loss(module,
batch)` is a mean over the batch, or (sum, count); `metric(module, batch)` a mean that evaluation tells;
`plan` names modules for tensor parallel, and under "stages" those that a pipeline calls one after another.
The module is called as such, `module(...)`: shards are gathered around that call, and where there are
stages, it is what the first is called with and the last one gives.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from node.island.data.dataset import SampleOrder, Tree
from node.island.data.functions import FunctionData, drawing
from node.island.data.manifest import read_manifest
from node.island.models.architecture import (
    BufferWatch,
    Counted,
    check_frozen,
    check_tensors,
    copy_parameters,
    digest_of_values,
    few_values_of,
    holds,
    keeping_parameters,
    without_memory,
)
from node.island.models.code import (
    called,
    check_functions,
    find_code,
    refuse,
    said,
    sources_of,
)
from node.island.models.generic import GenericArchitecture, styles_of
from node.island.models.running_statistics import (
    averaging,
    batches_for,
    norms_of,
    spectral_vectors_of,
    statistics_of,
)
from node.island.models.stages import units_of
from node.island.models.transformers import config_within
from node.outer_state import Vector
from protocol.errors import AtollError, BadDataError, ConfigError, UsageError
from protocol.run.models import (
    BYTES_VOCABULARY,
    Description,
    FunctionModel,
    StageUnit,
    TensorStyle,
    layout_of,
)
from protocol.run.run_spec import RunSpec

Loss = Callable[[nn.Module, Tree], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What a run's function returns."""

    module: nn.Module
    loss: Loss
    metric: Callable[[nn.Module, Tree], Any] | None
    plan: Mapping[str, TensorStyle]
    stages: Sequence[str]


class FunctionArchitecture(GenericArchitecture):
    """See Architecture."""

    draws = True
    may_leave_parameters_out = True
    divides_by_all = False
    may_count = True

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        with without_memory(), drawing(spec.run.seed):  # what is no parameter may be drawn as well
            self._brought = brought(spec)
        self.has_metric = self._brought.metric is not None
        self._is_built = False

    def build(self) -> nn.Module:
        """See GenericArchitecture: for a second stage on a rank the function is called once more."""
        module = self._brought.module
        if self._is_built:
            with without_memory(), drawing(self.spec.run.seed):
                module = brought(self.spec).module
        self._is_built = True
        check_tensors(module, self.spec)
        return module

    def enter(self, inputs: tuple[Tree, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See Ends."""
        return call_of(self._brought.loss, *inputs)

    def leave(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | Counted:
        """See Ends."""
        assert isinstance(self.spec.model, FunctionModel)
        answering = _Answering(output).train(self.stages[-1].training)
        return _checked(self._brought.loss(answering, *inputs), self.spec.model.function)

    def leave_metric(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Ends."""
        if not self.has_metric:
            return None
        answering = _Answering(output, call_of(self._brought.loss, *inputs))
        return self.metric(answering.train(self.stages[-1].training), inputs)

    def objective(self, part: nn.Module) -> nn.Module:
        """See Architecture."""
        assert isinstance(self.spec.model, FunctionModel)
        return _Objective(part, self._brought.loss, self.spec.model.function)

    def inputs(self, batch: Tree) -> tuple[Tree, ...]:
        """See Architecture: the batch as it is collated; of windows of tokens, tokens and targets."""
        if self.spec.data.source != "function" and isinstance(batch, Tensor):
            return ((batch[:, :-1], batch[:, 1:]),)
        return (batch,)

    def padded(self, inputs: tuple[Tree, ...], rows: int) -> tuple[Tree, ...]:
        """See Architecture. There is one sample at least, and nothing to pad with."""
        return inputs

    def measured(
        self, mean: Tensor | Counted, inputs: tuple[Tree, ...], num_samples: int
    ) -> tuple[Tensor, Tensor | float]:
        """See Architecture."""
        if isinstance(mean, Counted):
            counts = float(num_samples > 0)
            return mean.total * counts, mean.number * counts
        return mean * num_samples, float(num_samples)

    def frozen_values(self, names: Iterable[str], base: Path | None) -> dict[str, Tensor]:
        """See Architecture: as the function itself makes them."""
        return frozen_of(random_module(self.spec))

    def metric(self, part: nn.Module, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Architecture."""
        if self._brought.metric is None:
            return None
        return torch.as_tensor(self._brought.metric(part, *inputs), dtype=torch.float32)


class _Objective(nn.Module):
    """The run's own loss as a module, so that DistributedDataParallel wraps forward and loss as one."""

    def __init__(self, module: nn.Module, loss: Loss, function: str) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self._function = function

    def forward(self, batch: Tree) -> Tensor | Counted:
        """A mean, or a sum with its count."""
        return _checked(self._loss(self.module, batch), self._function)


class _Asking(BaseException):
    """Ends a loss where it calls its module: no Exception, which a loss might catch."""


class _Catching(nn.Module):
    """Stands for the module where only what it is called with is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.called_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        self.called_with = (inputs, named)
        raise _Asking


class _Answering(nn.Module):
    """Stands for the module where what it gives is known: to one call, if told to which."""

    def __init__(self, answer: Tensor, to: Any = None) -> None:
        super().__init__()
        self._answer = answer
        self._to = to

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        if self._to is not None and not _are_equal((inputs, named), self._to):
            raise ConfigError(
                "the metric calls the module with something else than the loss does, and a pipeline goes "
                "through the model once",
                next_step="set pp = 1 in node.toml, or change the function",
            )
        return self._answer


def _are_equal(one: Any, other: Any) -> bool:
    ones, others = (
        [x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in (one, other)
    )
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def call_of(loss: Loss, batch: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a loss calls its module with."""
    catching = _Catching()
    try:
        loss(catching, batch)
    except _Asking:
        return catching.called_with
    raise AssertionError("following its stages has shown that it calls the module")


def _checked(found: Any, function: str) -> Tensor | Counted:
    if isinstance(found, Tensor) and found.ndim == 0:
        return found
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
        total: Tensor = found[0]
        return Counted(total=total, number=torch.as_tensor(found[1], device=total.device))
    what = (
        f"a tensor of shape {list(found.shape)}"
        if isinstance(found, Tensor)
        else type(found).__name__
    )
    raise refuse(function, f"a loss that gives {what} instead of a scalar, or (sum, count)")


def brought(spec: RunSpec) -> Brought:
    """Calls the run's function. Raises ConfigError where it fails, BadDataError for what is no model."""
    model = spec.model
    assert isinstance(model, FunctionModel)
    found = called(model.function, model.arguments)
    is_for_loops = spec.data.source == "loop"
    if is_for_loops and isinstance(found, nn.Module):
        found = (found, _no_loss)
    if not isinstance(found, tuple) or not 2 <= len(found) <= 4:
        raise refuse(model.function, f"{type(found).__name__} instead of (module, loss)")
    parts: list[Any] = [*found, None, None]
    module, loss, metric, plan = parts[:4]
    if not isinstance(module, nn.Module):
        raise refuse(model.function, f"{type(module).__name__} where a torch module should be")
    if not callable(loss) or not (metric is None or callable(metric)):
        raise refuse(model.function, "a loss or a metric that cannot be called")
    plan = dict(plan or {})
    stages: Sequence[str] = ()
    if isinstance(plan.get("stages"), list | tuple):  # a module of this name has a style instead
        stages = plan.pop("stages")
    for name, style in plan.items():
        if style not in get_args(TensorStyle):
            known = ", ".join(get_args(TensorStyle))
            raise refuse(
                model.function, f"a plan with {name!r}: {style!r}, which is none of {known}"
            )
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse and not is_for_loops:
            raise ConfigError(
                f"the embedding {name} has sparse=True, whose gradients are not exchanged between ranks",
                next_step="remove it, and set [inner] sparse = true: rows without a gradient are then "
                "left alone",
            )
    module.train()
    return Brought(module=module, loss=loss, metric=metric, plan=plan, stages=stages)


def _no_loss(_module: nn.Module, _batch: Tree) -> Tensor:
    raise AssertionError("nobody but its loops computes anything of this run")


def random_module(spec: RunSpec, *, moves_seeds: bool = False) -> nn.Module:
    """The module with weights as its own code draws them, from the run's seed.

    With `moves_seeds` also those that the code sets itself are others, within this call. Raises BadDataError
    for a module that has none.
    """
    set_seed = torch.manual_seed
    set_seed(spec.run.seed)
    if moves_seeds:
        torch.manual_seed = lambda seed: set_seed(int(seed) ^ 1)
    try:
        module = brought(spec).module
    finally:
        torch.manual_seed = set_seed
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_meta:
            assert isinstance(spec.model, FunctionModel)
            raise BadDataError(
                f"the run's function {spec.model.function} returns a module on the meta device, where {name} "
                "has no values",
                next_step='let it call module.to_empty(device="cpu"), and then draw or load its weights',
            )
    return module


def refuse_unknown_tokens(spec: RunSpec, module: nn.Module) -> None:
    """Raises BadDataError where the loss fails on the last of the data's tokens, and on the first does not.

    As with tables of fewer rows: on a GPU that ends a rank without a word of why. What fails on any token, as
    without a GPU that it wants, ranks say; and nothing is known of data that are elsewhere.
    """
    assert isinstance(spec.model, FunctionModel)
    if (num_tokens := _num_tokens(spec)) is None:
        return
    with without_memory(), drawing(spec.run.seed):
        loss = brought(spec).loss
    length = min(spec.model.context, _TOKENS_TRIED)
    module.eval()
    for token in (0, num_tokens - 1):
        tokens = torch.full((1, length), token)
        try:
            with torch.no_grad():
                loss(module, (tokens, tokens))
        except Exception as error:
            if token == 0:
                return
            raise BadDataError(
                f"the data have {num_tokens} different tokens, and the loss of {spec.model.function} fails "
                f"on the last of them: {said(error)}",
                next_step="give its tables and its head as many rows, by [model] arguments or in its code",
            ) from error


_TOKENS_TRIED = 16


def _num_tokens(spec: RunSpec) -> int | None:
    if spec.data.source == "text":
        return BYTES_VOCABULARY
    folder = next(map(Path, spec.data.paths), None)
    if spec.data.source == "tokens" and folder is not None and folder.is_dir():
        return read_manifest(folder).vocab_size
    return None


def beside_the_trained(spec: RunSpec, parameters: Vector, code: Path | None) -> dict[str, Tensor]:
    """What a state's file needs beside what is trained, by names: frozen values and running statistics.

    Runs the run's code. Raises AtollError where the code or the data are not here, and BadDataError where
    frozen values come out otherwise than when the run was made, as by another torch.
    """
    described = spec.description or Description()
    rest: dict[str, Tensor] = {}
    if described.num_frozen:
        check_functions(spec, allowed=[spec.run.name], code=code)
        find_code(code)
        rest = frozen_of(random_module(spec))
        check_frozen(rest, described.frozen_digest, where="what its function makes")
        rest = {name: value.contiguous().clone() for name, value in rest.items()}
    if described.num_running_statistics:
        rest |= _statistics_for(spec, parameters, code)
    return rest


def _statistics_for(spec: RunSpec, parameters: Vector, code: Path | None) -> dict[str, Tensor]:
    """What norms remember of a state, on the CPU, as evaluations have it; runs the run's code.

    Raises AtollError where the code or the data are not here.
    """
    check_functions(spec, allowed=[spec.run.name], code=code)
    find_code(code)
    torch.manual_seed(spec.run.seed)
    found = brought(spec)
    copy_parameters(found.module, layout_of(spec), parameters)
    for each in spectral_vectors_of(found.module):
        each.settle()
    if not norms_of([found.module]):
        return statistics_of([found.module])
    if spec.data.source != "function":
        raise UsageError(
            "running statistics are computed here of samples that a function of the run gives, and those of "
            f'run {spec.run.name!r} are [data] source = "{spec.data.source}"',
            next_step="leave --code out: the model card has the lines that compute them",
        )
    data = FunctionData(spec)
    order = SampleOrder.of(spec.run.seed, data)
    with averaging([found.module]):
        for numbers in batches_for(spec, order, data.num_samples):
            found.loss(found.module, data.batch("training", numbers))
    return statistics_of([found.module])


def compute_once(spec: RunSpec, batch: Tree) -> None:
    """Computes the loss of a batch and its gradients, as ranks will: on a GPU where there is one.

    Raises BadDataError where that fails. It takes the memory of the model and its gradients.
    """
    model = spec.model
    assert isinstance(model, FunctionModel)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(spec.run.seed)
    found = brought(spec)
    on_device = tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, batch)
    try:
        result = _checked(found.loss(found.module.to(device), on_device), model.function)
        total: Any = result.total if isinstance(result, Counted) else result
        total.backward()
    except AtollError:
        raise
    except Exception as error:
        raise BadDataError(
            f"the loss of {model.function} fails with two samples, on {device.type}: {said(error)}",
            next_step="correct it, and make the run again; a model that needs a GPU is described where "
            "there is one",
        ) from error


def compares_samples(spec: RunSpec, together: Tree, alone: Sequence[Tree]) -> bool:
    """Whether the loss of samples together is not made of the loss of each, as with in-batch negatives.

    A mean is between them, whatever weighs how much. A loss that draws random numbers is tried several
    times. Nothing is found out of a model that cannot be computed here. Raises BadDataError for a sum.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: Brought | None = None

    def moved(batch: Tree) -> Tree:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)

    def losses(batch: Tree) -> list[float]:
        assert found is not None
        return [_loss_as_number(found, moved(batch), seed) for seed in range(_TRIES)]

    try:
        torch.manual_seed(spec.run.seed)
        found = brought(spec)
        found.module.to(device)
        _refuse_changed_buffers(found, moved(together))
        found.module.eval()
        with keeping_parameters(found.module):
            pair = losses(together)
    except AtollError:
        raise
    except Exception:  # what of it fails ranks say, and a GPU may be all that it wants
        return False
    if not all(map(math.isfinite, pair)):
        return False
    try:
        singles = [losses(each) for each in alone]
    except Exception:  # as of what normalises over a batch
        return True
    if not all(map(math.isfinite, chain(*singles))):
        return True
    low, high = min(map(min, singles)), max(map(max, singles))
    slack = 1e-4 * max(abs(low), abs(high), *map(abs, pair)) + 1e-7
    if any(low - slack <= each <= high + slack for each in pair):
        return False
    sums = [sum(each) for each in zip(*singles, strict=True)]
    if all(abs(own - added) <= slack for own, added in zip(pair, sums, strict=True)):
        assert isinstance(spec.model, FunctionModel)
        raise BadDataError(
            f"the loss of {spec.model.function} is a sum over its batch: {pair[0]:.6g} of two samples that "
            f"have {singles[0][0]:.6g} and {singles[1][0]:.6g} alone",
            next_step="let it return the mean, or (sum, count): rates, clipping and held-out losses go by it",
        )
    return True


_TRIES = 8


def _refuse_changed_buffers(found: Brought, batch: Tree) -> None:
    """Raises ConfigError for what shapes alone do not show: codebooks that write to `.data`."""
    watch = BufferWatch([found.module.train()])
    with torch.no_grad():
        found.loss(found.module, batch)
    watch.check()


def _loss_as_number(found: Brought, batch: Tree, seed: int) -> float:
    torch.manual_seed(seed)
    with torch.no_grad():
        result = found.loss(found.module, batch)
    if isinstance(result, tuple):
        total, number = result
        return float(total) / max(1.0, float(number))
    return float(result)


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """What of a module is not trained."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def described_function(
    spec: RunSpec, folder: Path | None
) -> tuple[nn.Module, Description, Callable[[Tree], Tensor], Tree | None]:
    """The module, what can be said of it, its loss and a batch of two samples, to count with.

    No batch where only loops have any. `folder` has the functions, unless they are installed.
    """
    model = spec.model
    assert isinstance(model, FunctionModel)
    sources = sources_of(spec, folder)
    find_code(folder)
    with without_memory(), drawing(spec.run.seed):
        found = brought(spec)
    _refuse_drawn_buffers(spec, found.module)
    if found.plan:
        styles_of(found.module, found.plan)  # refuses what does not fit
    batch: Tree | None = None
    if spec.data.source != "loop":
        batch = (torch.zeros(2, model.context, dtype=torch.int64),) * 2
    compares, num_samples = False, None
    if spec.data.source == "function":
        data = FunctionData(spec)
        num_samples = data.num_samples
        data.summary()  # what nodes read at their start: one that is not there is told here and now
        two = np.arange(2) % spec.inner.batch
        batch, *alone = (data.batch("training", own) for own in (two, two[:1], two[1:]))
        compares = compares_samples(spec, batch, alone)

    def loss(one: Tree) -> Tensor:
        result = _checked(found.loss(found.module, one), model.function)
        return result.total if isinstance(result, Counted) else result

    kind = type(found.module).__name__
    stages = _stages_of(spec, batch) if found.stages and batch is not None else ()
    frozen: dict[str, Tensor] = {}
    if any(not parameter.requires_grad for parameter in found.module.parameters()):
        frozen = frozen_of(random_module(spec))
    description = Description(
        frozen_digest=digest_of_values(frozen) if frozen else None,
        frozen_values=few_values_of(frozen),
        compares_samples=compares,
        num_samples=num_samples,
        sources=sources,
        config=config_within(found.module),
        tensor_plan=dict(found.plan),
        no_tensor_plan=""
        if found.plan
        else f"tp needs a plan, and the function of {kind} gives none",
        stages=stages,
        no_stages=""
        if found.stages
        else f"pp needs stages, and the function of {kind} names none in its plan",
    )
    return found.module, description, loss, batch


def _refuse_drawn_buffers(spec: RunSpec, module: nn.Module) -> None:
    """Raises ConfigError for a buffer with other values at each call: neither nodes nor exports have it.

    One that is made of parameters has none at all where the module is built.
    """
    statistics = statistics_of([module]).keys()
    buffers = {name: each for name, each in module.named_buffers() if name not in statistics}
    if not buffers:
        return
    with without_memory(), drawing(spec.run.seed + 1):
        again = dict(brought(spec).module.named_buffers())
    for name, buffer in buffers.items():
        if not _is_constant(buffer, again.get(name)):
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            how = "is made of parameters" if buffer.is_meta else "is another at each call"
            raise ConfigError(
                f"the buffer {name} of a {kind} {how}, and buffers are not exchanged: each node would have "
                "its own",
                next_step="make it a parameter with requires_grad=False"
                + (
                    ""
                    if buffer.is_meta
                    else ", or draw it from torch.Generator().manual_seed(0), which is the same everywhere"
                ),
            )


def _is_constant(buffer: Tensor, again: Tensor | None) -> bool:
    if again is None or buffer.is_meta or again.is_meta or buffer.shape != again.shape:
        return False
    return holds(buffer, again)


def _stages_of(spec: RunSpec, batch: Tree) -> tuple[StageUnit, ...]:
    """Raises ConfigError where the module is not its stages, or the loss is not one of what they give."""
    assert isinstance(spec.model, FunctionModel)
    with without_memory():
        found = brought(spec)  # a module of its own: its buffers go where its parameters are
    on_shapes = tree_map(lambda each: each.to("meta"), batch)
    num_samples = len(tree_leaves(batch)[0])

    def compute(module: nn.Module) -> None:
        outputs: list[Any] = []
        handle = module.register_forward_hook(lambda _, __, output: outputs.append(output))
        found.loss(module, on_shapes)
        handle.remove()
        if outputs:
            call_of(found.loss, on_shapes)
            found.loss(_Answering(outputs[0]), on_shapes)

    return units_of(found.module.to("meta"), found.stages, compute, num_samples)
