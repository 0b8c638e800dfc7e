"""An order to train, and how far it has come."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Message = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Training:
    """Changes with each inner step."""

    number: int
    round: int
    inner_steps: int
    ends_at: float  # on this machine's monotonic clock
    progress_span: tuple[float, float]  # of the run, at the first inner step and at the last
    rates: dict[str, float]  # by the run file's keys of [inner]: as amended, at the schedule's peak
    rate_shares: tuple[
        float, ...
    ]  # of those rates, at inner steps evenly from the first to the last
    began_at: float
    steps: int = 0
    look_at: int = 1  # steps after which the ranks agree next on whether to go on
    tokens: int = 0
    loss_sum: Tensor | float = 0.0  # kept on the device: reading it makes a GPU wait
    num_losses: int = 0
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
        """Counts the loss of a step."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"step(loss=…) is one number, and not a tensor of shape {list(loss.shape)}: tell its mean"
            )
        value = loss.detach().float().reshape(()) if isinstance(loss, Tensor) else float(loss)
        self.loss_sum = self.loss_sum + value
        self.num_losses += 1

    def stepped(self, now: float) -> Message:
        """Tells of the steps so far, with the mean loss since this was told last."""
        loss_sum, (sum_before, num_before) = float(self.loss_sum), self.told_losses
        num_new = self.num_losses - num_before
        self.told_at, self.told_losses = now, (loss_sum, self.num_losses)
        return {
            "kind": "stepped",
            "number": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            **_loss((loss_sum - sum_before) / num_new if num_new else None),
        }

    def trained(self, now: float) -> Message:
        """Answers the order."""
        return {
            "kind": "trained",
            "number": self.number,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": now - self.began_at,
            "is_leased": self.is_leased,
            **_loss(float(self.loss_sum) / self.num_losses if self.num_losses else None),
        }


def _loss(mean: float | None) -> Message:
    """A loss as it is told: JSON has no word for what is not a number."""
    is_finite = mean is None or math.isfinite(mean)
    return {"loss": mean if is_finite else None, "is_finite": is_finite}
