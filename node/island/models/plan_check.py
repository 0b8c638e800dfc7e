"""Tensor parallel by a function's own plan, compared with the whole module before anything is trained.

A plan may be wrong and still compute something: a norm that is called whole where it sees a part of the
heads has the right output and the wrong gradient. So one batch's loss and gradients are compared.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from node.island.data.dataset import Tree
from node.island.models.architecture import Counted
from node.island.models.describing import fill
from node.island.models.function import FunctionArchitecture, random_module
from node.outer_state import Vector
from protocol.errors import ConfigError
from protocol.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.engine import Engine

TOLERANCE = 1e-3
"""Of a gradient's norm, in fp32: rounding differs by a thousandth of it."""

LOWER_TOLERANCE = 0.1
"""The same where matrix products are in a lower precision."""


def check_plan(engine: "Engine", spec: RunSpec, parameters: Vector, batch: Tree) -> None:
    """Raises ConfigError with the first parameter whose gradient the plan gets wrong.

    All ranks take the same batch; each has the whole module on its CPU for a moment. The gradients of the
    engine are forgotten.
    """
    whole = random_module(spec).eval()
    fill(whole, spec, parameters)
    expected = _loss_and_gradients(whole, spec, batch)
    for part in engine.parts:
        part.eval()
    try:
        loss = engine.train(batch).item()
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise _wrong(spec, f"no loss at all ({type(error).__name__}: {said})") from error
    found = _gradients_of(engine.parts, engine.loss_scale.value)
    engine.forget_gradients()
    for part in engine.parts:
        part.train()
    tolerance = TOLERANCE if engine.dtype == torch.float32 else LOWER_TOLERANCE
    if abs(loss - expected[0]) > tolerance * max(1.0, abs(expected[0])):
        raise _wrong(spec, f"a loss of {loss:.6g} instead of {expected[0]:.6g}")
    # One measure for all: of a gradient that is nearly zero any part may be rounding.
    size = max(float(gradient.norm()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        difference = float((found[name] - gradient).norm())
        if difference > tolerance * max(float(gradient.norm()), size / 100):
            share = difference / max(float(gradient.norm()), 1e-12)
            raise _wrong(spec, f"a gradient of {name} that is off by {share:.1%}")


def _loss_and_gradients(
    module: nn.Module, spec: RunSpec, batch: Tree
) -> tuple[float, dict[str, Tensor]]:
    architecture = FunctionArchitecture(spec)
    result: Tensor | Counted = architecture.objective(module)(*architecture.inputs(batch))
    loss = result.total / result.number if isinstance(result, Counted) else result
    loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types
    return loss.item(), _gradients_of([module], 1.0)


def _gradients_of(parts: Sequence[nn.Module], scale: float) -> dict[str, Tensor]:
    """Whole, on the CPU; zero where a batch leaves a parameter out."""
    gradients = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                continue
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            gradients[name] = whole.detach().cpu() / scale
    return gradients


def _wrong(spec: RunSpec, what: str) -> ConfigError:
    return ConfigError(
        f"the plan for tensor parallel gives {what}: it does not train what one process trains",
        next_step='correct the plan ("sequence" is for modules that see a part of their inputs on each '
        "rank), or set tp = 1",
    )
