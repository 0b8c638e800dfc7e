"""How fast members train, and how many inner steps a round asks of each. Pure.

Nodes should finish together: whoever is slower takes fewer inner steps, and its weight, which
counts tokens, is smaller by as much.
"""

import math
from collections.abc import Mapping, Sequence

from coordinator.swarm.state import Member, Rules
from protocol.messages import Trained
from protocol.rounds import NodeId

SMOOTHING = 0.5
"""What a new measurement counts beside all before it. A disturbed round is forgotten in a few."""

EQUAL_FROM = 0.8
"""Members within 20 % of the fastest count as equal to it: noise must not make every plan differ."""

FILLED = 0.8
"""The part of the longest training that budgets fill where nodes share the steps of a round: a node that
is slower than it was still ends in time."""

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


def step_budgets(
    participants: Sequence[Member], rules: Rules, settled: Mapping[NodeId, int] | None = None
) -> dict[NodeId, int]:
    """The inner steps of each participant whose steps are not settled: at least one each.

    All of `rules.inner_steps` for the fastest, and in proportion for the slower; a member that was
    never measured gets all: it stops at the deadline, and is measured then. With `rules.round_steps`
    all participants share these in proportion, so the tokens of a round stay the same.
    """
    settled = settled or {}
    speeds = {m.node_id: m.inner_steps_per_second for m in participants}
    fastest = max((speed for speed in speeds.values() if speed is not None), default=None)
    if rules.round_steps is None:
        return {
            node_id: _budget(speed, fastest, rules.inner_steps)
            for node_id, speed in speeds.items()
            if node_id not in settled
        }
    here = {n: _evened(speed, fastest) for n, speed in speeds.items() if n not in settled}
    longest = math.inf if fastest is None else FILLED * rules.train_seconds
    return shared_out(rules.round_steps - sum(settled.values()), here, longest)


def _budget(speed: float | None, fastest: float | None, inner_steps: int) -> int:
    if speed is None or fastest is None or speed >= EQUAL_FROM * fastest:
        return inner_steps
    return max(1, round(speed / fastest * inner_steps))


def _evened(speed: float | None, fastest: float | None) -> float:
    """A speed to share by; who was never measured counts as the fastest, and stops at the deadline."""
    if fastest is None:
        return 1.0
    return fastest if speed is None or speed >= EQUAL_FROM * fastest else speed


def shared_out(
    num_steps: int, speeds: Mapping[NodeId, float], longest_seconds: float
) -> dict[NodeId, int]:
    """So many inner steps over all nodes, so that they end together: at least one each.

    Fewer where the nodes would train for longer than `longest_seconds`; more where there are more
    nodes than steps.
    """

    def in_seconds(seconds: float) -> dict[NodeId, float]:
        return {node_id: max(1.0, seconds * speed) for node_id, speed in speeds.items()}

    if not speeds:
        return {}
    shortest, longest = 0.0, min(longest_seconds, max(0, num_steps) / min(speeds.values()))
    steps = in_seconds(longest)
    if sum(steps.values()) <= num_steps and longest == longest_seconds:
        return {node_id: int(share) for node_id, share in steps.items()}
    for _ in range(64):  # doubles have no more digits
        middle = (shortest + longest) / 2
        if sum(in_seconds(middle).values()) < num_steps:
            shortest = middle
        else:
            longest = middle
    steps = in_seconds(shortest)
    budgets = {node_id: int(share) for node_id, share in steps.items()}
    left = max(0, num_steps - sum(budgets.values()))
    by_rest = sorted(steps, key=lambda node_id: budgets[node_id] - steps[node_id])
    return budgets | {node_id: budgets[node_id] + 1 for node_id in by_rest[:left]}


def budgets_in_words(budgets: Sequence[int], rules: Rules) -> str:
    """What the plan's reason adds: who takes fewer inner steps, or how a round's steps are shared."""
    if rules.round_steps is not None:
        return _shared_in_words(budgets, rules, rules.round_steps)
    fewer = [steps for steps in budgets if steps < rules.inner_steps]
    if not fewer:
        return ""
    nodes = "1 slower node takes" if len(fewer) == 1 else f"{len(fewer)} slower nodes take"
    return f"; {nodes} {_range(fewer)} of {rules.inner_steps} inner steps"


def _shared_in_words(budgets: Sequence[int], rules: Rules, round_steps: int) -> str:
    step_tokens, asked = rules.batch * rules.context, sum(budgets)
    wanted = f"round_tokens = {step_tokens * round_steps}"
    each = f"{_range(budgets)} inner steps each" if len(budgets) > 1 else f"{asked} inner steps"
    if asked == round_steps:
        return f"; {each} make {wanted}"
    told = f"; {each} make {step_tokens * asked} tokens, "
    if asked > round_steps and asked == len(budgets):
        return f"{told}more than {wanted}: a node takes one at least"
    if asked > round_steps:
        return f"{told}more than {wanted}: nodes came after steps were leased ahead"
    longest = FILLED * rules.train_seconds
    return (
        f"{told}less than {wanted}: no more fit into {longest:.0f} s of [deadlines] train = "
        f"{rules.train_seconds:g}, or nodes left after steps were leased ahead"
    )


def _range(budgets: Sequence[int]) -> str:
    least, most = min(budgets), max(budgets)
    return f"{least}" if least == most else f"{least} to {most}"


def schedule_in_words(rules: Rules, clock: int) -> str:
    """What the plan's reason adds once the schedule has come to its end before the run."""
    if rules.schedule_tokens is None or clock < rules.schedule_tokens:
        return ""
    return (
        f"; the learning rate stays at its end: total_tokens = {rules.schedule_tokens} are trained"
    )
