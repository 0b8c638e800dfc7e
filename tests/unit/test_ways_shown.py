"""How people see by which ways nodes reach each other."""

from protocol.terminal.node_words import node_facts, ways_to_others
from protocol.terminal.status_words import summary_line
from protocol.v1 import status_pb2
from tests.unit.status_scene import a_node, a_status, drawn


def test_nodes_that_do_not_reach_each_other_are_named_once_and_those_that_are_gone_not() -> None:
    one, two = a_node("node-1"), a_node("node-2")
    gone = a_node("node-3", status_pb2.NODE_STATE_LOST)
    one.heartbeat.unreachable_ids.extend([two.node_id, gone.node_id])
    two.heartbeat.unreachable_ids.append(one.node_id)
    told = "node-1 and node-2 do not reach each other"
    status = a_status(one, two, gone)
    for text in (drawn(status), summary_line(status)):
        assert text.count("do not reach each other") == 1
        assert told in text
    assert "reach" not in summary_line(a_status(two, gone))


def test_nodes_that_reach_each_other_through_a_helper_are_told_together() -> None:
    names = ("node-1", "node-2", "node-3")
    nodes = [a_node(name) for name in names]
    helper = a_node("helper-1")
    helper.is_helper = True
    for node in nodes:
        node.heartbeat.unreachable_ids.extend(n.node_id for n in nodes if n is not node)
    words = summary_line(a_status(*nodes, helper))
    assert "node-1, node-2, node-3 reach each other through helper-1" in words
    assert "do not reach" not in words
    nodes[2].heartbeat.unreachable_ids.append(helper.node_id)
    words = summary_line(a_status(*nodes, helper))
    assert "node-1, node-2 reach each other through helper-1" in words
    for other in ("node-1", "node-2"):
        assert f"{other} and node-3 do not reach each other" in words
    assert "helper-1 and node-3 do not reach each other" in words


def test_each_pair_is_told_by_the_way_it_has() -> None:
    one, two, three, four, helper = nodes = [a_node(f"node-{n}") for n in range(1, 6)]
    one.heartbeat.punched_ids.append(two.node_id)  # two has not said so yet
    one.heartbeat.unreachable_ids.append(three.node_id)
    one.heartbeat.unreachable_ids.append(helper.node_id)
    status = a_status(*nodes)
    assert ways_to_others(one, status.nodes) == (
        "node-2 punched, node-3 not reached, node-4 direct, node-5 not reached"
    )
    assert ways_to_others(two, status.nodes).startswith("node-1 punched, node-3 direct")
    assert "node-1 and node-2 reach each other, punched" in summary_line(status)
    four.is_helper = True
    words = ways_to_others(one, a_status(*nodes).nodes)
    assert words == "node-2 punched, node-3 through node-4, node-4 direct, node-5 through node-4"


def test_a_pair_that_another_node_carries_for_is_told_by_that_ones_name() -> None:
    one, two, three, gone = nodes = [a_node(f"node-{n}") for n in range(1, 5)]
    gone.state = status_pb2.NODE_STATE_LOST
    one.heartbeat.unreachable_ids.append(two.node_id)
    two.heartbeat.through.add(node_id=one.node_id, through_id=three.node_id)
    words = summary_line(a_status(*nodes))
    assert "node-1, node-2 reach each other through node-3" in words
    assert "do not reach" not in words
    for node in (one, two):
        assert " through node-3" in ways_to_others(node, nodes)
    two.heartbeat.through[0].through_id = gone.node_id
    assert "node-1 and node-2 do not reach each other" in summary_line(a_status(*nodes))
    assert ways_to_others(one, nodes) == "node-2 not reached, node-3 direct"


def test_a_pair_between_which_large_packets_get_lost_is_told_with_the_command_that_mends_it() -> (
    None
):
    one, two, three = nodes = [a_node(f"node-{n}") for n in range(1, 4)]
    for field in (one.heartbeat.unreachable_ids, one.heartbeat.narrow_ids):
        field.append(two.node_id)
    words = summary_line(a_status(*nodes))
    assert "between node-1 and node-2 only small packets get through" in words
    assert "mtu 1280" in words and "do not reach" not in words
    assert ways_to_others(two, nodes) == "node-1 only small packets get through, node-3 direct"
    one.heartbeat.through.add(node_id=two.node_id, through_id=three.node_id)
    assert "node-1, node-2 reach each other through node-3" in summary_line(a_status(*nodes))
    told = ways_to_others(two, nodes)
    assert told == "node-1 through node-3 (only small packets get through), node-3 direct"


def test_whom_a_node_reaches_by_its_proxy_is_told_on_both_sides() -> None:
    one, two, three = nodes = [a_node(f"node-{n}") for n in range(1, 4)]
    one.heartbeat.by_proxy_ids.extend([two.node_id, three.node_id, "gone"])
    assert ways_to_others(one, nodes) == "node-2 by proxy, node-3 by proxy"
    assert ways_to_others(two, nodes) == "node-1 by proxy, node-3 direct"
    assert "node-1 reaches node-2, node-3 by proxy" in summary_line(a_status(*nodes))
    two.heartbeat.unreachable_ids.append(one.node_id)
    assert ways_to_others(one, nodes) == "node-2 not reached, node-3 by proxy"
    one.state = status_pb2.NODE_STATE_LOST
    assert "proxy" not in summary_line(a_status(*nodes))


def test_of_a_node_that_was_not_heard_since_the_restart_nobody_is_warned() -> None:
    """It may have left meanwhile, and the other does not know yet."""
    nodes = [a_node(f"node-{n}") for n in range(1, 4)]
    one, two = nodes[:2]
    one.heartbeat.unreachable_ids.append(two.node_id)
    assert "node-1 and node-2 do not reach each other" in summary_line(a_status(*nodes))
    two.is_unheard, two.silent_seconds, two.device = True, 4.0, "cpu"
    assert "reach" not in summary_line(a_status(*nodes))
    assert ways_to_others(one, nodes) == "node-3 direct"
    assert node_facts(two)["heard"] == "before the restart"
    two.is_unheard = False
    assert node_facts(two)["heard"] == "4.0 s ago"
    assert node_facts(status_pb2.NodeStatus(state=status_pb2.NODE_STATE_UNAPPROVED))["heard"] == "-"


def test_a_pair_that_says_both_is_not_reached() -> None:
    one, two = a_node("node-1"), a_node("node-2")
    one.heartbeat.punched_ids.append(two.node_id)
    two.heartbeat.unreachable_ids.append(one.node_id)  # it knows of the hole's end first
    words = summary_line(a_status(one, two))
    assert "node-1 and node-2 do not reach each other" in words
    assert "punched" not in words


def test_a_router_that_no_hole_can_be_punched_in_is_named() -> None:
    one, two = a_node("node-1"), a_node("node-2")
    one.heartbeat.unreachable_ids.append(two.node_id)
    two.has_symmetric_router = True
    told = "node-1 and node-2 do not reach each other (symmetric router: node-2)"
    assert told in summary_line(a_status(one, two))
