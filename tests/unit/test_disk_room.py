"""What the disk of a node needs room for, what its owner may give, and how often snapshots are written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.disk.history import History
from node.disk.round_folder import LONGEST_SECONDS, DiskBudget, Need, Saving
from node.disk.snapshots import snapshot_bytes
from node.exchange.state.on_disk import LONGEST_ROUNDS, StateOnDisk, rounds_between
from protocol.errors import SystemRefusedError
from tests.unit.exchange_scene import NUM_ELEMENTS


@given(
    num_elements=st.integers(1, 10**12),
    rounds=st.integers(1, 10**5),
    seconds=st.floats(0, 1e8),
    result_bytes=st.integers(0, 10**15),
)
def test_snapshots_are_as_rare_as_they_must_be_and_no_rarer(
    num_elements: int, rounds: int, seconds: float, result_bytes: int
) -> None:
    one, budget = snapshot_bytes(num_elements), DiskBudget()
    apart = budget.seconds_between(one)
    every = rounds_between(
        num_elements=num_elements,
        rounds=rounds,
        seconds=seconds,
        result_bytes=result_bytes,
        apart_seconds=apart,
    )
    assert every & (every - 1) == 0
    if every > 1:  # results stay below their share, and what is owed is on disk within an hour
        assert every * result_bytes / rounds <= one / 4
        assert every * seconds / rounds <= LONGEST_SECONDS * 1.001
    is_most = every == LONGEST_ROUNDS
    is_slow = one * rounds / (2 * every * max(seconds, 1e-9)) < budget.bytes_per_second
    is_full = 2 * every * max(result_bytes, 1) / rounds > one / 4
    is_old = 2 * every * seconds / rounds > LONGEST_SECONDS
    assert is_most or is_slow or is_full or is_old  # twice as rare would be too rare, or needless


def test_the_disk_needs_room_for_two_snapshots_and_the_results_between(tmp_path: Path) -> None:
    state = StateOnDisk(tmp_path / "snapshots", history=History(None))
    DiskBudget().require(state.needs(NUM_ELEMENTS, 100))
    snapshots, results = state.needs(10**9, 1000)
    assert (snapshots.num_bytes, results.num_bytes) == (32_000_008_192, 8_000_006_048)
    _, results = state.needs(10**9, 10**9)
    assert results.num_bytes == 17 * 10**9
    with pytest.raises(
        SystemRefusedError,
        match=r"needs 40,000,000,000,014,240 bytes of disk \(32,000,000,000,008,192 for snapshots "
        r"and 8,000,000,000,006,048 for results\) in .*: 0 of it is there and [0-9,]+ are free",
    ):
        DiskBudget().require(state.needs(10**15, 1000))
    assert not state.path.exists()


def test_an_owner_may_give_less_than_the_disk_has(tmp_path: Path) -> None:
    needs = StateOnDisk(tmp_path / "snapshots", history=History(None)).needs(10**6, 1000)
    DiskBudget(most_bytes=41_000_000).require(needs)
    with pytest.raises(SystemRefusedError, match=r"max_disk allows 39,000,000") as refused:
        DiskBudget(most_bytes=39_000_000).require(needs)
    assert refused.value.next_step == "raise max_disk in node.toml to 41MB or more"


@pytest.mark.parametrize(
    ("most_bytes", "told"),
    [
        (39_000_000, ", or set a = 0 in node.toml, or set b = 0 in node.toml"),
        (35_000_000, ", or set b = 0 in node.toml"),
        (25_000_000, ", or set a = 0 and b = 0 in node.toml"),
        (20_000_000, ""),
    ],
)
def test_only_settings_that_make_room_are_named(most_bytes: int, told: str, tmp_path: Path) -> None:
    needs = [Need(what="snapshots", path=tmp_path, num_bytes=40_000_000, held_bytes=0)]
    savings = [
        Saving(what="a = 0", num_bytes=2_000_000),
        Saving(what="b = 0", num_bytes=14_000_000),
    ]
    with pytest.raises(SystemRefusedError) as refused:
        DiskBudget(most_bytes=most_bytes).require(needs, savings=savings)
    assert refused.value.next_step == f"raise max_disk in node.toml to 40MB or more{told}"
