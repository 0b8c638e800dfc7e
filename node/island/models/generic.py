"""What any module can do: copies and shards of it, whole layers recomputed, a plan for tensor parallel.

Rooms for kinds of modules build on it; what only the built-in decoder can do is refused before ranks
start (node.island.mesh_shape).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from node.island.mesh import Mesh
from node.island.models.architecture import Roles, Tree, layers_of, roles_of, shared_names, tie
from node.island.models.tensor_plan import cut_by_plan
from node.island.precision import LossScale
from protocol.run_spec import RunSpec

if TYPE_CHECKING:
    from node.island.pipeline import Pipeline


class GenericArchitecture:
    """The part of Architecture that needs to know nothing but the module."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def build(self) -> nn.Module:
        """The whole model, its parameters without memory; raises what tells it is not the run's."""
        raise NotImplementedError

    def part(self, mesh: Mesh, stage: int) -> nn.Module:
        """See Architecture."""
        assert mesh.shape.pipeline == 1, "check_shape has refused it"
        return self.build()

    def cut_by_tensor(self, part: nn.Module, devices: DeviceMesh) -> None:
        """See Architecture."""
        assert self.spec.description is not None
        shared = shared_names(part)
        cut_by_plan(part, devices, self.spec.description.tensor_plan)
        tie(part, shared)

    def cut_by_context(self, part: nn.Module, mesh: Mesh) -> None:
        """See Architecture."""
        raise AssertionError("check_shape has refused it")

    def gathered_together(
        self, part: nn.Module, dtype: torch.dtype
    ) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
        """See Architecture. All in fp32: which weights may be lower is known of the decoder alone."""
        for layer in layers_of(part):
            yield [layer], torch.float32
        yield [part], torch.float32

    def fill_buffers(self, part: nn.Module, mesh: Mesh, device: torch.device) -> None:
        """See Architecture. They were never without memory."""

    def layers(self, part: nn.Module) -> Sequence[nn.Module]:
        """See Architecture."""
        return layers_of(part)

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
        raise AssertionError("check_shape has refused it")

    def metric(self, part: nn.Module, inputs: tuple[Tree, ...]) -> Tensor | None:
        """See Architecture."""
        return None

    def roles(self, part: nn.Module) -> Roles:
        """See Architecture."""
        return roles_of(part)

    def copies(self, part: nn.Module) -> frozenset[nn.Parameter]:
        """See Architecture."""
        return frozenset()

    def tied(self, part: nn.Module) -> nn.Parameter | None:
        """See Architecture."""
        return None
