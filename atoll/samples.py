"""Samples that the ledger has leased, as the node tells them: of several inner steps at once."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A rank's share of an inner step's samples."""

    numbers: Tensor  # int64 [B], below the run's num_samples
    tokens: Tensor  # int64 [B, T + 1]: all but the last are the input; empty where not asked for
    counted: Tensor | None = None  # bool [B, T]: what is to be predicted; None: everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Samples of the steps from `first_step` on, of one order to train, for all ranks."""

    order: int
    first_step: int
    batch: int  # samples of a step
    numbers: list[int]
    tokens: Tensor  # int32 [N, T + 1], or empty
    counted: Tensor | None
    targets: list[int] | None  # [N] that count, where no tokens were asked for; None: all do
    why: str  # there are none; empty where there are

    @classmethod
    def of(
        cls, message: dict[str, Any], training: Training, *, batch: int, context: int
    ) -> "Chunk":
        """What the node told."""
        counted = message["counted"]
        tokens = _unpacked(message["tokens"] or "", np.dtype("<i4"))
        return cls(
            order=training.number,
            first_step=training.steps,
            batch=batch,
            numbers=message["numbers"],
            tokens=tokens.view(-1, context + 1),
            counted=None
            if counted is None
            else _unpacked(counted, np.dtype("u1")).view(-1, context).bool(),
            targets=message["targets"],
            why=message["why"],
        )

    def holds(self, training: Training) -> bool:
        """Whether the samples of the next step are among them."""
        end = (training.steps - self.first_step + 1) * self.batch
        return self.order == training.number and end <= len(self.numbers)

    def targets_at(self, first: int, count: int, *, context: int) -> int:
        """How many targets of some samples are to be predicted."""
        part = slice(first, first + count)
        if self.counted is not None:
            return int(self.counted[part].sum())
        return count * context if self.targets is None else sum(self.targets[part])

    def batch_at(self, first: int, count: int) -> Batch:
        """Some samples."""
        part = slice(first, first + count)
        return Batch(
            numbers=torch.tensor(self.numbers[part], dtype=torch.int64),
            tokens=self.tokens[part].long(),
            counted=None if self.counted is None else self.counted[part],
        )


def _unpacked(text: str, dtype: "np.dtype[Any]") -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).copy())
