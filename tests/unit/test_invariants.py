"""Whatever breaks a promise is found in what a swarm leaves behind."""

from dataclasses import replace
from typing import Any

import pytest

from lab.processes.invariants import Evidence, Places, Samples, broken, samples_of

CONTEXT = 8
DIGESTS = {1: "aa" * 32, 2: "bb" * 32}


def line(event: str, **values: Any) -> dict[str, Any]:
    return {"event": event, "level": "info", **values}


def applied(round: int, digest: str, **values: Any) -> dict[str, Any]:
    return line("applied", round=round, digest=digest[:12], **values)


WELL = Evidence(
    total_rounds=2,
    context=CONTEXT,
    entries={
        "coordinator": [line("round committed", round=1), line("round committed", round=2)],
        "a": [applied(1, DIGESTS[1]), applied(2, DIGESTS[2])],
        "b": [applied(2, DIGESTS[2]), {"text": "b has stopped"}],
    },
    rounds=[
        {"round": 2, "outer_digest": DIGESTS[2], "tokens": 10 * CONTEXT},
        {"round": 1, "outer_digest": DIGESTS[1], "tokens": 20 * CONTEXT},
    ],
    run={"phase": "finished", "digests_agree": True, "token_clock": 30 * CONTEXT},
    nodes=[{"committed_tokens": 20 * CONTEXT}, {"committed_tokens": 10 * CONTEXT}],
    data={
        "committed_samples": 30,
        "leased_samples": 0,
        "free_again_samples": 5,
        "frontier": 35,
    },
    taken=[
        Places(round=1, first=0, end=10),
        Places(round=1, first=15, end=25),
        Places(round=2, first=25, end=35),
    ],
    contributors={1: frozenset({"a", "b"}), 2: frozenset({"a"})},
)


def with_lines(name: str, *lines: dict[str, Any]) -> Evidence:
    return replace(WELL, entries={**WELL.entries, name: [*WELL.entries.get(name, ()), *lines]})


def changed(table: str, **values: Any) -> Evidence:
    changes: dict[str, Any] = {table: {**getattr(WELL, table), **values}}
    return replace(WELL, **changes)


def test_nothing_is_broken_when_all_is_well() -> None:
    assert broken(WELL) == []
    assert samples_of(WELL) == Samples(committed=30, double_counted=0, lost=0)


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (changed("run", phase="training"), "the run is training"),
        (replace(WELL, rounds=WELL.rounds[:1]), "have a commit are [2]"),
        (
            with_lines("coordinator", line("round committed", round=2)),
            "round 2 was committed 2 times",
        ),
        (with_lines("b", applied(1, DIGESTS[2])), "digests of round 1 differ"),
        (changed("run", digests_agree=False), "says that digests differ"),
        (
            with_lines("a", {"text": "Traceback (most recent call last):"}),
            "a says: Traceback",
        ),
        (with_lines("a", line("boom", exception=[{}])), "a says: {"),
        (with_lines("a", line("slice not reduced") | {"level": "error"}), "slice not reduced"),
        (changed("run", token_clock=31 * CONTEXT), "committed tokens differ"),
        (changed("data", committed_samples=31), "the ledger holds 31 committed samples"),
    ],
)
def test_a_broken_promise_is_told(evidence: Evidence, words: str) -> None:
    assert words in "\n".join(broken(evidence))


def test_a_digest_that_only_nodes_have_is_found() -> None:
    entries = {
        name: [{**line, "digest": "cc" * 6} if line.get("round") == 2 else line for line in lines]
        for name, lines in WELL.entries.items()
    }
    (sentence,) = broken(replace(WELL, entries=entries))
    assert sentence == "round 2 is bbbbbbbbbbbb to the coordinator, not cccccccccccc"


def test_a_round_that_was_taken_back_may_come_again_with_another_digest() -> None:
    again = with_lines("coordinator", line("round committed", round=2, incarnation=1))
    lines = [*WELL.entries["a"][:1], applied(2, "dd" * 32), applied(2, DIGESTS[2], incarnation=1)]
    other = [applied(2, DIGESTS[2], incarnation=1)]
    evidence = replace(again, entries={**again.entries, "a": lines, "b": other})
    assert broken(evidence) == []


def test_a_place_in_two_commits_is_double_counted() -> None:
    evidence = replace(WELL, taken=[*WELL.taken, Places(round=2, first=22, end=27)])
    assert samples_of(evidence) == Samples(committed=30, double_counted=5, lost=0)
    assert "5 samples are in two commits" in broken(evidence)


def test_a_place_that_nobody_will_lease_again_is_lost() -> None:
    assert samples_of(changed("data", free_again_samples=2)).lost == 3
    assert "3 samples are lost" in broken(changed("data", free_again_samples=2))
    assert samples_of(replace(WELL, taken=WELL.taken[1:])).lost == 10


def test_what_a_fault_explains_is_no_error() -> None:
    assert broken(with_lines("a", line("the libp2p daemon died") | {"level": "error"})) == []
