"""Joining when the coordinator's answer is a refusal, or never comes."""

from pathlib import Path

import pytest

from node.link.join import join
from protocol.errors import AnswerLostError, AtollError, NotPermittedError, SystemRefusedError
from protocol.files.durable import FolderLock
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite

INVITE = Invite(host="127.0.0.1", port=1, pin=b"p" * 32, invite_id="i", secret=b"s" * 32)


@pytest.fixture
def enrolling(monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """Who tried to enrol; by default nobody gets an answer."""
    tried: list[Identity] = []

    async def enrol(_: Invite, identity: Identity, *__: object) -> None:
        tried.append(identity)
        raise AnswerLostError("no answer")

    monkeypatch.setattr("protocol.trust.enrolment.enrol", enrol)
    return tried


async def test_an_identity_whose_answer_was_lost_tries_again_with_the_same_invite(
    tmp_path: Path, enrolling: list[Identity]
) -> None:
    for _ in range(2):
        with pytest.raises(AnswerLostError):
            await join(INVITE, tmp_path / "node", name="n")
    assert enrolling[0].node_id == enrolling[1].node_id


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_refused_join_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    async def enrol(*_: object) -> None:
        raise NotPermittedError("used up")

    monkeypatch.setattr("protocol.trust.enrolment.enrol", enrol)
    folder = tmp_path / "node"
    if not is_new:
        folder.mkdir()
    with pytest.raises(NotPermittedError):
        await join(INVITE, folder, name="n")
    assert folder.exists() != is_new
    assert not (folder / "identity.key").exists()


async def test_two_joins_into_one_folder_do_not_mix(
    tmp_path: Path, enrolling: list[Identity]
) -> None:
    lock = FolderLock.take(tmp_path, holder="node", next_step="")
    with pytest.raises(SystemRefusedError, match="another node"):
        await join(INVITE, tmp_path, name="n")
    lock.release()
    assert enrolling == []


def test_a_lock_whose_file_was_removed_holds_nobody_up(tmp_path: Path) -> None:
    before = FolderLock.take(tmp_path, holder="node", next_step="")
    before.path.unlink()
    after = FolderLock.take(tmp_path, holder="node", next_step="")
    with pytest.raises(AtollError):
        FolderLock.take(tmp_path, holder="node", next_step="")
    after.release()
    before.release()
