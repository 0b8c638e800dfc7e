"""`atoll node drain`: whom it signals, and what it does with one that does not end."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import stopping
from node.stopping import drain_node
from protocol.errors import NoInputError, SystemRefusedError
from protocol.files.durable import LOCK_NAME
from protocol.trust.credentials import IDENTITY_FILE

NODE = """
import signal, sys
from pathlib import Path
from protocol.files.durable import FolderLock

left = int(sys.argv[2])  # signals that it does not mind
def hear(*_):
    global left
    if left == 0:
        sys.exit(0)
    left -= 1
signal.signal(signal.SIGTERM, hear)
lock = FolderLock.take(Path(sys.argv[1]), holder="node", next_step="")
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / IDENTITY_FILE).touch()
    return tmp_path


@contextlib.contextmanager
def running(folder: Path, *, ignored: int = 0) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", NODE, str(folder), str(ignored)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(stopping.__file__).parents[1]
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_node_that_holds_the_folder_is_asked_once_and_waited_for(folder: Path) -> None:
    said: list[str] = []
    with running(folder) as node:
        drain_node(folder, within_seconds=60, say=said.append)
        assert node.wait(1) == 0
    assert said[0] == f"draining the node in {folder} (process {node.pid}), 60 s at most"
    assert len(said) == 2 and said[1].startswith("its own limit is 30 s (drain_within in ")


def test_who_asks_for_no_more_than_the_nodes_own_limit_hears_of_none(folder: Path) -> None:
    said: list[str] = []
    with running(folder):
        drain_node(folder, within_seconds=30, say=said.append)
    assert len(said) == 1


def test_a_node_that_takes_too_long_is_asked_again(folder: Path) -> None:
    said: list[str] = []
    with running(folder, ignored=1) as node:
        drain_node(folder, within_seconds=0.1, say=said.append)
        assert node.wait(1) == 0
    assert said[-1] == "out of time: it leaves at once"


def test_a_node_that_never_ends_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "GOODBYE_SECONDS", 0.1)
    with (
        running(folder, ignored=9) as node,
        pytest.raises(SystemRefusedError, match=f"process {node.pid}\\) does not end"),
    ):
        drain_node(folder, within_seconds=0.1, say=lambda _: None)


def test_a_process_that_only_has_the_number_of_an_ended_node_is_let_alone(folder: Path) -> None:
    (folder / LOCK_NAME).write_text(f"{os.getpid()}\n")
    with pytest.raises(SystemRefusedError, match="no node runs in "):
        drain_node(folder, within_seconds=1, say=lambda _: None)
    (folder / LOCK_NAME).unlink()
    with pytest.raises(SystemRefusedError, match="no node runs in "):
        drain_node(folder, within_seconds=1, say=lambda _: None)


def test_a_coordinator_is_not_taken_for_a_node(tmp_path: Path) -> None:
    with (
        running(tmp_path) as coordinator,
        pytest.raises(NoInputError, match="is not a node's folder"),
    ):
        drain_node(tmp_path, within_seconds=1, say=lambda _: None)
    assert coordinator.returncode == -9  # by us, at the end
