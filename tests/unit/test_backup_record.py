"""What became of backups is noted in the coordinator's folder, and told to its owner."""

from pathlib import Path

import pytest

from coordinator.backup import Backup
from coordinator.backups import (
    ABANDONED_AFTER_SECONDS,
    RECORD_FILE,
    BackupRecords,
    Failed,
    Made,
    Records,
    Waits,
    add_to,
    ended,
    noted,
    told,
    without_password,
)
from protocol.errors import UnavailableError
from protocol.terminal.status_words import backups_in_words, owner_troubles
from protocol.v1 import status_pb2 as pb

S3 = "s3://backups/my-run"
BACKUP = Backup(
    run_name="my-run", committed_round=7, total_rounds=9, num_bytes=1000, authority_key=""
)
MADE = Made(place=f"{S3}/one", backup=BACKUP, next_seconds=600)
FAILED = Failed(
    error=UnavailableError("the key has ended", next_step="check your credentials"), next_seconds=5
)


def run_with(records: Records, now: float) -> pb.RunStatus:
    return pb.RunStatus(backups=told(records, now))


def test_failures_in_a_row_are_counted_from_the_first_on_and_a_whole_copy_ends_them() -> None:
    records = noted({}, S3, MADE, 100)
    for at in (700, 705, 715):
        records = noted(records, S3, FAILED, at)
    (one,) = told(records, 745)
    assert (one.made_seconds, one.committed_round, one.num_bytes) == (645, 7, 1000)
    assert (one.num_failures, one.failing_seconds) == (3, 45)
    assert one.next_seconds == -25 and not one.is_abandoned
    (trouble,) = owner_troubles(run_with(records, 745))
    assert trouble == (
        "no backup for 10 min 45 s: 3 tries at s3://backups/my-run in 45 s failed, the latest: the key has "
        "ended; next: check your credentials"
    )
    (for_everybody,) = owner_troubles(run_with(records, 745), for_everybody=True)
    assert for_everybody == "no backup for 10 min 45 s: 'atoll status' tells the run owner why"
    records = noted(records, S3, MADE, 800)
    assert not owner_troubles(run_with(records, 800))
    assert backups_in_words(run_with(records, 1000)) == (
        "3 min 20 s ago, round 7, 1.0 kB, at s3://backups/my-run/one; the next in 6 min 40 s"
    )


def test_a_first_try_that_fails_is_told_though_there_was_never_a_copy() -> None:
    run = run_with(noted({}, S3, FAILED, 100), 100)
    (trouble,) = owner_troubles(run)
    assert trouble.startswith(
        "no backup yet: the try at s3://backups/my-run in 0.0 s failed: the key"
    )
    assert backups_in_words(run) == ""


def test_copies_that_nobody_makes_any_more_are_told_unless_they_were_ended() -> None:
    records = noted({}, S3, MADE, 0)
    late = MADE.next_seconds + ABANDONED_AFTER_SECONDS  # type: ignore[operator]
    assert not owner_troubles(run_with(records, late))
    (trouble,) = owner_troubles(run_with(records, late + 1))
    assert trouble.startswith(
        "no backup for 20 min 1 s: nobody has made one at s3://backups/my-run"
    )
    over = run_with(ended(records, S3), late + 1)
    assert not owner_troubles(over)
    assert backups_in_words(over).endswith("; none is to follow")
    seldom = noted({}, S3, Waits(next_seconds=100, every_seconds=86400), 0)
    assert not owner_troubles(run_with(seldom, 80_000))
    assert owner_troubles(run_with(seldom, 90_000))


def test_a_place_that_copies_do_not_go_to_any_more_goes_with_the_next_whole_copy() -> None:
    failing = noted({}, "/old", FAILED, 0)
    both = noted(failing, S3, MADE, 1)
    assert set(both) == {"/old", S3}  # somebody still tries there
    assert set(noted(ended(both, "/old"), S3, MADE, 2)) == {S3}
    by_hand = noted(both, "", Made(place="/monday", backup=BACKUP), 3)
    assert set(by_hand) == {"/old", S3, ""}
    assert told(by_hand, 4)[0].place == "/monday"
    assert not told(by_hand, 4)[0].HasField("next_seconds")


def without_backup(records: Records, *, configured: str = "", is_finished: bool = False) -> bool:
    phase = pb.RUN_PHASE_FINISHED if is_finished else pb.RUN_PHASE_TRAINING
    run = pb.RunStatus(phase=phase)
    add_to(run, records, configured=configured, now=700)
    return run.is_without_backup


def test_a_run_of_which_nobody_makes_copies_is_told_how_to_have_some() -> None:
    assert without_backup({})
    assert without_backup(ended(noted({}, S3, FAILED, 100), S3))
    words = backups_in_words(pb.RunStatus(is_without_backup=True))
    assert words.startswith("none is made, and the run cannot go on without the coordinator's fold")
    assert words.endswith("; 'atoll coordinator backup DIR TARGET --every 10m' makes them")
    for well in (
        without_backup({}, configured=S3),
        without_backup({}, is_finished=True),
        without_backup(noted({}, S3, FAILED, 100)),
        without_backup(noted({}, "", Made(place="/monday", backup=BACKUP), 3)),
        without_backup(ended(noted({}, S3, MADE, 100), S3)),
    ):
        assert not well


def test_what_is_noted_stays_in_the_folder_for_others_to_read(tmp_path: Path) -> None:
    reader, writer = BackupRecords(tmp_path), BackupRecords(tmp_path)
    assert reader.latest() == {}
    writer.note(S3, MADE, now=1)
    writer.note("/row", FAILED, now=2)
    assert reader.latest() == noted(noted({}, S3, MADE, 1), "/row", FAILED, 2)
    assert (tmp_path / RECORD_FILE).stat().st_mode & 0o777 == 0o600
    writer.end(S3)
    assert reader.latest()[S3].next_at is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"s3://b": {"made_at": "monday"}}'])
def test_a_damaged_record_is_said_once_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    import structlog

    (tmp_path / RECORD_FILE).write_bytes(damage)
    records = BackupRecords(tmp_path)
    with structlog.testing.capture_logs() as logged:
        assert records.latest() == {} == records.latest()
    (line,) = logged
    assert line["event"] == "what became of backups cannot be read"
    records.note(S3, MADE, now=1)
    assert set(records.latest()) == {S3}


def test_no_password_of_an_address_is_told() -> None:
    assert without_password("ftp://me:secret@host/row") == "ftp://host/row"
    assert without_password(S3) == S3
