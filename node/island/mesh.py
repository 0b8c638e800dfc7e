"""How the ranks of one island work as one: data parallel, over torch's process groups.

Every rank holds the whole model, trains its share of each batch, and gradients are averaged.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One rank's place among the ranks; with a single rank nothing is ever sent."""

    rank: int = 0
    num_ranks: int = 1
    decisions: dist.ProcessGroup | None = None  # gloo, also when gradients go over NCCL

    @classmethod
    def joined(cls, *, rank: int, num_ranks: int, device: torch.device, meeting: Path) -> "Mesh":
        """Waits for the other ranks at a file that only this attempt uses.

        A file, not a TCP store: those listen on all addresses, and one of an earlier attempt hands
        out dead ones.
        """
        if num_ranks == 1:
            return cls()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            backend="nccl" if is_cuda else "gloo",
            store=dist.FileStore(str(meeting), num_ranks),  # type: ignore[attr-defined]  # is public
            rank=rank,
            world_size=num_ranks,
            device_id=device if is_cuda else None,
        )
        decisions = dist.new_group(backend="gloo") if is_cuda else dist.group.WORLD
        return cls(rank=rank, num_ranks=num_ranks, decisions=decisions)

    def parallel(self, objective: nn.Module, device: torch.device) -> nn.Module:
        """The objective with gradients averaged over the ranks."""
        if self.num_ranks == 1:
            return objective
        return DistributedDataParallel(
            objective,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,  # constants
            gradient_as_bucket_view=True,
        )

    def share(self, count: int) -> slice:
        """The rank's own part of `count` samples."""
        return slice(self.rank * count // self.num_ranks, (self.rank + 1) * count // self.num_ranks)

    def decided_by_first(self, decision: bool) -> bool:
        """What rank 0 decided, so that all ranks leave a loop at the same inner step."""
        if self.num_ranks == 1:
            return decision
        flag = torch.tensor(decision)
        dist.broadcast(flag, src=0, group=self.decisions)
        return bool(flag)

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the ranks of CPU values."""
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self.decisions)
        return values
