"""When the core has two members dial each other, which only their routers keep apart."""

from collections.abc import Sequence

from coordinator.swarm.events import Tell
from coordinator.swarm.reach import (
    FIRST_WAIT_SECONDS,
    LAST_WAIT_SECONDS,
    MOST_PAIRS_AT_ONCE,
    MOST_SYMMETRIC_TRIES,
)
from protocol.wire.messages import PunchAsked
from tests.unit.swarm_scene import INITIAL, Scene


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


def by_ipv6(site: int, host: int = 1) -> str:
    """Where a member says that it is."""
    return f"/ip6/2a02:{site}::{host}/udp/4001/quic-v1"


def beat(
    scene: Scene, name: str, *unreachable: str, outside: tuple[str, ...] = (), six: str = ""
) -> None:
    scene.beat(
        name, at=0, digest=INITIAL, unreachable=unreachable, outside=outside, outside_by_ipv6=six
    )


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


def num_tries(scene: Scene, *, seconds: float) -> int:
    """How often the pair is told, while it stays apart."""
    num = 0
    for _ in range(int(seconds / 5)):
        scene.now += 5
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


def places_tried(
    scene: Scene, num: int, *, a: tuple[tuple[str, ...], str], b: tuple[tuple[str, ...], str]
) -> list[set[str]]:
    """Where the two are told to dial each other, while they stay apart: one pair for each try."""
    found = []
    for _ in range(num):
        scene.now += LAST_WAIT_SECONDS
        beat(scene, "a", "b", outside=a[0], six=a[1])
        beat(scene, "b", "a", outside=b[0], six=b[1])
        places = {place for _, _, place in told(scene)}
        if places:
            found.append(places)
    return found


def test_where_both_have_ipv6_they_dial_by_it_first_and_then_in_turns() -> None:
    six, other = by_ipv6(1), by_ipv6(2)
    tried = places_tried(scene(), 5, a=(A, six), b=(B, other))
    assert tried[:4] == [{six, other}, {A[0], B[0]}, {six, other}, {A[0], B[0]}]
    # No router shows them: the coordinator hears no datagrams, or by IPv6 alone.
    assert places_tried(scene(), 3, a=((), six), b=((), other)) == 3 * [{six, other}]
    assert places_tried(scene(), 3, a=(A, six), b=(B, "")) == 3 * [{A[0], B[0]}]
    assert places_tried(scene(), 3, a=(A, ""), b=((), other)) == []


def test_symmetric_routers_are_no_matter_by_ipv6() -> None:
    six, other = by_ipv6(1), by_ipv6(2)
    tried = places_tried(scene(), 12, a=(OF_MANY, six), b=(B, other))
    assert tried[MOST_SYMMETRIC_TRIES:] == (12 - MOST_SYMMETRIC_TRIES) * [{six, other}]


def test_addresses_of_ipv6_for_one_site_are_tried_there_alone() -> None:
    here, beside, elsewhere = (
        f"/ip6/{host}/udp/1/quic-v1" for host in ("fd00:1:2:3::1", "fd00:1:2:4::1", "fd00:9::1")
    )
    assert places_tried(scene(), 1, a=((), here), b=((), beside)) == [{here, beside}]
    assert places_tried(scene(), 1, a=((), here), b=((), elsewhere)) == []
    assert places_tried(scene(), 1, a=((), here), b=((), by_ipv6(1))) == []


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
