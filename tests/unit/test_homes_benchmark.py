"""The benchmark of nodes at home: what is told of a pair, and the table that the docs have of it."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measurement import read_rows
from benchmarks.wire.homes import ONE, OTHER, ROUTERS, Seen, report, seen_in

DOCS = Path(__file__).parents[2] / "docs"


class Told:
    """A swarm by what it answers."""

    committed_round = 7

    def __init__(self, **heartbeats: dict[str, Any] | None) -> None:
        self._heartbeats = heartbeats

    def asked(self, command: str) -> list[dict[str, Any]]:
        assert command == "nodes"
        return [
            {"node_id": f"id of {name}", "node_name": name, "heartbeat": heartbeat}
            for name, heartbeat in self._heartbeats.items()
        ]


@pytest.mark.parametrize(
    ("of_one", "of_other", "way"),
    [
        ({}, {}, "direct"),
        ({}, {"punched_ids": ["id of one"]}, "punched"),
        ({"unreachable_ids": ["id of other"]}, {}, "through the helper"),
        (
            {"unreachable_ids": ["id of other"]},
            {"punched_ids": ["id of one"]},
            "through the helper",
        ),
        ({"unreachable_ids": ["id of helper"]}, {"punched_ids": ["id of helper"]}, "direct"),
    ],
)
def test_the_way_between_the_two_is_what_either_says_of_the_other(
    of_one: dict[str, Any], of_other: dict[str, Any], way: str
) -> None:
    telling = {name: told | {"session": 1} for name, told in ((ONE, of_one), (OTHER, of_other))}
    swarm: Any = Told(**telling, helper={"session": 1})
    assert seen_in(swarm) == Seen(way=way, round=7)
    assert seen_in(Told(**telling | {OTHER: None})) is None  # type: ignore[arg-type]  # as asked of


def test_the_table_in_the_docs_is_what_was_measured() -> None:
    """Run 'python -m benchmarks.wire.homes --report' after rows have been added."""
    rows = read_rows(DOCS / "results" / "homes.jsonl")
    num_pairs = len(ROUTERS) * (len(ROUTERS) + 1) // 2
    assert len({(row["one"], row["other"]) for row in rows}) == len(rows) == num_pairs
    table, *told = report(rows)
    page = " ".join((DOCS / "performance.md").read_text().split())
    assert " ".join(table.split()) in page
    assert all(line in page for line in told if re.search("(punched|helper) after", line))
