"""Whole matrices out of shards, each on one rank: what Muon's iteration needs.

Every rank gets about as much work, and twice over the network goes no more than its own shards
("Muon is scalable for LLM training", Liu et al., 2025, section 2.3, gathers all of a matrix on all
ranks and has each of them iterate).
"""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from node.island.parallel.boxes import dealt, extent_of

Corners = list[int]
"""A box of a matrix: first row and column, rows, columns."""


class WholeMatrices:
    """Matrices of which each rank of a group has a box. All its ranks make the same calls."""

    def __init__(self, matrices: list[Tensor], group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        extents = [extent_of(matrix) for matrix in matrices]
        own = torch.tensor([start + size for start, size in extents], device=matrices[0].device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        self._boxes: list[list[Corners]] = torch.stack(every).tolist()
        work = [rows * columns * min(rows, columns) for rows, columns in self._shapes]
        self._dealt = dealt(work, len(every))

    def apply(
        self, function: Callable[[list[Tensor]], list[Tensor]], parts: list[Tensor]
    ) -> list[Tensor]:
        """The rank's boxes of what a function of whole matrices makes of them."""
        own = self._boxes[self._rank]
        to_owners = [[parts[i] for i in turn] for turn in self._dealt]
        mine = self._dealt[self._rank]
        from_ranks = [[boxes[i] for i in mine] for boxes in self._boxes]
        received = self._exchanged(to_owners, from_ranks, parts[0])
        whole = [parts[0].new_empty(self._shapes[i]) for i in mine]
        for boxes, pieces in zip(from_ranks, received, strict=True):
            for matrix, box, piece in zip(whole, boxes, pieces, strict=True):
                _cut(matrix, box).copy_(piece)
        results = function(whole)
        to_ranks = [
            [_cut(matrix, box) for matrix, box in zip(results, boxes, strict=True)]
            for boxes in from_ranks
        ]
        from_owners = [[own[i] for i in turn] for turn in self._dealt]
        returned = self._exchanged(to_ranks, from_owners, parts[0])
        places = dict(zip(chain(*self._dealt), chain(*returned), strict=True))
        return [places[i] for i in range(len(parts))]

    def _exchanged(
        self, sent: list[list[Tensor]], expected: list[list[Corners]], like: Tensor
    ) -> Iterator[list[Tensor]]:
        """What each rank has for this one, in the order of ranks; a rank may have nothing."""
        flat = torch.cat([like.new_empty(0), *(each.reshape(-1) for each in chain(*sent))])
        sizes = [[rows * columns for _, _, rows, columns in boxes] for boxes in expected]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            received,
            flat,
            output_split_sizes=[sum(each) for each in sizes],
            input_split_sizes=[sum(piece.numel() for piece in pieces) for pieces in sent],
            group=self._group,
        )
        pieces = iter(torch.split(received, list(chain(*sizes))))
        return (
            [next(pieces).view(rows, columns) for _, _, rows, columns in boxes]
            for boxes in expected
        )


def _cut(matrix: Tensor, box: Corners) -> Tensor:
    row, column, rows, columns = box
    return matrix.narrow(0, row, rows).narrow(1, column, columns)
