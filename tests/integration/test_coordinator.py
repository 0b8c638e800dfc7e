"""A real coordinator: a whole round, the status, and coming back from kill -9."""

import asyncio
import os
import re
import signal
import sys
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.config import RUN_TEMPLATE, Home, run_text
from coordinator.swarm.members import MemberState
from coordinator.swarm.state import is_present
from node.link.calls import CoordinatorLink
from protocol.errors import (
    AtollError,
    NoInputError,
    NotPermittedError,
    SessionEndedError,
    SystemRefusedError,
)
from protocol.run.run_files import run_from_json, validated
from protocol.run.run_spec import RunSpec
from protocol.trust.credentials import Credentials
from protocol.v1 import operator_pb2, session_pb2, status_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.v1.status_pb2_grpc import StatusServiceStub
from protocol.wire.channel import open_channel
from protocol.wire.rounds import NodeId
from tests.integration.coordinator_scene import (
    MIDDLE,
    NUM_ELEMENTS,
    PATIENCE_SECONDS,
    START,
    FakeNode,
    new_home,
    result,
    serving,
    two_nodes,
)


def test_the_template_says_what_holds_without_it_but_for_what_its_head_names() -> None:
    tables = tomllib.loads(RUN_TEMPLATE)
    template = validated(tables, origin="template")
    assert template.run.min_nodes == 2 and template.inner.optimizer == "muon"
    stated = [("run", "min_nodes"), ("model", "qk_norm"), ("outer", "merge")]
    inner = [("inner", key) for key in ("optimizer", "learning_rate", "muon_learning_rate")]
    for table, key in (*stated, *inner):
        del tables[table][key]
    assert validated(tables, origin="template") == RunSpec(), "all others are the defaults"
    named = validated(tomllib.loads(run_text(name="x-1")), origin="template")
    assert named.run.name == "x-1"
    keys = set(re.findall(r"^(?:# )?(\w+) = ", RUN_TEMPLATE, flags=re.MULTILINE))
    known = {
        key for table in RunSpec().model_dump(exclude={"description"}).values() for key in table
    }
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
        assert (second.round, second.base_digest) == (2, MIDDLE)
        assert second.token_clock == plans[0].round_tokens, "schedules stand where the plan got"

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


async def test_a_round_is_told_stage_by_stage_and_again_after_a_restart(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b):
        with pytest.raises(NoInputError, match="round 2 has not begun: the newest is 1"):
            await a.status.GetRound(status_pb2.GetRoundRequest(round=2))
        plans = [(await node.next("plan")).plan for node in (a, b)]
        await a.trained(1)
        flying = await b.status.GetRound(status_pb2.GetRoundRequest())
        assert (flying.summary.round, flying.is_open) == (1, True)
        assert {node.node_name: node.HasField("trained_seconds") for node in flying.nodes} == {
            "node-a": True,
            "node-b": False,
        }
        await b.trained(1)
        for node in (a, b):
            await node.reduced(plans[0])
        for node in (a, b):
            await node.held(plans[0])
        for node in (a, b):
            await node.next("commit")
            await node.applied(1, MIDDLE)
        await b.next("plan")
        closed = await b.status.GetRound(status_pb2.GetRoundRequest(round=1))
        assert (closed.is_open, closed.not_kept, closed.summary.tokens) == (False, "", 2000)
        for told in closed.nodes:
            stages = ("trained", "reduced", "held", "applied")
            times = [getattr(told, f"{stage}_seconds") for stage in stages]
            assert times == sorted(times) and times[-1] <= closed.seconds + 0.001
            assert all(told.HasField(f"{stage}_seconds") for stage in stages)  # type: ignore[arg-type]
            assert told.num_slices_reduced == 1
            assert told.screening.num_contributions == 2
    async with serving(home) as coordinator:
        async with open_channel(Credentials.load(home.directory)) as channel:
            again = await StatusServiceStub(channel).GetRound(status_pb2.GetRoundRequest(round=1))
            nodes = (
                await StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
            ).nodes
        assert again == closed
        assert [node.given.num_rounds for node in nodes] == [1, 1]
        assert all(node.given.present_seconds > 0 for node in nodes)
        assert coordinator.driver.state.committed_round == 1


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


async def test_a_goodbye_that_the_disk_refuses_is_answered_and_has_not_happened(
    tmp_path: Path,
) -> None:
    """The coordinator ends with the reason, and comes back with the node as it was, whose lease ends then."""
    home = new_home(tmp_path / "home")
    async with serving(home) as coordinator, two_nodes(home) as (_, b):
        database = coordinator.driver.store._database
        database._connection.execute("PRAGMA query_only = ON")  # as on a disk that takes nothing
        with pytest.raises(AtollError, match=r"atoll\.db cannot be used: attempt to write"):
            await CoordinatorLink(b.session).detach(b.session_id, "its owner needs the machine")
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(SystemRefusedError, match="cannot be used") as ended:
                await coordinator.serve_until(asyncio.Event())
        assert "make room on the disk" in ended.value.next_step
        assert is_present(coordinator.driver.state, NodeId(b.node_id)), "nobody was told otherwise"

    async with serving(home) as coordinator:
        states = {m.node_name: m.state for m in coordinator.driver.state.members.values()}
        assert states == dict.fromkeys(("node-a", "node-b"), MemberState.READY)
        again = FakeNode(b.identity, b.credentials, "node-b")
        await again.attach()
        await CoordinatorLink(again.session).detach(again.session_id, "now")
        assert not is_present(coordinator.driver.state, NodeId(b.node_id))
        await again.close()


class Process:
    """A coordinator in a process of its own, as 'atoll coordinator start' makes it."""

    def __init__(self, process: asyncio.subprocess.Process, control_port: int) -> None:
        self.process, self.control_port = process, control_port

    @classmethod
    async def start(cls, home: Home, log: Path, *options: str) -> "Process":
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "protocol.terminal.cli", "coordinator", "start"),
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
                await node.beat()  # the coordinator hears first who is back
            for node in (a, b):
                again = (await node.next("plan")).plan
                assert again.assignments == plan.assignments and again.slices == plan.slices
                assert again.commit_seconds <= plan.commit_seconds
            # Only what was not yet reported before the crash:
            await b.trained(1)
            await b.reduced(plan)
            await a.held(plan)
            commits = [(await node.next("commit")).commit for node in (a, b)]
            assert [
                len(c.contributor_sets[c.slices[0].contributor_set].nodes) for c in commits
            ] == [2, 2]
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
            *(
                sys.executable,
                "-m",
                "protocol.terminal.cli",
                "coordinator",
                "start",
                str(directory),
            ),
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


async def test_the_run_owner_takes_out_what_a_round_trained_and_nobody_else_may(
    tmp_path: Path,
) -> None:
    home = new_home(tmp_path / "home")
    async with serving(home), two_nodes(home) as (a, b), AsyncExitStack() as opened:
        plan = (await a.next("plan")).plan

        owner = await opened.enter_async_context(open_channel(Credentials.load(home.directory)))
        operator = OperatorServiceStub(owner)
        asked = operator_pb2.SampleRange(first=1001, end=1009)
        answer = await operator.SkipSamples(operator_pb2.SkipSamplesRequest(ranges=[asked]))
        batch = home.run.inner.batch
        (piece,) = answer.ranges
        assert (piece.first, piece.end) == (1001 // batch * batch, -(-1009 // batch) * batch)
        status = await a.status.GetStatus(status_pb2.GetStatusRequest())
        assert status.run.data.skipped_samples == piece.end - piece.first
        assert status.run.data.frontier == piece.end
        with pytest.raises(NoInputError, match="which samples round 7 trained is not known"):
            await operator.SkipSamples(operator_pb2.SkipSamplesRequest(round=7))
        for node in (a, b):
            await node.trained(1)
            await node.reduced(plan)
        for node in (a, b):
            await node.held(plan)
        await a.next("commit")
        answer = await operator.SkipSamples(operator_pb2.SkipSamplesRequest(round=1))
        assert [(r.first, r.end - r.first) for r in answer.ranges] == [
            (each.first_sample, each.num_samples) for each in plan.assignments
        ]
        mine = await opened.enter_async_context(open_channel(a.credentials))
        with pytest.raises(NotPermittedError, match="only the run owner"):
            await OperatorServiceStub(mine).SkipSamples(operator_pb2.SkipSamplesRequest(round=1))
