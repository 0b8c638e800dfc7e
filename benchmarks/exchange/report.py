"""What benchmarks/exchange makes of its lines of results: a table, and a figure. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.figures import Point, scattered
from benchmarks.measurement import Row, markdown
from node.exchange.peers import Limits

# Of lines from before these stood in them.
_DEFAULTS: Row = {
    "slow": 1.0,
    "by_bandwidth": True,
    "stripes": Limits().max_streams_per_body,
    "keeps_window": False,
    "congestion_control": "bbr",  # what the kernel had
    "pause_seconds": 1.0,
    "slow_motion": 1.0,
    "num_helpers": 0,
    "plain_seconds": None,
    "note": "",
}

_CASE = (
    "num_nodes",
    "num_helpers",
    "codec",
    "megabytes",
    "mbit",
    "round_trip_ms",
    "slow",
    "by_bandwidth",
    "stripes",
    "keeps_window",
    "congestion_control",
    "pause_seconds",
    "slow_motion",
)

COLUMNS = (
    "nodes",
    "codec",
    "MB",
    "Mbit/s",
    "round trip",
    "slow motion",
    "slow",
    "slices",
    "streams",
    "TCP",
    "took",
    "limit",
    "took / limit",
    "spread",
    "plain TCP",
    "cores, ours",
    "cores, all",
)
WORDS = ("codec", "slices", "TCP")
"""Columns that hold no number."""


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last line of each case, where its first one stood."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        whole = _DEFAULTS | row
        found[tuple(whole[key] for key in _CASE)] = whole
    return list(found.values())


def has_even_slices(row: Row) -> bool:
    """Whether what each node reduces is about the same."""
    return bool(max(row["slices"]) <= 1.5 * min(row["slices"]))


def _helpers(row: Row) -> str:
    number = row["num_helpers"]
    return f"{number} helper" + ("s" if number > 1 else "")


def cells_of(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    row = _DEFAULTS | row
    ours, machine = row.get("cores_ours"), row.get("cores_machine")
    return (
        f"{row['num_nodes']}" + (f" by {_helpers(row)}" if row["num_helpers"] else ""),
        row["codec"],
        f"{row['megabytes']:.3g}",
        f"{row['mbit']:g}",
        f"{row['round_trip_ms']:g} ms",
        f"× {row['slow_motion']:g}",
        f"{row['slow']:g}",
        f"{len(row['slices'])}, {'by bandwidth' if row['by_bandwidth'] else 'equal'}",
        f"{row['stripes']}",
        row["congestion_control"] + (", window kept" if row["keeps_window"] else ""),
        f"{row['seconds']:.2f} s",
        f"{row['limit_seconds']:.2f} s",
        f"{row['ratio']:.2f}",
        f"{row['ratio_least']:.2f} to {row['ratio_most']:.2f}",
        "" if row["plain_seconds"] is None else f"{row['plain_seconds']:.2f} s",
        "" if ours is None else f"{ours:.2f}",
        "" if machine is None else f"{machine:.2f} of {row['cores']}",
    )


def as_markdown(rows: Sequence[Row]) -> str:
    """The same table for docs."""
    return markdown(COLUMNS, map(cells_of, rows))


_SAID: tuple[Callable[[Row], str], ...] = (
    lambda row: (
        f"{row['num_nodes']} nodes" + (f" by {_helpers(row)}" if row["num_helpers"] else "")
    ),
    lambda row: f"{row['mbit']:g} Mbit/s",
    lambda row: f"round trip {row['round_trip_ms']:g} ms",
    lambda row: row["congestion_control"] + (", window kept" if row["keeps_window"] else ""),
    # By bandwidth or not: with even ones it makes no difference, and uneven ones move the limit.
    lambda row: "" if has_even_slices(row) else "uneven slices",
)
"""What tells series apart. What all rows share stands in the title instead."""


def drawn(rows: Iterable[Row]) -> str:
    """Took / limit over a contribution's size: of each case that has equal links its newest line."""
    chosen = sorted(
        (row for row in newest(rows) if row["slow"] == 1), key=lambda row: int(row["num_nodes"])
    )
    if not chosen:
        raise ValueError("there is no row with equal links to draw")
    said = [(say, {say(row) for row in chosen}) for say in _SAID]
    shared = [next(iter(words)) for _, words in said if len(words) == 1]
    codecs = {row["codec"] for row in chosen}
    models = {row.get("num_elements") for row in chosen}
    if len(codecs) == 1:
        shared.append(next(iter(codecs)))
    elif len(models) == 1 and None not in models:
        shared.append(f"{models.pop():,} parameters")
    names = {
        id(row): ", ".join(filter(None, (say(row) for say, words in said if len(words) > 1)))
        for row in chosen
    }
    in_order = list(dict.fromkeys(names[id(row)] for row in chosen))
    chosen.sort(key=lambda row: (in_order.index(names[id(row)]), row["megabytes"]))
    points = [
        Point(
            series=names[id(row)] or "took / limit",
            label=f"{row['ratio']:.2f}" if len(codecs) == 1 else row["codec"],
            x=row["megabytes"],
            y=row["ratio"],
            low=row["ratio_least"],
            high=row["ratio_most"],
        )
        for row in chosen
    ]
    return scattered(
        title=f"One round's exchange against its links: {', '.join(filter(None, shared))}",
        across="megabytes of a contribution, on the wire",
        upward="×",
        points=points,
        level=(1.0, "the links' limit"),
        is_joined=len(codecs) == 1,
        is_apart=True,
    )
