"""The package atoll in environments that are not ours: what it imports, and what it finds there."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import atoll
from atoll.child import ChildNode
from atoll.connection import find_folder
from atoll.log_file import LoopLog
from atoll.swarm import require_torch
from lab.processes.family import SOURCES
from protocol.files.durable import FolderLock
from protocol.terminal.logs import Logs
from protocol.trust.credentials import LINK_FILE, find_home

_ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"{name} is not in this environment")

sys.meta_path.insert(0, Absent())
import atoll
assert atoll.join and atoll.Swarm
try:
    atoll.TrainerCallback
except ModuleNotFoundError as error:
    print(error)
"""

_OURS_AND_THEIRS = {
    *(
        "node",
        "protocol",
        "coordinator",
        "lab",
        "benchmarks",
        "pydantic",
        "grpc",
        "hivemind",
        "structlog",
    ),
    *("click", "rich", "blake3", "platformdirs", "google", "numba", "cryptography", "transformers"),
}


def test_it_imports_torch_numpy_and_the_standard_library_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _ALONE.replace("{ABSENT}", repr(_OURS_AND_THEIRS))],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert ran.stdout == "transformers is not in this environment\n"


def test_it_finds_the_folder_that_the_node_s_commands_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DIR", raising=False)
    given = tmp_path / "given"
    assert find_folder(given) == find_home(given) == given
    assert find_folder(None) == find_home(None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert find_folder(None) == find_home(None) == tmp_path / "data" / "atoll"
    (tmp_path / LINK_FILE).touch()
    assert find_folder(None) == find_home(None) == tmp_path
    monkeypatch.setenv("ATOLL_DIR", "~/elsewhere")
    assert find_folder(None) == find_home(None)


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("ATOLL_PROGRAM", str(path))


def test_an_invite_that_is_refused_is_told_in_the_program_s_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        tmp_path,
        'test "$ATOLL_INVITE" = secret; echo "atoll: it expired" >&2; exit 77',
        monkeypatch,
    )
    with pytest.raises(atoll.SwarmError, match="'atoll join' has failed: atoll: it expired"):
        ChildNode.start(tmp_path, "secret")


def test_a_node_of_its_own_that_ends_is_told_at_once_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.toml").touch()
    program(tmp_path, 'echo "atoll: another node runs here"; exit 75', monkeypatch)
    with pytest.raises(atoll.SwarmError, match="exit code 75: atoll: another node runs here"):
        atoll.join(torch.nn.Linear(1, 1), folder=tmp_path, invite="atoll1-…")


def test_a_node_of_its_own_ends_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.toml").touch()
    program(tmp_path, "cat; echo ended >&2", monkeypatch)
    child = ChildNode.start(tmp_path, "atoll1-…")
    assert child.is_alive
    child.end()
    assert not child.is_alive
    assert (tmp_path / "node.log").read_text() == "ended\n"


def test_no_program_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_PROGRAM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(atoll.SwarmError, match=r"set \$ATOLL_PROGRAM"):
        ChildNode.start(tmp_path, "atoll1-…")


def test_ranks_that_are_not_connected_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(atoll.SwarmError, match="one of 4 ranks, and torch"):
        atoll.join(torch.nn.Linear(1, 1), folder=tmp_path)


def test_the_node_of_a_killed_loop_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.toml").touch()
    program(tmp_path, "cat", monkeypatch)
    before = FolderLock.take(tmp_path, holder="node", next_step="")
    monkeypatch.setattr("atoll.child._END_SECONDS", 0.0)
    with pytest.raises(atoll.SwarmError, match="another node runs in"):
        ChildNode.start(tmp_path, "atoll1-…")
    before.release()
    ChildNode.start(tmp_path, "atoll1-…").end()


def test_a_loop_writes_lines_that_the_logs_command_reads_each_rank_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "attic"
    home.mkdir()
    first, third = LoopLog(home, rank=0), LoopLog(home, rank=3)
    first.tell(logging.INFO, "trained", round=7, inner_steps=4)
    third.tell(logging.WARNING, "cut off\nfor good\x1b[2J")
    lines = sorted(Logs(home).read(), key=lambda line: line.who)
    assert [(line.who, line.told["event"]) for line in lines] == [
        ("attic loop", "trained"),
        ("attic loop-3", "cut off\nfor good\x1b[2J"),
    ]
    assert (lines[0].told["round"], lines[1].told["level"]) == (7, "warning")
    assert [record.getMessage() for record in caplog.records] == ["attic: cut off\nfor good\x1b[2J"]

    monkeypatch.setattr("atoll.log_file.MOST_BYTES", 50)
    tail = Logs(home)
    assert len(tail.read()) == 2
    first.tell(logging.INFO, "in a new file")
    assert [line.told["event"] for line in tail.read()] == ["in a new file"]
    assert (home / "logs" / "loop.log.old").is_file()


def test_a_loop_whose_folder_takes_no_line_trains_on(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    LoopLog(tmp_path, rank=0).tell(logging.INFO, "trained")
    LoopLog(tmp_path / "gone", rank=0).tell(logging.INFO, "trained")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124"])
def test_a_torch_that_lacks_what_loops_call_is_refused_before_anything_else(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 1)
    monkeypatch.setattr("atoll.swarm.torch.__version__", version)
    with pytest.raises(
        atoll.SwarmError, match=r"needs 2\.6 or later; 'pip install --upgrade torch'"
    ) as said:
        atoll.join(model, torch.optim.SGD(model.parameters()), folder="none", wait_seconds=0)
    assert f"has torch {version}," in str(said.value)
    for enough in ("2.6.0a0+git1234", "2.10.0", "3.0.0.dev20261130"):
        require_torch(enough)
