"""Who may take part, over real TLS: expelled, quarantined, waiting for approval, or only looking on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner, Result

from coordinator.backup import back_up
from coordinator.config import Home
from coordinator.inviting import invite as invite_command
from coordinator.steering import expel
from node.disk.history import KeptRulings
from protocol.errors import (
    AtollError,
    BadDataError,
    ExpelledError,
    HeldBackError,
    NoInputError,
    NotPermittedError,
    SessionEndedError,
    TemporaryError,
    UsageError,
)
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.invite import Invite
from protocol.trust.pki import Role
from protocol.trust.rulings import RulingKind, checked_chain, rulings_from_wire, rulings_to_wire
from protocol.v1 import operator_pb2 as pb
from protocol.v1 import session_pb2, status_pb2, status_pb2_grpc
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.v1.ruling_pb2 import Rulings
from protocol.wire.channel import open_channel
from tests.integration.coordinator_scene import invite_from, joined, new_home, serving, two_nodes
from tests.ports import free_port

if TYPE_CHECKING:
    from protocol.v1.operator_pb2_grpc import OperatorServiceAsyncStub


@asynccontextmanager
async def owner_of(home: Home) -> AsyncIterator["OperatorServiceAsyncStub"]:
    async with open_channel(Credentials.load(home.directory)) as channel:
        yield OperatorServiceStub(channel)


async def ruled(home: Home, node: str, verdict: str, reason: str = "") -> None:
    async with owner_of(home) as owner:
        value = pb.NodeVerdict.Value(f"NODE_VERDICT_{verdict}")
        await owner.RuleNode(pb.RuleNodeRequest(node=node, verdict=value, reason=reason))


async def log_of(home: Home) -> list[str]:
    """The kinds of all rulings, each with its node; none is missing or unsigned."""
    async with owner_of(home) as owner:
        listed = await owner.ListRulings(pb.ListRulingsRequest())
    signed = [one for wire in listed.rulings for one in rulings_from_wire(Rulings(rulings=[wire]))]
    checked_chain(signed, home.verifier)
    return [f"{one.ruling.kind} {one.ruling.node_name}".strip() for one in signed]


async def invite_with(home: Home, **wants: object) -> Invite:
    async with owner_of(home) as owner:
        request = pb.CreateInviteRequest(max_uses=2, valid_seconds=60, **wants)  # type: ignore[arg-type]
        return Invite.decode((await owner.CreateInvite(request)).invite)


async def test_an_expelled_node_is_refused_at_once_by_whom_and_why_and_the_others_hear_of_it(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        await ruled(home, "node-b", "EXPEL", "sends noise")
        with pytest.raises(SessionEndedError, match=r"the run owner decided: .*sends noise"):
            while True:
                await b.next("nothing")
        for call in (b.attach(), b.beat()):
            with pytest.raises(
                ExpelledError, match=r"the run owner has expelled node-b .*sends noise"
            ):
                await call
        with pytest.raises(ExpelledError):
            await b.status.GetStatus(status_pb2.GetStatusRequest())
        gone = (await a.next("roster_change")).roster_change.gone_ids
        while not gone:
            gone = (await a.next("roster_change")).roster_change.gone_ids
        assert list(gone) == [b.node_id]
        status = await a.status.GetStatus(status_pb2.GetStatusRequest())
        (shown,) = [n for n in status.nodes if n.node_name == "node-b"]
        assert shown.state == status_pb2.NODE_STATE_EXPELLED
        assert shown.standing == "by the run owner: sends noise"


async def test_an_expelled_key_is_refused_with_another_invite_and_after_a_restart(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (_, b):
        await ruled(home, b.node_id[:8], "EXPEL")
    async with serving(home):
        another, _ = await invite_from(home)
        with pytest.raises(ExpelledError):
            await enrol(another, b.identity, "under another name")
        b.credentials = replace(
            b.credentials, control_port=Credentials.load(home.directory).control_port
        )
        b.connect()
        with pytest.raises(ExpelledError):
            await b.attach()
        await ruled(home, "node-b", "READMIT")
        await b.attach()
        await b.close()
        assert (await log_of(home))[-2:] == ["invited", "readmitted node-b"]


async def typed(home: Home, command: click.Command, *arguments: str) -> Result:
    line = [*arguments, "--dir", str(home.directory)]
    return await asyncio.to_thread(CliRunner().invoke, command, line)


async def test_all_who_joined_by_an_invite_are_expelled_by_it_and_it_lets_nobody_in_any_more(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), AsyncExitStack() as opened:
        theirs, invite_id = await invite_from(home, uses=4)
        ours, _ = await invite_from(home)
        first, second, *rest = [
            await joined(invite, name)
            for name, invite in (("x", theirs), ("y", theirs), ("z", theirs), ("mine", ours))
        ]
        for node in (first, second, *rest):
            opened.push_async_callback(node.close)
        await ruled(home, "z", "EXPEL")
        alone = await typed(home, expel, "x", "--reason", "copies")
        assert alone.exit_code == 0 and "x (" in alone.stdout
        assert f"'atoll invite revoke {invite_id}' closes it" in alone.stdout

        all_of_it = await typed(home, expel, "--invite", invite_id, "--reason", "copies too")
        told = f"invite {invite_id} is revoked, and expelled by it: "
        assert all_of_it.stdout.endswith(f"{told}y\n")
        for node in (first, second):
            with pytest.raises(ExpelledError):
                await node.attach()
        with pytest.raises(NotPermittedError, match="was revoked"):
            await joined(theirs, "x by a new key")
        await rest[-1].attach()
        again = await typed(home, expel, "--invite", invite_id)
        assert again.stdout.endswith(f"{told}nobody who was not before\n")
        assert (await log_of(home))[-4:] == ["expelled z", "expelled x", "revoked", "expelled y"]

        await ruled(home, "mine", "EXPEL")
        for wrong, error in (
            (("--invite", "nonesuch"), NoInputError),
            (("x", "--invite", invite_id), UsageError),
            ((), UsageError),
        ):
            assert isinstance((await typed(home, expel, *wrong)).exception, error)
        async with owner_of(home) as owner:
            bar = pb.NODE_VERDICT_QUARANTINE
            with pytest.raises(BadDataError, match="by their invite nodes can only be expelled"):
                await owner.RuleNode(pb.RuleNodeRequest(invite_id=invite_id, verdict=bar))


async def test_a_run_owners_own_invites_are_a_ruling_and_shown(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        assert (await typed(home, invite_command, "create", "--own", "--uses", "8")).exit_code == 0
        _, later = await invite_from(home)
        assert (await typed(home, invite_command, "own", later)).exit_code == 0
        await invite_from(home)
        again = await typed(home, invite_command, "own", later)
        assert isinstance(again.exception, UsageError) and "already" in again.exception.what
        unknown = await typed(home, invite_command, "own", "nonesuch")
        assert isinstance(unknown.exception, NoInputError)
    async with serving(home):
        listed = json.loads((await typed(home, invite_command, "list", "--json")).stdout)
        assert [one["own"] for one in listed] == [False, True, True]
        assert "own node" in (await typed(home, invite_command, "list")).stdout
        assert await log_of(home) == ["invited"] * 4


async def test_the_round_in_flight_goes_on_without_an_expelled_participant(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        plan = (await a.next("plan")).plan
        await ruled(home, "node-b", "EXPEL")
        departed = (await a.next("departed")).departed
        assert (departed.round, list(departed.node_ids)) == (plan.round, [b.node_id])


async def test_a_quarantined_node_waits_and_is_let_back_in(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        await ruled(home, "node-b", "QUARANTINE", "an odd loss")
        with pytest.raises(HeldBackError, match=r"has quarantined node-b .*an odd loss"):
            await b.attach()
        status = await a.status.GetStatus(status_pb2.GetStatusRequest())
        states = {n.node_name: n.state for n in status.nodes}
        assert states["node-b"] == status_pb2.NODE_STATE_QUARANTINED
        await ruled(home, "node-b", "READMIT")
        await b.attach()


async def test_a_node_waits_for_approval_and_goes_on_once_it_has_it(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        invite = await invite_with(home, label="lab B", needs_approval=True)
        node = await joined(invite, "node-a")
        with pytest.raises(HeldBackError, match="waits until the run owner approves it"):
            await node.session.GetRun(session_pb2.GetRunRequest())
        async with owner_of(home) as owner:
            (listed,) = (await owner.ListInvites(pb.ListInvitesRequest())).invites
        assert (listed.label, listed.needs_approval) == ("lab B", True)
        assert list(listed.node_names) == ["node-a"]
        async with open_channel(Credentials.load(home.directory)) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            (shown,) = (await stub.GetStatus(status_pb2.GetStatusRequest())).nodes
        assert shown.state == status_pb2.NODE_STATE_UNAPPROVED
        assert "atoll nodes approve node-a" in shown.standing
        await ruled(home, "node-a", "APPROVE")
        await node.attach()
        await node.close()
        assert await log_of(home) == ["invited", "joined node-a", "approved node-a"]


@pytest.mark.parametrize(
    ("asked", "verdict", "kind", "words"),
    [
        ("nobody", "EXPEL", NoInputError, "no node 'nobody' has joined"),
        ("twin", "EXPEL", UsageError, "may be any of 2 nodes"),
        ("node-a", "APPROVE", UsageError, "node-a needs no approval"),
        ("node-a", "READMIT", UsageError, "neither expelled nor quarantined"),
        ("node-b", "EXPEL", UsageError, "expelled already"),
    ],
)
async def test_a_ruling_that_makes_no_sense_is_one_clear_sentence(
    tmp_path: Path, asked: str, verdict: str, kind: type[AtollError], words: str
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home):
        invite, _ = await invite_from(home)
        for _ in range(2):
            await (await joined(invite, "twin")).close()
        await ruled(home, "node-b", "EXPEL")
        before = await log_of(home)
        with pytest.raises(kind, match=words) as refused:
            await ruled(home, asked, verdict)
        assert refused.value.next_step
        assert await log_of(home) == before


@pytest.mark.parametrize("has_ruled_since", [False, True])
async def test_a_coordinator_from_an_older_copy_learns_rulings_from_a_node(
    tmp_path: Path, has_ruled_since: bool
) -> None:
    home = new_home(tmp_path / "home")
    verifier = home.verifier
    async with serving(home), two_nodes(home) as (a, b):
        await asyncio.to_thread(back_up, home.directory, tmp_path / "copy")
        kept = KeptRulings(home.run, verifier=verifier)
        await ruled(home, "node-b", "EXPEL", "sends noise")
        while kept.number < 4:
            kept.take(rulings_from_wire((await a.next("rulings")).rulings))
        copy = Home.load(tmp_path / "copy")
        apart = copy.config.with_changes(control_port=free_port(), enrolment_port=free_port())
        async with serving(replace(copy, config=apart)):
            port = Credentials.load(copy.directory).control_port
            for node in (a, b):
                node.credentials = replace(node.credentials, control_port=port)
                node.connect()
            if has_ruled_since:
                await invite_from(copy)
            opened = await a.attach(
                num_rulings=kept.number, rulings_digest=kept.digest, process_id=1
            )
            assert opened.num_rulings == 3 + has_ruled_since
            await b.attach(process_id=2)
            request = session_pb2.SubmitRulingsRequest(
                session_id=a.session_id, rulings=rulings_to_wire(kept.after(3))
            )
            await a.session.SubmitRulings(request)
            with pytest.raises(ExpelledError, match="sends noise"):
                await b.beat()
            expected = ["invited"] * has_ruled_since + ["expelled node-b"]
            assert (await log_of(copy))[3:] == expected
            kept.take(rulings_from_wire((await a.attach(process_id=1)).rulings))
            assert [one.kind for one in kept.rulings[3:]] == [one.split()[0] for one in expected]


@pytest.mark.parametrize("has_ruled_since", [False, True])
async def test_who_joined_after_the_copy_by_an_invite_that_it_knows_comes_back_with_its_ruling(
    tmp_path: Path, has_ruled_since: bool
) -> None:
    home = new_home(tmp_path / "home")
    async with AsyncExitStack() as opened:
        async with serving(home):
            before = await invite_with(home, needs_approval=True)
            a = await joined((await invite_from(home))[0], "node-a")
            await asyncio.to_thread(back_up, home.directory, tmp_path / "copy")
            known = [await joined(before, name) for name in ("approved", "unapproved")]
            stranger = await joined((await invite_from(home))[0], "stranger")
            await ruled(home, "approved", "APPROVE")
            for node in (a, *known, stranger):
                opened.push_async_callback(node.close)
            await a.attach()
            a.subscribe()
            kept = KeptRulings(home.run, verifier=home.verifier)
            while kept.rulings[-1:] == () or kept.rulings[-1].kind != RulingKind.APPROVED:
                kept.take(rulings_from_wire((await a.next("rulings")).rulings))
        copy = Home.load(tmp_path / "copy")
        apart = copy.config.with_changes(control_port=free_port(), enrolment_port=free_port())
        async with serving(replace(copy, config=apart)):
            port = Credentials.load(copy.directory).control_port
            for node in (a, *known, stranger):
                node.credentials = replace(node.credentials, control_port=port)
                node.connect()
            if has_ruled_since:
                await invite_from(copy)
            for node in (*known, stranger):
                with pytest.raises(TemporaryError, match="members of before may yet bring back"):
                    await node.attach()
            opened_session = await a.attach(num_rulings=kept.number, rulings_digest=kept.digest)
            num_known = opened_session.num_rulings - has_ruled_since
            lacking = rulings_to_wire(kept.after(num_known))
            await a.session.SubmitRulings(
                session_pb2.SubmitRulingsRequest(session_id=a.session_id, rulings=lacking)
            )
            await known[0].attach()
            with pytest.raises(HeldBackError, match="waits until the run owner approves it"):
                await known[1].attach()
            with pytest.raises(TemporaryError, match="members of before"):
                await stranger.attach()
            told = await log_of(copy)
            for name in ("approved", "unapproved"):
                assert f"joined {name}" in told


async def test_rulings_that_nobody_signed_are_refused(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, _):
        known = rulings_from_wire((await a.next("rulings")).rulings)
        forged = replace(known[-1].ruling, number=99, kind=RulingKind.EXPELLED)
        request = session_pb2.SubmitRulingsRequest(
            session_id=a.session_id,
            rulings=rulings_to_wire([replace(known[-1], ruling=forged)]),
        )
        with pytest.raises(BadDataError, match="ruling 99 does not bear the signature"):
            await a.session.SubmitRulings(request)


async def test_a_viewer_sees_the_status_without_addresses(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, _):
        viewer = await joined(await invite_with(home, role="viewer"), "viewer")
        assert viewer.credentials.principal.role is Role.VIEWER
        seen = (await viewer.status.GetStatus(status_pb2.GetStatusRequest())).nodes
        assert {n.node_name for n in seen} == {"node-a", "node-b"}
        assert not any(n.HasField("address") for n in seen)
        theirs = (await a.status.GetStatus(status_pb2.GetStatusRequest())).nodes
        assert all(n.address.multiaddrs for n in theirs)
        await ruled(home, "viewer", "EXPEL")
        with pytest.raises(ExpelledError):
            await viewer.status.GetStatus(status_pb2.GetStatusRequest())
        await viewer.close()
