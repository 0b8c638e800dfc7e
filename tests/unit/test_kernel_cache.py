"""Folders of compiled kernels go when nobody uses them, and never while somebody does."""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from node.exchange.codecs.codec import UNUSED_SECONDS, hold, locked, remove_unused

NOW = 1e9
LONG_AGO = NOW - UNUSED_SECONDS - 1


def folder_of(cache: Path, version: str, *, used_at: float = LONG_AGO) -> Path:
    folder = cache / f"kernels-{version}"
    (folder / "codecs").mkdir(parents=True)
    (folder / "codecs" / "int4.nbi").write_bytes(b"compiled")
    os.utime(folder, (used_at, used_at))
    return folder


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_what_other_versions_left_goes_after_a_week_without_use(tmp_path: Path) -> None:
    own = folder_of(tmp_path, "own", used_at=NOW)
    folder_of(tmp_path, "old")
    folder_of(tmp_path, "recent", used_at=NOW - UNUSED_SECONDS + 1)
    (tmp_path / "else").mkdir()
    os.utime(tmp_path / "else", (LONG_AGO, LONG_AGO))
    remove_unused(own)
    assert left_in(tmp_path) == {"kernels-own", "kernels-recent", "else"}


def test_what_is_held_stays_however_old_until_its_holder_has_ended(tmp_path: Path) -> None:
    own, old = folder_of(tmp_path, "own", used_at=NOW), folder_of(tmp_path, "old")
    held = hold(old)
    assert held is not None
    os.utime(old, (LONG_AGO, LONG_AGO))  # it has run for long
    remove_unused(own)
    assert (old / "codecs" / "int4.nbi").exists()
    held.release()
    remove_unused(own)
    assert not old.exists()


def test_many_may_hold_a_folder_and_doing_so_counts_as_use(tmp_path: Path) -> None:
    own, old = folder_of(tmp_path, "own", used_at=NOW), folder_of(tmp_path, "old")
    held = [hold(old), hold(old)]
    for each in held:
        assert each is not None
        each.release()
    remove_unused(own)
    assert old.exists()


def test_nodes_that_start_together_may_all_remove(tmp_path: Path) -> None:
    own = folder_of(tmp_path, "own", used_at=NOW)
    for number in range(50):
        folder_of(tmp_path, str(number))
    all_there = Barrier(4)

    def start() -> None:
        all_there.wait()
        remove_unused(own)

    with ThreadPoolExecutor(4) as pool:
        for started in [pool.submit(start) for _ in range(4)]:
            started.result()
    assert left_in(tmp_path) == {"kernels-own"}


def test_a_folder_that_is_removed_while_it_is_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels-own"
    lock = fcntl.flock
    seen: list[int] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not seen:
            shutil.rmtree(folder)
        seen.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    held = hold(folder)
    assert held is not None and len(seen) == 2
    assert os.path.samestat(os.fstat(seen[1]), folder.stat())
    held.release()


def test_one_compiles_at_a_time_and_the_next_is_told_that_it_waits(tmp_path: Path) -> None:
    told, order = [], []
    waits, is_waiting = Barrier(2), Event()

    def wait() -> None:
        told.append("second")
        is_waiting.set()

    def second() -> None:
        waits.wait()
        with locked(tmp_path / "new", on_wait=wait):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "new", on_wait=lambda: told.append("first")):
            running = pool.submit(second)
            waits.wait()
            assert is_waiting.wait(60)
            order.append("first")
        running.result()
    assert (told, order) == (["second"], ["first", "second"])


def test_where_nothing_can_be_locked_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with locked(tmp_path / "file" / "cache", on_wait=lambda: pytest.fail("waits")):
            pass


def test_where_no_folder_can_be_none_is_held(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert hold(tmp_path / "file" / "kernels-own") is None
