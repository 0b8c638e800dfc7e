import errno
import fcntl
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from node.disk import snapshots as snapshot_module
from node.disk.snapshot_folder import OpenSnapshot, SnapshotError, SnapshotFolder
from node.disk.snapshots import Owed, Snapshot
from protocol.errors import BadDataError, CannotCreateError, ConfigError, SystemRefusedError
from protocol.wire.rounds import Digest

RUN = Digest(bytes(range(32)))
LAYOUT = Digest(bytes(range(32, 64)))
NUM_ELEMENTS = 100


def vector(seed: int) -> np.ndarray:
    return ((np.arange(NUM_ELEMENTS) * (2 * seed + 13) % 101 - 50) / 7).astype(np.float32)


RESIDUAL = Owed(residual=vector(9))
BOTH = Owed(residual=vector(9), reducer_error={0: vector(10)[:2], 3: vector(10)[:1]})


def snapshot_at(round: int) -> Snapshot:
    return Snapshot(
        round=round,
        run_digest=RUN,
        layout_digest=LAYOUT,
        parameters=vector(round),
        momentum=vector(round + 1),
    )


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    assert (found.round, found.run_digest, found.layout_digest) == (expected.round, RUN, LAYOUT)
    assert found.parameters.tobytes() == expected.parameters.tobytes()
    assert found.momentum.tobytes() == expected.momentum.tobytes()
    assert found.outer_digest() == expected.outer_digest()


def names(path: Path) -> list[str]:
    """Without hidden files, of which there is one at most: what the next file is written over."""
    every = sorted(file.name for file in path.iterdir())
    shown = [name for name in every if not name.startswith(".")]
    assert len(every) - len(shown) <= 1, every
    return shown


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_was_read_is_read_only(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), BOTH)
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[1] is not None
    for found in (loaded[0].parameters, loaded[0].momentum, *loaded[1].tensors().values()):
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1


@pytest.mark.parametrize(
    "owed", [None, RESIDUAL, BOTH], ids=["nothing owed", "residual", "reducer's error too"]
)
def test_a_file_returns_every_bit(tmp_path: Path, owed: Owed | None) -> None:
    folder = SnapshotFolder(tmp_path / "snapshots")
    assert folder.load_newest(RUN, LAYOUT) is None
    path = folder.save(snapshot_at(12), owed)
    assert path.name == "round-00000012.safetensors"
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None
    assert_same(loaded[0], snapshot_at(12))
    if owed is None:
        assert loaded[1] is None
    else:
        assert loaded[1] is not None
        found, expected = loaded[1].tensors(), owed.tensors()
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_file_of_a_format_to_come_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "FILE_FORMAT", "atoll snapshot 4")
    SnapshotFolder(tmp_path).save(snapshot_at(12), RESIDUAL)
    monkeypatch.undo()
    with capture_logs() as logs, pytest.raises(BadDataError):
        SnapshotFolder(tmp_path).load_newest(RUN, LAYOUT)
    assert "'atoll snapshot 4'" in logs[0]["why"]


def test_zeros_take_no_room_in_a_new_file_and_are_written_over_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    pwrite = os.pwrite

    def counted(descriptor: int, data: bytes, at: int) -> int:
        written.append(len(data))
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", counted)
    zeros = np.zeros(NUM_ELEMENTS, np.float32)
    first = replace(snapshot_at(0), momentum=zeros)
    folder = SnapshotFolder(tmp_path)
    folder.save(first, Owed(residual=zeros))
    assert written.count(4 * NUM_ELEMENTS) == 1
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[1] is not None
    assert_same(loaded[0], first)
    assert loaded[1].residual.tobytes() == zeros.tobytes()
    for round in (1, 2, 3):
        folder.save(snapshot_at(round), RESIDUAL)
    folder.save(replace(first, round=4), Owed(residual=-zeros))
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[1] is not None
    assert_same(loaded[0], replace(first, round=4))
    assert loaded[1].residual.tobytes() == (-zeros).tobytes()  # which is not all zero bits


def test_what_is_held_is_what_files_take_of_the_disk(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path).folder
    with folder.path_of(7).open("wb") as file:
        file.write(bytes(100))
        file.truncate(1 << 24)
    assert 100 <= folder.held_bytes() < 1 << 20


def test_strided_vectors_are_saved_as_they_look(tmp_path: Path) -> None:
    wide = np.repeat(vector(3), 2)
    state = Snapshot(
        round=1, run_digest=RUN, layout_digest=LAYOUT, parameters=vector(1), momentum=vector(2)
    )
    SnapshotFolder(tmp_path).save(state, Owed(residual=wide[::2]))
    loaded = SnapshotFolder(tmp_path).load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[1] is not None
    assert loaded[1].residual.tobytes() == vector(3).tobytes()


def test_the_two_newest_files_are_kept(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".round-00000009.safetensors.abc").write_text("left by a killed process")
    for round in (9, 10, 99_999_999, 100_000_000):
        folder.save(snapshot_at(round), None)
    assert names(tmp_path) == [
        "notes.txt",
        "round-100000000.safetensors",
        "round-99999999.safetensors",
    ]
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[0].round == 100_000_000


def test_what_was_just_saved_is_never_removed(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    for round in (8, 9, 3):
        folder.save(snapshot_at(round), None)
    assert "round-00000003.safetensors" in names(tmp_path)


def test_any_flipped_byte_is_found_and_the_file_before_is_taken(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), BOTH)
    path = folder.save(snapshot_at(2), BOTH)
    whole = path.read_bytes()
    for place in range(0, len(whole), 17):
        flip(path, place)
        with capture_logs() as logs:
            loaded = folder.load_newest(RUN, LAYOUT)
        assert loaded is not None and loaded[0].round == 1, place
        assert [entry["log_level"] for entry in logs] == ["warning"]
        assert logs[0]["path"] == str(path)
        path.write_bytes(whole)


def test_a_truncated_file_is_passed_over(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), None)
    path = folder.save(snapshot_at(2), None)
    whole = path.read_bytes()
    for length in (0, 5, 400, len(whole) - 1):
        path.write_bytes(whole[:length])
        loaded = folder.load_newest(RUN, LAYOUT)
        assert loaded is not None and loaded[0].round == 1


def test_nothing_but_damage_is_an_error(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    flip(folder.save(snapshot_at(1), None), -1)
    with pytest.raises(BadDataError, match="damaged"):
        folder.load_newest(RUN, LAYOUT)


def test_files_of_another_run_or_layout_are_refused_by_name(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), None)
    other = Digest(b"\xee" * 32)
    with pytest.raises(ConfigError, match=r"run 000102030405, not to eeeeeeeeeeee"):
        folder.load_newest(other, LAYOUT)
    with pytest.raises(ConfigError, match=r"layout 202122232425, not to eeeeeeeeeeee"):
        folder.load_newest(RUN, other)


def test_a_state_is_read_alike_from_memory_and_from_its_file(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(3), BOTH)
    whole = vector(3).tobytes() + vector(4).tobytes()
    for state in (snapshot_at(3), folder.open(3)):
        assert (state.round, state.outer_digest()) == (3, snapshot_at(3).outer_digest())
        for start in (0, 4, 396, 400, 404, 796):
            for stop in range(start, 801, 4):
                assert state.read(start, stop) == whole[start:stop], (start, stop)


def test_an_open_file_stays_readable_when_the_folder_has_gone_on(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), None)
    served = folder.open(1)
    for round in (2, 3):
        folder.save(snapshot_at(round), None)
    assert folder.rounds() == [3, 2]
    assert served.read(0, 400) == vector(1).tobytes()
    with pytest.raises(SnapshotError):
        folder.open(1)


def test_files_are_written_over_the_oldest_and_nothing_of_that_is_left(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    inodes = []
    for round in range(1, 9):
        owed = BOTH if round < 7 else None  # the last are half as long
        inodes.append(folder.save(snapshot_at(round), owed).stat().st_ino)
        loaded = folder.load(round, snapshot_at(round).outer_digest())
        assert loaded is not None and (loaded[1] is None) == (owed is None)
        assert_same(loaded[0], snapshot_at(round))
    assert inodes[2:] == inodes[:-2] and len(set(inodes)) == 2
    assert folder.rounds() == [8, 7]


def test_what_is_served_is_not_written_over(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), None)
    served = folder.open(1)
    for round in range(2, 9):
        folder.save(snapshot_at(round), None)
        assert served.read(0, 800) == vector(1).tobytes() + vector(2).tobytes()
    assert len(names(tmp_path)) == 2


def test_a_file_is_written_over_again_once_nobody_serves_it(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    served = folder.save(snapshot_at(1), None).stat().st_ino
    state: OpenSnapshot | None = folder.open(1)
    folder.save(snapshot_at(2), None)
    assert state is not None
    del state
    assert folder.save(snapshot_at(3), None).stat().st_ino == served


def test_a_file_that_is_just_set_aside_does_not_open(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), None)
    with folder.save(snapshot_at(2), None).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SnapshotError, match="just being set aside"):
            folder.open(2)
        loaded = folder.load_newest(RUN, LAYOUT)
        assert loaded is not None and loaded[0].round == 1


def test_a_copy_by_another_name_is_not_written_over(tmp_path: Path) -> None:
    """As `cp --link` makes one for a backup."""
    folder = SnapshotFolder(tmp_path / "snapshots")
    copy = tmp_path / "copy"
    copy.hardlink_to(folder.save(snapshot_at(1), None))
    whole = copy.read_bytes()
    for round in range(2, 9):
        folder.save(snapshot_at(round), None)
    assert copy.read_bytes() == whole


def test_a_damaged_newest_file_makes_room_before_the_whole_one(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    whole = folder.save(snapshot_at(1), BOTH)
    damaged = folder.save(snapshot_at(2), BOTH)
    inode = damaged.stat().st_ino
    flip(damaged, -1)
    loaded = folder.load_newest(RUN, LAYOUT)
    assert loaded is not None and loaded[0].round == 1
    assert names(tmp_path) == [whole.name, damaged.name + ".damaged"]
    writing = folder.begin(snapshot_at(3), BOTH)
    assert names(tmp_path) == [whole.name]
    assert writing.write().stat().st_ino == inode
    assert folder.rounds() == [3, 1]


class Killed(BaseException):
    """Nothing that comes after it is done."""


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_kill_at_any_byte_leaves_the_newest_file_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    folder = SnapshotFolder(tmp_path)
    for round in range(1, num_before + 1):
        size = folder.save(snapshot_at(round), BOTH).stat().st_size
    pwrite = os.pwrite
    for last_byte in range(0, size + 9, 53):  # all bytes, and eight that say that it is none
        left = last_byte

        def until_killed(descriptor: int, data: bytes, at: int) -> int:
            nonlocal left
            num_written = pwrite(descriptor, bytes(data)[:left], at)
            left -= num_written
            if not left:
                raise Killed
            return num_written

        with monkeypatch.context() as death:
            death.setattr(os, "pwrite", until_killed)
            with pytest.raises(Killed):
                folder.save(snapshot_at(9), BOTH)
        assert folder.rounds()[0] == num_before, last_byte
        kept = folder.load(num_before, snapshot_at(num_before).outer_digest())
        assert kept is not None and kept[1] is not None
        assert kept[1].residual.tobytes() == BOTH.residual.tobytes()
    folder.save(snapshot_at(9), BOTH)
    assert folder.rounds() == [9, num_before]
    names(tmp_path)


def test_a_disk_that_refuses_keeps_nobody_from_changing_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(1), BOTH)
    writing = folder.begin(snapshot_at(2), BOTH)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        writing.keep(slice(0, NUM_ELEMENTS))
        for _ in range(2):
            with pytest.raises(SystemRefusedError, match="No space left"):
                writing.write()
        with pytest.raises(SystemRefusedError, match=r"write .*/round-00000003.*No space left"):
            folder.begin(snapshot_at(3), BOTH)  # not even its first bytes
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000001.safetensors"]


def test_where_nothing_can_be_locked_old_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems, where nobody could say that he reads."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = SnapshotFolder(tmp_path)
    for round in range(1, 5):
        folder.save(snapshot_at(round), None)
    assert folder.load(4, snapshot_at(4).outer_digest()) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == names(tmp_path)
    assert folder.rounds() == [4, 3]


def test_a_file_without_the_outer_state_does_not_open(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    path = folder.save(snapshot_at(1), None)
    path.write_bytes(path.read_bytes().replace(b"outer_digest", b"other_digest"))
    with pytest.raises(SnapshotError):
        folder.open(1)
    path.write_bytes(b"")
    with pytest.raises(SnapshotError):
        folder.open(1)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CannotCreateError, match="taken"):
        SnapshotFolder(tmp_path / "taken").save(snapshot_at(1), None)


def test_a_state_is_loaded_by_its_round_and_its_digest(tmp_path: Path) -> None:
    """Of one round there may have been two, where history was taken back."""
    folder = SnapshotFolder(tmp_path)
    folder.save(snapshot_at(3), RESIDUAL)
    digest = snapshot_at(3).outer_digest()
    kept = folder.load(3, digest)
    assert kept is not None
    assert_same(kept[0], snapshot_at(3))
    assert folder.load(3, snapshot_at(4).outer_digest()) is None
    assert folder.load(4, digest) is None
