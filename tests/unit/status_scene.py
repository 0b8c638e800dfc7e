"""A status as tests make it up: of a run, and of nodes with what they said last."""

import io
from typing import Any

from rich.console import Console

from protocol.terminal.watch import render
from protocol.v1 import session_pb2, status_pb2

DIGEST = bytes(range(32))


def a_node(
    name: str,
    state: status_pb2.NodeState.ValueType = status_pb2.NODE_STATE_READY,
    **heartbeat: Any,
) -> status_pb2.NodeStatus:
    node = status_pb2.NodeStatus(node_id=f"{name}-0123456789", node_name=name, state=state)
    holds: dict[str, Any] = {"outer_round": 6, "outer_digest": DIGEST}
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(**holds | heartbeat))
    return node


def a_status(*nodes: status_pb2.NodeStatus, **changes: Any) -> status_pb2.GetStatusResponse:
    run: dict[str, Any] = {
        "run_name": "demo",
        "phase": status_pb2.RUN_PHASE_TRAINING,
        "reason": "training: 1 of 3 nodes are done",
        "committed_round": 6,
        "open_round": 7,
        "total_rounds": 12,
        "token_clock": 1_234_567,
        "outer_digest": DIGEST,
        "outer_digest_round": 6,
        "digests_agree": True,
        "inner_steps": 30,
    }
    return status_pb2.GetStatusResponse(run=status_pb2.RunStatus(**run | changes), nodes=nodes)


def drawn(status: status_pb2.GetStatusResponse, *, width: int = 80, **settings: Any) -> str:
    target = io.StringIO()
    Console(file=target, width=width, color_system=None).print(render(status, **settings))
    return target.getvalue()
