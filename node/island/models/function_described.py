"""What is found out of a function's model before there is a run, and refused.

It is called, and its loss computed on two samples, where a run is made; ranks would say the rest.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from node.island.data.dataset import Tree
from node.island.data.functions import FunctionData, drawing
from node.island.data.manifest import read_manifest
from node.island.models.architecture import (
    BufferWatch,
    Counted,
    digest_of_values,
    few_values_of,
    holds,
    keeping_parameters,
    without_memory,
)
from node.island.models.code import find_code, said, sources_of
from node.island.models.function import (
    Answering,
    Brought,
    brought,
    call_of,
    checked_loss,
    frozen_of,
    random_module,
)
from node.island.models.generic import styles_of
from node.island.models.running_statistics import statistics_of
from node.island.models.stages import units_of
from node.island.models.transformers import config_within
from protocol.errors import AtollError, BadDataError, ConfigError
from protocol.run.models import BYTES_VOCABULARY, Description, FunctionModel, StageUnit
from protocol.run.run_spec import RunSpec


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
        result = checked_loss(found.loss(found.module, one), model.function)
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
            found.loss(Answering(outputs[0]), on_shapes)

    return units_of(found.module.to("meta"), found.stages, compute, num_samples)


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
        result = checked_loss(found.loss(found.module.to(device), on_device), model.function)
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
