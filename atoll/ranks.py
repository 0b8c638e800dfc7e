"""What the ranks of a loop agree on through torch.distributed: rank 0 says it, all do it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from atoll.errors import SwarmError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank among those of the loop. With more than one, all make the same calls in the same order."""

    rank: int
    world_size: int
    device: torch.device  # where numbers travel: NCCL carries none of the CPU's

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Of this process. Raises SwarmError where ranks are not connected, or on several machines."""
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        if not (dist.is_available() and dist.is_initialized()):
            if asked > 1:
                raise SwarmError(
                    f"this is one of {asked} ranks, and torch.distributed is not set up",
                    next_step="call torch.distributed.init_process_group() before atoll.join()",
                )
            return cls(rank=0, world_size=1, device=torch.device("cpu"))
        world_size = dist.get_world_size()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        if here < world_size:
            raise SwarmError(
                f"{here} of the loop's {world_size} ranks are on this machine, and all must be: they "
                "share memory with the node",
                next_step="start a node and a loop on each machine: each is an island of the swarm",
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return cls(rank=dist.get_rank(), world_size=world_size, device=device)

    def said_by_first(self, decide: Callable[[], int]) -> int:
        """What rank 0 decides, on all ranks."""
        if self.world_size == 1:
            return decide()
        said = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.rank == 0:
            said.fill_(decide())
        dist.broadcast(said, src=0)
        return int(said.item())

    def said_by_any(self, seen: float) -> bool:
        """Whether any rank has seen it, on all ranks."""
        if self.world_size == 1:
            return bool(seen)
        said = torch.tensor(seen, device=self.device)
        dist.all_reduce(said)
        return bool(said.item())

    def average(self, tensor: torch.Tensor) -> None:
        """Gives all ranks the mean of theirs, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
            tensor /= self.world_size

    def same_for_all(self, value: Value) -> Value:
        """Rank 0's value, on all ranks."""
        if self.world_size == 1:
            return value
        values = [value]
        device = self.device if self.device.type != "cpu" else None
        dist.broadcast_object_list(values, src=0, device=device)
        return values[0]
