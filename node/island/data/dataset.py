"""What a rank asks for: samples by number, whatever they are made of."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from node.island.data.manifest import Split
from node.island.data.samples import Indices
from protocol.wire.rounds import CorpusSummary

Tree = Any
"""A tensor, or a tuple, list or dictionary of trees: what torch collates of a function's samples."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples as a model takes them."""

    tokens: Tokens  # [B, T + 1]; all but the last are the input
    counted: npt.NDArray[np.bool_] | None = (
        None  # [B, T]: what is to be predicted; None: everything
    )
    documents: npt.NDArray[np.int32] | None = None  # [B, T + 1], counted from 0 in each row


class Dataset(Protocol):
    """Two splits of samples. A sample is the same on all nodes whose summary has the same digest."""

    @property
    def num_samples(self) -> int:
        """Samples of the training split."""

    @property
    def num_held_out_samples(self) -> int:
        """Samples of the held-out split, which no node trains on."""

    @property
    def num_together(self) -> int:
        """Neighbouring samples that are as near as one: orders take them together; 1 if all are near."""

    def summary(self) -> CorpusSummary:
        """What the coordinator is told."""

    def batch(self, split: Split, indices: Indices) -> Batch | Tree:
        """Samples of a split by number: tokens, or what a function gives. Raises BadDataError."""

    def expect(self, split: Split, indices: Indices) -> None:
        """Says which samples come next, so that what is far can be on its way."""

    def num_counted(self, split: Split, indices: Indices) -> int:
        """Tokens of these samples that are to be predicted; 0 where masks leave none."""
