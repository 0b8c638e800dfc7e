"""The races of benchmarks.race: who competes over what, what was tried, and what that shows, as tables."""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.measurement import markdown
from coordinator.presets.cost import FP32_BYTES, Situation

CEILING, PLAIN, STREAMING, ATOLL = (
    "data parallelism",
    "plain DiLoCo",
    "Streaming DiLoCo",
    "Atoll",
)
PEERS = (PLAIN, STREAMING)
CONTENDERS = (CEILING, *PEERS, ATOLL)
FAST = (STREAMING, ATOLL)
"""Who sends while nodes train, and alone competes with the ceiling in longer races."""

RATES = {
    "adamw": (9e-3, 3e-3, 6e-3, 1.2e-2, 1.8e-2),
    "muon": (1.6e-2, 6e-3, 1.1e-2, 2.4e-2, 3.6e-2),
}
"""Of the inner optimizer, the middle first. Beside Muon, AdamW has the first of its own."""

OUTERS = ((0.7, 0.6), (0.7, 0.9), (0.7, 0.3), (1.0, 0.0))
"""Rate and momentum of Nesterov's outer step, the middle first; without momentum it is the plain mean."""

NUM_LAYERS = 2
"""Of what is trained, which is cut into no more fragments, whoever exchanges them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A real model, link and step, and how many steps the ceiling takes in the race's time."""

    says: str
    num_parameters: int
    bits_per_second: float
    step_seconds: float
    steps: int
    num_nodes: int = 2
    flops_per_second: float = 0.0  # of a node; presets take it for one of GPUs, or of a CPU

    @property
    def ratio(self) -> float:
        """R."""
        return 8 * FP32_BYTES * self.num_parameters / self.bits_per_second / self.step_seconds

    def situation(self, optimizer: str, *, times: int = 1) -> Situation:
        """As presets are told of it, so many times as long."""
        return Situation(
            num_parameters=self.num_parameters,
            num_layers=NUM_LAYERS,
            num_nodes=self.num_nodes,
            down_bits_per_second=self.bits_per_second,
            up_bits_per_second=self.bits_per_second,
            round_trip_seconds=0.05,
            seconds_per_inner_step=self.step_seconds,
            total_steps=times * self.steps,
            inner_optimizer=optimizer,
            flops_per_second=self.flops_per_second,
        )


RACES = {
    5: Race(
        says="4.7 million parameters, 100 Mbit/s, 0.3 s",
        num_parameters=4_700_000,
        bits_per_second=100e6,
        step_seconds=0.3,
        steps=800,
    ),
    50: Race(
        says="7 billion parameters, 1 Gbit/s, 4.5 s",
        num_parameters=7_000_000_000,
        bits_per_second=1e9,
        step_seconds=4.5,
        steps=1200,
        flops_per_second=200e12,
    ),
    300: Race(
        says="1 billion parameters, 100 Mbit/s, 1.07 s",
        num_parameters=1_000_000_000,
        bits_per_second=100e6,
        step_seconds=1.07,
        steps=3000,
        flops_per_second=50e12,
    ),
}


def race_of(ratio: int, num_nodes: int, *, is_quick: bool = False) -> Race:
    """A case with so many nodes; the quick one is as short as it can be."""
    race = replace(RACES[ratio], num_nodes=num_nodes)
    return replace(race, steps=15 * race.steps // 800) if is_quick else race


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One run of a contender."""

    ratio: int
    num_nodes: int
    contender: str
    optimizer: str
    rate: float
    interval: float = 1.0  # inner steps between exchanges, in multiples of the usual
    outer: tuple[float, float] = OUTERS[0]
    share: float = 1.0  # of the race's time
    seed: int = 0
    times: int = 1  # the usual time of the race


Known = dict[Try, dict[str, Any]]
"""Tries and their lines of results."""


def share_at(goal: float, curve: Sequence[tuple[float, float]]) -> tuple[float, str]:
    """The part of the time in which a loss is reached by (share, loss), and whether it is less or more.

    Between two runs the logarithm of the share is taken to be straight in the loss.
    """
    falling = sorted(curve, reverse=True)
    for (long, low), (short, high) in itertools.pairwise(falling):
        if low <= goal < high:
            part = (goal - low) / (high - low)
            return math.exp(math.log(long) + part * (math.log(short) - math.log(long))), ""
    return (falling[0][0], "more") if falling[0][1] > goal else (falling[-1][0], "less")


def report(known: Known) -> Iterator[str]:
    """A table for each case and number of nodes."""
    cases = sorted({(each.ratio, each.num_nodes, each.times) for each in known})
    for case in cases:
        rows: list[tuple[object, ...]] = []
        for optimizer in RATES:
            rows += _rows(of_case(known, *case, optimizer), optimizer)
        if not rows:
            continue
        ratio, num_nodes, times = case
        length = f", {times} times as long" if times > 1 else ""
        yield f"R = {ratio}, {num_nodes} nodes: {RACES[ratio].says}{length}"
        columns = (
            "contender",
            "tries",
            "rate",
            "interval",
            "outer",
            "steps",
            "loss",
            "above the ceiling",
        )
        yield markdown((*columns, "× as fast as the better peer", "× the ceiling's speed"), rows)


def of_case(known: Known, ratio: int, num_nodes: int, times: int, optimizer: str) -> Known:
    """The tries with one inner optimizer."""
    case = (ratio, num_nodes, times, optimizer)
    return {
        each: row
        for each, row in known.items()
        if (each.ratio, each.num_nodes, each.times, each.optimizer) == case
    }


def best_tries(known: Known) -> dict[str, Try]:
    """Of one case on the first seed, whoever has raced."""
    full = [each for each, row in known.items() if each.share == 1 and row["loss"] is not None]
    best: dict[str, Try] = {}
    for name in CONTENDERS:
        tries = [each for each in full if each.contender == name and each.seed == 0]
        if tries:
            best[name] = min(tries, key=lambda each: known[each]["loss"])
    return best


def _rows(known: Known, optimizer: str) -> Iterator[tuple[object, ...]]:
    best = best_tries(known)
    if not best.keys() >= {CEILING, *FAST}:  # somebody has not raced yet
        return
    full = [each for each, row in known.items() if each.share == 1 and row["loss"] is not None]
    peer = min((best[name] for name in PEERS if name in best), key=lambda each: known[each]["loss"])
    seeds = sorted({each.seed for each in full})
    seeds = [s for s in seeds if all(replace(each, seed=s) in known for each in best.values())]
    for name, each in best.items():
        losses = [known[replace(each, seed=seed)]["loss"] for seed in seeds]
        ceiling = [known[replace(best[CEILING], seed=seed)]["loss"] for seed in seeds]
        above = [loss / least - 1 for loss, least in zip(losses, ceiling, strict=True)]
        row = known[each]
        yield (
            f"{name}, {optimizer}" + (f", {row['codec']}" if row["codec"] else ""),
            len([one for one in full if one.contender == name and one.seed == 0]),
            f"{each.rate:g}",
            "–" if name == CEILING else row["steps"],
            "–" if name == CEILING else f"{each.outer[0]:g}, {each.outer[1]:g}",
            row["steps"] * row["rounds"],
            f"{statistics.mean(losses):.4f} {_range(losses, '.4f')}",
            f"{statistics.mean(above):+.2%} {_range(above, '+.2%')}",
            _speeds(known, each, peer, seeds) if name in (CEILING, ATOLL) else "1" * (each == peer),
            _speeds(known, best[CEILING], each, seeds, is_inverse=True),
        )


def _speeds(
    known: Known,
    fast: Try,
    slow: Try,
    seeds: Sequence[int],
    *,
    is_inverse: bool = False,
) -> str:
    """How much sooner `fast` reaches what `slow` ends at, or, inverse, what part of its speed `slow` has."""
    if fast == slow:
        return "1"
    found = []
    for seed in seeds:
        curve = [
            (each.share, row["loss"])
            for each, row in known.items()
            if replace(each, share=1.0) == replace(fast, seed=seed) and row["loss"] is not None
        ]
        if len(curve) > 1:  # it ran in shorter times, too
            found.append(share_at(known[replace(slow, seed=seed)]["loss"], curve))
    if not found:
        return ""
    values = [share if is_inverse else 1 / share for share, _ in found]
    signs = {sign for _, sign in found} - {""}
    if not signs:
        return f"{statistics.mean(values):.2f} {_range(values, '.2f')}"
    is_more = ("more" in signs) == is_inverse
    return f"{'over' if is_more else 'under'} {statistics.mean(values):.2f} {_range(values, '.2f')}"


def _range(values: Sequence[float], form: str) -> str:
    return f"({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
