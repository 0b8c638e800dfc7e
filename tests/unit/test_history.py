"""The commits that a node keeps, on disk and in memory."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.disk import history
from node.disk.history import History
from protocol.errors import SystemRefusedError
from protocol.trust.signing import CommitSigner, commit_statement
from protocol.wire import convert
from protocol.wire.convert import commit_to_wire
from protocol.wire.rounds import Assignment, Commit, Contributor, Digest, NodeId, SliceOutcome

SIGNER = CommitSigner(Ed25519PrivateKey.from_private_bytes(b"k" * 32))


def commit_of(number: int, *, incarnation: int = 0) -> Commit:
    outcome = SliceOutcome(
        index=0,
        start=0,
        num_elements=256,
        digest=Digest(bytes([number]) * 32),
        contributors=(Contributor(node_id=NodeId("a"), samples=1, tokens=5),),
        holder_ids=(NodeId("a"),),
    )
    return SIGNER.signed(
        Commit(
            round=number,
            fragment=0,
            base_digest=Digest(b"b" * 32),
            slices=(outcome,),
            incarnation=incarnation,
            assignments=(
                Assignment(node_id=NodeId("a"), inner_steps=1, first_sample=0, num_samples=4),
            ),
        )
    )


def kept(kept_by: History, after: int = 0) -> list[tuple[int, int]]:
    commits = kept_by.after(after, max_bytes=1 << 20)
    assert all(SIGNER.has_signed(commit) for commit in commits)
    return [(commit.round, commit.incarnation) for commit in commits]


def saved(path: Path, *commits: Commit) -> History:
    written = History(path)
    for commit in commits:
        written.add(commit)
        written.save()
    return written


def test_what_was_saved_is_there_after_a_restart_signatures_included(tmp_path: Path) -> None:
    path = tmp_path / "history"
    saved(path, commit_of(3), commit_of(4), commit_of(4))
    assert kept(History(path)) == [(3, 0), (4, 0)]
    assert kept(History(path), after=3) == [(4, 0)]
    assert path.stat().st_size == sum(4 + n for n in [len_of(3), len_of(4)])


def len_of(number: int) -> int:
    return commit_to_wire(commit_of(number)).ByteSize()


def test_a_commit_that_was_taken_back_goes_with_all_after_it(tmp_path: Path) -> None:
    path = tmp_path / "history"
    saved(path, commit_of(3), commit_of(4), commit_of(5), commit_of(4, incarnation=1))
    again = History(path)
    assert kept(again) == [(3, 0), (4, 1)]
    assert [again.incarnation_at(number) for number in (3, 4, 5)] == [0, 1, 0]


@pytest.mark.parametrize("lost_bytes", [1, 50])
def test_a_write_that_was_cut_off_costs_the_last_commit_only(
    tmp_path: Path, lost_bytes: int
) -> None:
    path = tmp_path / "history"
    saved(path, commit_of(3), commit_of(4))
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    again = History(path)
    assert kept(again) == [(3, 0)]
    again.add(commit_of(4))
    again.add(commit_of(5))
    again.save()
    assert kept(History(path)) == [(3, 0), (4, 0), (5, 0)]


def test_a_file_is_read_without_looking_through_commits_and_a_damaged_one_ends_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history"
    wrong = replace(commit_of(4), base_digest=Digest(b"short"))
    saved(path, commit_of(3), wrong, commit_of(5))
    with monkeypatch.context() as patched:
        patched.setattr(convert, "commit_from_wire", None)
        again = History(path)
    assert kept(again) == [(3, 0)] == [(one.round, one.incarnation) for one in again.commits]
    assert again.at(4) is None and kept(again, after=4) == [(5, 0)]


def test_a_batch_holds_what_fits_but_never_nothing() -> None:
    in_memory = History(None)
    for number in (1, 2, 3):
        in_memory.add(commit_of(number))
    size = len_of(1)
    assert [c.round for c in in_memory.after(0, max_bytes=2 * size)] == [1, 2]
    assert [c.round for c in in_memory.after(1, max_bytes=1)] == [2]
    assert in_memory.after(3, max_bytes=size) == ()


def test_a_file_that_grows_too_large_loses_its_older_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "KEPT_BYTES", 4 * (4 + len_of(1)))
    path = tmp_path / "history"
    saved(path, *(commit_of(number) for number in range(1, 6)))
    assert kept(History(path)) == [(3, 0), (4, 0), (5, 0)]


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_what_a_disk_refused_is_written_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trimmed: bool
) -> None:
    path = tmp_path / "history"
    written = saved(path, commit_of(1), commit_of(2), commit_of(3))
    before = path.read_bytes()
    if is_trimmed:
        monkeypatch.setattr(history, "KEPT_BYTES", len(before))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        written.add(commit_of(4))
        with pytest.raises(SystemRefusedError):
            written.save()
        assert kept(written) == [(n, 0) for n in (1, 2, 3, 4)]
    written.add(commit_of(5))
    written.save()
    there = [(n, 0) for n in ((3, 4, 5) if is_trimmed else (1, 2, 3, 4, 5))]
    assert kept(History(path)) == kept(written) == there
    written.save()
    assert kept(History(path)) == there


def test_rounds_are_looked_at_once_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reading, adding and handing out; counted, for time says nothing on a busy machine."""

    class Counted(list[int]):
        num_looks = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.num_looks += 1
            return super().__getitem__(place)

        def __iter__(self) -> Iterator[int]:
            Counted.num_looks += len(self)
            return super().__iter__()

    class CountedDict(dict[int, bytes]):
        def __iter__(self) -> Iterator[int]:
            Counted.num_looks += len(self)
            return super().__iter__()

        def items(self) -> Any:
            Counted.num_looks += len(self)
            return super().items()

    rounds = History(None)
    rounds._rounds, rounds._commits = Counted(), CountedDict()
    commit = commit_of(1)
    for number in range(1, 2001):
        rounds.add(replace(commit, round=number))
    known = 0
    while batch := rounds.after(known, max_bytes=1):
        known = batch[-1].round
    assert known == 2000
    assert Counted.num_looks < 50 * 2000


def test_a_signature_covers_all_but_the_digest_that_nodes_agree_on_later() -> None:
    commit = commit_of(3)
    assert SIGNER.has_signed(replace(commit, outer_digest=Digest(b"o" * 32)))
    assert not SIGNER.has_signed(replace(commit, round=4))
    assert not SIGNER.has_signed(replace(commit, incarnation=1))
    assert not SIGNER.has_signed(replace(commit, assignments=()))
    assert not SIGNER.has_signed(replace(commit, signature=b""))
    other = CommitSigner(Ed25519PrivateKey.generate())
    assert not other.has_signed(commit)
    # Golden: nodes keep statements over versions of Atoll, and of protobuf.
    assert commit_statement(commit).hex() == (
        "61746f6c6c20636f6d6d697420340a0803" + "1a20" + "62" * 32 + "2228188002"
        "2220" + "03" * 32 + "320100" + "3a070a0161100120" + "044a0161" + "52090a01001201051a0101"
    )


def test_undone_rounds_are_forgotten_also_by_the_file(tmp_path: Path) -> None:
    written = saved(tmp_path / "history", *map(commit_of, (1, 2, 3, 4)))
    written.forget_after(2)
    assert kept(written) == [(1, 0), (2, 0)]
    assert kept(History(tmp_path / "history")) == [(1, 0), (2, 0), (3, 0), (4, 0)], (
        "until it is saved"
    )
    written.save()
    assert kept(History(tmp_path / "history")) == [(1, 0), (2, 0)]
    written.add(commit_of(3, incarnation=1))
    written.save()
    assert kept(History(tmp_path / "history")) == [(1, 0), (2, 0), (3, 1)]
