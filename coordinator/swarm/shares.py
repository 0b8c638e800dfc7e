"""What share of a round each participant has: inner steps by its speed, slices by its link. Pure.

Nodes should finish together: whoever is slower takes fewer inner steps, and its weight, which
counts tokens, is smaller by as much. What a node says of its speed is held against what the coordinator
has seen: the time between plan and report, the node's own record, and others with the same device.

Likewise the slowest link is to be done soonest. A contribution to the whole fragment and its result are
about as large; take that size as 1. A node among n that reduces the share x then sends 1 - x as
contributions to others' slices, and x as the result of its own slice to each of the n - 1 others; and it
receives as much:

    load = (1 - x) + (n - 1) x = 1 + (n - 2) x     up, and the same down

So from three nodes on, who reduces more carries more. Within a time T, a link of U and D bytes per
second has room for the x at which the slower direction takes T. The best T is the smallest at which
these rooms together hold the whole fragment; it is found by bisection, for all rooms grow with T. A
node whose link is busy until T with its own part alone has no room, and reduces nothing; the others
then share in proportion to their rooms. With one or two nodes it does not matter who reduces.

A helper contributes nothing, and nobody is sent less because of it: with m contributions its share x is

    load = max((n - 1) x up, 1 + (m - 1) x down)

The run owner vouches for it, so no cap holds for it: one helper may reduce everything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from coordinator.swarm.members import Member
from coordinator.swarm.state import Rules
from protocol.wire.messages import Trained
from protocol.wire.rounds import LEAST_CHECKED, NodeId
from protocol.wire.vitals import LinkRates

SMOOTHING = 0.5
"""What a new measurement counts beside all before it. A disturbed round is forgotten in a few."""

EQUAL_SPEED_FROM = 0.8
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
    if speed is None or fastest is None or speed >= EQUAL_SPEED_FROM * fastest:
        return inner_steps
    return max(1, round(speed / fastest * inner_steps))


def _evened(speed: float | None, fastest: float | None) -> float:
    """A speed to share by; who was never measured counts as the fastest, and stops at the deadline."""
    if fastest is None:
        return 1.0
    return fastest if speed is None or speed >= EQUAL_SPEED_FROM * fastest else speed


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


# Slices, by links

EQUAL_LINK_FROM = 2 / 3
"""A link of so much of the fastest counts as equal to it: noise must not make plans uneven
(docs/decisions.md)."""

LEAST_OF_EQUAL = 0.1
"""A share smaller than this part of an equal one is none: a slice costs round trips too."""

MOST_OF_EQUAL = 2.0
"""No share is larger than so many equal ones: a reducer holds all contributions to its slice in
memory, decoded, and what it says of its link is its own word."""

MOST_OF_ALL = 1 / 2
"""Of a fragment, that one reducer has where there are others."""

MOST_OF_USUAL = 4.0
"""No link counts as faster than so many times the median of all that are known."""

_NUM_BISECTIONS = 60


def reducer_shares(
    links: Sequence[LinkRates], may_reduce: Sequence[bool], is_helper: Sequence[bool] = ()
) -> tuple[float, ...]:
    """The share of the fragment that each participant reduces; they sum to 1.

    A rate that is not known is taken for the median of those that are, of its kind. Somebody must be
    allowed to reduce. Without `is_helper` there is no helper; else somebody trains.
    """
    num_reducers = sum(may_reduce)
    if not num_reducers:
        raise ValueError("somebody must reduce")
    is_helper = is_helper or [False] * len(links)
    slower = _slower_rates(links, is_helper)
    is_alike = not any(is_helper) and min(slower) == max(slower)
    if len(links) < 3 or is_alike:
        return tuple(may / num_reducers for may in may_reduce)
    cap = max(1 / num_reducers, min(MOST_OF_ALL, MOST_OF_EQUAL / num_reducers))
    most = [1.0 if helps else cap for helps in is_helper]
    num_others = len(links) - 1
    num_contributions = len(links) - sum(is_helper)

    def room(seconds: float, rate: float, helps: bool) -> float:
        if not helps:
            return (seconds * rate - 1) / (num_others - 1)
        down = (seconds * rate - 1) / (num_contributions - 1) if num_contributions > 1 else 1.0
        return min(seconds * rate / num_others, down)

    def rooms(seconds: float) -> list[float]:
        return [
            may * min(limit, max(0.0, room(seconds, rate, helps)))
            for rate, may, limit, helps in zip(slower, may_reduce, most, is_helper, strict=True)
        ]

    low = high = 1 / min(slower)  # nobody's own part is through sooner
    while sum(rooms(high)) < 1:
        high *= 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(rooms(middle)) >= 1 else (middle, high)
    return _without_crumbs(rooms(high), least=LEAST_OF_EQUAL / num_reducers, most=most)


def _slower_rates(links: Sequence[LinkRates], is_helper: Sequence[bool]) -> list[float]:
    """The slower direction of each link as it counts. What is near and what is usual is so among nodes.

    While no rate is known all are 1, for only ratios matter. A helper receives as much as its share lets
    come, so little is seen of the downlink of whoever has a small one. It counts as its uplink does.
    """
    ups = _known([link.up_bytes_per_second for link in links], is_helper)
    downs = _known([link.down_bytes_per_second for link in links], is_helper)
    slower = [
        up if helps and up < math.inf else min(up, down)
        for up, down, helps in zip(ups, downs, is_helper, strict=True)
    ]
    if min(slower) == math.inf:
        return [1.0] * len(links)
    usual = median_low(
        [rate for rate, helps in zip(slower, is_helper, strict=True) if not helps] or slower
    )
    return [
        rate if helps else min(rate, MOST_OF_USUAL * usual)
        for rate, helps in zip(slower, is_helper, strict=True)
    ]


def _without_crumbs(room: list[float], *, least: float, most: list[float]) -> tuple[float, ...]:
    """The shares without those that are too small; what these had goes to others up to the most."""
    whole = sum(room)
    shares = [share if share / whole >= least else 0.0 for share in room]
    equal = 1 / sum(share > 0 for share in shares)
    most = [max(limit, equal) for limit in most]
    full: set[int] = set()
    while True:
        left = 1 - sum(most[place] for place in full)
        others = sum(share for place, share in enumerate(shares) if place not in full)
        scaled = [
            most[place] if place in full else share * left / others if others else share
            for place, share in enumerate(shares)
        ]
        over = {place for place, share in enumerate(scaled) if share > most[place]} - full
        if not over:
            return tuple(scaled)
        full |= over


def _known(rates: Sequence[float | None], is_helper: Sequence[bool]) -> list[float]:
    """All rates: unknown ones are the median, and near ones the fastest, of their kind; inf: none known.

    Where nothing is known of a kind, the median is of all.
    """
    kinds = list(zip(rates, is_helper, strict=True))
    known = [rate for rate in rates if rate is not None]
    usual = {}
    for kind in (False, True):
        alike = [rate for rate, helps in kinds if helps == kind and rate is not None] or known
        usual[kind] = median(alike) if alike else math.inf
    filled = [usual[helps] if rate is None else rate for rate, helps in kinds]
    fastest = {
        kind: max((r for r, k in zip(filled, is_helper, strict=True) if k == kind), default=0.0)
        for kind in (False, True)
    }
    return [
        fastest[kind] if rate >= EQUAL_LINK_FROM * fastest[kind] else rate
        for rate, kind in zip(filled, is_helper, strict=True)
    ]


def shares_in_words(shares: Sequence[float], may_reduce: Sequence[bool]) -> str:
    """What the plan's reason adds when slices are uneven; empty when they are not."""
    asked = [share for share, may in zip(shares, may_reduce, strict=True) if may]
    none = sum(share == 0 for share in asked)
    some = [share for share in asked if share > 0]
    words = []
    if none:
        words.append(
            "1 slow link reduces nothing" if none == 1 else f"{none} slow links reduce nothing"
        )
    if max(some) > 1.01 * min(some):
        words.append(
            f"slices by bandwidth, {100 * min(some):.0f} to {100 * max(some):.0f} % of the fragment"
        )
    return "; " + ", ".join(words) if words else ""
