"""Digits of 8 × 8 pixels: a small residual network, its loss, and accuracy as a metric.

The images come with scikit-learn. With batch norm, running statistics are computed before each evaluation.
"""

import numpy as np
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 — its usual name

Batch = tuple[Tensor, Tensor]


def block(channels_in: int, channels_out: int, norm: str) -> nn.Sequential:
    """One convolution, normalised."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    normalise = nn.BatchNorm2d(channels_out) if norm == "batch" else nn.GroupNorm(4, channels_out)
    return nn.Sequential(convolution, normalise, nn.ReLU())


class Residual(nn.Sequential):
    """What its modules add."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x."""
        return x + super().forward(x)


def model(channels: int = 16, norm: str = "group"):
    """What [model] function names."""
    module = nn.Sequential(
        block(1, channels, norm),
        nn.MaxPool2d(2),
        Residual(block(channels, channels, norm)),
        block(channels, 2 * channels, norm),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, 10),
    )
    # Modules one after another, for contributors whose pipelines (pp) cut them: here all there are.
    return module, loss, accuracy, {"stages": ["*"]}


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Mean nats a digit."""
    images, digits = batch
    return F.cross_entropy(module(images), digits)


def accuracy(module: nn.Module, batch: Batch) -> Tensor:
    """The part of digits that is recognised."""
    images, digits = batch
    return (module(images).argmax(dim=1) == digits).float().mean()


class Digits:
    """Some of the digits; sample i is an image [1, 8, 8] and its number."""

    def __init__(self, chosen: np.ndarray) -> None:
        digits = load_digits()
        self._images = (digits.images[chosen, None] / 8 - 1).astype(np.float32)
        self._numbers = digits.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self._images[index], self._numbers[index]


def data():
    """What [data] function names: every fifth digit is held out."""
    numbers = np.arange(1797)
    return Digits(numbers[numbers % 5 != 0]), Digits(numbers[numbers % 5 == 0])
