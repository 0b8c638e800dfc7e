"""How much the outer learning rate is scaled in a commit: from what the commit says, in integers."""

import numpy as np

from protocol.rounds import Contributor
from protocol.run_spec import RateScaling, RunSpec

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
