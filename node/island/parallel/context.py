"""Context parallel: each rank has a part of every sample's positions, and asks the others for keys.

Keys and values of all ranks are gathered in each layer (Llama 3, Grattafiori et al., 2024, section
3.3.2): simple, any number of heads, and cheap with grouped heads. torch's own `context_parallel`
has no kernel for CPUs.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd

from node.island.models.decoder_modules import attend_to_earlier


def positions_of(part: int, num_parts: int, length: int) -> Tensor:
    """The positions [length / num_parts] of one rank: a piece near the start, and its mirror image.

    Later positions attend to more keys, so two pieces from opposite ends are about as much work on
    every rank.
    """
    pieces = torch.arange(length).view(2 * num_parts, -1)
    return torch.cat((pieces[part], pieces[2 * num_parts - 1 - part]))


class ContextAttention:
    """Causal attention of the rank's own queries to the keys of all ranks before them."""

    def __init__(
        self, *, group: dist.ProcessGroup, part: int, num_parts: int, window: int | None
    ) -> None:
        self._group = group
        self._window = window
        self._pieces = (part, 2 * num_parts - 1 - part)
        gathered = [piece for i in range(num_parts) for piece in (i, 2 * num_parts - 1 - i)]
        self._order = sorted(range(2 * num_parts), key=gathered.__getitem__)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See node.island.models.decoder_modules.Attend, with T the rank's own positions."""
        both = torch.stack((k, v))  # [2, B, kv heads, T, head size]
        gathered = all_gather_single_autograd(both, gather_dim=0, group=self._group)
        pieces = [piece for own in gathered.split(2) for piece in own.chunk(2, dim=3)]
        k, v = torch.cat([pieces[i] for i in self._order], dim=3)  # in the order of positions
        length = q.shape[2] // 2
        mixed = [
            attend_to_earlier(own, k[:, :, :stop], v[:, :, :stop], self._window)
            for own, stop in zip(
                q.chunk(2, dim=2), (length * (i + 1) for i in self._pieces), strict=True
            )
        ]
        return torch.cat(mixed, dim=2)
