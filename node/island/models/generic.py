"""What any module can do: copies and shards of it, layers recomputed, plans for tensor parallel and stages.

Rooms for kinds of modules build on it; what only the built-in decoder can do is refused before ranks
start (node.island.parallel.mesh_shape).
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from node.island.models.architecture import (
    Architecture,
    Roles,
    layers_of,
    roles_of,
    shared_names,
    tie,
)
from node.island.models.stages import Cut
from node.island.models.tensor_plan import cut_by_plan
from node.island.parallel.mesh import Mesh
from node.island.ranks.accelerator import LossScale
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
