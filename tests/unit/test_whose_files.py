"""Files of another user in a daemon's folder are refused before any work, and whose they are is said."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from coordinator.app import WRITTEN as OF_A_COORDINATOR
from node.app import WRITTEN as OF_A_NODE
from protocol.errors import AtollError, CannotCreateError, ExitCode, SystemRefusedError
from protocol.files.durable import (
    FolderLock,
    name_of_user,
    read_toml,
    require_ours,
    user_beside_root,
    whose_it_is,
    write_atomically,
)
from protocol.terminal import console

ROOT = Path(__file__).parents[2]
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@contextmanager
def as_nobody() -> Iterator[None]:
    """The user whose the folder is, after root has typed something in it."""
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Nobody's; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as around:
        Path(around).chmod(0o755)
        made = Path(around) / "my node"
        made.mkdir(mode=0o700)
        os.chown(made, NOBODY, NOBODY)
        yield made


def test_a_folder_without_files_of_others_is_fine(folder: Path) -> None:
    with as_nobody():
        require_ours(folder, OF_A_NODE)
        write_atomically(folder / "rulings", b"ours")
        (folder / "logs").mkdir()
        require_ours(folder, (*OF_A_NODE, *OF_A_COORDINATOR))


@pytest.mark.parametrize("name", sorted({*OF_A_NODE, *OF_A_COORDINATOR}))
def test_a_file_that_root_has_left_is_told_with_what_gives_all_of_them_back(
    folder: Path, name: str
) -> None:
    (folder / name).touch(mode=0o644)
    with as_nobody(), pytest.raises(CannotCreateError) as refused:
        require_ours(folder, (*OF_A_NODE, *OF_A_COORDINATOR))
    assert refused.value.what == f"cannot write {folder / name}: Permission denied"
    assert f"run as root, whose {folder / name} is, and not as nobody" in refused.value.next_step
    assert "sudo chown -R nobody" in refused.value.next_step
    assert str(folder) in refused.value.next_step.rpartition("chown")[2]
    assert name not in refused.value.next_step.rpartition("chown")[2]


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_so_is_a_folder_however_deep(folder: Path, mode: int) -> None:
    (folder / "inner" / "round-3").mkdir(parents=True)
    os.chown(folder / "inner", NOBODY, NOBODY)
    (folder / "inner" / "round-3").chmod(mode)
    with as_nobody(), pytest.raises(CannotCreateError, match="inner/round-3: Permission denied"):
        require_ours(folder, OF_A_NODE)


def test_a_folder_that_is_another_users_as_a_whole_is_first_of_all_that_users(folder: Path) -> None:
    os.chown(folder, 0, 0)
    folder.chmod(0o755)
    with as_nobody(), pytest.raises(CannotCreateError) as refused:
        require_ours(folder, OF_A_NODE)
    assert refused.value.next_step.startswith(f"run as root, whose {folder} is")


def test_what_is_only_read_may_be_anothers_and_so_may_what_is_nothing_of_ours(folder: Path) -> None:
    (folder / "node.toml").write_text("# of a ConfigMap, or of who gives services their keys")
    (folder / "tokens").mkdir(mode=0o755)
    for place in (folder, folder / "snapshots"):  # which are volumes
        place.mkdir(exist_ok=True)
        os.chown(place, NOBODY, NOBODY)
        (place / "lost+found").mkdir(mode=0o700)
    (folder / "island.token").touch(mode=0o600)
    with as_nobody():
        require_ours(folder, OF_A_NODE)


def every_other_refusal(folder: Path) -> Iterator[AtollError]:
    """What those say who meet a file of root's later, or in a command."""
    (folder / "lock").touch(mode=0o600)
    (folder / "node.toml").touch(mode=0o600)
    (folder / "logs").mkdir(mode=0o700)
    with as_nobody():
        with pytest.raises(SystemRefusedError) as locked:
            FolderLock.take(folder, holder="node", next_step="")
        with pytest.raises(AtollError) as read:
            read_toml(folder / "node.toml", when_missing="")
        with pytest.raises(CannotCreateError) as written:
            write_atomically(folder / "logs" / "node.log", b"")
    yield from (locked.value, read.value, written.value)


def test_whose_it_is_is_said_wherever_it_shows(folder: Path) -> None:
    refusals = list(every_other_refusal(folder))
    assert len(refusals) == 3
    for refused in refusals:
        assert "Permission denied" in refused.what and "sudo chown" in refused.next_step
        assert refused.exit_code in (ExitCode.SYSTEM, ExitCode.NO_INPUT, ExitCode.CANNOT_CREATE)


def test_it_is_said_of_a_file_that_nobody_has_thought_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "news.jsonl").touch(mode=0o600)

    @click.command()
    def reading() -> None:
        (folder / "news.jsonl").read_bytes()

    with as_nobody():
        assert console.run(reading, []) == ExitCode.SYSTEM
    said = capsys.readouterr().err
    assert "news.jsonl: Permission denied" in said and "sudo chown -R nobody" in said


def test_of_our_own_files_nothing_is_said_and_of_root_nothing_to_root(folder: Path) -> None:
    assert whose_it_is(folder) == ""
    with as_nobody():
        assert whose_it_is(folder) == whose_it_is(folder / "not" / "there") == ""


def test_root_in_the_folder_of_a_user_is_warned_before_it_leaves_files(folder: Path) -> None:
    assert user_beside_root(folder) == name_of_user(NOBODY)
    starting = (
        "import sys; from pathlib import Path; from protocol.terminal.logging import start_logging; "
        "start_logging(as_json=True, folder=Path(sys.argv[1]), process='node')"
    )
    command = [sys.executable, "-c", starting, str(folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stderr
    warned = json.loads(said)
    assert warned["user"] == "nobody" and "chown -R nobody" in warned["next_step"]
    with as_nobody():
        assert user_beside_root(folder) == ""
    os.chown(folder, 0, 0)
    assert user_beside_root(folder) == ""
