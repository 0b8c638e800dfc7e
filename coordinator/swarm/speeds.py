"""How fast members train, and how many inner steps a round asks of each. Pure.

Nodes should finish together: whoever is slower takes fewer inner steps, and its weight, which
counts tokens, is smaller by as much.
"""

import math
from collections.abc import Mapping, Sequence

from coordinator.swarm.state import Member, Trained
from protocol.rounds import NodeId

SMOOTHING = 0.5
"""What a new measurement counts beside all before it. A disturbed round is forgotten in a few."""

EQUAL_FROM = 0.8
"""Members within 20 % of the fastest count as equal to it: noise must not make every plan differ."""

SLOWEST, FASTEST = 1e-6, 1e6
"""Inner steps per second. What lies outside is a broken clock or a lie, and no measurement."""


def measured(before: float | None, trained: Trained) -> float | None:
    """A member's inner steps per second after a report of its training; None without measurement.

    An exponential mean, in which the first report counts fully.
    """
    if trained.inner_steps < 1 or not trained.seconds > 0:
        return before
    speed = trained.inner_steps / trained.seconds
    if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
        return before
    return speed if before is None else before + SMOOTHING * (speed - before)


def step_budgets(participants: Sequence[Member], inner_steps: int) -> Mapping[NodeId, int]:
    """The inner steps of each participant: all for the fastest, in proportion for the slower.

    At least one step each. A member that was never measured gets all: it stops at the deadline,
    and is measured then.
    """
    speeds = {m.node_id: m.inner_steps_per_second for m in participants}
    fastest = max((speed for speed in speeds.values() if speed is not None), default=None)
    return {node_id: _budget(speed, fastest, inner_steps) for node_id, speed in speeds.items()}


def _budget(speed: float | None, fastest: float | None, inner_steps: int) -> int:
    if speed is None or fastest is None or speed >= EQUAL_FROM * fastest:
        return inner_steps
    return max(1, round(speed / fastest * inner_steps))


def budgets_in_words(budgets: Sequence[int], inner_steps: int) -> str:
    """What the plan's reason adds when not all take the same inner steps; empty when they do."""
    fewer = [steps for steps in budgets if steps < inner_steps]
    if not fewer:
        return ""
    nodes = "1 slower node takes" if len(fewer) == 1 else f"{len(fewer)} slower nodes take"
    least, most = min(fewer), max(fewer)
    steps = f"{least}" if least == most else f"{least} to {most}"
    return f"; {nodes} {steps} of {inner_steps} inner steps"
