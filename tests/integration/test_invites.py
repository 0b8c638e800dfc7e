"""Invites over real TLS: who may join, who may call, and what the others are told."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.config import Home, create_home
from coordinator.inviting import invite as invite_command
from protocol.errors import (
    BadDataError,
    HeldBackError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
    UsageError,
)
from protocol.terminal.node_words import node_details
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite
from protocol.trust.pki import make_request
from protocol.v1 import operator_pb2, session_pb2, status_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire.channel import open_channel
from tests.integration.coordinator_scene import (
    LOCAL,
    FakeNode,
    authority_of,
    described,
    invite_from,
    joined,
    new_home,
    serving,
)


async def test_the_owner_types_invite_create_and_the_one_line_printed_lets_a_node_join(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")

    unstarted = create_home(tmp_path / "unstarted", config=LOCAL, text=described)

    async def typed(*arguments: str, of: Home = home) -> Result:
        line = [*arguments, "--dir", str(of.directory)]
        return await asyncio.to_thread(CliRunner().invoke, invite_command, line)

    for asked, words in ((home, "no coordinator answers"), (unstarted, "was never started")):
        before = await typed("create", of=asked)
        assert isinstance(before.exception, UnavailableError) and words in before.exception.what
    async with serving(home):
        created = await typed("create", "--uses", "3", "--expires", "7d")
        match = re.search(r"(?m)^atoll join (\S+)\n", created.stdout)
        assert match is not None, created.output
        await (await joined(Invite.decode(match[1]), "node-a")).close()
        (listed,) = json.loads((await typed("list", "--json")).stdout)
        assert (listed["max_uses"], len(listed["node_ids"])) == (3, 1)
        assert 6.9 * 86400 < listed["remaining_seconds"] <= 7 * 86400
        assert (await typed("revoke", listed["invite_id"])).exit_code == 0
        assert "revoked" in (await typed("list")).stdout
        unknown = await typed("revoke", "nonesuch")
        assert isinstance(unknown.exception, NoInputError)


async def test_invites_that_do_not_hold_are_refused_each_with_its_reason(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        once, _ = await invite_from(home, uses=1)
        first = await joined(once, "first")
        await first.close()
        await enrol(once, first.identity, "first")  # its answer was lost: free of charge
        with pytest.raises(NotPermittedError, match="used up: 1 of 1"):
            await joined(once, "second")

        wrong = Invite(
            host=once.host, port=once.port, pin=once.pin, invite_id=once.invite_id, secret=bytes(32)
        )
        with pytest.raises(NotPermittedError, match="is not an invite of this swarm"):
            await joined(wrong, "third")

        expired, _ = await invite_from(home, seconds=1e-6)
        with pytest.raises(NotPermittedError, match="expired"):
            await joined(expired, "fourth")

        revoked, invite_id = await invite_from(home)
        operator = Credentials.load(home.directory)
        async with open_channel(operator) as channel:
            stub = OperatorServiceStub(channel)
            await stub.RevokeInvite(operator_pb2.RevokeInviteRequest(invite_id=invite_id))
            listed = (await stub.ListInvites(operator_pb2.ListInvitesRequest())).invites
        assert [(status.revoked, len(status.node_ids)) for status in listed] == [
            (True, 0),
            (False, 0),
            (False, 1),
        ]
        with pytest.raises(NotPermittedError, match="revoked"):
            await joined(revoked, "fifth")


async def test_who_guesses_invites_is_made_to_wait_and_a_neighbour_with_one_is_not(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        invite, _ = await invite_from(home)
        wrong = Invite(
            host=invite.host, port=invite.port, pin=invite.pin, invite_id="guess", secret=bytes(32)
        )
        for _ in range(10):
            with pytest.raises(NotPermittedError):
                await joined(wrong, "guesser")
        with pytest.raises(TemporaryError, match="10 attempts"):
            await joined(wrong, "guesser")
        neighbour = await joined(invite, "neighbour")
        await neighbour.close()


async def test_only_members_may_call_and_only_the_run_owner_may_invite(tmp_path: Path) -> None:
    home, other = new_home(tmp_path / "home"), new_home(tmp_path / "other")
    async with serving(home), serving(other), AsyncExitStack() as opened:
        invite, _ = await invite_from(home)
        elsewhere, _ = await invite_from(other)
        member, stranger = await joined(invite, "member"), await joined(elsewhere, "stranger")
        opened.push_async_callback(member.close)
        opened.push_async_callback(stranger.close)

        owner = await opened.enter_async_context(open_channel(Credentials.load(home.directory)))
        with pytest.raises(NotPermittedError, match="operator's certificate is not a node's"):
            await SessionServiceStub(owner).GetRun(session_pb2.GetRunRequest())

        mine = await opened.enter_async_context(open_channel(member.credentials))
        with pytest.raises(NotPermittedError, match="only the run owner"):
            await OperatorServiceStub(mine).ListInvites(operator_pb2.ListInvitesRequest())
        with pytest.raises(ProtocolMismatchError, match="works by run"):
            await member.attach(run_digest=b"\xee" * 32)
        with pytest.raises(BadDataError, match="has the key of node"):
            await member.attach(
                address=session_pb2.PeerAddress(public_key=stranger.identity.public_key)
            )

        # The other swarm's certificate, shown to this swarm's coordinator.
        forged = replace(
            member.credentials,
            certificate_pem=stranger.credentials.certificate_pem,
            key_pem=stranger.credentials.key_pem,
        )
        theirs = await opened.enter_async_context(open_channel(forged))
        with pytest.raises(ProtocolMismatchError):
            await SessionServiceStub(theirs).GetRun(session_pb2.GetRunRequest())


async def test_a_certificate_that_the_database_does_not_know_is_not_enough(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        invite, _ = await invite_from(home)
        identity = Identity.generate()
        request_der, key_pem = make_request()
        issued = authority_of(home).issue_node(request_der, identity.node_id)
        credentials = replace(
            Credentials.load(home.directory), certificate_pem=issued, key_pem=key_pem
        )
        node = FakeNode(identity, credentials, "unknown")
        with pytest.raises(NotPermittedError, match="is not enrolled"):
            await node.attach()
        with pytest.raises(NotPermittedError, match="is not enrolled"):
            await node.status.GetStatus(status_pb2.GetStatusRequest())
        await enrol(invite, identity, "unknown")
        await node.attach()
        await node.close()


async def test_who_comes_when_as_many_are_here_as_the_invite_lets_in_waits_until_one_leaves(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")

    async def typed(*arguments: str) -> Result:
        line = [*arguments, "--dir", str(home.directory)]
        return await asyncio.to_thread(CliRunner().invoke, invite_command, line)

    async def listed() -> dict[str, object]:
        (one,) = json.loads((await typed("list", "--json")).stdout)
        return dict(one)

    async with serving(home):
        created = await typed("create", "--own", "--uses", "3", "--max-nodes", "1")
        assert "for 3 nodes, 1 of them at once, and" in created.stderr
        match = re.search(r"(?m)^atoll join (\S+)\n", created.stdout)
        assert match is not None, created.output
        invite = Invite.decode(match[1])
        a, b = [await joined(invite, name) for name in ("node-a", "node-b")]
        await a.attach()
        await a.attach()  # its own place is not another's
        with pytest.raises(HeldBackError, match="so many are here: node-a"):
            await b.attach()
        told = await listed()
        assert (told["max_nodes"], told["num_present"], told["own"]) == (1, 1, True)
        assert "1 of 1" in (await typed("list")).stdout
        status = await a.status.GetStatus(status_pb2.GetStatusRequest())
        (shown,) = [node for node in status.nodes if node.node_id == a.node_id]
        facts = node_details(shown, status)
        assert facts["invite"] == f"own {invite.invite_id}"

        await a.session.Detach(session_pb2.DetachRequest(session_id=a.session_id))
        await b.attach()
        with pytest.raises(HeldBackError, match="here: node-b"):
            await a.attach()
        same = await typed("limit", invite.invite_id, "--max-nodes", "1")
        assert isinstance(same.exception, UsageError)
        more = await typed("limit", invite.invite_id, "--max-nodes", "2")
        assert "lets 2 of its nodes take part at once; here are 1" in more.stdout
        await a.attach()
    async with serving(home) as coordinator:  # as rulings of its database say
        assert coordinator.driver.state.invite_limits == {invite.invite_id: 2}
        late = await joined(invite, "node-c")
        for node in (a, b):
            await node.close()
            node.connect()
            await node.attach()
        with pytest.raises(HeldBackError, match="lets 2 of its nodes"):
            await late.attach()
        assert (await typed("limit", invite.invite_id)).exit_code == 0
        await late.attach()
        for node in (a, b, late):
            await node.close()


async def test_a_limit_of_who_takes_no_part_is_refused(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home):
        line = ["create", "--role", "viewer", "--max-nodes", "2", "--dir", str(home.directory)]
        refused = await asyncio.to_thread(CliRunner().invoke, invite_command, line)
        assert isinstance(refused.exception, UsageError)
        assert "viewers take no part" in refused.exception.what
