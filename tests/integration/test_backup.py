"""`atoll coordinator backup`: whole and consistent, whatever the coordinator does meanwhile."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Home, create_home
from coordinator.rules import rules_of
from coordinator.settings import CoordinatorConfig
from coordinator.store import Store
from lab.processes.family import atoll_command, atoll_environment
from protocol.terminal.query import StatusLink
from tests.integration.small_machine import small_disk
from tests.integration.typed_commands import Swarm, Typed, atoll, done, refused, typed_here, until
from tests.tiny_runs import tiny_text

RUN = tiny_text(
    run={"name": "kept", "rounds": 100_000, "min_nodes": 1},
    inner={"steps": 1},
    evaluation={"every_rounds": 1000},
)
PRIVATE = {"ca.key", "coordinator.key", "server.key", "client.key"}


def round_of(said: str) -> int:
    found = re.search(
        r"copied run 'kept' at round (\d+) of 100000 to \S+ \(\d+\.\d kB\), "
        r"with the authority's key, which is not encrypted\n$",
        said,
    )
    assert found is not None, said
    return int(found[1])


def assert_consistent(copy: Path, committed_round: int) -> None:
    home = Home.load(copy)
    store = Store.open(copy)
    try:
        state = store.load(rules_of(home.run), home.run.digest())
        commits = store.commits_after(0, limit=1000)
    finally:
        store.close()
    assert state.committed_round == committed_round
    assert [commit.round for commit in commits] == list(range(1, len(commits) + 1))
    # A round is closed once its digest is agreed on; until then its commit is the open round's.
    assert committed_round - len(commits) in (0, 1)
    assert state.open_round is None or state.open_round.number in (
        committed_round,
        committed_round + 1,
    )


@pytest.mark.nightly
def test_copies_of_a_run_in_full_flight_are_consistent_and_one_can_be_started(
    swarm: Swarm,
) -> None:
    swarm.join("node", swarm.invite())
    node = swarm.start_node("node")
    node.says("applied", times=3)
    rounds = []
    for number in range(4):
        copy = swarm.folder / f"copy-{number}"
        before = swarm.status().run.committed_round
        rounds.append(round_of(done(atoll("coordinator", "backup", swarm.home, copy))))
        assert before <= rounds[-1] <= swarm.status().run.committed_round
        assert_consistent(copy, rounds[-1])
    assert rounds == sorted(set(rounds))  # it went on from copy to copy

    files = {path.name for path in copy.iterdir()} - {"lock"}
    assert files == {path.name for path in swarm.home.iterdir()} - {
        "lock",
        "atoll.db-wal",
        "atoll.db-shm",
        "news.jsonl",  # what the page of this machine has told
        "times.jsonl",  # what its timeline has
        "logs",
        "given.json",
        "backups.json",  # what became of copies
        "page.token",  # of the link to the page, which is another one elsewhere
    }
    for name in files:
        mode = (copy / name).stat().st_mode & 0o777
        assert mode == (swarm.home / name).stat().st_mode & 0o777
        assert (mode == 0o600) == (name in PRIVATE)
        if name != "atoll.db":
            assert (copy / name).read_bytes() == (swarm.home / name).read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o700

    ports = ("--port", "0", "--enrolment-port", "0", "--no-dashboard")  # the first has its page's
    started = swarm.start("coordinator", "start", copy, *ports)
    started.says("coordinator ready")
    with StatusLink(copy) as link:
        assert link.status().run.committed_round == rounds[-1]
        assert [known.node_name for known in link.status().nodes] == ["node"]
        assert len(link.rounds(1000).rounds) in (rounds[-1], rounds[-1] - 1)

    # What a killed coordinator has answered lies in its log, and is copied all the same.
    swarm.coordinator.kill()
    of_node = ("me", "--json", "--dir", swarm.folder / "node")
    alone = atoll(*of_node)
    told = json.loads(done(alone))
    assert told["source"] == "folder" and "of this folder alone, for " in alone.err
    assert told["rounds"] == told["run_rounds"] >= rounds[-1] and told["tokens"] > 0
    assert told["node_name"] == "node" and told["sent_bytes"] is None
    assert "node in kept, as its folder knows it" in done(atoll("me", "--dir", of_node[-1]))
    again = swarm.folder / "after"
    assert round_of(done(atoll("coordinator", "backup", swarm.home, again))) >= rounds[-1]
    swarm.start_coordinator()
    assert swarm.status().run.committed_round >= rounds[-1]
    assert json.loads(done(atoll(*of_node)))["source"] == "coordinator"
    swarm.does("training", "node")  # the copy that was started took nobody away


@pytest.mark.nightly
def test_a_coordinator_started_from_an_old_copy_goes_on_where_its_node_is(swarm: Swarm) -> None:
    swarm.join("node", swarm.invite())
    node = swarm.start_node("node")
    node.says("applied", times=3)
    copy = swarm.folder / "copy"
    old_round = round_of(done(atoll("coordinator", "backup", swarm.home, copy)))
    until(lambda: swarm.status().run.committed_round > old_round + 20, "rounds after the copy")
    newest = swarm.status().run
    swarm.coordinator.kill()

    swarm.home = copy
    swarm.start_coordinator()
    swarm.coordinator.says("round learned", times=newest.committed_round - old_round)
    node.says("the coordinator lacks commits")
    until(lambda: swarm.status().run.committed_round > newest.committed_round + 3, "new rounds")
    with StatusLink(copy) as link:
        run, closed = link.status().run, link.rounds(1000).rounds
    assert run.digests_agree
    assert [summary.round for summary in closed[::-1]] == list(range(1, closed[0].round + 1))
    learned = [
        summary.round for summary in closed if summary.reason.startswith("learned from node")
    ]
    assert learned[-1] == old_round + 1
    assert learned[::-1] == list(range(old_round + 1, learned[0] + 1))
    assert learned[0] >= newest.committed_round
    # All that was trained is in the books, once.
    in_time = (summary for summary in closed if summary.round <= run.committed_round)
    assert run.token_clock == sum(summary.tokens for summary in in_time)
    assert run.data.committed_samples * 32 == run.token_clock
    assert "fetch the outer state anew" not in node.log


@pytest.mark.nightly
def test_nodes_that_come_after_their_rounds_were_closed_without_them_bring_all_of_them_back(
    tmp_path: Path,
) -> None:
    """Real processes: the copy's coordinator gives the node up before the node starts again."""
    text = tiny_text(
        run={"name": "kept", "rounds": 100_000, "min_nodes": 1},
        inner={"steps": 1},
        evaluation={"every_rounds": 1000},
        deadlines={"train": 4, "contribute": 5, "commit": 30, "apply": 4, "lease": 3},
    )
    swarm = Swarm(tmp_path / "swarm", text)
    try:
        swarm.join("node", swarm.invite())
        node = swarm.start_node("node")
        node.says("applied", times=3)
        copy = swarm.folder / "copy"
        old_round = round_of(done(atoll("coordinator", "backup", swarm.home, copy)))
        until(lambda: swarm.status().run.committed_round > old_round + 20, "rounds after the copy")
        for running in (swarm.coordinator, node):
            running.kill()

        swarm.home = copy
        swarm.start_coordinator()
        assert "waits for these nodes of round" in swarm.status().run.reason
        swarm.coordinator.says("going on without nodes that have not come back")
        until(lambda: "coordinator has started" not in swarm.status().run.reason, "the time limit")
        node = swarm.start_node("node")
        node.says("the coordinator lacks commits")
        until(lambda: swarm.status().run.committed_round > old_round + 30, "new rounds")
        with StatusLink(copy) as link:
            run, closed = link.status().run, link.rounds(1000).rounds
        assert run.digests_agree
        assert [summary.round for summary in closed[::-1]] == list(range(1, closed[0].round + 1))
        learned = [c.round for c in closed[::-1] if c.reason.startswith("learned from node")]
        assert learned[0] <= old_round + 1 and learned[-1] >= old_round + 20
        in_time = [summary for summary in closed if summary.round <= run.committed_round]
        assert run.token_clock == sum(summary.tokens for summary in in_time)
        assert run.data.committed_samples * 32 == run.token_clock
        assert all(summary.tokens for summary in in_time if summary.round in learned)
        assert "residual=dropped" not in node.log
    finally:
        swarm.end()


def test_who_joined_after_the_copy_was_made_is_told_so_and_joins_again_in_its_folder(
    swarm: Swarm,
) -> None:
    copy = swarm.folder / "copy"
    done(atoll("coordinator", "backup", swarm.home, copy))
    home = swarm.join("late", swarm.invite())
    key = (home / "identity.key").read_bytes()
    swarm.coordinator.kill()

    swarm.home = copy
    swarm.start_coordinator()
    refused(atoll("status", "--dir", home), 77, "joined after the copy was made", "atoll join")
    done(typed_here("join", swarm.invite(), "--dir", home))
    assert (home / "identity.key").read_bytes() == key
    done(typed_here("status", "--dir", home))
    refused(atoll("join", swarm.invite(), "--dir", home), 73, f"{home} is a member of")


def test_a_backup_is_refused_where_it_cannot_be_whole(swarm: Swarm, tmp_path: Path) -> None:
    taken, new, at = tmp_path / "taken", tmp_path / "new", tmp_path / "disk"
    for folder in (taken, at):
        folder.mkdir()
    (taken / "file").touch()
    command = ("coordinator", "backup")
    refused(atoll(*command, swarm.home, taken), 73, f"{taken} exists and is not empty")
    refused(typed_here(*command, taken, new), 66, f"{taken} is not a coordinator's folder")
    done(typed_here("coordinator", "init", tmp_path / "fresh"))
    refused(atoll(*command, tmp_path / "fresh", new), 66, "was never started", "atoll.db")
    with small_disk(at, num_bytes=32 << 10) as disk:  # less than the database
        tried = swarm.start(*command, swarm.home, at / "copy", through=disk.through)
        tried.ends_with(71, "atoll.db cannot be copied: database or disk is full", f"disk of {at}")
        assert list(disk.path.iterdir()) == []
    assert not new.exists()
    assert [path.name for path in taken.iterdir()] == ["file"]


KILLED = """
import os, signal, sys
from pathlib import Path
from coordinator import backup

class Home(backup.Home):
    @classmethod
    def load(cls, directory):
        if (directory / "ca.key").exists() and ".unfinished-" in directory.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(directory)

backup.Home = Home
backup.back_up(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("next_command", ["backup", "start"])
def test_a_backup_that_was_killed_leaves_no_key_after_the_next_command(
    tmp_path: Path, next_command: str
) -> None:
    home, at, elsewhere = (tmp_path / name for name in ("home", "at", "elsewhere"))
    config = CoordinatorConfig(
        host="127.0.0.1", control_port=0, enrolment_port=0, advertise="127.0.0.1"
    )
    loaded = create_home(home, config=config, text=RUN)
    store = Store.open(home)
    state = store.load(rules_of(loaded.run), loaded.run.digest())
    store.save(state, replace(state, next_session_id=2), now=1.0)
    store.close()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, home, at / "copy"], capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = at.iterdir()
    assert (left / "ca.key").stat().st_mode & 0o777 == 0o600
    assert left.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in home.glob(".backup-*")]
    if next_command == "backup":
        done(atoll("coordinator", "backup", home, elsewhere / "copy"))
        assert (elsewhere / "copy" / "ca.key").exists()
    else:
        unsent = home / ".upload-4194305"  # of a process that no system has
        unsent.mkdir()
        (unsent / "ca.key").touch()
        held = Store.open(home)  # so that this start ends by itself, after it has cleared up
        try:
            refused(atoll("coordinator", "start", home), 71, "another coordinator")
        finally:
            held.close()
        assert not unsent.exists()
    assert list(at.iterdir()) == []
    assert not list(home.glob(".backup-*"))


def test_a_copy_on_a_disk_that_is_read_only_comes_back_and_one_with_a_log_is_refused(
    swarm: Swarm, tmp_path: Path
) -> None:
    """As snapshots of disks are mounted."""
    done(typed_here("coordinator", "backup", swarm.home, tmp_path / "copy"))
    swarm.coordinator.kill()
    (mounted := tmp_path / "mounted").mkdir()
    with small_disk(mounted, num_bytes=16 << 20) as disk:
        shutil.copytree(tmp_path / "copy", disk.path / "copy")
        shutil.copytree(swarm.home, disk.path / "killed")
        remount = ("mount", "-o", "remount,ro", str(mounted))
        subprocess.run([*disk.through, *remount], check=True)

        def restored(name: str) -> Typed:
            command = atoll_command("coordinator", "restore", mounted / name, tmp_path / "back")
            ran = subprocess.run(
                [*disk.through, *command], env=atoll_environment({}), capture_output=True, text=True
            )
            return Typed(code=ran.returncode, out=ran.stdout, err=ran.stderr)

        refused(restored("killed"), 71, "atoll.db-wal holds commits that", "copy all of")
        assert "restored run" in done(restored("copy"))
    swarm.home = tmp_path / "back"
    swarm.start_coordinator()


def test_a_backup_of_a_damaged_database_is_refused_and_so_is_a_start(swarm: Swarm) -> None:
    swarm.invite()
    swarm.coordinator.stop(signal.SIGTERM)
    connection = sqlite3.connect(swarm.home / "atoll.db")
    connection.execute("UPDATE invites SET max_uses = 1000")
    connection.commit()
    connection.close()
    said = "atoll.db is damaged: row 1 of table invites is not what was written"
    advice = "atoll coordinator start BACKUP"
    refused(atoll("coordinator", "start", swarm.home), 65, said, advice)
    copy = swarm.folder / "copy"
    refused(atoll("coordinator", "backup", swarm.home, copy), 65, "of no use", said, advice)
    assert not copy.exists()


@pytest.mark.nightly
def test_a_damaged_key_of_the_authority_is_said_and_no_copy_of_it_drives_whole_ones_out(
    swarm: Swarm,
) -> None:
    """Nothing else would show it before the day on which keys have to change."""
    row, key = swarm.folder / "row", swarm.home / "ca.key"
    backups = swarm.start("coordinator", "backup", swarm.home, row, "--every", "1s", "--keep", "2")
    backups.says("copied run 'kept' at round 0", times=2)
    whole = key.read_bytes()
    key.write_bytes(whole[: len(whole) // 2])
    damaged = f"{key} is damaged, or not the key of this run's authority"
    backups.says(f"no copy: {damaged}", times=3)
    kept = copies_in(row)
    assert all((row / name / "ca.key").read_bytes() == whole for name in kept)
    first, *_ = done(atoll("status", "--dir", swarm.home)).replace("\n", " ").splitlines()
    assert first.startswith("no backup for ") and "an older backup's in its place" in first
    backups.stop(signal.SIGTERM)

    swarm.coordinator.stop(signal.SIGTERM)
    swarm.start_coordinator()  # which does not need it
    swarm.coordinator.says(damaged)
    copy = swarm.folder / "copy"
    refused(atoll("coordinator", "backup", swarm.home, copy), 65, damaged, "move it away")
    assert not copy.exists()
    key.write_bytes((row / kept[-1] / "ca.key").read_bytes())
    done(atoll("coordinator", "backup", swarm.home, copy))
    assert (copy / "ca.key").read_bytes() == whole


def copies_in(row: Path) -> list[str]:
    return sorted(path.name for path in row.iterdir() if not path.name.startswith("."))


def backups_told(home: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(done(atoll("status", "--json", "--dir", home)))["run"][
        "backups"
    ]
    return told


def test_one_line_keeps_copies_of_a_run_in_full_flight_and_the_newest_is_restored(
    swarm: Swarm,
) -> None:
    row = swarm.folder / "row"
    swarm.join("node", swarm.invite())
    none = "none is made, and the run cannot go on without the coordinator's folder"
    swarm.coordinator.says(f"backup: {none}")
    assert none in done(typed_here("status", "--dir", swarm.home)).replace("\n       ", " ")
    assert "none is made" not in done(typed_here("status", "--dir", swarm.folder / "node"))
    swarm.coordinator.stop(signal.SIGTERM)
    ports = ("--port", swarm.control_port)
    options = ("--backup", str(row), "--backup-every", "1s", "--backup-keep", "3")
    swarm.coordinator = swarm.begin_coordinator(*ports, *options)
    node = swarm.start_node("node")
    node.says("applied", times=3)
    assert "none is made" not in swarm.coordinator.log
    # The child sees that an old one goes only after it has told of the new one.
    swarm.coordinator.says("backup made", times=6)
    until(lambda: len(copies_in(row)) == 3, "older copies to go")
    for name in copies_in(row):
        assert name.startswith("kept-")
    (tampered := row / copies_in(row)[0] / "notes").touch()  # a copy is a folder like another
    until(lambda: not tampered.exists(), "it to go as well")

    # Copies begin to fail. The run owner sees it at once, on every way; members see nothing of it.
    shown = done(atoll("status", "--dir", swarm.home))
    assert "backup " in shown and f"at {row}/kept-" in shown.replace("\n       ", "")
    row.rename(aside := swarm.folder / "aside")
    row.write_text("a file is in its place")
    until(lambda: backups_told(swarm.home)[0]["num_failures"] >= 2, "failures to be told")
    (told,) = backups_told(swarm.home)
    assert told["target"] == str(row) and told["made_seconds"] > 0 and told["why"]
    first, *_ = done(typed_here("status", "--dir", swarm.home)).splitlines()
    assert first.startswith("no backup for ")
    assert backups_told(swarm.folder / "node") == []
    row.unlink()
    aside.rename(row)
    until(lambda: backups_told(swarm.home)[0]["num_failures"] == 0, "copies to be made again")

    # The process that makes copies is started again, where somebody kills it.
    (copying,) = swarm.coordinator.processes() - {swarm.coordinator.process.pid}
    os.kill(copying, signal.SIGKILL)
    swarm.coordinator.says("the backup has ended, and is started again")
    num_made = swarm.coordinator.log.count("backup made")
    swarm.coordinator.says("backup made", times=num_made + 2)

    # The process that makes copies does not outlive a coordinator that is killed.
    swarm.coordinator.kill()
    until(lambda: not swarm.coordinator.processes(), "the end of the process beside it")
    rounds = []
    for name in copies_in(row):
        home = Home.load(row / name)
        store = Store.open(row / name)
        rounds.append(store.load(rules_of(home.run), home.run.digest()).committed_round)
        store.close()
        (row / name / "lock").unlink()
    assert rounds == sorted(rounds) and rounds[0] < rounds[-1]

    back = swarm.folder / "back"
    said = done(atoll("coordinator", "restore", row, back))
    assert f"restored run 'kept' at round {rounds[-1]} to {back}" in said
    assert f"from {row / copies_in(row)[-1]}" in said
    swarm.home = back
    swarm.start_coordinator()
    until(lambda: swarm.status().run.committed_round > rounds[-1] + 3, "new rounds")
    swarm.coordinator.stop(signal.SIGTERM)


def test_backups_that_cannot_be_made_again_and_again_are_refused_at_once(swarm: Swarm) -> None:
    row = swarm.folder / "row"
    command = ("coordinator", "backup", swarm.home)
    refused(atoll(*command, row, "--keep", "2"), 64, "--keep 2", "--every")
    refused(typed_here(*command, row, "--every", "0s"), 64, "less than a second")
    swarm.coordinator.stop(signal.SIGTERM)
    refused(atoll("coordinator", "start", swarm.home, "--backup", "s4://b/c"), 65, "s4://b/c")
    every = ("--backup", row, "--backup-every", "soon")
    refused(typed_here("coordinator", "start", swarm.home, *every), 64, "time span")


@pytest.mark.nightly
def test_failures_are_said_and_tried_again_and_no_copy_goes_meanwhile(swarm: Swarm) -> None:
    row = swarm.folder / "row"
    command = ("coordinator", "backup", swarm.home)
    swarm.coordinator.stop(signal.SIGTERM)
    backups = swarm.start(*command, row, "--every", "1s", "--keep", "2")
    backups.says("copied run 'kept' at round 0", times=3)
    kept_aside = swarm.folder / "aside.db"
    (swarm.home / "atoll.db").rename(kept_aside)
    backups.says("no copy: the coordinator of", times=2)
    assert "was never started" in backups.log and "tried again in 1" in backups.log
    whole = copies_in(row)
    assert len(whole) == 2
    kept_aside.rename(swarm.home / "atoll.db")
    until(lambda: copies_in(row)[-1] > whole[-1], "a new copy")
    backups.stop(signal.SIGTERM)
    assert len(copies_in(row)) in (2, 3)  # it may have ended before the oldest went
    assert not [path for path in row.iterdir() if path.name not in copies_in(row)]
