"""What a coordinator looks after in its folder: the authority's key, and what the disk has left."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from coordinator.authority_key import encrypted, refuse_damaged
from coordinator.database import DATABASE_NAME
from coordinator.disk import AGAIN, LEAST_BYTES, SLOW_SECONDS, SLOW_TOLD_AGAIN_SECONDS, Disk, Room
from protocol.errors import BadDataError
from protocol.trust.pki import Authority, new_swarm_id
from protocol.v1 import status_pb2 as pb

AUTHORITY = Authority.create(new_swarm_id())
KEPT = {
    "plain": AUTHORITY.key_pem,
    "encrypted": encrypted(AUTHORITY.key_pem, b"five words that nobody guesses"),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=list(KEPT))
def test_a_key_that_is_cut_off_or_zeroed_is_refused_and_a_whole_one_is_not(
    kept: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "ca.key"
    refuse_damaged(path, AUTHORITY.certificate_pem)  # it lies elsewhere
    for content in (kept, kept.rstrip()):
        path.write_bytes(content)
        path.chmod(0o600)
        refuse_damaged(path, AUTHORITY.certificate_pem)
    without_a_line = kept.splitlines(keepends=True)
    del without_a_line[1]
    for content in (b"", bytes(len(kept)), kept[: len(kept) // 2], b"".join(without_a_line)):
        path.write_bytes(content)
        with pytest.raises(BadDataError, match=f"{path} is damaged, or not the key"):
            refuse_damaged(path, AUTHORITY.certificate_pem)


def test_another_authoritys_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.key"
    path.write_bytes(Authority.create(new_swarm_id()).key_pem)
    path.chmod(0o600)
    with pytest.raises(BadDataError, match="not the key of this run's authority"):
        refuse_damaged(path, AUTHORITY.certificate_pem)


def test_room_for_two_databases_is_wanted_and_never_less_than_the_least(tmp_path: Path) -> None:
    assert Room.of(tmp_path).wanted_bytes == LEAST_BYTES
    for name in (DATABASE_NAME, f"{DATABASE_NAME}-wal"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(LEAST_BYTES)
    (tmp_path / "news.jsonl").write_bytes(bytes(1000))
    room = Room.of(tmp_path)
    assert room.wanted_bytes == 4 * LEAST_BYTES
    assert room.free_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * 4096, rel=0.5)


def test_the_log_tells_once_until_there_is_clearly_enough_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of, told = Disk(tmp_path, now=lambda: 0.0), []
    looks = (2.0, 0.9, 1.1, 0.9, AGAIN, 1.1, 0.5)  # of what is wanted
    for free in looks:
        disk = SimpleNamespace(f_bavail=int(free * LEAST_BYTES), f_frsize=1)
        monkeypatch.setattr("os.statvfs", lambda path, disk=disk: disk)
        with capture_logs() as logged:
            disk_of.look()
        run = pb.RunStatus()
        disk_of.add_to(run)
        assert run.disk_free_bytes == disk.f_bavail
        told.append((run.is_disk_low, [line["event"] for line in logged]))
    low, is_said = zip(*told, strict=True)
    assert low == (False, True, True, True, False, False, True)
    said = ["the disk is nearly full"]
    assert is_said == ([], said, [], [], [], [], said)


def test_a_folder_that_cannot_be_looked_at_is_not_told_of(tmp_path: Path) -> None:
    disk, run = Disk(tmp_path / "gone", now=lambda: 0.0), pb.RunStatus()
    disk.look()
    disk.add_to(run)
    assert not run.HasField("disk_free_bytes") and not run.is_disk_low


def test_a_disk_that_takes_seconds_for_a_write_is_told_once_in_a_while(tmp_path: Path) -> None:
    again = SLOW_TOLD_AGAIN_SECONDS
    writes = [(0.0, 0.1), (1.0, SLOW_SECONDS), (4.0, SLOW_SECONDS), (1.0 + again, SLOW_SECONDS)]
    now, told = 0.0, []
    disk = Disk(tmp_path, now=lambda: now)
    for at, seconds in writes:
        now = at
        with capture_logs() as logged:
            disk.note_write(seconds)
        told.append([line["event"] for line in logged])
    slow = ["the disk is slow, and rounds wait for it"]
    assert told == [[], slow, [], slow]


def test_the_run_owner_is_told_of_the_slowest_write_until_it_is_long_ago(tmp_path: Path) -> None:
    now, told = 0.0, []
    disk = Disk(tmp_path, now=lambda: now)
    assert disk.slowest_write_seconds is None
    for at, seconds in ((0.0, 0.1), (10.0, 3.0), (20.0, 0.2), (30.0, 0.1)):
        now = at
        disk.note_write(seconds)
    for later in (31.0, 10.0 + SLOW_TOLD_AGAIN_SECONDS, 11.0 + SLOW_TOLD_AGAIN_SECONDS, 5000.0):
        now = later
        run = pb.RunStatus()
        disk.add_to(run)
        told.append((run.disk_write_seconds, run.is_disk_slow))
    assert told == [(3.0, True), (3.0, True), (0.2, False), (0.0, False)]
