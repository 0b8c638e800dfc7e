"""Recoveries and figures of a chaos run, from what its logs say."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.chaos.report import Kill, began, in_words, recovered_at
from lab.processes.invariants import Evidence


def phase(phase: str, round: int, at: float) -> dict[str, Any]:
    timestamp = datetime.fromtimestamp(at, UTC).isoformat()
    return {"event": "phase", "phase": phase, "round": round, "timestamp": timestamp}


def evidence(
    contributors: dict[int, Sequence[str]], **entries: Sequence[dict[str, Any]]
) -> Evidence:
    return Evidence(
        total_rounds=9,
        context=8,
        entries={"coordinator": [], **entries},
        rounds=[],
        run={},
        nodes=[],
        data={},
        taken=[],
        contributors={number: frozenset(names) for number, names in contributors.items()},
    )


def kill(seconds: float | None) -> Kill:
    return Kill(
        victim="a",
        kind="kill",
        at=0.0,
        round=None,
        phase=None,
        is_final=False,
        recovery_seconds=seconds,
    )


def test_a_recovery_lasts_to_the_commit_with_the_next_work() -> None:
    found = evidence(
        {4: ["a", "b"], 5: ["b"], 6: ["a", "b"]},
        a=[phase("contributing", 4, 10.0), phase("contributing", 6, 30.0)],
        coordinator=[
            phase("committed", 4, 11.0),
            phase("committed", 5, 21.0),
            phase("committed", 6, 31.0),
        ],
    )
    # What it had sent before it died is in the commit of round 4, and does not count.
    assert recovered_at(found, "a", 10.5) == 31.0
    assert recovered_at(found, "a", 9.5) == 11.0
    assert recovered_at(found, "a", 30.5) is None


def test_work_that_no_commit_took_is_no_recovery() -> None:
    found = evidence(
        {5: ["b"], 6: ["a"]},
        a=[phase("contributing", 5, 20.0), phase("contributing", 6, 30.0)],
        coordinator=[phase("committed", 5, 21.0), phase("committed", 6, 31.0)],
    )
    assert recovered_at(found, "a", 15.0) == 31.0


def test_the_coordinator_has_recovered_with_its_next_commit_though_only_nodes_tell_of_it() -> None:
    found = evidence(
        {5: ["a"], 6: ["a"]}, a=[phase("applying", 5, 21.0), phase("applying", 6, 31.0)]
    )
    assert recovered_at(found, "coordinator", 22.0) == 31.0


def test_figures_begin_with_the_first_round_of_all() -> None:
    found = evidence(
        {1: ["a"], 2: ["a", "b"], 3: ["a", "b"]},
        a=[phase("applying", number, 10.0 * number) for number in (1, 2, 3)],
    )
    assert began(found, ["a", "b"]) == (2, 20.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([1.0, 2.0, 9.0], "median 2.0 s, 90 % within 9.0 s, worst 9.0 s, of 3"),
        (
            [5.0, None],
            "median 5.0 s, 90 % within 5.0 s, worst 5.0 s, of 1; 1 were not back before the end",
        ),
        ([None], "none of 1"),
    ],
)
def test_recoveries_in_words(seconds: list[float | None], words: str) -> None:
    assert in_words([kill(one) for one in seconds]) == words
