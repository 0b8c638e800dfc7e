"""The coordinator's benchmark, with a handful of nodes: all of it runs, and its counts are right."""

import sqlite3
from pathlib import Path

import pytest

from benchmarks.coordinator import page
from benchmarks.coordinator.command import measured, table


async def test_a_few_simulated_nodes_go_through_their_rounds(tmp_path: Path) -> None:
    result = await measured(tmp_path / "home", num_nodes=3, num_rounds=2, beat_seconds=0.2)
    assert (result.num_nodes, result.num_rounds) == (3, 2)
    assert result.heartbeats_per_second > 0
    assert result.plan_bytes > 3 * 60  # an assignment and a slice for each
    assert result.database_bytes > 0
    assert "| nodes | 3 |" in table([result])


@pytest.mark.nightly
async def test_the_page_of_a_written_run_opens_and_is_watched(tmp_path: Path) -> None:
    asked = page.Asked(
        num_rounds=2500,
        num_nodes=3,
        num_attached=2,
        num_played=12,
        round_seconds=1.0,
        openings=1,
        chromium=None,
        turns=1,
        turn_seconds=3.0,
    )
    result = await page.measured(tmp_path / "home", asked)
    with sqlite3.connect(tmp_path / "home" / "atoll.db") as database:
        (num_figures,) = database.execute("SELECT count(*) FROM figures").fetchone()
        (num_commits,) = database.execute("SELECT count(*) FROM commits").fetchone()
        (num_losses,) = database.execute("SELECT count(*) FROM held_out").fetchone()
    assert 1000 <= num_figures <= 1000 + 1500 / 10 + 20, "thinned out by the store's own rule"
    assert num_commits >= 2500
    assert num_losses >= 250
    assert result.history_bytes > 30_000
    assert result.picture_bytes < 20_000, "a picture does not grow with the run"
    assert result.pictures_per_second > 0
    assert "2500 rounds, 3 nodes" in page.table([result])
