"""The table of attacks says of which rows nothing can be said, and why."""

from typing import Any

import pytest

from benchmarks.attacks import report

CLEAN = {
    "attack": "clean",
    "liars": 0,
    "merge": "mean",
    "seed": 0,
    "rounds": 2,
    "uneven": False,
    "audit": 0.05,
    "invites": True,
    "loss": 2.0,
    "seconds": 20.0,
    "same": True,
    "noticed": None,
    "honest_refused": 0,
    "put_out": 0,
    "put_out_after": None,
}
ATTACKED = CLEAN | {"attack": "1e30", "liars": 2, "loss": 2.1}


def line_of(*rows: dict[str, Any]) -> str:
    (line,) = (line for line in report(rows).splitlines() if "| 1e30 |" in line)
    return line


def test_a_row_is_set_against_the_clean_run_of_its_seed() -> None:
    assert "1.050 (1.050–1.050)" in line_of(CLEAN, ATTACKED)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((ATTACKED,), "no clean run of seed 0"),
        ((CLEAN, ATTACKED, ATTACKED | {"seed": 1}), "no clean run of seed 1"),
        (
            ({**CLEAN, "ended": "RunStuckError: here"}, ATTACKED),
            "the clean run of seed 0: RunStuck",
        ),
        ((CLEAN, {**ATTACKED, "ended": "RunStuckError: there"}), "RunStuckError: there"),
    ],
)
def test_where_there_is_nothing_to_compare_with_the_row_says_so(
    rows: tuple[dict[str, Any], ...], why: str
) -> None:
    """A run that ended early has no loss."""
    cut = ({k: v for k, v in row.items() if "ended" not in row or k != "loss"} for row in rows)
    assert why in line_of(*cut)
