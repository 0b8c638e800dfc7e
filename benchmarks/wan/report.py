"""What benchmarks/wan makes of what was measured: times to a loss, ratios, the table. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.wan.peers.contender import VARIANT_MARK
from protocol.terminal import console


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The global model of a contender at some moment of its training."""

    seconds: float
    inner_steps: int  # of one node
    tokens: int  # of all nodes
    sent_bytes: int  # by the node that sent most
    loss: float  # held out, nats per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contender, or one variant of it, in one case.

    `trouble` says why there is nothing to measure, or what to know.
    """

    name: str
    words: str
    is_atoll: bool
    points: tuple[Point, ...] = ()  # the first one is at 0 seconds
    step_seconds: float = 0.0
    late_share: float = 0.0  # of inner steps whose own work took too long
    replicas_apart: float | None = None  # relative to how far the weights have moved
    trouble: str = ""

    @property
    def contender(self) -> str:
        """The name that all its variants share."""
        return self.name.partition(VARIANT_MARK)[0]

    @property
    def is_variant(self) -> bool:
        return VARIANT_MARK in self.name

    @property
    def has_trained(self) -> bool:
        return len(self.points) > 1

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def tokens_per_second(self) -> float:
        return self.last.tokens / self.last.seconds

    @property
    def utilisation(self) -> float | None:
        """Share of the time that inner steps took by their set length; None: they have none."""
        if not self.step_seconds:
            return None
        return self.last.inner_steps * self.step_seconds / self.last.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When a loss was reached, and what had been sent by then."""

    seconds: float
    sent_bytes: float


def reached(points: Sequence[Point], target: float) -> Reached | None:
    """The first crossing of the target, on a straight line between two evaluations; None: never."""
    before: Point | None = None
    for point in points:
        if point.loss <= target:
            if before is None:
                return Reached(seconds=point.seconds, sent_bytes=point.sent_bytes)
            share = (before.loss - target) / (before.loss - point.loss)
            return Reached(
                seconds=before.seconds + share * (point.seconds - before.seconds),
                sent_bytes=before.sent_bytes + share * (point.sent_bytes - before.sent_bytes),
            )
        before = point
    return None


def target_of(rows: Sequence[Measured]) -> float | None:
    """The lowest loss that a variant of a peer ends with; without peers the highest of ours."""
    peers = [row.last.loss for row in rows if row.has_trained and not row.is_atoll]
    ours = [row.last.loss for row in rows if row.has_trained and row.is_atoll]
    if peers:
        return min(peers)
    return max(ours, default=None)


def quickest(
    rows: Sequence[Measured], target: float, *, is_atoll: bool
) -> tuple[Measured, float] | None:
    """Which of ours, or of all variants of peers, took least to the target, and how many seconds."""
    found = [
        (row, at.seconds)
        for row in rows
        if row.is_atoll == is_atoll and (at := reached(row.points, target)) is not None
    ]
    return min(found, key=lambda pair: pair[1], default=None)


def verdict(rows: Sequence[Measured], target: float | None) -> str:
    """The best of ours beside the best peer, each the best of all its variants; "": one is missing."""
    if target is None:
        return ""
    ours, peer = (quickest(rows, target, is_atoll=is_atoll) for is_atoll in (True, False))
    if ours is None or peer is None:
        return ""
    return (
        f"to {target:.3f}: {ours[0].name} in {ours[1]:.1f} s, the quickest peer, {peer[0].name}, "
        f"in {peer[1]:.1f} s: × {peer[1] / ours[1]:.2f}"
    )


def best_variants(rows: Sequence[Measured], target: float) -> list[Measured]:
    """One row of each contender that has trained: first to the target, or the lowest at its end."""
    best: dict[str, Measured] = {}
    for row in rows:
        if row.has_trained:
            known = best.setdefault(row.contender, row)
            best[row.contender] = min(known, row, key=lambda each: _standing(each, target))
    return list(best.values())


COLUMNS = (
    "contender",
    "to the loss",
    "of the best peer",
    "sent by then",
    "loss at the end",
    "inner steps",
    "tokens/s",
    "computing",
    "late steps",
    "replicas apart",
)


DOCS_COLUMNS = tuple(column for column in COLUMNS if column != "tokens/s")


def cells_of(rows: Sequence[Measured], target: float | None) -> list[tuple[str, ...]]:
    """The table's cells; a contender without figures says so."""
    peer = None if target is None else quickest(rows, target, is_atoll=False)
    return [_cells(row, target, peer and peer[1]) for row in rows]


def _cells(row: Measured, target: float | None, peer_seconds: float | None) -> tuple[str, ...]:
    name = f"{row.name}: {row.words}"
    if not row.has_trained:
        # Its words stand below the table: a traceback has no place in a cell.
        return (name, "no figures", *[""] * (len(COLUMNS) - 2))
    found = None if target is None else reached(row.points, target)
    if found is None:
        to_loss, ratio, sent = "not reached", "", ""
    else:
        to_loss, sent = f"{found.seconds:.1f} s", console.bytes_in_words(round(found.sent_bytes))
        ratio = "" if peer_seconds is None else f"× {peer_seconds / found.seconds:.2f}"
    apart = "not compared" if row.replicas_apart is None else f"{row.replicas_apart:.1g}"
    return (
        name,
        to_loss,
        ratio,
        sent,
        f"{row.last.loss:.3f}",
        f"{row.last.inner_steps}",
        f"{row.tokens_per_second:,.0f}",
        "" if row.utilisation is None else _percent(row.utilisation),
        _percent(row.late_share),
        apart,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def as_markdown(rows: Sequence[Measured], target: float | None, *, of: str) -> str:
    """The table of docs/performance.md: who is there first comes first. `of` names the case."""
    to_loss = "to the loss" if target is None else f"to the loss, {target:.3f}"
    ours = None if target is None else quickest(rows, target, is_atoll=True)
    lines = [
        f"| {' | '.join((of, to_loss, *DOCS_COLUMNS[2:]))} |",
        "|---" * len(DOCS_COLUMNS) + "|",
    ]
    by_column = [dict(zip(COLUMNS, cells, strict=True)) for cells in cells_of(rows, target)]
    for row, cells in sorted(
        zip(rows, by_column, strict=True), key=lambda each: _standing(each[0], target)
    ):
        if ours is not None and row is ours[0] and cells["of the best peer"]:
            cells["of the best peer"] = f"**{cells['of the best peer']}**"
        cells["contender"] = f"`{row.name}`"
        lines.append(f"| {' | '.join(cells[column] for column in DOCS_COLUMNS)} |")
    return "\n".join(lines)


def _standing(row: Measured, target: float | None) -> tuple[float, float]:
    """Smaller for who is first to the target, or lower at the end."""
    if not row.has_trained:
        return (math.inf, math.inf)
    at = None if target is None else reached(row.points, target)
    return (math.inf if at is None else at.seconds, row.last.loss)
