"""What members are called, and which of two processes with one key is attached."""

from dataclasses import replace

import pytest

from coordinator.swarm.events import Event, Started, StreamBroken, Ticked, Woke
from coordinator.swarm.members import MemberState
from coordinator.swarm.membership import roster_of
from protocol.errors import CopyAttachedError, SessionEndedError
from protocol.wire.rounds import NodeId
from tests.unit.swarm_scene import INITIAL, Scene


def names(scene: Scene) -> dict[str, str]:
    return {entry.node_id: entry.node_name for entry in roster_of(scene.state)}


def broken(scene: Scene, name: str) -> StreamBroken:
    return StreamBroken(node_id=NodeId(name), session_id=scene.member(name).session_id)


def test_nodes_of_one_name_are_numbered_and_keep_their_numbers() -> None:
    scene = Scene(min_nodes=4)
    for node_id in ("a", "b", "c"):
        scene.attach(node_id, node_name="vm")
    assert names(scene) == {"a": "vm", "b": "vm-2", "c": "vm-3"}
    assert "vm-2" not in scene.reason  # all are ready
    scene.attach("d", node_name="vm-2", at=1)
    assert names(scene)["d"] == "vm-2-2"
    assert "vm-2-2 holds round 1" in scene.reason
    scene.leave("a")
    for node_id in ("c", "b"):
        scene.attach(node_id, node_name="vm")
    assert names(scene) == {"b": "vm-2", "c": "vm-3", "d": "vm-2-2"}
    scene.attach("a", node_name="vm")
    assert names(scene)["a"] == "vm"


def test_a_node_that_asks_for_another_name_gets_it_and_leaves_its_own_to_others() -> None:
    scene = Scene(min_nodes=3)
    scene.attach("a", "b", node_name="vm")
    scene.attach("b", node_name="attic")
    scene.attach("c", node_name="vm")
    assert names(scene) == {"a": "vm", "b": "attic", "c": "vm-2"}


def test_another_process_of_a_node_that_is_heard_is_refused_and_changes_nothing() -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a")
    for _ in range(10):
        scene.wait(10)
        scene.beat("a", at=0, digest=INITIAL)
        before = scene.state
        with pytest.raises(CopyAttachedError, match="key of a is attached") as refused:
            scene.attach("a", is_beside=True)
        assert "stop one of the two" in refused.value.next_step
        assert scene.state is before


def test_a_process_whose_session_broke_attaches_again_while_it_is_still_heard() -> None:
    scene = Scene(min_nodes=2)
    scene.attach("a")
    scene.attach("a", is_new_process=False)
    assert scene.member("a").session_id == 2


def test_a_node_that_is_started_again_attaches_at_once_for_its_stream_is_broken() -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a")
    scene.do(broken(scene, "a"))
    scene.attach("a", is_beside=True)
    assert scene.member("a").session_id == 2


def test_a_node_whose_stream_broke_and_that_is_heard_again_is_not_replaced() -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a")
    scene.do(broken(scene, "a"))
    scene.beat("a", at=0, digest=INITIAL)
    with pytest.raises(CopyAttachedError):
        scene.attach("a", is_beside=True)


def test_the_second_process_takes_over_when_the_first_is_silent_for_its_lease() -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a", "b")
    first = scene.member("a").session_id
    scene.now += 15  # and nobody has noticed yet
    scene.attach("a", is_beside=True)
    assert scene.member("a").state is MemberState.READY
    with pytest.raises(SessionEndedError):
        scene.beat("a", at=0, digest=INITIAL, session_id=first)
    scene.do(Ticked())
    scene.leave("a")
    scene.attach("a", is_beside=True)  # who has said goodbye is in nobody's way


def test_the_first_process_waits_in_its_turn_once_the_second_has_taken_over() -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a")
    first = scene.member("a").process_id
    scene.do(broken(scene, "a"))
    scene.attach("a", is_beside=True)
    scene._num_processes["a"] = first - 1  # the first one comes back
    with pytest.raises(CopyAttachedError):
        scene.attach("a", is_beside=True)


def test_a_stream_that_broke_while_the_coordinator_slept_costs_no_lease_and_locks_nobody_out() -> (
    None
):
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a")
    lease_until = scene.member("a").lease_until
    scene.do(replace(broken(scene, "a"), may_be_ours=True))
    assert scene.member("a").lease_until == lease_until
    scene.attach("a", is_beside=True)
    assert scene.member("a").session_id == 2


@pytest.mark.parametrize("event", [Started(), Woke(pause_seconds=30)])
def test_after_a_coordinator_could_hear_nobody_a_new_process_is_let_in(event: Event) -> None:
    scene = Scene(min_nodes=2, lease_seconds=15)
    scene.attach("a", "b")
    scene.do(event)
    scene.beat("b", at=0, digest=INITIAL)
    scene.attach("a", is_beside=True)
    with pytest.raises(CopyAttachedError):
        scene.attach("b", is_beside=True)
