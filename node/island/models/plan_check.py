"""A function's plan for tensor parallel or for stages, compared with the whole module before training.

A plan may be wrong and still compute something: a norm that is called whole where it sees a part of the
heads has the right output and the wrong gradient. So one batch's loss and gradients are compared.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from node.island.data.dataset import Batch, Tree
from node.island.models.architecture import Counted, copy_parameters
from node.island.models.function import FunctionArchitecture, random_module
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.accelerator import autocast
from node.outer_state import Vector
from protocol.errors import ConfigError
from protocol.run.models import layout_of
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.training.engine import Engine

TOLERANCE = 1e-3
"""Of a gradient's norm, in fp32: rounding differs by a thousandth of it."""

LOWER_TOLERANCE = 0.1
"""The same where matrix products are in a lower precision."""


def check_plan(
    engine: "Engine", mesh: Mesh, spec: RunSpec, parameters: Vector, batch: Batch | Tree
) -> None:
    """Raises ConfigError with the first parameter whose gradient the plan gets wrong.

    All ranks take the same batch, and find the same; each has the whole module on its CPU for a moment.
    The gradients of the engine are forgotten.
    """
    expected_loss, expected = _expected(spec, parameters, engine.placed(batch), engine.dtype)
    for part in engine.parts:
        part.eval()
    try:
        own_loss, found = _found(engine, mesh, batch)
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        why = f"no loss at all ({type(error).__name__}: {said})"
        raise _wrong(mesh.shape, why) from error
    for part in engine.parts:
        part.train()
    # One measure for all: of a gradient that is nearly zero any part may be rounding.
    size = max(float(gradient.norm()) for gradient in expected.values())
    shares = [own_loss if mesh.has_loss else -torch.inf]
    for name, gradient in expected.items():
        norm = max(float(gradient.norm()), size / 100, 1e-12)
        shares.append(float((found[name] - gradient).norm()) / norm if name in found else 0.0)
    # Each rank of a pipeline has a part of the gradients.
    loss, *others = mesh.largest(torch.tensor(shares, dtype=torch.float64)).tolist()
    tolerance = TOLERANCE if engine.dtype == torch.float32 else LOWER_TOLERANCE
    if not abs(loss - expected_loss) <= tolerance * max(1.0, abs(expected_loss)):
        raise _wrong(mesh.shape, f"a loss of {loss:.6g} instead of {expected_loss:.6g}")
    for name, share in zip(expected, others, strict=True):
        if not share <= tolerance:
            raise _wrong(mesh.shape, f"a gradient of {name} that is off by {share:.1%}")


def _found(engine: "Engine", mesh: Mesh, batch: Batch | Tree) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; in fp16 the loss scale falls until they are finite, as in training."""
    scale = engine.loss_scale
    while True:
        loss = engine.train(batch).item()
        found = _gradients_of(engine.parts, scale.value)
        engine.forget_gradients()
        overflows = torch.tensor(
            [float(not all(gradient.isfinite().all() for gradient in found.values()))]
        )
        if scale.value <= 1.0 or not mesh.largest(overflows).item():
            return loss, found
        scale.value /= 2


def _expected(
    spec: RunSpec, parameters: Vector, batch: Tree, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Of the whole module, in the precision of training: what that rounds away is no fault of a plan."""
    architecture = FunctionArchitecture(spec)
    whole = random_module(spec).eval()
    copy_parameters(whole, layout_of(spec), parameters)
    on_cpu = tree_map(lambda each: each.cpu(), architecture.inputs(batch))
    with autocast(dtype, torch.device("cpu")):
        result: Tensor | Counted = architecture.objective(whole)(*on_cpu)
    loss = result.total / result.number if isinstance(result, Counted) else result
    loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types
    return loss.item(), _gradients_of([whole], 1.0)


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


def _wrong(shape: MeshShape, what: str) -> ConfigError:
    plans = (("tensor parallel", "tp", shape.tensor), ("stages", "pp", shape.pipeline))
    used = [(name, option) for name, option, number in plans if number > 1]
    return ConfigError(
        f"the plan for {' and '.join(name for name, _ in used)} gives {what}: it does not train what one "
        "process trains",
        next_step='correct the plan ("sequence" is for modules that see a part of their inputs on each '
        f"rank), or set {' and '.join(f'{option} = 1' for _, option in used)}",
    )
