"""The chaos benchmark in its short form: three nodes, four kills, and every promise holds."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lab.processes.family import SOURCES, atoll_environment

PATIENCE_SECONDS = 900
"""It takes a tenth of that on two cores with nothing else to do."""


@pytest.mark.nightly
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_a_short_chaos_run_breaks_nothing(tmp_path: Path) -> None:
    out = tmp_path / "chaos"
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.chaos", "--short", "--out", str(out)],
        cwd=SOURCES,
        env=atoll_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as ran:
        try:
            said, _ = ran.communicate(timeout=PATIENCE_SECONDS)
        finally:
            ran.terminate()  # nothing, unless it takes too long: then it ends what it started
    assert ran.returncode == 0, said
    assert "invariants       all hold" in said
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    counts = Counter((line["what"], line.get("run")) for line in lines)
    assert counts["planned", None] == 4
    assert counts["kill", "faults"] >= 3  # one at a phase may come too late
    assert counts["round", "faults"] == 10 and counts["kill", "undisturbed"] == 0
    sums = {line["run"]: line for line in lines if line["what"] == "sum"}
    for name in ("undisturbed", "faults"):
        assert sums[name]["tokens_per_second"] > 0
        assert sums[name]["samples"]["lost"] == sums[name]["samples"]["double_counted"] == 0
