"""What liars do to a swarm, by the command that a user types: two of eight, at the default merge."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attacks import QUICK, outcome_of, rows_of

ROOT = Path(__file__).parents[2]
MOST_LOSS = 1.03
"""Times the clean run's: both end at 1.00 after six rounds, and above 1.05 with nothing against them."""


def test_two_that_pull_beside_the_momentum_count_for_nothing_and_no_honest_one_is_left_out() -> (
    None
):
    """A short one by day: what it comes to in loss is tried by night."""
    _, wanted = rows_of(
        ["beside the momentum"],
        liars=[2],
        merges=["agreeing"],
        seeds=[0],
        rounds=3,
        uneven=False,
        audit=0.0,
        invites=True,
    )
    row = outcome_of(wanted)
    assert "ended" not in row, row
    assert row["noticed"] == 2, row  # in the first round nobody has work, so fewer may be left out
    assert row["honest_refused"] == 0, row
    assert row["same"], "honest nodes differ"


@pytest.mark.nightly
def test_two_liars_of_eight_bend_no_run_and_every_honest_node_holds_the_same_state(
    tmp_path: Path,
) -> None:
    results = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.attacks", "--quick", "--results", str(results)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["attack"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert set(rows) == {"clean", *QUICK}
    clean = rows.pop("clean")
    assert clean["honest_refused"] == 0 and clean["same"]
    for name, row in rows.items():
        assert "ended" not in row, row
        assert row["same"], f"honest nodes differ under {name}"
        assert row["loss"] < MOST_LOSS * clean["loss"], row
        assert row["honest_refused"] == 0, row
        assert f"| {name} | 2 | agreeing |" in done.stdout
    assert rows["beside the momentum"]["noticed"] is not None
    assert rows["lying reducer"]["put_out"] == 2
