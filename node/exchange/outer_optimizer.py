"""Outer optimizers, and by which rules of a run they and all that leads to them go.

Every node does this arithmetic for itself and must come to the same bits (docs/concepts.md, promise 1). So
each step is one fp32 operation that IEEE 754 rounds correctly, in the order written here. Never
use a fused form (torch.add with alpha, addcmul, lerp): whether it rounds once or twice depends on
the machine. Kernels run each operation by itself, on the calling thread (codecs/codec.py).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from node.exchange.codecs.codec import ONE_THREAD, Codec, Tiles, kernel, read_only
from node.exchange.codecs.registry import codec_named
from node.exchange.reduction import Merging
from node.outer_state import Vector
from protocol.errors import SystemRefusedError
from protocol.run.run_spec import OuterSection, RateScaling, RunSpec
from protocol.wire.rounds import Contributor

UNSCALED = np.float32(1)


class OuterOptimizer(ABC):
    """Applies a mean pseudo-gradient to a span of the outer state, element by element.

    Element by element means: applying it to two halves is the same as to the whole.
    """

    moves_momentum: ClassVar[bool]
    """Whether it changes the momentum at all."""

    def __init__(self, *, learning_rate: float) -> None:
        self._learning_rate = np.float32(learning_rate)

    def apply(
        self,
        parameters: Vector,
        momentum: Vector,
        mean: Vector,
        rate_scale: np.float32 = UNSCALED,
    ) -> None:
        """Changes `parameters` and `momentum` [n] in place by the pseudo-gradient `mean` [n].

        The learning rate is multiplied by `rate_scale`, once, before anything else.
        Raises ValueError when the lengths differ, and SystemRefusedError when this thread rounds
        unlike IEEE 754 demands; both before anything has changed.
        """
        _check(parameters, momentum, mean)
        self._move(parameters, momentum, read_only(mean), self._learning_rate * rate_scale)

    @abstractmethod
    def _move(
        self, parameters: Vector, momentum: Vector, mean: Vector, learning_rate: np.float32
    ) -> None: ...


@kernel
def _move_by_nesterov(
    parameters: Vector,
    momentum: Vector,
    mean: Vector,
    learning_rate: np.float32,
    decay: np.float32,
) -> None:
    for i in range(mean.size):
        momentum[i] = (decay * momentum[i]) + mean[i]
        update = mean[i] + (decay * momentum[i])
        parameters[i] -= learning_rate * update


@kernel
def _move_by_sgd(parameters: Vector, mean: Vector, learning_rate: np.float32) -> None:
    for i in range(mean.size):
        parameters[i] -= learning_rate * mean[i]


class Nesterov(OuterOptimizer):
    """SGD with Nesterov momentum on the averaged pseudo-gradient.

    DiLoCo (Douillard et al. 2023, Algorithm 1), in the form of torch.optim.SGD(nesterov=True,
    dampening=0), with g the mean:

        m = mu * m + g
        p = p - lr * (g + mu * m)

    Both hyperparameters are rounded to fp32 first; the run file has none that this ruins.
    """

    moves_momentum = True

    def __init__(self, *, learning_rate: float, momentum: float) -> None:
        super().__init__(learning_rate=learning_rate)
        self._momentum = np.float32(momentum)

    def _move(
        self, parameters: Vector, momentum: Vector, mean: Vector, learning_rate: np.float32
    ) -> None:
        _move_by_nesterov(parameters, momentum, mean, learning_rate, self._momentum)


class Sgd(OuterOptimizer):
    """Plain SGD, p = p - lr * g, which leaves momentum alone. Sparse codecs want it."""

    moves_momentum = False

    def _move(
        self, parameters: Vector, momentum: Vector, mean: Vector, learning_rate: np.float32
    ) -> None:
        _move_by_sgd(parameters, mean, learning_rate)


def outer_optimizer_of(outer: OuterSection) -> OuterOptimizer:
    """The optimizer that the run file asks for."""
    match outer.optimizer:
        case "nesterov":
            return Nesterov(learning_rate=outer.learning_rate, momentum=outer.momentum)
        case "sgd":
            return Sgd(learning_rate=outer.learning_rate)


def _check(parameters: Vector, momentum: Vector, mean: Vector) -> None:
    if not parameters.shape == momentum.shape == mean.shape:
        raise ValueError(
            f"parameters {parameters.shape}, momentum {momentum.shape} and mean {mean.shape} "
            "differ in length"
        )
    if {parameters.dtype, momentum.dtype, mean.dtype} != {np.dtype(np.float32)}:
        raise ValueError(f"not all float32: {parameters.dtype}, {momentum.dtype}, {mean.dtype}")
    refuse_flushed_subnormals()


def refuse_flushed_subnormals() -> None:
    """Raises SystemRefusedError when this thread rounds unlike IEEE 754 demands."""
    # Momentum of a weight that no longer moves shrinks into the subnormal range. Libraries built
    # with -ffast-math make the thread that loads them, and all it starts, flush such numbers to
    # zero: this node's outer state would leave the others' without a sign.
    halved = np.multiply(np.finfo(np.float32).tiny, np.float32(0.5))
    if halved == 0:
        raise SystemRefusedError(
            "this process flushes subnormal numbers to zero, so its outer state would differ from "
            "the other nodes'",
            next_step="leave out torch.set_flush_denormal(True) and libraries built for fast math",
        )


_BITS = 48
"""Of the root, after the point: twice what fp32 keeps."""


class RateScale:
    """The factor of the outer learning rate for one slice of a commit.

    `learning_rate` is meant for `round_tokens`, or for `min_nodes` that train all their inner steps.
    More nodes, or more steps, bring a mean with less noise in it, which bears a higher rate (Charles
    et al. 2025, "Communication-Efficient Language Model Training Scales Reliably and Robustly"); fewer
    want a lower one. With t the samples of the slice's contributors over those of a full round, the
    factor is the square root of t ("sqrt") or its cube root ("cbrt": 0.4, 0.5, 0.63, 0.8 for 1, 2, 4, 8
    nodes if it is 0.4 for one). Samples, and not the tokens in them that count: data of which half is
    masked is no round of half the nodes.

    Every node computes it for itself, and libraries differ in the last bit of a root. So it is
    taken in integers, cut after 48 binary places, and rounded to fp32.
    """

    def __init__(self, *, scaling: RateScaling, full_round_samples: int) -> None:
        self._scaling = scaling
        self._full_round_samples = full_round_samples

    def of(self, contributors: tuple[Contributor, ...]) -> np.float32:
        """The factor for a slice with these contributors."""
        samples = sum(contributor.samples for contributor in contributors)
        match self._scaling:
            case "none":
                return np.float32(1)
            case "sqrt":
                degree = 2
            case "cbrt":
                degree = 3
        root = _root((samples << degree * _BITS) // self._full_round_samples, degree)
        return np.float32(root / (1 << _BITS))


def rate_scale_of(spec: RunSpec) -> RateScale:
    """What the run file asks for."""
    return RateScale(
        scaling=spec.outer.scaling,
        full_round_samples=spec.inner.batch
        * (spec.round_steps or spec.run.min_nodes * spec.inner.steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterRules:
    """A run's rules in a round, as far as they are of the outer state's arithmetic."""

    uplink: Codec
    downlink: Codec
    optimizer: OuterOptimizer
    rate_scale: RateScale
    merging: Merging = field(default_factory=Merging)
    residual_decay: float = 1.0  # what part of an encoding error is still owed after a commit


def outer_rules_of(spec: RunSpec, tiles: Tiles = ONE_THREAD) -> OuterRules:
    """Those of a run file, or of what amendments have made of it."""
    return OuterRules(
        uplink=codec_named(spec.exchange.uplink, tiles),
        downlink=codec_named(spec.exchange.downlink, tiles),
        optimizer=outer_optimizer_of(spec.outer),
        rate_scale=rate_scale_of(spec),
        merging=Merging(
            merge=spec.outer.merge,
            is_screened=spec.outer.screening,
            is_audited=spec.outer.audit > 0,
            most_weight=spec.data.most_weight,
        ),
        residual_decay=spec.exchange.residual_decay,
    )


def _root(number: int, degree: int) -> int:
    """The largest integer whose power of that degree is no more than `number`."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        if middle**degree <= number:
            low = middle
        else:
            high = middle
    return low
