"""Disks and shared memory that are too small or become full: real ones, and real processes.

Exit codes stand as numbers: they are an interface.
"""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.kept import kept_model
from node.models.card import Origin
from node.models.export import export_model
from protocol.errors import SystemRefusedError
from protocol.run.models import layout_of
from protocol.terminal.query import StatusLink
from protocol.v1 import status_pb2
from protocol.wire.rounds import Digest
from tests.integration.small_machine import SmallDisk, small_disk
from tests.integration.typed_commands import (
    ROOT,
    WITHOUT_PRIVILEGES,
    Swarm,
    atoll,
    done,
    rests,
    typed_here,
    until,
)
from tests.tiny_runs import tiny

RUN = """
[run]
name = "small"
rounds = {rounds}

[model]
hidden_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
ffn_size = 128
context = 32

[inner]
steps = 1000000 # rounds end at their deadline
batch = 4

[deadlines]
train = 1
contribute = 20
commit = 30
lease = 12

[evaluation]
every_rounds = 1000
samples = 16
"""
MEGABYTE = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    at = tmp_path / "disk"
    at.mkdir()
    with small_disk(at, num_bytes=10 * MEGABYTE) as disk:
        yield disk


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path / "swarm", RUN.format(rounds=1000))
    yield swarm
    swarm.end()


def on_disk(swarm: Swarm, name: str, disk: SmallDisk) -> Path:
    """Joins a node whose folder lies on the disk."""
    home = disk.path / name
    shutil.copytree(rests(swarm.join(name, swarm.invite())), home)
    return home


def test_a_node_without_room_for_its_snapshots_is_refused_before_it_trains(
    swarm: Swarm, disk: SmallDisk
) -> None:
    home = on_disk(swarm, "cramped", disk)
    (disk.path / "filler").write_bytes(bytes(disk.free_bytes - MEGABYTE))
    free = disk.free_bytes
    typed = atoll("node", "start", "--dir", home)
    assert (typed.code, typed.out) == (71, "")
    assert "loading torch" not in typed.err
    assert re.search(
        r"atoll: this run needs [0-9,]+ bytes of disk \([0-9,]+ for snapshots and [0-9,]+ for results "
        r"and [0-9,]+ for checkpoints",
        typed.err,
    )
    told = re.search(
        rf" in {re.escape(str(home))}: 0 of it is there and ([0-9,]+) are free", typed.err
    )
    assert told is not None
    assert free - 64_000 < int(told[1].replace(",", "")) <= free, "its log takes a little"
    assert typed.err.splitlines()[-1].startswith("  next: free some space on that disk")
    assert not swarm.status().nodes


def test_a_node_whose_disk_becomes_full_ends_with_the_reason_and_its_older_snapshot_holds(
    swarm: Swarm, disk: SmallDisk
) -> None:
    home = on_disk(swarm, "filled", disk)
    node = swarm.start("node", "start", "--dir", home)
    node.says("applied")
    until(lambda: bool(list((home / "snapshots").glob("round-*"))), "a first snapshot")
    disk.fill()
    node.ends_with(
        71,
        "not saved",
        f"atoll: cannot write {home / 'snapshots'}/round-",
        "No space left on device",
        "next: free some space on that disk",
    )
    (member,) = swarm.status().nodes
    assert member.state == status_pb2.NODE_STATE_LEFT  # it said goodbye
    newest = kept_model(home)
    commits = {closed.round: closed.outer_digest for closed in closed_rounds(swarm)}
    assert 1 <= newest.round <= max(commits)
    assert newest.outer_digest == commits[newest.round]
    assert not list((home / "snapshots").glob(".round-*"))  # nothing half written takes up room


def test_a_disk_that_an_export_fills_is_told_as_full_and_keeps_nothing(disk: SmallDisk) -> None:
    spec = tiny(model={"hidden_size": 512, "ffn_size": 2048})
    with pytest.raises(SystemRefusedError, match="No space left") as refusal:
        export_model(
            spec=spec,
            parameters=np.zeros(layout_of(spec).num_elements, dtype=np.float32),
            origin=Origin(
                run="small", run_digest=Digest(bytes(32)), round=1, outer_digest=Digest(bytes(32))
            ),
            out=disk.path / "model",
        )
    assert refusal.value.next_step.startswith("free some space on that disk")
    assert not list(disk.path.iterdir())


@pytest.mark.nightly
def test_a_node_alone_whose_folder_becomes_read_only_ends_and_the_run_goes_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    run = RUN.format(rounds=1000).replace("lease = 12", "lease = 12\napply = 10")
    swarm = Swarm(tmp_path / "swarm", run)
    try:
        home = rests(swarm.join("locked", swarm.invite()))
        start = ("node", "start", "--dir", home)
        node = swarm.start(*start, through=(sys.executable, "-c", WITHOUT_PRIVILEGES))
        swarm.coordinator.says("round committed", times=3)
        folders = [home, *(path for path in home.rglob("*") if path.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        node.ends_with(
            73, "not saved", f"atoll: cannot write {home}", "Permission denied", "next: "
        )
        for folder in folders:
            folder.chmod(0o755)
        num_said = swarm.coordinator.log.count("reason='all slices are committed'")
        swarm.start(*start)
        swarm.coordinator.says("reason='all slices are committed'", times=num_said + 2)
        assert swarm.status().run.digests_agree
    finally:
        swarm.end()


def closed_rounds(swarm: Swarm) -> list[status_pb2.RoundSummary]:

    with StatusLink(swarm.home) as link:
        return list(link.rounds(1000).rounds)


def test_a_coordinator_whose_disk_becomes_full_keeps_what_was_committed_and_its_nodes(
    tmp_path: Path, disk: SmallDisk
) -> None:
    # No deadline and no lease ends while the test is patient: the refused write is what ends it.
    run = RUN.format(rounds=6).replace("commit = 30", "commit = 900").replace("= 12", "= 900")
    swarm = Swarm(tmp_path / "swarm", run, disk=disk)
    try:
        swarm.join("lasting", swarm.invite())
        swarm.coordinator.says("the disk is nearly full")
        told = swarm.status().run
        assert told.is_disk_low and 0 < told.disk_free_bytes <= 10 * MEGABYTE
        shown = done(typed_here("status", "--dir", swarm.home)).replace("\n", " ")
        assert shown.startswith("the coordinator's disk is nearly full: ")
        assert "nearly full" not in done(typed_here("status", "--dir", swarm.folder / "lasting"))
        node = swarm.start_node("lasting")
        swarm.coordinator.says("round committed", times=2)
        filler = disk.fill()
        swarm.coordinator.ends_with(71, "atoll: ", "database or disk is full", "make room")
        num_said = len(re.findall(r"round committed\b", swarm.coordinator.log))
        disk.fill()  # what it gave back when it ended, its log of writes, is taken too
        swarm.begin_coordinator().ends_with(71, "atoll: ", "full", "next: ")
        assert node.process.poll() is None, node.log
        filler.unlink()
        node.process.send_signal(
            signal.SIGSTOP
        )  # else it may come back and end a round before we ask
        swarm.start_coordinator()
        assert swarm.status().run.committed_round == num_said  # what it told anybody, and no more
        node.process.send_signal(signal.SIGCONT)
        node.ends(node.shared_memory())
        status = swarm.status().run
        assert (status.committed_round, status.digests_agree) == (6, True)
    finally:
        swarm.end()


@pytest.mark.nightly
def test_a_log_on_a_full_disk_ends_nobody(tmp_path: Path) -> None:
    full = Path("/dev/full")
    swarm = Swarm(tmp_path / "swarm", RUN.format(rounds=2))
    try:
        swarm.coordinator.stop(signal.SIGINT)
        swarm.start_coordinator(stderr=full)
        swarm.join("mute", swarm.invite())
        node = swarm.start_node("mute", stderr=full)
        until(lambda: "mute" in swarm.nodes(), "the node to attach")
        node.ends(node.shared_memory())
        assert node.log.startswith("mute has stopped: ")
        assert swarm.status().run.committed_round == 2
        swarm.coordinator.stop(signal.SIGTERM)
        assert swarm.coordinator.log.count("\n") == 1  # that it is ready, on standard output
    finally:
        swarm.end()


SHARED = """
import contextlib, os, sys
from node.outer_state import SharedVectors
from protocol.errors import SystemRefusedError

first = SharedVectors.create(300_000)  # 2.4 MB, and nobody has touched a byte of it
try:
    SharedVectors.create(300_000)
except SystemRefusedError as error:
    print(error)
else:
    print("both were promised what only one can have")
left = os.listdir("/dev/shm")
with open("/dev/shm/filler", "wb", buffering=0) as filler:
    with contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
first.parameters[:], first.published[:] = 1, 2
first.close()
print(len(left), os.listdir("/dev/shm"))
"""


def in_namespace(disk: SmallDisk, program: str) -> "subprocess.CompletedProcess[str]":
    command = [*disk.through, sys.executable, "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]"]
    command[-1] += f"\n{program}"
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_shared_memory_is_there_when_it_is_given_out() -> None:
    with small_disk(Path("/dev/shm"), num_bytes=4 * MEGABYTE) as disk:
        ran = in_namespace(disk, SHARED)
    assert ran.returncode == 0, ran  # a page that cannot be had would end it by SIGBUS
    refusal, left = ran.stdout.splitlines()
    assert refusal.startswith("the outer state needs 2,400,000 bytes of /dev/shm and 1,")
    assert "docker run --shm-size" in refusal
    assert left == "2 ['filler']"


def test_shared_memory_that_vanishes_between_look_and_use_is_refused() -> None:
    # What statvfs promises is what it would promise with room to spare.
    program = """
import os
from types import SimpleNamespace
free = os.statvfs
os.statvfs = lambda path: SimpleNamespace(f_bavail=1 << 30, f_frsize=4096)
"""
    with small_disk(Path("/dev/shm"), num_bytes=4 * MEGABYTE) as disk:
        ran = in_namespace(disk, program + SHARED)
    assert ran.returncode == 0, ran
    refusal, left = ran.stdout.splitlines()
    assert refusal.startswith("the outer state needs 2,400,000 bytes of /dev/shm and ")
    assert left == "2 ['filler']"


def test_a_node_with_too_little_shared_memory_is_refused(swarm: Swarm) -> None:
    swarm.join("cramped", swarm.invite())
    with small_disk(Path("/dev/shm"), num_bytes=64 << 10) as disk:
        node = swarm.start("node", "start", "--dir", swarm.folder / "cramped", through=disk.through)
        node.ends_with(71, "bytes of /dev/shm and it has 65,536", "docker run --shm-size")
    assert "loading torch" not in node.log
    assert not swarm.status().nodes
