"""Lots by a secret that members do not know: who is audited, checked, or asked for a loss. Pure."""

from collections.abc import Sequence
from typing import TypeVar

from blake3 import blake3

from coordinator.swarm.state import SwarmState

T = TypeVar("T")


def number_of(state: SwarmState, *of: object) -> int:
    """A number of 63 bits, another one for each thing that it is drawn for, and in each incarnation."""
    place = ", ".join(map(str, (*of, state.incarnation)))
    digest = blake3(state.audit_secret + place.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def lot(state: SwarmState, *of: object) -> float:
    """A number from 0 to 1, likewise."""
    return number_of(state, *of) / 2.0**63


def drawn(state: SwarmState, may: Sequence[T], weights: Sequence[float], *of: object) -> T:
    """One of some, each as likely as it weighs."""
    left = lot(state, *of) * sum(weights)
    for each, weight in zip(may, weights, strict=True):
        left -= weight
        if left < 0:
            return each
    return may[-1]
