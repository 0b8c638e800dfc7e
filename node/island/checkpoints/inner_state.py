"""The inner optimizer's state under canonical names, whatever the mesh: what a checkpoint holds.

Tensors are a rank's own parts, which torch.distributed.checkpoint cuts and joins for another mesh.
Files and the time at which they are written are node.island.checkpoints.writer's business.
"""

from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import AdamW, Optimizer

from node.island.ranks.accelerator import carries_pinned_memory
from node.island.training.optimizers import Muon, RowwiseAdamW

Tensors = dict[str, Tensor]
"""Such as "exp_avg/model.norm.weight"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A parameter of the rank with its canonical name, and the optimizer that steps it here."""

    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    is_copy: bool  # of a tied embedding, at the end of a pipeline


def named_by(
    parts: Iterable[nn.Module],
    optimizers: list[Optimizer],
    *,
    copies: frozenset[nn.Parameter] = frozenset(),
) -> list[Named]:
    """All parameters whose state the rank holds: with ZeRO 1 those that it steps for all."""
    names = {
        parameter: (name, parameter in copies)
        for part in parts
        for name, parameter in part.named_parameters()
    }
    found = []
    for optimizer in optimizers:
        # By its attribute: importing ZeRO's optimizer makes every start a tenth slower.
        own: Optimizer = getattr(optimizer, "optim", optimizer)
        for group in own.param_groups:
            for parameter in group["params"]:
                name, is_copy = names[parameter]
                found.append(Named(name=name, parameter=parameter, optimizer=own, is_copy=is_copy))
    return found


def is_stepped(named: list[Named]) -> bool:
    """Whether there is anything to keep. A parameter that no batch has used yet has nothing."""
    return any(each.optimizer.state.get(each.parameter) for each in named)


class Staging:
    """Copies the state into the CPU's memory, which further steps leave alone.

    A GPU's goes into pinned memory that is kept for the next copy, since pinning takes longer than
    copying, and training waits for it. So one copy is written at a time: `staged` writes over it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = carries_pinned_memory(device)
        self._kept: DefaultStager | None = None

    def staged(self, named: list[Named], *, is_part: bool = False) -> Tensors:
        """The copy of what the rank holds.

        In a part of several hosts' checkpoint a tied embedding's copy stays: its first may be elsewhere.
        """
        own = {
            f"{key}/{each.name}": value
            for each in named
            if is_part or not each.is_copy
            for key, value in (
                each.optimizer.state.get(each.parameter) or _zero_state(each)
            ).items()
        }
        stager = self._kept or self._new_stager()
        if self._is_pinned:
            self._kept = stager
        try:
            copy = stager.stage(own)
        finally:
            if not self._is_pinned:
                stager.close()
        assert isinstance(copy, dict)
        return copy

    def _new_stager(self) -> DefaultStager:
        # torch's own copy of DTensors: simpler ones alias tensors that are on the CPU already.
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=self._is_pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=self._is_pinned,
            )
        )


class PartPlanner(DefaultSavePlanner):
    """Plans a checkpoint of what some of the ranks hold; torch's own refuses tensors that lack parts.

    Reading one alone finds nothing amiss with what it lacks: passing, beside this, joins all hosts'.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See SavePlanner: what ranks have alike is written once."""
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        self.global_plan = plans
        self.metadata = replace(
            metadata, planner_data=dict(ChainMap(*(plan.planner_data for plan in plans)))
        )
        return plans, self.metadata


class Blank:
    """State that is zero: a checkpoint is read into it, and then the optimizers step from it."""

    def __init__(self, named: list[Named]) -> None:
        self._named = named
        self._fresh: dict[str, Tensors] = {}
        for each in named:
            self._fresh.setdefault(each.name, _zero_state(each))

    def read(self, reader: StorageReader, group: dist.ProcessGroup | None) -> None:
        """Reads the state of a checkpoint, cut for this rank. The optimizers are not changed.

        All ranks of the group must call it. Raises CheckpointException for files that do not fit or
        cannot be read.
        """
        state_dict_loader.load(
            {
                f"{key}/{name}": value
                for name, state in self._fresh.items()
                for key, value in state.items()
            },
            storage_reader=reader,
            process_group=group,
            no_dist=group is None,
        )

    def install(self) -> None:
        """Has the optimizers step from it."""
        for each in self._named:
            state = self._fresh[each.name]
            each.optimizer.state[each.parameter] = (
                {key: value.clone() for key, value in state.items()} if each.is_copy else state
            )


def _zero_state(each: Named) -> Tensors:
    """What the optimizer makes before its first step, which it leaves out where it finds one."""
    parameter = each.parameter.detach()
    if isinstance(each.optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(each.optimizer, RowwiseAdamW):
        return each.optimizer.zero_state(parameter)
    assert isinstance(each.optimizer, AdamW)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
