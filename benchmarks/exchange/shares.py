"""What presets count on of a link, of the results of benchmarks/exchange.

    python -m benchmarks.exchange.shares

Prints each exchange beside what the formula of presets says of it, the share that belongs in
coordinator/presets/cost.py as MEASURED_SHARE, which is the median of two nodes' exchanges on hosts as
they come, and what docs/performance.md says of them. Run it after new rows have been added;
tests/unit/test_preset_link_figures.py says where code or docs differ.

Of each case the newest row counts, if slices are even, which the formula is for, and if hardly anything else
ran on the machine's cores. A row's time ends when all nodes hold all results, so what the coordinator's
messages take is not in it. In slow motion cores are as many times as fast.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.exchange.case import codecs_named
from benchmarks.exchange.report import has_even_slices, newest
from benchmarks.measurement import Row, read_rows
from coordinator.presets.cost import (
    COORDINATOR_ROUND_TRIPS,
    INSTANT_HOST,
    MEASURED_HOST,
    PEER_ROUND_TRIPS,
    Setting,
    Situation,
    bytes_per_round,
    host_seconds,
    predicted,
)
from protocol.terminal import console

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
FILES = ("exchange.jsonl", "exchange-nodes.jsonl", "exchange-codecs.jsonl")

MOST_OF_OTHERS = 0.25
"""Of all cores, what other processes may have taken beside a row that counts."""

FORGETTING_SECONDS = 1.0
"""After shorter pauses TCP counts as one that kept its windows: after 0.3 s two and four nodes took less than
two round trips more than their links' limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One row, as presets see it."""

    situation: Situation
    setting: Setting
    seconds: float
    slow_motion: float

    @property
    def is_as_hosts_come(self) -> bool:
        """Of the usual two nodes, whose TCP forgets its windows over pauses, if it is one that does."""
        return self.situation.num_nodes == 2 and not self.situation.keeps_windows

    @property
    def link_seconds(self) -> float:
        """What the bodies would take at the link's whole rate."""
        num_bytes = bytes_per_round(self.situation, self.setting)
        return num_bytes * 8 / self.situation.link.bits_per_second

    def share(self, peer_round_trips: int = PEER_ROUND_TRIPS) -> float:
        """Of a full link: round trips and slow start apart, what cores did included."""
        link = self.situation.link
        num_bytes = bytes_per_round(self.situation, self.setting)
        waits = peer_round_trips + link.round_trips_lost(num_bytes)
        return self.link_seconds / (self.seconds - waits * link.round_trip_seconds)

    @property
    def predicted_seconds(self) -> float:
        """By the formula, but for what the row does not contain."""
        whole = predicted(self.situation, self.setting, INSTANT_HOST).exchange_seconds
        apart = COORDINATOR_ROUND_TRIPS * self.situation.round_trip_seconds
        work = host_seconds(self.situation, self.setting, MEASURED_HOST)
        return whole - apart + work / self.slow_motion


def exchanges() -> list[Exchange]:
    """Of the files of results."""
    return list(map(_exchange_of, _counting(read_rows(*(RESULTS / name for name in FILES)))))


def _counting(rows: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in newest(rows)
        if row["slow"] == 1
        and has_even_slices(row)
        and row["cores_machine"] - row["cores_ours"] <= MOST_OF_OTHERS * row["cores"]
    ]


def _exchange_of(row: Row) -> Exchange:
    codecs = codecs_named(row["codec"])
    bits_per_second = row["mbit"] * 1e6
    return Exchange(
        situation=Situation(
            num_parameters=row["num_elements"],
            num_layers=1,
            num_nodes=row["num_nodes"],
            down_bits_per_second=bits_per_second,
            up_bits_per_second=bits_per_second,
            round_trip_seconds=row["round_trip_ms"] / 1e3,
            seconds_per_inner_step=1.0,
            total_steps=1,
            congestion_control=row["congestion_control"],
            keeps_windows=row["keeps_window"] or row["pause_seconds"] < FORGETTING_SECONDS,
        ),
        setting=Setting(
            uplink=codecs.uplink, downlink=codecs.downlink, fragments=1, has_overlap=False, steps=1
        ),
        seconds=row["seconds"],
        slow_motion=row["slow_motion"],
    )


def measured_share(found: Iterable[Exchange]) -> float:
    """What coordinator/presets/cost.py should say."""
    return median(each.share() for each in found if each.is_as_hosts_come)


def predictions_in_words(found: Iterable[Exchange]) -> str:
    """For the docs."""
    ratios = [each.predicted_seconds / each.seconds for each in found]
    return (
        f"{min(ratios):.2f} to {max(ratios):.2f} times what was measured, {median(ratios):.2f} times in the "
        "median"
    )


def share_in_words(found: Iterable[Exchange]) -> str:
    """For the docs."""
    shares = [each.share() for each in found if each.is_as_hosts_come]
    return (
        f"{median(shares):.2f} of its rate, the median of {len(shares)} exchanges that got "
        f"{min(shares):.2f} to {max(shares):.2f}"
    )


COLUMNS = (
    "nodes",
    "MB",
    "Mbit/s",
    "TCP",
    "round trips",
    "lost",
    "share",
    "took",
    "predicted",
    "ratio",
)
WORDS = ("TCP",)
"""Columns that hold no number."""


def _cells_of(each: Exchange) -> tuple[str, ...]:
    situation, num_bytes = each.situation, bytes_per_round(each.situation, each.setting)
    link = situation.link
    kept = ", window kept" if link.keeps_windows else ""
    return (
        f"{situation.num_nodes}",
        f"{num_bytes / 1e6:.3g}",
        f"{link.bits_per_second / 1e6:g}",
        f"{link.congestion_control}{kept}",
        f"{link.round_trips_of(num_bytes):.1f}",
        f"{link.round_trips_lost(num_bytes):.1f}",
        f"{each.share():.3f}",
        f"{each.seconds:.2f} s",
        f"{each.predicted_seconds:.2f} s",
        f"{each.predicted_seconds / each.seconds:.2f}",
    )


def main() -> None:
    """Prints what the results come to."""
    found = exchanges()
    right = tuple(column for column in COLUMNS if column not in WORDS)
    console.terminal().print(console.table(COLUMNS, list(map(_cells_of, found)), right=right))
    print(f"\nMEASURED_SHARE = {measured_share(found):.2f}\n")
    print(f"a full link gives {share_in_words(found)}")
    print(f"predictions are {predictions_in_words(found)}")


if __name__ == "__main__":
    main()
