"""Payments, few of them fraudulent: a table, rare positives that weigh more, and the area under the curve.

The table is drawn from a seed. The loss gives a sum and its count, as each payment has a weight of its own.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 — its usual name

Batch = dict[str, Tensor]
NUM_FEATURES = 12


def model(width: int = 32, positive_weight: float = 8.0):
    """What [model] function names."""
    module = nn.Sequential(
        nn.Linear(NUM_FEATURES, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 1)
    )

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nats, summed with their weights, and the sum of the weights."""
        fraudulent = batch["is_fraud"]
        weights = 1 + (positive_weight - 1) * fraudulent
        nats = F.binary_cross_entropy_with_logits(
            module(batch["features"]).squeeze(1), fraudulent, reduction="none"
        )
        return (nats * weights).sum(), weights.sum()

    return module, loss, ranked_right


def ranked_right(module: nn.Module, batch: Batch) -> Tensor:
    """Of all pairs of a fraud and another payment, the part in which the fraud scores higher."""
    scores, fraudulent = module(batch["features"]).squeeze(1), batch["is_fraud"] > 0
    pairs = scores[fraudulent][:, None] > scores[~fraudulent]
    return pairs.float().mean() if pairs.numel() else torch.tensor(0.5)


class Payments:
    """Rows of a table that is drawn from a seed."""

    def __init__(self, seed: int, count: int) -> None:
        draws = np.random.default_rng(seed)
        self._features = draws.standard_normal((count, NUM_FEATURES)).astype(np.float32)
        odds = self._features[:, 0] * self._features[:, 1] + self._features[:, 2] - 2.5
        self._is_fraud = (draws.random(count) < 1 / (1 + np.exp(-2 * odds))).astype(np.float32)

    def __len__(self) -> int:
        return len(self._is_fraud)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"features": self._features[index], "is_fraud": self._is_fraud[index]}


def data(count: int = 8000):
    """What [data] function names."""
    return Payments(1, count), Payments(2, count // 8)
