"""The page shows what the status says, and nothing that a node puts into its name is run."""

from coordinator.dashboard.run_page import page_of
from protocol.v1 import session_pb2
from protocol.v1 import status_pb2 as pb


def test_a_name_is_text_and_never_markup() -> None:
    hostile = "<script>alert(1)</script>"
    status = pb.GetStatusResponse(run=pb.RunStatus(run_name=hostile, reason=hostile))
    node = status.nodes.add(node_id="1", node_name=hostile, device=hostile)
    node.heartbeat.CopyFrom(session_pb2.HeartbeatRequest(activity=hostile, mesh=hostile))
    page = page_of(status, [pb.RoundSummary(round=1, reason=hostile)])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_what_is_not_known_is_a_dash_and_not_a_number() -> None:
    status = pb.GetStatusResponse(run=pb.RunStatus(run_name="run", total_rounds=3))
    status.nodes.add(node_id="1", node_name="attic", state=pb.NODE_STATE_READY)
    page = page_of(status, [])
    assert "round 0 of 3" in page
    (row,) = [line for line in page.splitlines() if "attic" in line]
    # does, loss, tokens/s, time, MFU, memory, link, upload, sent, received
    assert row.count("<td>-</td>") == 10


def test_nodes_that_cannot_reach_each_other_are_named() -> None:
    status = pb.GetStatusResponse()
    for name, other in (("one", "two"), ("two", "")):
        node = status.nodes.add(node_id=name, node_name=name, state=pb.NODE_STATE_READY)
        node.heartbeat.unreachable_ids.extend([other] if other else [])
    assert "one and two do not reach each other" in page_of(status, [])
