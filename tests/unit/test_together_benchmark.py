"""How much sooner several nodes reach the loss of one alone: told right of runs whose losses are known."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from benchmarks.learning.together import PLAIN_MEAN, SHARED, SHARES, compete, faster, report
from benchmarks.races import CEILING, RATES, Known, Try

ALONE = Try(
    ratio=50,
    num_nodes=1,
    contender=CEILING,
    optimizer="muon",
    rate=RATES["muon"][0],
    outer=PLAIN_MEAN,
    times=2,
)
SPEEDS = {(CEILING, number): number**0.9 for number in (1, 2, 4, 8)} | {
    ("Atoll", number): number**0.7 for number in (2, 4, 8)
}


class Runs:
    """Losses that fall by the logarithm of the work, and are least at one rate, in short runs at the next."""

    def __init__(self, best_rate: float) -> None:
        self.known: Known = {}
        self._best_rate = best_rate

    def losses_of(self, tries: Sequence[Try]) -> list[float]:
        for each in tries:
            work = each.share * SPEEDS[each.contender, each.num_nodes]
            best = replace(each, rate=self._best_rate)
            best_rate = faster(best).rate if each.share < 0.2 else best.rate
            off = math.log(each.rate / best_rate) ** 2
            self.known[each] = asdict(each) | {
                "loss": 1.3 + 0.01 * each.seed - 0.1 * math.log(work) + off
            }
        return [self.known[each]["loss"] for each in tries]


@pytest.mark.parametrize("best_rate", [6e-3, 3.6e-2])
def test_the_table_tells_how_much_sooner_a_loss_is_reached_whatever_rate_is_best(
    best_rate: float,
) -> None:
    runs = Runs(best_rate)
    compete(ALONE, list(SHARES), [0, 3], runs.losses_of)
    (table,) = report(runs.known)
    assert "2400 steps to 1.3000, 1.3300" in table
    for number in SHARES:
        atoll, ceiling = (f"{SPEEDS[each, number]:.2f}" for each in SHARED)
        row = f"| {number} | {atoll} ({atoll} to {atoll}) | {ceiling} ({ceiling} to {ceiling}) |"
        assert row in table


def test_where_no_part_of_the_time_is_short_enough_the_table_says_so() -> None:
    runs = Runs(RATES["muon"][0])
    compete(ALONE, [2], [0], runs.losses_of)
    longest, next_one = SHARES[2][:2]
    one_part = {e: row for e, row in runs.known.items() if e.share in (1.0, longest)}
    assert "| 2 |  |  |" in next(iter(report(one_part))), "one part makes no line"
    sooner = {e: row | {"loss": row["loss"] - e.num_nodes + 1} for e, row in runs.known.items()}
    told = f"over {1 / next_one:.2f}"
    assert f"| 2 | {told} | {told} |" in next(iter(report(sooner)))
    later = {e: row | {"loss": row["loss"] + e.num_nodes - 1} for e, row in runs.known.items()}
    told = f"under {1 / longest:.2f}"
    assert f"| 2 | {told} | {told} |" in next(iter(report(later)))
