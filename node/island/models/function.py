"""A torch module with its loss, from a function of the run: source = "function".

The function returns (module, loss), (module, loss, metric) or (module, loss, metric, plan). `loss(module,
batch)` is a mean over the batch, or (sum, count); `metric(module, batch)` a mean that evaluation tells;
`plan` names modules for tensor parallel, and under "stages" those that a pipeline calls one after another.
The module is called as such, `module(...)`: shards are gathered around that call, and where there are
stages, it is what the first is called with and the last one gives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from node.island.data.dataset import SampleOrder, Tree
from node.island.data.functions import FunctionData, drawing
from node.island.models.architecture import (
    Counted,
    check_frozen,
    check_tensors,
    copy_parameters,
    without_memory,
)
from node.island.models.code import (
    called,
    check_functions,
    find_code,
    refuse,
)
from node.island.models.generic import GenericArchitecture
from node.island.models.running_statistics import (
    averaging,
    batches_for,
    norms_of,
    spectral_vectors_of,
    statistics_of,
)
from node.outer_state import Vector
from protocol.errors import BadDataError, ConfigError, UsageError
from protocol.run.models import (
    Description,
    FunctionModel,
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
        answering = Answering(output).train(self.stages[-1].training)
        return checked_loss(self._brought.loss(answering, *inputs), self.spec.model.function)

    def leave_metric(self, output: Tensor, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Ends."""
        if not self.has_metric:
            return None
        answering = Answering(output, call_of(self._brought.loss, *inputs))
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
        return checked_loss(self._loss(self.module, batch), self._function)


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


class Answering(nn.Module):
    """Stands for the module where what it gives is known: to one call, if told to which."""

    def __init__(self, answer: Tensor, to: Any = None) -> None:
        super().__init__()
        self._answer = answer
        self._to = to

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The answer. Raises ConfigError for another call than was told."""
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


def checked_loss(found: Any, function: str) -> Tensor | Counted:
    """What a loss gave. Raises BadDataError for what is neither a scalar nor (sum, count)."""
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


def frozen_of(module: nn.Module) -> dict[str, Tensor]:
    """What of a module is not trained."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


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
        check_frozen(rest, described.frozen_digest, base=None)
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
