"""A node that starts before its coordinator waits for it; one that starts after its run's end may not."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from node.config import HISTORY_FILE, SNAPSHOTS_FOLDER
from node.disk.history import History
from node.kept import refuse_what_nobody_gives
from node.link.calls import CoordinatorLink, RunOver, run_of_coordinator
from node.link.renewing import kept_members
from protocol.errors import (
    AtollError,
    IncompleteError,
    NotPermittedError,
    OtherSwarmError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
)
from protocol.run.run_spec import RunSpec
from protocol.trust.invite import InvitedBy
from protocol.wire.channel import RETRY_CAP_SECONDS
from protocol.wire.rounds import Commit, Digest, NodeId, PeerAddress, RosterEntry
from tests.unit.exchange_scene import in_virtual_time

SPEC = RunSpec()
REFUSED = UnavailableError("no coordinator answers at here:1 (Connection refused)")
UNREACHABLE = UnavailableError("no coordinator answers at here:1 (Network is unreachable)")
REPLACED = OtherSwarmError(
    "the coordinator at here:1 is not of swarm s", next_step="check host and port"
)


class Link(CoordinatorLink):
    """Fails as it was told, and then answers; without anything to fail with, never stops failing."""

    def __init__(self, *errors: AtollError, is_endless: bool = False) -> None:
        self.errors = list(errors)
        self.num_asked = 0
        self.is_endless = is_endless
        self.elsewhere: list[bool] = []  # what members say, once each
        self.look_elsewhere = self._look_elsewhere

    async def _look_elsewhere(self, ask: object = None) -> bool:
        return bool(self.elsewhere) and self.elsewhere.pop(0)

    async def get_run(self) -> RunSpec:
        self.num_asked += 1
        if self.is_endless:
            raise self.errors[0]
        if self.errors:
            raise self.errors.pop(0)
        return SPEC


async def said(link: Link, *, waits: bool = True) -> list[structlog.typing.EventDict]:
    """What the log says until the run is here."""
    with structlog.testing.capture_logs() as lines:
        assert await run_of_coordinator(link, waits=waits, rng=random.Random(0)) is SPEC
    return list(lines)


@in_virtual_time
async def test_a_coordinator_that_is_away_for_hours_is_waited_for_with_one_line() -> None:
    lines = await said(link := Link(*[REFUSED] * 1000))
    assert link.num_asked == 1001
    assert [line.get("why") for line in lines] == [REFUSED.what, None]
    assert lines[-1]["after_tries"] == 1000
    waited = asyncio.get_running_loop().time()
    assert 0.3 * 1000 * RETRY_CAP_SECONDS < waited < 1000 * RETRY_CAP_SECONDS  # half, by the jitter


@in_virtual_time
async def test_another_runs_coordinator_in_the_place_of_its_own_is_waited_out() -> None:
    lines = await said(link := Link(*[REPLACED] * 10))
    assert link.num_asked == 11
    assert (lines[0]["why"], lines[0]["next_step"]) == (REPLACED.what, REPLACED.next_step)
    with pytest.raises(OtherSwarmError):
        await run_of_coordinator(Link(REPLACED), waits=False, rng=random.Random(0))


@in_virtual_time
async def test_each_change_of_the_reason_is_a_line() -> None:
    busy = TemporaryError("busy with a backup")
    lines = await said(Link(UNREACHABLE, UNREACHABLE, REFUSED, REFUSED, busy, busy, REFUSED))
    reasons = [line["why"] for line in lines[:-1]]
    assert reasons == [UNREACHABLE.what, REFUSED.what, busy.what, REFUSED.what]


@in_virtual_time
async def test_a_coordinator_that_is_there_is_asked_once_and_nothing_is_said() -> None:
    assert await said(Link()) == []


@pytest.mark.parametrize("error", [NotPermittedError("no longer"), ProtocolMismatchError("other")])
@in_virtual_time
async def test_what_no_waiting_can_mend_ends_the_waiting(error: AtollError) -> None:
    link = Link(REFUSED, error)
    with pytest.raises(type(error)) as caught:
        await run_of_coordinator(link, waits=True, rng=random.Random(0))
    assert caught.value is error
    assert link.num_asked == 2


@in_virtual_time
async def test_who_does_not_wait_is_refused_at_once() -> None:
    link = Link(REFUSED)
    with pytest.raises(UnavailableError):
        await run_of_coordinator(link, waits=False, rng=random.Random(0))
    assert asyncio.get_running_loop().time() == 0
    assert link.num_asked == 1


@in_virtual_time
async def test_who_does_not_wait_asks_members_before_it_is_refused() -> None:
    link = Link(REFUSED)
    link.elsewhere = [True]
    assert await said(link, waits=False) == []
    assert link.num_asked == 2
    (link := Link(REFUSED, UNREACHABLE)).elsewhere = [True]
    with pytest.raises(UnavailableError, match="unreachable"):
        await run_of_coordinator(link, waits=False, rng=random.Random(0))


def met(*hosts: str) -> list[RosterEntry]:
    """Members that tell such an address each; the last character of the host is their key."""
    return [
        RosterEntry(
            node_id=NodeId(host),
            node_name=host,
            address=PeerAddress(
                public_key=host[-1].encode() * 32,
                multiaddrs=("/unix/nothing", f"/ip4/{host}/tcp/7710"),
            ),
        )
        for host in hosts
    ]


def test_a_folder_names_members_that_all_can_dial_and_those_of_before_first() -> None:
    def hosts(kept: Sequence[InvitedBy], *now: str) -> list[str]:
        found = kept_members(kept, met(*now), own_id=NodeId("8.8.4.9"))
        return [member.host for member in found]

    assert hosts((), "10.0.0.1", "8.8.4.2", "8.8.4.9") == ["8.8.4.2", "10.0.0.1"]
    kept = kept_members((), met("10.0.0.5", "8.8.4.4"), own_id=NodeId(""))
    many = ("8.8.4.1", "8.8.4.2", "8.8.4.3", "8.8.4.4", "10.0.0.5", "8.8.4.6")
    assert hosts(kept, *many) == ["8.8.4.4", "8.8.4.1", "8.8.4.2", "8.8.4.3"]
    assert hosts(kept, "8.8.4.9") == ["8.8.4.4", "10.0.0.5"]  # alone: nobody is forgotten


@in_virtual_time
async def test_the_waiting_ends_when_its_task_is_cancelled() -> None:
    link = Link(REFUSED, is_endless=True)
    waiting = asyncio.create_task(run_of_coordinator(link, waits=True, rng=random.Random(0)))
    await asyncio.sleep(100)
    before = asyncio.get_running_loop().time()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert asyncio.get_running_loop().time() == before


def over(*, is_held_here: bool = False) -> RunOver:
    return RunOver(why="all 3 rounds are committed", last_round=3, is_held_here=is_held_here)


def a_commit(round: int) -> Commit:
    return Commit(round=round, fragment=0, base_digest=Digest(bytes(32)), slices=())


def test_a_node_that_nobody_can_give_the_end_of_its_run_is_told_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(IncompleteError, match="no member is here that holds its final") as refused:
        refuse_what_nobody_gives(tmp_path, over())
    assert "this folder holds no state of the run" in refused.value.what
    assert refused.value.next_step.startswith("type 'atoll export OUT' where a node has taken part")
    refuse_what_nobody_gives(tmp_path, over(is_held_here=True))
    snapshots = tmp_path / SNAPSHOTS_FOLDER
    snapshots.mkdir()
    (snapshots / "round-00000002.safetensors").touch()
    with pytest.raises(IncompleteError, match="holds a state of round 2") as refused:
        refuse_what_nobody_gives(tmp_path, over())
    assert f"what is here: atoll export OUT --dir {tmp_path}" in refused.value.next_step
    (snapshots / "round-00000003.safetensors").touch()
    refuse_what_nobody_gives(tmp_path, over())


def test_a_node_that_knows_the_last_commit_may_get_there_from_its_own_disk(tmp_path: Path) -> None:
    history = History(tmp_path / HISTORY_FILE)
    history.add(a_commit(2))
    history.save()
    with pytest.raises(IncompleteError):
        refuse_what_nobody_gives(tmp_path, over())
    history.add(a_commit(3))
    history.save()
    refuse_what_nobody_gives(tmp_path, over())
