"""An order to train, how far it has come, and the samples that the ledger has leased for it."""

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Message = dict[str, Any]

MOST_SKIPPED = 24
"""Inner steps one after another whose loss may be no number: those that a GradScaler skips."""


@dataclass(slots=True, kw_only=True)
class Training:
    """Changes with each inner step."""

    number: int
    round: int
    inner_steps: int
    ends_at: float  # on this machine's monotonic clock
    progress_span: tuple[float, float]  # of the run, at the first inner step and at the last
    rates: dict[str, float]  # by the run file's keys of [inner]: as amended, at the schedule's peak
    # Of those rates, at inner steps evenly from the first to the last.
    rate_shares: tuple[float, ...]
    began_at: float
    read: dict[str, float] = field(default_factory=dict)  # what the loop has last read of them
    steps: int = 0
    look_at: int = 1  # steps after which the ranks agree next on whether to go on
    tokens: int = 0
    loss_sum: Tensor | float = 0.0  # kept on the device: reading it makes a GPU wait
    num_losses: Tensor | int = 0  # of those that are numbers
    num_bad: Tensor | int = 0  # latest losses, one after another, that are none
    told_at: float = 0.0
    told_losses: tuple[float, int] = (0.0, 0)  # sum and number, when they were told last
    is_leased: bool = True  # all steps were on leased samples
    sampled_step: int = -1  # the last one whose samples were handed out
    sampled_tokens: int = 0  # most that count in those samples, of this rank

    @property
    def progress(self) -> float:
        """How far the run is at the next inner step."""
        first, last = self.progress_span
        return first + min(1.0, self.steps / max(1, self.inner_steps - 1)) * (last - first)

    def rate(self, key: str) -> float:
        """What the run makes of one of its learning rates at the next inner step."""
        last = len(self.rate_shares) - 1
        place = min(1.0, self.steps / max(1, self.inner_steps - 1)) * last
        before = min(int(place), max(0, last - 1))
        after = min(before + 1, last)
        share = self.rate_shares[before]
        share += (place - before) * (self.rate_shares[after] - share)
        return self.rates[key] * share

    def add_loss(self, loss: float | Tensor) -> None:
        """Counts the loss of a step; one that is no number is left out of the mean."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"step(loss=…) is one number, and not a tensor of shape {list(loss.shape)}: tell its mean"
            )
        is_good: Tensor | bool
        if isinstance(loss, Tensor):
            value = loss.detach().float().reshape(())
            is_good = value.isfinite()
            self.loss_sum = self.loss_sum + value.nan_to_num(0.0, 0.0, 0.0)
        else:
            is_good = math.isfinite(loss)
            self.loss_sum = self.loss_sum + (float(loss) if is_good else 0.0)
        self.num_losses = self.num_losses + is_good
        self.num_bad = (self.num_bad + 1) * (1 - is_good * 1)

    def stepped(self, now: float, are_weights_finite: Callable[[], bool]) -> Message:
        """Tells of the steps so far, with the mean loss since this was told last."""
        loss_sum, (sum_before, num_before) = float(self.loss_sum), self.told_losses
        num_losses = int(self.num_losses)
        num_new = num_losses - num_before
        self.told_at, self.told_losses = now, (loss_sum, num_losses)
        return {
            "kind": "stepped",
            "number": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            "loss": (loss_sum - sum_before) / num_new if num_new else None,
            "is_finite": self._is_finite(are_weights_finite),
        }

    def trained(self, now: float, are_weights_finite: Callable[[], bool]) -> Message:
        """Answers the order."""
        num_losses = int(self.num_losses)
        return {
            "kind": "trained",
            "number": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": now - self.began_at,
            "is_leased": self.is_leased,
            "loss": float(self.loss_sum) / num_losses if num_losses else None,
            "is_finite": self._is_finite(are_weights_finite),
        }

    def _is_finite(self, are_weights_finite: Callable[[], bool]) -> bool:
        """Whether training goes on well: a step that was skipped may have a loss that is no number."""
        num_bad = int(self.num_bad)
        return not num_bad or (num_bad < MOST_SKIPPED and are_weights_finite())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A rank's share of an inner step's samples."""

    numbers: Tensor  # int64 [B], below the run's num_samples
    tokens: Tensor  # int64 [B, T + 1]: all but the last are the input; empty where not asked for
    counted: Tensor | None = None  # bool [B, T]: what is to be predicted; None: everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Samples of the steps from `first_step` on, as the node tells them: for all ranks."""

    order: int
    first_step: int
    batch: int  # samples of a step
    numbers: list[int]
    tokens: Tensor  # int32 [N, T + 1], or empty
    counted: Tensor | None
    targets: list[int] | None  # [N] that count, where no tokens were asked for; None: all do
    why: str  # there are none; empty where there are

    @classmethod
    def of(cls, message: Message, training: Training, *, batch: int, context: int) -> "Chunk":
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
