"""What liars do to a swarm, by the command that a user types: two of eight, at the default merge."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.attacks import QUICK, QUICK_ROUNDS, longest_of

ROOT = Path(__file__).parents[2]
MOST_LOSS = 1.03
"""Times the clean run's: they end at 1.00 to 1.013 after five rounds, and above 1.05 with nothing against."""

MOST_LONGER = 1.5
"""Times a usual round of the clean run: where liars keep what others wait for."""

BY_DAY = ("beside the momentum", "lying reducer")
"""What no other test tries with the default merge; tests in their own process have the other kinds."""


@pytest.mark.timeout(660)  # two minutes of processor time by night, beside other tests
@pytest.mark.parametrize(
    ("attacks", "options"),
    [
        (BY_DAY, ("--attacks", *BY_DAY, "--seeds", "0", "--rounds", str(QUICK_ROUNDS))),
        pytest.param(QUICK, ("--quick",), marks=pytest.mark.nightly),
    ],
    ids=["by day", "one of each kind"],
)
def test_two_liars_of_eight_bend_no_run_and_every_honest_node_holds_the_same_state(
    attacks: Sequence[str], options: Sequence[str], tmp_path: Path
) -> None:
    results = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.attacks", *options, "--results", str(results)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["attack"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert set(rows) == {"clean", *attacks}
    for name, row in rows.items():
        assert "ended" not in row, row
        assert row["same"], f"honest nodes differ under {name}"
        assert row["loss"] < MOST_LOSS * rows["clean"]["loss"], row
        assert row["honest_refused"] == row["honest_put_out"] == 0, row
        assert f"| {name} | {row['liars']} | agreeing |" in done.stdout
    for name in {"kept contributions", "kept results", "no results"} & set(attacks):
        assert max(longest_of(rows[name], rows["clean"])) < MOST_LONGER, rows[name]
    # In the first round nobody has work, so fewer may be left out.
    assert rows["beside the momentum"]["noticed"] == 2
    assert rows["lying reducer"]["put_out"] == 2
