"""What any module can do: copies and shards of it, layers recomputed, plans for tensor parallel and stages.

Rooms for kinds of modules build on it; what only the built-in decoder can do is refused before ranks
start (node.island.parallel.mesh_shape).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from node.island.models.architecture import (
    Architecture,
    Roles,
    layers_of,
    roles_of,
    shared_names,
    tie,
)
from node.island.models.stages import Cut
from node.island.parallel.mesh import Mesh
from node.island.parallel.mesh_shape import matches
from node.island.ranks.accelerator import LossScale
from protocol.errors import ConfigError
from protocol.run.models import TensorStyle
from protocol.run.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.parallel.pipeline import Pipeline


class GenericArchitecture(Architecture):
    """The part of Architecture that needs to know nothing but the module."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._cut = Cut(spec.description.stages if spec.description else ())
        self.stages: list[nn.Module] = []
        """The rank's parts of a pipeline."""

    @abstractmethod
    def build(self) -> nn.Module:
        """A whole model, its parameters without memory; raises what tells it is not the run's."""

    def run_alone(
        self, part: nn.Module, modules: Sequence[nn.Module], *, is_first: bool, is_last: bool
    ) -> None:
        """Has a stage compute what it is of the whole model: by default its modules, one after another."""

        def forward(*inputs: Any, **named: Any) -> Any:
            x = modules[0](*inputs, **named)
            for module in modules[1:]:
                x = module(x)
            return x

        part.forward = forward

    def part(self, mesh: Mesh, stage: int) -> nn.Module:
        """See Architecture."""
        part = self.build()
        if mesh.shape.pipeline > 1:
            self._cut.leave(part, mesh.shape, stage)
            self.run_alone(
                part,
                self._cut.modules_of(part),
                is_first=stage == 0,
                is_last=stage == mesh.shape.num_stages - 1,
            )
        return part

    def cut_by_tensor(self, part: nn.Module, devices: DeviceMesh) -> None:
        """See Architecture."""
        assert self.spec.description is not None
        shared = shared_names(part)
        # A stage has less than the plan names.
        cut_by_plan(part, devices, self.spec.description.tensor_plan)
        tie(part, shared)

    def gathered_together(
        self, part: nn.Module, dtype: torch.dtype
    ) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
        """See Architecture. All in fp32: which weights may be lower is known of the decoder alone."""
        for layer in self.layers(part):
            yield [layer], torch.float32
        yield [part], torch.float32

    def layers(self, part: nn.Module) -> Sequence[nn.Module]:
        """See Architecture."""
        return self._cut.layers(part) if self._cut.has(part) else layers_of(part)

    def pipeline(
        self,
        parts: list[nn.Module],
        mesh: Mesh,
        device: torch.device,
        *,
        dtype: torch.dtype,
        loss_scale: LossScale,
    ) -> "Pipeline":
        """See Architecture."""
        from node.island.parallel.pipeline import Pipeline  # with torch's compiler

        self.stages = parts
        ends: Any = self  # a room that has stages is Ends as well
        return Pipeline(
            parts,
            mesh,
            device,
            self.spec,
            ends=ends,
            leaving=self._cut.leaving(mesh.shape),
            dtype=dtype,
            loss_scale=loss_scale,
        )

    def roles(self, part: nn.Module) -> Roles:
        """See Architecture."""
        return self._cut.roles(part) if self._cut.has(part) else roles_of(part)

    def copies(self, part: nn.Module) -> frozenset[nn.Parameter]:
        """See Architecture."""
        return self._cut.copies(part) if self._cut.has(part) else frozenset()

    def tied(self, part: nn.Module) -> nn.Parameter | None:
        """See Architecture."""
        return self._cut.tied(part) if self._cut.has(part) else None


# Tensor parallel by a plan: names of modules, and how each is cut
#
# Megatron-LM (Shoeybi et al., 2019). Between the modules activations are plain tensors that all ranks of
# a group have alike, but for those between a column and its row, which are parts. What holds parameters
# and is not in the plan stays whole on each rank.


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
