"""Which copies of a coordinator stay, which go, and when the next is due."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.backup import Backup, clear_unfinished_backups
from coordinator.backups import (
    CopyName,
    Failed,
    FolderCopies,
    Made,
    Series,
    Waits,
    back_up_for_good,
    copies_at,
    restore,
)
from coordinator.remote_backup import Restored
from coordinator.settings import CONFIG_FILE
from protocol.errors import BadDataError, NoInputError, UnavailableError, UsageError

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
OURS = Series(run="my-run", swarm="0a1b2c3d", keep=3, every_seconds=600.0)
BACKUP = Backup(run_name="my-run", committed_round=7, total_rounds=9, num_bytes=1, authority_key="")


def name_at(minutes: float, *, swarm: str = OURS.swarm) -> str:
    return str(CopyName(run=OURS.run, swarm=swarm, at=NOON + timedelta(minutes=minutes)))


@pytest.mark.parametrize("content", [b"", bytes(20), b"\xff\xfe", b"/nowhere/\xfc"])
def test_the_note_of_a_backup_that_a_power_cut_has_damaged_stops_no_start(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / ".backup-1").write_bytes(content)
    clear_unfinished_backups(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_is_read_as_it_was_written_and_other_folders_are_none() -> None:
    name = name_at(0)
    assert name == "my-run-0a1b2c3d-20261126T120000Z"
    assert str(CopyName.read(name)) == name
    for other in ("my-run", f".{name}.unfinished-x", f"{name}-old", name.replace("1126", "1199")):
        assert CopyName.read(other) is None


def test_a_copy_is_due_once_the_newest_whole_one_is_old_enough() -> None:
    def due(found: dict[str, bool], *, waited: float = 0.0) -> float:
        return OURS.due_in_seconds(found, NOON, waited_seconds=waited)

    assert due({}) == 0
    assert due({name_at(-4): True}, waited=3600) == 360
    assert due({name_at(-4): False}) == 0  # it broke off
    assert due({name_at(-4, swarm="ffffffff"): True}) == 0
    assert due({name_at(-11): True}) == 0
    assert due({name_at(1800): True}) == 600  # the clock was set back
    assert due({name_at(1800): True}, waited=590) == 10


def test_a_name_follows_all_others_when_the_clock_was_set_back() -> None:
    assert OURS.next_name({}, NOON) == name_at(0)
    assert OURS.next_name({name_at(60): False}, NOON) == name_at(60 + 1 / 60)


@given(
    minutes=st.lists(st.integers(-100, 100), unique=True),
    broken=st.sets(st.integers(-100, 100)),
    keep=st.integers(1, 5),
)
def test_what_goes_is_older_than_what_stays_and_never_another_swarms(
    minutes: list[int], broken: set[int], keep: int
) -> None:
    series = Series(run=OURS.run, swarm=OURS.swarm, keep=keep, every_seconds=60)
    there = {name_at(minute): minute not in broken for minute in minutes}
    others = {name_at(minute, swarm="ffffffff"): True for minute in minutes} | {"notes": True}
    made = series.next_name(there | others, NOON)
    found = there | others | {made: True}
    gone = set(series.to_remove(found, made=made))
    assert gone <= there.keys()
    stays = [name for name in (*there, made) if name not in gone]
    whole = sorted(name for name in there if there[name])
    assert sorted(stays) == [*whole[max(0, len(whole) - keep + 1) :], made][-keep:]


def test_pauses_after_failures_grow_up_to_the_time_between_copies() -> None:
    assert [OURS.pause_seconds(n) for n in (1, 2, 3, 7, 1000)] == [5, 10, 20, 300, 300]
    seldom = Series(run="r", swarm=OURS.swarm, keep=1, every_seconds=7)
    assert [seldom.pause_seconds(n) for n in (1, 2)] == [5, 7]


@dataclass(slots=True, kw_only=True)
class Shelf:
    """Copies that are names alone; `fails` holds what the next calls of `add` do."""

    there: dict[str, bool] = field(default_factory=dict)
    fails: list[bool] = field(default_factory=list)
    is_one: bool = False
    told: list[str] = field(default_factory=list)

    def found(self) -> dict[str, bool]:
        return dict(self.there)

    def add(self, directory: Path, name: str) -> Backup:
        if self.fails and self.fails.pop(0):
            self.there[name] = False
            raise UnavailableError("the storage is away")
        self.there[name] = True
        self.told.append(f"made {name}")
        return BACKUP

    def restore(self, name: str, directory: Path) -> Restored:
        raise AssertionError(f"{name} is restored, where copies are only made")

    def remove(self, name: str) -> None:
        self.told.append(f"removed {name}")
        del self.there[name]

    def place(self, name: str) -> str:
        return name


def played(
    shelf: Shelf, *, seconds: float, set_by: Mapping[float, float] = MappingProxyType({})
) -> list[Made | Failed | Waits]:
    """What is said over so many seconds. The clock is set by so many hours once so many seconds are over."""
    said: list[Made | Failed | Waits] = []
    passed = 0.0

    def now() -> datetime:
        hours = sum(hours for at, hours in set_by.items() if at <= passed)
        return NOON + timedelta(seconds=passed, hours=hours)

    def wait(pause: float) -> bool:
        nonlocal passed
        assert pause > 0
        passed += pause
        return passed > seconds

    back_up_for_good(Path("my-run"), shelf, OURS, say=said.append, wait=wait, now=now)
    return said


def test_copies_go_on_in_their_time_however_the_clock_is_set() -> None:
    for hours in (-30, 30):
        shelf = Shelf()
        said = played(shelf, seconds=3700, set_by={1300: hours})
        made = [name.removeprefix("made ") for name in shelf.told if name.startswith("made ")]
        assert len(said) == len(made) and len(made) in (7, 8), (
            made
        )  # at once where it was set ahead
        assert made == sorted(made)
        assert sorted(shelf.there) == made[-OURS.keep :]
    there = dict.fromkeys([name_at(1800)], True)  # of a clock that was ahead before the start
    assert [type(told) for told in played(Shelf(there=there), seconds=1900)] == [Waits, *[Made] * 3]


def test_a_copy_follows_the_other_and_an_old_one_goes_after_the_new_one_is_there() -> None:
    shelf = Shelf()
    assert all(isinstance(told, Made) for told in played(shelf, seconds=2000))
    made = [name_at(minutes) for minutes in (0, 10, 20, 30)]
    assert shelf.told == [*(f"made {name}" for name in made), f"removed {made[0]}"]


def test_nothing_goes_while_copies_fail_and_what_broke_off_goes_afterwards() -> None:
    old = [name_at(minutes) for minutes in (-30, -20, -10)]
    shelf = Shelf(there=dict.fromkeys(old, True), fails=[True, True])
    said = played(shelf, seconds=16)
    assert [type(told) for told in said] == [Failed, Failed, Made]
    assert [told.next_seconds for told in said] == [5, 10, 600]
    assert shelf.told[0].startswith("made ")
    assert set(shelf.there) == {*old[1:], shelf.told[0].removeprefix("made ")}
    assert all(shelf.there.values())


def whole_copy(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).touch()


def refusals(source: Path, to: Path) -> Sequence[str]:
    with pytest.raises((NoInputError, UsageError, BadDataError)) as caught:
        restore(str(source), to)
    return caught.value.what, caught.value.next_step


def test_restoring_wants_a_whole_copy_of_one_swarm(tmp_path: Path) -> None:
    row, to = tmp_path / "row", tmp_path / "to"
    assert "no whole backup lies at" in refusals(row, to)[0]
    (row / name_at(0)).mkdir(parents=True)  # it lacks everything
    assert "no whole backup lies at" in refusals(row, to)[0]
    whole_copy(row / name_at(-10))
    whole_copy(row / name_at(-20, swarm="ffffffff"))
    what, next_step = refusals(row, to)
    assert "copies of 2 swarms" in what and name_at(-10) in next_step


def test_a_folder_of_ones_home_may_be_written_as_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """coordinator.toml is read by no shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    whole_copy(tmp_path / "row" / name_at(0))
    assert copies_at("~/row").found() == {name_at(0): True}


def test_a_copy_that_goes_is_no_copy_from_its_first_moment_on(tmp_path: Path) -> None:
    whole_copy(tmp_path / name_at(0))
    copies = FolderCopies(folder=tmp_path)
    assert copies.found() == {name_at(0): True}
    (tmp_path / name_at(0)).rename(tmp_path / f".{name_at(0)}.unfinished-1")  # and then killed
    assert [CopyName.read(name) for name in copies.found()] == [None]
    whole_copy(tmp_path / name_at(1))
    copies.remove(name_at(1))
    assert list(copies.found()) == [f".{name_at(0)}.unfinished-1"]
