"""When the core has two members dial each other, which only their routers keep apart."""

from collections.abc import Sequence

from swarm_scene import INITIAL, Scene

from coordinator.swarm.events import Tell
from coordinator.swarm.punching import (
    FIRST_WAIT_SECONDS,
    LAST_WAIT_SECONDS,
    MOST_PAIRS_AT_ONCE,
    MOST_SYMMETRIC_TRIES,
)
from protocol.wire.messages import PunchAsked


def at(host: int, *ports: int) -> tuple[str, ...]:
    """What each of the coordinator's ports sees of a member."""
    return tuple(f"/ip4/203.0.113.{host}/udp/{port}/quic-v1" for port in ports)


A, B = at(1, 20_001, 20_001), at(2, 30_002, 30_002)
OF_MANY = at(1, 20_001, 20_002)
"""A router that gives a port for each that is sent to."""


def scene(*names: str) -> Scene:
    scene = Scene(min_nodes=100)  # no round begins
    scene.attach(*(names or ("a", "b")))
    scene.log.clear()
    return scene


def beat(scene: Scene, name: str, *unreachable: str, outside: tuple[str, ...] = ()) -> None:
    scene.beat(name, at=0, digest=INITIAL, unreachable=unreachable, outside=outside)


def told(scene: Scene) -> Sequence[tuple[str, str, str]]:
    """Who was told to dial whom and where, since it was asked last."""
    found = [
        (action.to[0], action.message.node_id, action.message.multiaddr)
        for action in scene.log
        if isinstance(action, Tell) and isinstance(action.message, PunchAsked) and action.to
    ]
    scene.log.clear()
    return found


def apart(scene: Scene, a: tuple[str, ...] = A, b: tuple[str, ...] = B) -> None:
    """Both say that they do not reach each other, and were seen."""
    beat(scene, "a", "b", outside=a)
    beat(scene, "b", "a", outside=b)


def num_tries(scene: Scene, *, seconds: float, every: float = 5.0) -> int:
    """How often the pair is told, while it stays apart."""
    num = 0
    for _ in range(int(seconds / every)):
        scene.now += every
        apart(scene)
        num += len(told(scene)) // 2
    return num


def test_both_are_told_at_once_where_the_others_router_lets_it_be_reached() -> None:
    on_stage = scene()
    apart(on_stage)
    assert told(on_stage) == [("a", "b", B[0]), ("b", "a", A[0])]


def test_it_is_enough_that_one_of_them_says_that_it_does_not_reach_the_other() -> None:
    on_stage = scene()
    beat(on_stage, "b", outside=B)
    beat(on_stage, "a", "b", outside=A)
    assert len(told(on_stage)) == 2


def test_nobody_is_told_of_a_member_that_was_not_seen() -> None:
    on_stage = scene()
    beat(on_stage, "b", "a")
    beat(on_stage, "a", "b", outside=A)
    assert told(on_stage) == []


def test_nobody_is_told_to_dial_an_address_in_the_coordinators_own_network() -> None:
    inside, outside = "/ip4/192.168.1.7/udp/1/quic-v1", "/ip4/93.184.215.14/udp/2/quic-v1"
    on_stage = scene()
    apart(on_stage, (inside,), (outside,))
    assert told(on_stage) == []
    for alike in (inside, outside):  # of one network, or both beyond the coordinator's router
        on_stage = scene()
        apart(on_stage, (alike,), (alike.replace("udp/", "udp/1"),))
        assert len(told(on_stage)) == 2


def test_those_that_reach_each_other_are_left_alone() -> None:
    on_stage = scene()
    beat(on_stage, "a", outside=A)
    beat(on_stage, "b", outside=B)
    assert told(on_stage) == []


def test_a_pair_that_stays_apart_is_tried_ever_less_often_and_never_given_up() -> None:
    on_stage = scene()
    apart(on_stage)
    assert told(on_stage)
    assert num_tries(on_stage, seconds=FIRST_WAIT_SECONDS - 5) == 0
    assert num_tries(on_stage, seconds=5) == 1
    assert num_tries(on_stage, seconds=2 * FIRST_WAIT_SECONDS - 5) == 0
    assert num_tries(on_stage, seconds=5) == 1
    assert num_tries(on_stage, seconds=20 * LAST_WAIT_SECONDS) >= 20


def test_a_pair_that_came_to_reach_each_other_is_tried_at_once_when_it_does_not_any_more() -> None:
    on_stage = scene()
    apart(on_stage)
    told(on_stage)
    beat(on_stage, "b")
    beat(on_stage, "a")
    on_stage.now += 1
    apart(on_stage)
    assert len(told(on_stage)) == 2


def test_a_symmetric_router_is_tried_a_few_times_and_then_left_to_helpers() -> None:
    on_stage = scene()
    num = 0
    for _ in range(1000):
        apart(on_stage, a=OF_MANY)
        num += len(told(on_stage)) // 2
        on_stage.now += FIRST_WAIT_SECONDS
    assert num == MOST_SYMMETRIC_TRIES


def test_a_member_that_moves_to_another_router_is_tried_again_but_no_oftener() -> None:
    on_stage = scene()
    for _ in range(100):
        apart(on_stage, a=OF_MANY)
        on_stage.now += FIRST_WAIT_SECONDS
    told(on_stage)
    num = 0
    for host in range(3, 63):  # moves every 5 s
        apart(on_stage, a=at(host, 1, 1))
        num += len(told(on_stage)) // 2
        on_stage.now += 5
    assert num == 60 * 5 / FIRST_WAIT_SECONDS


def test_one_heartbeat_sets_few_pairs_off_and_the_next_ones_the_others() -> None:
    names = [f"n{number:02}" for number in range(20)]
    on_stage = scene("a", *names)
    for host, name in enumerate(names, start=2):
        beat(on_stage, name, outside=at(host, 5, 5))
    beat(on_stage, "a", *names, outside=A)
    assert len(told(on_stage)) == 2 * MOST_PAIRS_AT_ONCE
    beat(on_stage, "a", *names, outside=A)
    beat(on_stage, "a", *names, outside=A)
    assert len(told(on_stage)) == 2 * (len(names) - MOST_PAIRS_AT_ONCE)


def test_a_member_that_has_left_is_not_told_and_nobody_is_told_of_it() -> None:
    on_stage = scene()
    beat(on_stage, "b", outside=B)
    on_stage.leave("b")
    beat(on_stage, "a", "b", outside=A)
    assert told(on_stage) == []
