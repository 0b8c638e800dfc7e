"""Folders that are whole or not there, and what is said of a full disk."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import CannotCreateError, SystemRefusedError
from protocol.files.durable import clear_unfinished, is_taken, whole_folder
from protocol.files.leftovers import TemporaryFolder


def test_a_folder_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with whole_folder(path) as building:
        (building / "file").write_text("text")
        assert not path.exists()
    assert (path / "file").read_text() == "text"
    assert path.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_did_not_become_whole_was_never_there(tmp_path: Path) -> None:
    for error, kind in (
        (OSError(errno.ENOSPC, "No space left on device"), SystemRefusedError),
        (OSError(errno.EACCES, "Permission denied"), CannotCreateError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with pytest.raises(kind), whole_folder(tmp_path / "folder") as building:
            (building / "file").write_text("text")
            raise error
        assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from protocol.files.durable import whole_folder
with whole_folder(Path(sys.argv[1])) as building:
    (building / "secret.key").write_text("secret")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_was_filling_is_cleared_by_the_next_and_what_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "first"], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "secret.key").stat().st_mode and left.stat().st_mode & 0o777 == 0o700
    with whole_folder(tmp_path / "second") as building:
        assert not left.exists()
        (building / "file").touch()
        with whole_folder(tmp_path / "third"):
            pass
        clear_unfinished(tmp_path)
        assert (building / "file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "third"]


def test_what_is_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "full" / "file"
    empty.mkdir()
    full.mkdir()
    file.touch()
    assert [is_taken(path) for path in (tmp_path / "none", empty, full, file)] == [
        False,
        False,
        True,
        True,
    ]
    with whole_folder(empty) as building:
        (building / "file").touch()
    assert (empty / "file").exists()
    with pytest.raises(CannotCreateError, match="cannot be made"), whole_folder(full):
        pass
    assert list(full.iterdir()) == [file]
    assert sorted(tmp_path.iterdir()) == [empty, full]


def test_a_place_for_temporary_files_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SystemRefusedError, match=r"nowhere.*TMPDIR"):
        TemporaryFolder("test")
