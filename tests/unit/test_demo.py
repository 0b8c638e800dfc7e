"""The demo: its children, and what it claims at the end."""

import itertools
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.demo.children import Child, ChildDiedError, Children
from node.demo.command import NotProvenError, agreed_digest, follow, traffic_of
from protocol.errors import ExitCode, TemporaryError, UnavailableError
from protocol.terminal.watch import LineScreen
from protocol.v1 import session_pb2, status_pb2
from tests.unit.status_scene import drawn

SLEEP = ["sleep", "60"]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    with Children(logs=tmp_path, environment=os.environ) as children:
        yield children


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(child: Child) -> Callable[[], bool]:
    return lambda: child.exit_code() is not None


def test_leaving_stops_every_child_and_reaps_it(tmp_path: Path) -> None:
    with Children(logs=tmp_path, environment=os.environ) as children:
        pids = [children.start(name, SLEEP).pid for name in ("one", "two")]
        assert all(map(exists, pids))
    assert not any(map(exists, pids))


def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started(children: Children) -> None:
    stubborn = children.start(
        "stubborn",
        python(
            "import signal, subprocess, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
            "time.sleep(60)"
        ),
    )
    children.wait_until(lambda: "\n" in stubborn.log_text(), seconds=30, what="starting")
    grandchild = os.pidfd_open(int(stubborn.log_text()))
    children.stop(stop_seconds=0.3)
    assert not exists(stubborn.pid)
    assert has_ended(grandchild, within_seconds=10)


def test_what_a_child_left_behind_goes_with_it(children: Children) -> None:
    short = children.start(
        "short",
        python("import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"),
    )
    children.wait_for([short], seconds=30, what="the child")
    leftover = os.pidfd_open(int(short.log_text()))
    assert not has_ended(leftover, within_seconds=0)
    children.stop()
    assert has_ended(leftover, within_seconds=10)


def has_ended(pidfd: int, *, within_seconds: float) -> bool:
    """A kill takes effect a moment after it was sent."""
    return bool(select.select([pidfd], [], [], within_seconds)[0])


def test_a_child_that_dies_is_named_with_its_last_words_and_its_exit_code(
    children: Children,
) -> None:
    child = children.start("node-2", python("import sys; print('port in use'); sys.exit(71)"))
    with pytest.raises(ChildDiedError) as caught:
        children.wait_until(lambda: False, seconds=30, what="forever")
    assert "node-2 ended with exit code 71" in caught.value.what
    assert "| port in use" in caught.value.what
    assert str(child.log) in caught.value.next_step
    assert caught.value.exit_code == ExitCode.SYSTEM


def test_a_killed_child_is_told_by_the_signals_name(children: Children) -> None:
    child = children.start("node-1", SLEEP)
    child.signal(signal.SIGKILL)
    with pytest.raises(ChildDiedError, match="node-1 was killed by SIGKILL"):
        children.wait_until(lambda: False, seconds=30, what="forever")


def test_a_child_may_end_well_only_when_it_is_meant_to(children: Children) -> None:
    early = children.start("early", ["true"])
    with pytest.raises(ChildDiedError, match="early ended before its work was done"):
        children.wait_until(lambda: False, seconds=30, what="forever")
    early.may_end = True
    children.check()


def test_a_signal_ends_the_wait_and_leaves_nothing_running(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt),
        Children(logs=tmp_path, environment=os.environ) as children,
    ):
        pid = children.start("one", SLEEP).pid
        os.kill(os.getpid(), signal.SIGTERM)
        children.wait_until(lambda: False, seconds=30, what="forever")
    assert not exists(pid)
    assert signal.getsignal(signal.SIGTERM) is before


def test_children_do_not_share_the_terminals_session(children: Children) -> None:
    assert os.getsid(children.start("one", SLEEP).pid) != os.getsid(0)


def test_waiting_ends_when_it_takes_too_long(tmp_path: Path) -> None:
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with Children(
        logs=tmp_path, environment=os.environ, clock=lambda: now[0], pause=pause
    ) as children:
        with pytest.raises(TemporaryError, match="joining took more than 60 s"):
            children.wait_until(lambda: False, seconds=60, what="joining")
        assert 60 <= now[0] < 61


def a_status(phase: status_pb2.RunPhase.ValueType) -> status_pb2.GetStatusResponse:
    return status_pb2.GetStatusResponse(run=status_pb2.RunStatus(phase=phase))


TRAINING = a_status(status_pb2.RUN_PHASE_TRAINING)
FINISHED = a_status(status_pb2.RUN_PHASE_FINISHED)


def test_nodes_that_end_before_we_hear_that_the_run_is_finished_are_not_missed(
    children: Children,
) -> None:
    node = children.start("node-1", ["true"])
    node.may_end = True
    children.wait_until(ended(node), seconds=30, what="the node")
    answers = iter([FINISHED, FINISHED])
    assert follow([node], children, lambda: next(answers), LineScreen()) == FINISHED


def test_a_node_that_leaves_a_run_in_flight_ends_the_demo(children: Children) -> None:
    node = children.start("node-1", ["true"])
    node.may_end = True
    children.wait_until(ended(node), seconds=30, what="the node")
    with pytest.raises(ChildDiedError, match="node-1 ended before its work was done"):
        follow([node], children, lambda: TRAINING, LineScreen())


def test_a_demo_asks_nobody_for_copies_of_its_folder(children: Children) -> None:
    class Seeing(LineScreen):
        def show(self, status: status_pb2.GetStatusResponse) -> None:
            seen.append(drawn(status))

    seen: list[str] = []
    status = a_status(status_pb2.RUN_PHASE_FINISHED)
    status.run.is_without_backup = True
    assert "backup" in drawn(status)
    follow([], children, lambda: status, Seeing())
    assert seen and "backup" not in "".join(seen)


def test_a_coordinator_that_is_slow_to_answer_is_asked_again(tmp_path: Path) -> None:
    asked = itertools.count()

    def ask() -> status_pb2.GetStatusResponse:
        if next(asked) == 0:
            raise UnavailableError("busy")
        return FINISHED

    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with Children(
        logs=tmp_path, environment=os.environ, clock=lambda: now[0], pause=pause
    ) as children:
        node = children.start("node-1", ["true"])
        assert follow([node], children, ask, LineScreen()) == FINISHED


def a_node(
    name: str, *, round: int = 12, digest: bytes = b"\x11" * 32, sent: int = 0, tokens: int = 0
) -> status_pb2.NodeStatus:
    node = status_pb2.NodeStatus(node_name=name, committed_tokens=tokens)
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(outer_round=round, outer_digest=digest))
    node.heartbeat.wire.add(kind="contribution", sent_bytes=sent)
    return node


def test_nodes_that_hold_the_same_state_are_proven_equal() -> None:
    nodes = [a_node("node-1"), a_node("node-2")]
    assert agreed_digest(nodes, round=12, num_nodes=2) == b"\x11" * 32


@pytest.mark.parametrize(
    ("odd_one", "what"),
    [
        (a_node("node-2", digest=b"\x22" * 32), "node-1 111111111111, node-2 222222222222"),
        (a_node("node-2", round=11), "node-2 did not report its outer state at round 12"),
        (a_node("node-2", digest=b""), "node-2 did not report its outer state"),
    ],
)
def test_a_node_that_differs_or_says_nothing_is_a_failure(
    odd_one: status_pb2.NodeStatus, what: str
) -> None:
    with pytest.raises(NotProvenError, match=what) as caught:
        agreed_digest([a_node("node-1"), odd_one], round=12, num_nodes=2)
    assert caught.value.exit_code == ExitCode.INTERNAL


def test_a_missing_node_is_a_failure() -> None:
    with pytest.raises(NotProvenError, match="1 of 2 nodes"):
        agreed_digest([a_node("node-1")], round=12, num_nodes=2)


def test_traffic_is_compared_with_a_ring_all_reduce_at_every_inner_step() -> None:
    # 3 nodes of 10 steps each: a ring sends 2·2/3·4 bytes for each of 300 parameters and step.
    nodes = [a_node(f"node-{i}", sent=1000, tokens=10 * 2048) for i in range(3)]
    traffic = traffic_of(nodes, num_parameters=300, tokens_per_inner_step=2048)
    assert traffic.sent_bytes == 3000
    assert traffic.averaging_bytes == pytest.approx(3 * 10 * 1600)
    assert traffic.times_less == pytest.approx(16)
