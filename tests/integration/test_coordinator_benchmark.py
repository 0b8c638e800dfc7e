"""The coordinator's benchmark, with a handful of nodes: all of it runs, and its counts are right."""

from pathlib import Path

from benchmarks.coordinator.command import measured, table


async def test_a_few_simulated_nodes_go_through_their_rounds(tmp_path: Path) -> None:
    result = await measured(tmp_path / "home", num_nodes=3, num_rounds=2, beat_seconds=0.2)
    assert (result.num_nodes, result.num_rounds) == (3, 2)
    assert result.heartbeats_per_second > 0
    assert result.plan_bytes > 3 * 60  # an assignment and a slice for each
    assert result.database_bytes > 0
    assert "| nodes | 3 |" in table([result])
