"""Records of rounds: how many there ever are, which of them stay, and what is left of what did not."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.disk.round_folder import Retention, RoundFolder, kept_for_reading, leaving

ROUNDS = st.integers(0, 30)


@given(rounds=st.sets(ROUNDS, max_size=4), new=ROUNDS, kept=st.integers(2, 4))
def test_with_the_new_record_there_are_never_more_than_are_kept_and_one_is_whole_until_then(
    rounds: set[int], new: int, kept: int
) -> None:
    going = leaving(rounds, new, kept=kept)
    staying = rounds - set(going)
    assert len(staying) + 1 <= max(kept, 2)
    assert staying or not rounds
    own = sorted(number for number in rounds if number < new)
    if own and new not in rounds:
        assert own[-1] in staying, "the newest of its own history"


@pytest.mark.parametrize("as_folders", [False, True])
@given(lives=st.lists(ROUNDS, min_size=1, max_size=8))
def test_whatever_history_does_the_newest_record_is_the_last_one_that_was_made(
    as_folders: bool, lives: list[int]
) -> None:
    with TemporaryDirectory(dir="/dev/shm") as path:
        folder = RoundFolder(Path(path), suffix="" if as_folders else ".kind", kept=2)
        for number in lives:
            spare = folder.make_room(number)
            building = folder.building(number)
            if as_folders:
                building.mkdir()
            elif spare is not None:
                spare.rename(building)
            else:
                building.touch()
            assert len(list(Path(path).iterdir())) <= 2
            folder.finish(number)
            assert folder.rounds()[0] == number
        assert len(folder.rounds()) <= 2


def test_kinds_that_share_a_folder_leave_each_other_alone(tmp_path: Path) -> None:
    one, other = (RoundFolder(tmp_path, suffix=suffix, kept=2) for suffix in (".one", ".other"))
    for number in (1, 2, 3):
        one.write(number, b"one")
    other.write(2, b"other")
    other.clear()
    assert (one.rounds(), other.rounds()) == ([3, 2, 1], [])  # `write` alone drops no earlier ones
    one.forget_before(3)
    assert one.rounds() == [3]
    assert one.held_bytes() == 3


def test_what_is_damaged_takes_room_until_the_next_record_is_made(tmp_path: Path) -> None:
    folder = RoundFolder(tmp_path, suffix=".kind", kept=2)
    folder.write(1, b"whole")
    folder.write(2, b"damaged")
    assert folder.set_apart(2).name == "round-00000002.kind.damaged"
    assert (folder.rounds(), folder.held_bytes()) == ([1], 12)
    spare = folder.make_room(3)
    assert spare is not None and spare.read_bytes() == b"damaged"
    assert folder.rounds() == [1]


def test_a_record_that_is_read_is_served_until_it_is_not(tmp_path: Path) -> None:
    folder = RoundFolder(tmp_path, suffix=".kind", kept=2)
    for number in (1, 2):
        folder.write(number, b"some")
    with kept_for_reading(folder.path_of(1)):
        assert folder.is_served(3)
        larger = RoundFolder(tmp_path, suffix=".kind", kept=3)
        assert not larger.is_served(3)  # nothing has to go
    assert not folder.is_served(3)


def test_the_oldest_record_stays_until_enough_are_retained_for_a_run_to_go_back_to() -> None:
    retention = Retention(keep=2, every=8)
    assert retention.kept_of([1, 2, 3]) == {1}
    assert retention.kept_of([1, 8, 9]) == {1, 8}
    assert retention.kept_of([1, 8, 15, 16]) == {8, 16}
    assert not Retention(keep=0).kept_of([1, 2, 3])


@pytest.mark.parametrize("make", ["write", "make_room"])
def test_others_of_the_machine_read_no_weights_in_a_folder_that_is_open_to_them(
    make: str, tmp_path: Path
) -> None:
    """`atoll join --dir` takes a folder that is there as it is, and that is 0755 mostly."""
    tmp_path.chmod(0o755)
    folder = RoundFolder(tmp_path / "snapshots", suffix=".kind", kept=2)
    if make == "write":
        folder.write(1, b"weights")
    else:
        folder.make_room(1)
    assert folder.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_an_earlier_release_left_open_is_closed_to_others(tmp_path: Path) -> None:
    left_open = tmp_path / "snapshots"
    left_open.mkdir()
    left_open.chmod(0o755)
    RoundFolder(left_open, suffix=".kind", kept=2).write(3, b"weights")
    assert left_open.stat().st_mode & 0o777 == 0o700
