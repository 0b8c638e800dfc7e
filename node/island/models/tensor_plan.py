"""Tensor parallel of any module by a plan: names of modules, and how each is cut.

Megatron-LM (Shoeybi et al., 2019). Between the modules activations are plain tensors that all ranks of
a group have alike, but for those between a column and its row, which are parts. What holds parameters
and is not in the plan stays whole on each rank.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from node.island.parallel.mesh_shape import matches
from protocol.errors import ConfigError
from protocol.run.models import TensorStyle


def cut_by_plan(part: nn.Module, devices: DeviceMesh, plan: Mapping[str, TensorStyle]) -> None:
    """Turns parameters into tensors of the group; each is in the plan, or whole."""
    styles, _ = _styles_and_unused(part, plan)
    for name, style in styles.items():
        _STYLES[style]()._apply(part.get_submodule(name), devices)


def styles_of(part: nn.Module, plan: Mapping[str, TensorStyle]) -> dict[str, TensorStyle]:
    """A style for each module that holds parameters itself. Raises ConfigError where none fits.

    That is a module that holds parameters beside others that do, and a name that means nothing.
    """
    found, unused = _styles_and_unused(part, plan)
    if unused:
        raise ConfigError(
            f"the plan for tensor parallel names {sorted(unused)[0]!r}, and the model has no such module",
            next_step="correct the plan; 'layers.*.up' means that module in each of the layers",
        )
    return found


def _styles_and_unused(
    part: nn.Module, plan: Mapping[str, TensorStyle]
) -> tuple[dict[str, TensorStyle], set[str]]:
    found: dict[str, TensorStyle] = {}
    unused = set(plan)
    for name, module in part.named_modules():
        named = [pattern for pattern in plan if matches(pattern, name)]
        unused -= set(named)
        own = next(module.parameters(recurse=False), None)
        if named and own is not None:
            found[name] = plan[named[0]]
        elif own is not None and next(module.children(), None) is None:
            found[name] = "replicate"
        elif own is not None:
            raise ConfigError(
                f"tensor parallel has no way for {name or 'the model itself'}, a "
                f"{type(module).__name__} that holds parameters beside modules of its own",
                next_step="set tp = 1, or put those parameters into a module of their own",
            )
    return found, unused


class _Whole(ParallelStyle):
    """The same on each rank: so are its gradients, as all get the same inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def inputs_of(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(each, mesh, [Replicate()], run_check=False)
                if isinstance(each, Tensor) and not isinstance(each, DTensor)
                else each
                for each in inputs
            )

        def output_of(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            if isinstance(output, tuple):
                return tuple(_plain(each) for each in output)
            return _plain(output)

        # torch has what the two return in no type, and takes it all the same
        either: Any = inputs_of
        return distribute_module(module, device_mesh, None, either, output_of)


def _plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


_STYLES: Mapping[TensorStyle, Any] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "table": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    # Its inputs are parts, of positions or of heads; its weights are whole, and their gradients summed.
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "replicate": _Whole,
}
