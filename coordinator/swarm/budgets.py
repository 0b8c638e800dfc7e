"""How many inner steps a round asks of each member, by the speeds that were measured. Pure.

Nodes should finish together: whoever is slower takes fewer inner steps, and its weight, which
counts tokens, is smaller by as much. What a node says of its speed is held against what the coordinator
has seen: the time between plan and report, the node's own record, and others with the same device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from coordinator.swarm.members import Member
from coordinator.swarm.state import Rules
from protocol.wire.messages import Trained
from protocol.wire.rounds import LEAST_CHECKED, NodeId

SMOOTHING = 0.5
"""What a new measurement counts beside all before it. A disturbed round is forgotten in a few."""

EQUAL_FROM = 0.8
"""Members within 20 % of the fastest count as equal to it: noise must not make every plan differ."""

FILLED = 0.8
"""The part of the longest training that budgets fill where nodes share the steps of a round: a node that
is slower than it was still ends in time."""

SLOWEST, FASTEST = 1e-6, 1e6
"""Inner steps per second. What lies outside is a broken clock or a lie, and no measurement."""

GROWTH = 4.0
"""A member's speed grows by no more than this in a round: what it says of itself becomes of use slowly,
and one that was disturbed for a while has its steps back in three."""

MOST_OF_ALIKE = 10.0
"""No member counts as faster than so many times the median of those with the same device. Much has one
name, "cpu" above all, so this catches what cannot be; what is asked of a member has a bound of its own."""

MOST_FOR_CHECKS = 0.75
"""The part of its inner steps that a member takes less, at most, in a round in which it checks others. Nor
does its lease become smaller than what shows anything to those that check it."""

MOST_OF_MEAN = 2.0
"""No member is asked for more than so many times the mean of a round's participants: its weight is its
tokens, and whoever has most of the weight is the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a report of training says of a member's speed."""

    speed: float | None  # inner steps per second by which plans go; None: never measured
    credible_steps: int  # of those that it reports


def measured(
    before: float | None, trained: Trained, *, seen_seconds: float = 0.0, usual: float | None = None
) -> Measurement:
    """A member's speed after a report of its training: an exponential mean, the first counts fully.

    `seen_seconds` are those from the plan to the report: the node cannot have trained for less, only have
    begun later than it could. `usual` is the median of members with the same device.
    """
    seconds = max(trained.seconds, seen_seconds)
    unmeasured = Measurement(speed=before, credible_steps=trained.inner_steps)
    if trained.inner_steps < 1 or not trained.seconds > 0:
        return unmeasured
    told = trained.inner_steps / seconds
    if not (math.isfinite(told) and SLOWEST <= told <= FASTEST):
        return unmeasured
    most = math.inf if usual is None else MOST_OF_ALIKE * usual
    speed = min(told, most) if before is None else min(told, most, GROWTH * before)
    smoothed = speed if before is None else min(most, before + SMOOTHING * (speed - before))
    steps = trained.inner_steps if speed == told else math.ceil(speed * seconds)
    return Measurement(speed=smoothed, credible_steps=min(steps, trained.inner_steps))


def device_of(member: Member) -> str:
    """What members must have in common to be as fast as each other."""
    return f"{member.num_ranks} × {member.device}"


def usual_speeds(members: Sequence[Member]) -> dict[str, float]:
    """The median speed of those that were measured, for each device: of two the slower."""
    known: dict[str, list[float]] = {}
    for member in members:
        if member.inner_steps_per_second is not None:
            known.setdefault(device_of(member), []).append(member.inner_steps_per_second)
    return {device: median_low(speeds) for device, speeds in known.items()}


def step_budgets(
    participants: Sequence[Member],
    rules: Rules,
    settled: Mapping[NodeId, int] | None = None,
    checking: Mapping[NodeId, float] | None = None,
) -> dict[NodeId, int]:
    """The inner steps of each participant whose steps are not settled: at least one each.

    All of `rules.inner_steps` for the fastest, and in proportion for the slower; a member that was
    never measured gets all: it stops at the deadline, and is measured then. With `rules.round_steps`
    all participants share these in proportion, so the tokens of a round stay the same. Those that check
    others take so many steps less in the same time.
    """
    settled, checking = settled or {}, checking or {}
    speeds = _capped({m.node_id: m.inner_steps_per_second for m in participants})
    fastest = max((speed for speed in speeds.values() if speed is not None), default=None)
    if rules.round_steps is None:
        budgets = {n: _budget(speed, fastest, rules.inner_steps) for n, speed in speeds.items()}
        return {
            node_id: max(
                1, math.floor(steps * _left(steps, checking.get(node_id, 0.0), rules.batch))
            )
            for node_id, steps in budgets.items()
            if node_id not in settled
        }
    here = {n: _evened(speed, fastest) for n, speed in speeds.items() if n not in settled}
    longest = math.inf if fastest is None else FILLED * rules.train_seconds
    steps_left = rules.round_steps - sum(settled.values())
    budgets = shared_out(steps_left, here, longest)
    if not checking:
        return budgets
    slowed = {n: s * _left(budgets[n], checking.get(n, 0.0), rules.batch) for n, s in here.items()}
    return shared_out(steps_left, slowed, longest)


def _left(steps: int, for_checks: float, batch: int) -> float:
    """The part of its steps that is left to a member when checks take the time of so many."""
    least = max(1.0 - MOST_FOR_CHECKS, LEAST_CHECKED / (batch * steps))
    return min(1.0, max(least, 1.0 - for_checks / steps))


def _capped(speeds: Mapping[NodeId, float | None]) -> dict[NodeId, float | None]:
    """The speeds, of which none is more than MOST_OF_MEAN times the mean that they then have.

    If the k fastest have the cap c, and the rest is r together, then c = MOST_OF_MEAN (k c + r) / n.
    """
    known = sorted((speed for speed in speeds.values() if speed is not None), reverse=True)
    cap, rest = math.inf, sum(known)
    for num_capped, speed in enumerate(known):
        cap = MOST_OF_MEAN * rest / max(1e-9, len(known) - MOST_OF_MEAN * num_capped)
        if speed <= cap:
            break
        rest -= speed
    return {n: speed if speed is None else min(speed, cap) for n, speed in speeds.items()}


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


def capped_in_words(participants: Sequence[Member]) -> str:
    """What the plan's reason adds where a node is faster than what is asked of it."""
    speeds = {m.node_id: m.inner_steps_per_second for m in participants}
    num_capped = sum(speeds[node_id] != speed for node_id, speed in _capped(speeds).items())
    if not num_capped:
        return ""
    nodes = "1 node is" if num_capped == 1 else f"{num_capped} nodes are"
    return f"; {nodes} asked for no more than {MOST_OF_MEAN:g} times the mean"


def budgets_in_words(budgets: Sequence[int], rules: Rules) -> str:
    """What the plan's reason adds: who takes fewer inner steps, or how a round's steps are shared."""
    if rules.round_steps is not None:
        return _shared_in_words(budgets, rules, rules.round_steps)
    fewer = [steps for steps in budgets if steps < rules.inner_steps]
    if not fewer:
        return ""
    which = "slower or checking" if rules.audited_share else "slower"
    nodes = f"1 {which} node takes" if len(fewer) == 1 else f"{len(fewer)} {which} nodes take"
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
    end = rules.schedule.ends_at_tokens
    if end is None or clock < end:
        return ""
    return f"; the learning rate stays at its end: total_tokens = {end} are trained"
