"""Folders that are whole or not there, and what is said of a full disk."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import AtollError, CannotCreateError, ConfigError, SystemRefusedError
from protocol.files.durable import (
    clear_unfinished,
    is_taken,
    read_toml,
    refusal_to_write,
    whole_folder,
    write_atomically,
)
from protocol.files.leftovers import TemporaryFolder, temporary_directory


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


@pytest.mark.parametrize("knows_unnamed", [True, False])
def test_of_a_file_that_a_killed_process_was_writing_nothing_stays_beside_the_old_one(
    tmp_path: Path, knows_unnamed: bool
) -> None:
    path = tmp_path / "identity.key"
    without = (
        "" if knows_unnamed else "os.O_TMPFILE = os.O_DIRECTORY\n"
    )  # which refuses as such a disk does
    program = (
        f"import os, signal\n{without}from pathlib import Path\n"
        "from protocol.files.durable import write_atomically\n"
        f"path = Path({str(path)!r})\n"
        "write_atomically(path, b'old', mode=0o600)\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(path, b'a new secret', mode=0o600)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program])
    assert ran.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old" and path.stat().st_mode & 0o777 == 0o600
    left = [each for each in tmp_path.iterdir() if each != path]
    assert len(left) == (0 if knows_unnamed else 1)


def test_where_a_file_without_a_name_cannot_be_given_one_it_is_written_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without /proc, or on a disk of FUSE."""

    def refusing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "link", refusing)
    path = tmp_path / "identity.key"
    write_atomically(path, b"a new ", b"secret", mode=0o600)
    assert path.read_bytes() == b"a new secret" and path.stat().st_mode & 0o777 == 0o600
    monkeypatch.delattr(os, "O_TMPFILE")
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "kind", "next_step"),
    [
        (errno.EFBIG, SystemRefusedError, "FAT ends at 4 GB"),
        (errno.EIO, SystemRefusedError, "dmesg"),
        (errno.EROFS, CannotCreateError, "mount it for writing"),
        (errno.EISDIR, CannotCreateError, "move it away"),
        (errno.EACCES, CannotCreateError, "a folder that you may write to"),
    ],
)
def test_why_a_file_is_not_written_leads_to_what_helps(
    number: int, kind: type[AtollError], next_step: str
) -> None:
    refusal = refusal_to_write(Path("/disk/file"), OSError(number, os.strerror(number)))
    assert type(refusal) is kind and next_step in refusal.next_step


def test_a_file_from_windows_is_read_and_one_in_another_coding_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for coding in ("utf-8", "utf-8-sig"):
        path.write_bytes("[run]\r\nname = 'ä'\r\n".encode(coding))
        assert read_toml(path, when_missing="") == {"run": {"name": "ä"}}
    path.write_bytes("[run]\nname = 'ä'\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="save it again, as UTF-8"):
        read_toml(path, when_missing="")


def test_a_file_that_lost_its_text_does_not_mean_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"node\.toml is empty: 1 bytes"):
        read_toml(path, when_missing="")
    path.write_text("# defaults")
    assert read_toml(path, when_missing="") == {}


# Answers flock with "no locks available", as a share of a network does whose server keeps none.
WITHOUT_LOCKS = """
import ctypes, sys
from pathlib import Path

class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

SYSCALL, ERROR, ALLOWED, ENOLCK, FLOCK = 0x20, 0x50000, 0x7FFF0000, 37, 73
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, FLOCK), (0x06, 0, 0, ERROR | ENOLCK), (0x06, 0, 0, ALLOWED)]
code = b"".join(
    number.to_bytes(2, "little") + bytes([then, other]) + value.to_bytes(4, "little")
    for number, then, other, value in steps
)
kept = ctypes.create_string_buffer(code)
program = Filter(len(steps), ctypes.addressof(kept))
call = ctypes.CDLL(None, use_errno=True).prctl
assert call(38, 1, 0, 0, 0) == 0  # no new privileges
assert call(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
"""


def test_a_folder_on_a_disk_that_locks_nothing_is_refused_in_a_sentence(tmp_path: Path) -> None:
    program = f"""{WITHOUT_LOCKS}
from protocol.files.durable import FolderLock
from protocol.errors import SystemRefusedError
try:
    FolderLock.take(Path({str(tmp_path)!r}), holder="node", next_step="")
except SystemRefusedError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"the disk of {tmp_path / 'lock'} locks no files (No locks available)" in ran.stdout
    assert "let the folder be on a disk of this machine" in ran.stdout


def test_a_place_for_temporary_files_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(SystemRefusedError, match=r"nowhere.*TMPDIR"):
        TemporaryFolder("test")


def test_a_machine_without_a_place_for_temporary_files_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(SystemRefusedError, match="neither TMPDIR nor /tmp"):
        temporary_directory()
