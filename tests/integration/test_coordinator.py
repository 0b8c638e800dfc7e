"""A real coordinator over real TLS: joining, a whole round, and coming back from kill -9."""

import asyncio
import json
import os
import re
import signal
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.app import Coordinator
from coordinator.cli import invite as invite_command
from coordinator.config import RUN_TEMPLATE, CoordinatorConfig, Home, create_home, run_text
from protocol.channel import open_blocking_channel, open_channel
from protocol.credentials import Credentials
from protocol.enrolment import enrol
from protocol.errors import (
    BadDataError,
    NoInputError,
    NotPermittedError,
    ProtocolMismatchError,
    SessionEndedError,
    TemporaryError,
    UnavailableError,
)
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.pki import make_request
from protocol.run_spec import RunSpec, run_from_json, validated
from protocol.v1 import operator_pb2, round_pb2, session_pb2, status_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.v1.status_pb2_grpc import StatusServiceStub

PATIENCE_SECONDS = 30.0
LOCAL = CoordinatorConfig(host="127.0.0.1", control_port=0, enrolment_port=0, advertise="127.0.0.1")
RUN = '[run]\nname = "tested"\nrounds = 2\nmin_nodes = 2\n'
START, MIDDLE = b"\x10" * 32, b"\x20" * 32
NUM_ELEMENTS = 1024


def new_home(folder: Path) -> Home:
    return create_home(folder, config=LOCAL, text=RUN, now=datetime.now(UTC))


@asynccontextmanager
async def serving(home: Home) -> AsyncIterator[Coordinator]:
    coordinator = await Coordinator.start(home, home.config)
    try:
        yield coordinator
    finally:
        await coordinator.stop()


async def invite_from(home: Home, *, uses: int = 2, seconds: float = 60.0) -> tuple[Invite, str]:
    """An invite, and its name; asked for as 'atoll invite create' does, but without blocking."""

    def ask() -> operator_pb2.CreateInviteResponse:
        with open_blocking_channel(Credentials.load(home.directory)) as channel:
            request = operator_pb2.CreateInviteRequest(max_uses=uses, valid_seconds=seconds)
            response: operator_pb2.CreateInviteResponse = OperatorServiceStub(channel).CreateInvite(
                request
            )
            return response

    made = await asyncio.to_thread(ask)
    return Invite.decode(made.invite), made.invite_id


class FakeNode:
    """A node that trains nothing and says what the test wants."""

    def __init__(self, identity: Identity, credentials: Credentials, name: str) -> None:
        self.identity, self.credentials, self.name = identity, credentials, name
        self.node_id = identity.node_id
        self.session_id = 0
        self.events: AsyncIterator[session_pb2.SubscribeResponse]
        self.connect()

    def connect(self) -> None:
        self._channel = open_channel(self.credentials)
        self.session = SessionServiceStub(self._channel)
        self.status = StatusServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def attach(self, **changes: object) -> session_pb2.AttachResponse:
        digest = (await self.session.GetRun(session_pb2.GetRunRequest())).run_digest
        request = session_pb2.AttachRequest(
            node_name=self.name,
            address=session_pb2.PeerAddress(
                public_key=self.identity.public_key, multiaddrs=["/ip4/127.0.0.1/tcp/1"]
            ),
            run_digest=digest,
            layout=session_pb2.LayoutSummary(digest=b"l" * 32, fragment_elements=[NUM_ELEMENTS]),
            corpus=session_pb2.CorpusSummary(digest=b"c" * 32, num_samples=10, num_bytes=99),
            outer_digest=START,
            device="cpu",
            num_ranks=1,
            version="0",
        )
        request.MergeFrom(session_pb2.AttachRequest(**changes))  # type: ignore[arg-type]
        response: session_pb2.AttachResponse = await self.session.Attach(request)
        self.session_id = response.session_id
        return response

    def subscribe(self) -> None:
        request = session_pb2.SubscribeRequest(session_id=self.session_id)
        self.events = self.session.Subscribe(request).__aiter__()

    async def next(self, kind: str) -> session_pb2.SubscribeResponse:
        """The next event of a kind; those of others are passed over."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                event = await anext(self.events)
                if event.WhichOneof("event") == kind:
                    return event

    async def report(self, number: int, **report: object) -> None:
        request = session_pb2.ReportRequest(session_id=self.session_id, round=number)
        request.MergeFrom(session_pb2.ReportRequest(**report))  # type: ignore[arg-type]
        await self.session.Report(request)

    async def trained(self, number: int) -> None:
        report = session_pb2.TrainedReport(inner_steps=30, tokens=1000, loss=2.0, seconds=1.0)
        await self.report(number, trained=report)

    async def reduced(self, plan: round_pb2.Plan) -> None:
        """Reduces its slices, with a contribution of every participant."""
        contributors = [
            round_pb2.Contributor(node_id=a.node_id, tokens=1000) for a in plan.assignments
        ]
        for part in plan.slices:
            if part.reducer_id == self.node_id:
                reduced = session_pb2.ReducedReport(
                    slice_index=part.index, digest=result(part.index), contributors=contributors
                )
                await self.report(plan.round, reduced=reduced)

    async def held(self, plan: round_pb2.Plan) -> None:
        for part in plan.slices:
            held = session_pb2.HeldReport(slice_index=part.index, digest=result(part.index))
            await self.report(plan.round, held=held)

    async def applied(self, number: int, digest: bytes) -> None:
        await self.report(number, applied=session_pb2.AppliedReport(outer_digest=digest))


def result(slice_index: int) -> bytes:
    return bytes([200 + slice_index]) * 32


async def joined(invite: Invite, name: str) -> FakeNode:
    identity = Identity.generate()
    return FakeNode(identity, await enrol(invite, identity, name), name)


@asynccontextmanager
async def two_nodes(home: Home) -> AsyncIterator[tuple[FakeNode, FakeNode]]:
    invite, _ = await invite_from(home)
    nodes = await joined(invite, "node-a"), await joined(invite, "node-b")
    try:
        for node in nodes:
            await node.attach()
            node.subscribe()
        yield nodes
    finally:
        await asyncio.gather(*(node.close() for node in nodes))


def test_the_template_says_what_holds_without_it() -> None:
    assert validated(tomllib.loads(RUN_TEMPLATE), origin="template") == RunSpec()
    named = validated(tomllib.loads(run_text(name="x-1", run_file=None)), origin="template")
    assert named.run.name == "x-1"
    keys = set(re.findall(r"^(?:# )?(\w+) = ", RUN_TEMPLATE, flags=re.MULTILINE))
    known = {key for table in RunSpec().model_dump().values() for key in table}
    assert keys == known, "the template names every key and no other"


async def test_two_nodes_join_and_go_through_a_whole_round(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        run = await a.session.GetRun(session_pb2.GetRunRequest())
        assert run_from_json(run.run_json) == home.run
        plans = [(await node.next("plan")).plan for node in (a, b)]
        assert plans[0].round == 1
        assert {x.node_id for x in plans[0].assignments} == {a.node_id, b.node_id}
        assert [s.num_elements for s in plans[0].slices] == [NUM_ELEMENTS // 2] * 2
        for node in (a, b):
            await node.trained(1)
            await node.reduced(plans[0])
        for node in (a, b):
            await node.held(plans[0])
        commits = [(await node.next("commit")).commit for node in (a, b)]
        assert commits[0] == commits[1]
        assert [outcome.digest for outcome in commits[0].slices] == [result(0), result(1)]
        for node in (a, b):
            await node.applied(1, MIDDLE)
        second = (await b.next("plan")).plan
        assert (second.round, second.base_digest, second.token_clock) == (2, MIDDLE, 2000)

        status = await a.status.GetStatus(status_pb2.GetStatusRequest())
        assert (status.run.committed_round, status.run.outer_digest) == (1, MIDDLE)
        assert status.run.digests_agree and status.run.num_parameters == NUM_ELEMENTS
        assert [node.committed_tokens for node in status.nodes] == [1000, 1000]
        rounds = (await a.status.ListRounds(status_pb2.ListRoundsRequest())).rounds
        assert [(r.round, r.num_contributors, r.outer_digest, r.loss) for r in rounds] == [
            (1, 2, MIDDLE, 2.0)
        ]
        listed = (await b.session.ListCommits(session_pb2.ListCommitsRequest())).commits
        assert [(c.round, c.outer_digest) for c in listed] == [(1, MIDDLE)]


async def test_heartbeats_show_in_the_status_and_a_node_that_leaves_is_gone(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        beat = session_pb2.HeartbeatRequest(
            session_id=a.session_id, outer_digest=START, activity="training", loss=3.5
        )
        await a.session.Heartbeat(beat)
        await b.session.Detach(session_pb2.DetachRequest(session_id=b.session_id, reason="bye"))
        nodes = (await a.status.GetStatus(status_pb2.GetStatusRequest())).nodes
        states = {node.node_name: (node.state, node.heartbeat.activity) for node in nodes}
        assert states == {
            "node-a": (status_pb2.NODE_STATE_READY, "training"),
            "node-b": (status_pb2.NODE_STATE_LEFT, ""),
        }
        assert (await a.next("departed")).departed.node_ids == [b.node_id]
        with pytest.raises(SessionEndedError):
            await b.next("commit")
        beat.session_id += 100
        with pytest.raises(SessionEndedError):
            await a.session.Heartbeat(beat)


async def test_the_owner_types_invite_create_and_the_one_line_printed_lets_a_node_join(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")

    async def typed(*arguments: str) -> Result:
        line = [*arguments, "--dir", str(home.directory)]
        return await asyncio.to_thread(CliRunner().invoke, invite_command, line)

    before = await typed("create")
    assert (
        isinstance(before.exception, UnavailableError) and "never started" in before.exception.what
    )
    async with serving(home):
        created = await typed("create", "--uses", "3", "--expires", "7d")
        match = re.fullmatch(r"atoll join (\S+)\n", created.stdout)
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


async def test_who_guesses_invites_is_made_to_wait(tmp_path: Path) -> None:
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
            await joined(invite, "guesser")


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
        issued = home.authority.issue_node(request_der, identity.node_id, datetime.now(UTC))
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


class Process:
    """A coordinator in a process of its own, as 'atoll coordinator start' makes it."""

    def __init__(self, process: asyncio.subprocess.Process, control_port: int) -> None:
        self.process, self.control_port = process, control_port

    @classmethod
    async def start(cls, home: Home, log: Path, *options: str) -> "Process":
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "protocol.cli", "coordinator", "start"),
                *(str(home.directory), *options),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = (await process.stdout.readline()).decode()
        match = re.fullmatch(r"coordinator ready: control 127.0.0.1:(\d+), enrolment .*\n", line)
        assert match is not None, f"it said {line!r}; its log is {log}"
        return cls(process, int(match[1]))

    async def end(self, signal_number: signal.Signals) -> int:
        self.process.send_signal(signal_number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.process.wait()


async def test_a_round_outlives_a_killed_coordinator(tmp_path: Path) -> None:
    home, log = new_home(tmp_path / "home"), tmp_path / "log"
    process = await Process.start(home, log)
    try:
        async with two_nodes(home) as (a, b):
            plan = (await a.next("plan")).plan
            await a.trained(1)
            await a.reduced(plan)
            await b.held(plan)
            await process.end(signal.SIGKILL)
            process = await Process.start(home, log, "--port", str(process.control_port))
            for node in (a, b):
                await node.close()
                node.connect()
                node.subscribe()  # the session of before the crash
                again = (await node.next("plan")).plan
                assert again.assignments == plan.assignments and again.slices == plan.slices
                assert again.commit_seconds <= plan.commit_seconds
            # Only what was not yet reported before the crash:
            await b.trained(1)
            await b.reduced(plan)
            await a.held(plan)
            commits = [(await node.next("commit")).commit for node in (a, b)]
            assert [len(c.slices[0].contributors) for c in commits] == [2, 2]
            assert all(outcome.digest for commit in commits for outcome in commit.slices)
            code = await process.end(signal.SIGTERM)
        assert code == 0, log.read_text()
        text = log.read_text()
        assert text.count("round committed") == 1 and "Traceback" not in text, text
    finally:
        if process.process.returncode is None:
            process.process.kill()


async def test_a_second_coordinator_is_refused_its_folder_and_its_port(tmp_path: Path) -> None:
    home, other = new_home(tmp_path / "home"), new_home(tmp_path / "other")

    async def refused(directory: Path, *options: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "protocol.cli", "coordinator", "start", str(directory)),
            *options,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                _, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, stderr.decode()

    async with serving(home) as coordinator:
        (code, said), (other_code, other_said) = await asyncio.gather(
            refused(home.directory),
            refused(other.directory, "--port", str(coordinator.control_port)),
        )
    assert (code, other_code) == (71, 71)
    assert "another coordinator" in said and "Traceback" not in said
    assert f"port {coordinator.control_port} of 127.0.0.1 is in use" in other_said
