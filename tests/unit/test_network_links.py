"""The network lab's arithmetic: rates, delays, loss, cuts and firewalls, without a socket or a clock."""

import math
from ipaddress import IPv4Address
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.network.links import Link, Network, Packet, Pipe, Traffic, opens_a_conversation
from protocol.errors import UsageError

ADDRESSES = {
    "one": IPv4Address("10.99.0.1"),
    "other": IPv4Address("10.99.0.2"),
    "third": IPv4Address("10.99.0.3"),
}
TCP, UDP, ICMP = 6, 17, 1
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10


def ipv4(
    target: str = "other",
    *,
    protocol: int = UDP,
    body: bytes = b"",
    size: int = 0,
    fragment_offset: int = 0,
    options: bytes = b"",
) -> bytes:
    header = bytearray(20)
    header[0] = 0x40 | (5 + len(options) // 4)
    header[6:8] = fragment_offset.to_bytes(2, "big")
    header[9] = protocol
    header[16:20] = ADDRESSES[target].packed
    return (bytes(header) + options + body).ljust(size, b"\0")


def tcp(flags: int) -> bytes:
    return bytes(12) + bytes([0x50, flags]) + bytes(6)


def packet(size: int, mark: int = 0) -> Packet:
    return Packet("one", "other", bytes([mark]) * size)


def pipe(link: Link, *, seed: int = 0, bits_per_second: float = math.inf) -> Pipe:
    made = Pipe(lottery=Random(seed))
    made.set(link, bits_per_second=bits_per_second, now=0.0)
    return made


def network(**links: Link) -> Network:
    free = {host: Link() for host in ADDRESSES}
    return Network(free | links, ADDRESSES, seed=0, now=0.0)


def hosts_reached(net: Network, now: float) -> list[str]:
    return [host for host, _ in net.deliveries(now)]


def test_a_packet_takes_the_time_of_its_bits_and_then_the_delay() -> None:
    wire = pipe(Link(delay_seconds=0.5), bits_per_second=8000)
    for _ in range(2):
        assert wire.offer(packet(1000), 0.0)
    assert wire.arrivals(1.49) == []
    assert wire.next_at() == 1.5
    assert [arrival.at for arrival in wire.arrivals(2.5)] == [1.5, 2.5]
    assert wire.next_at() == math.inf


def test_a_wire_that_was_idle_saves_nothing_up() -> None:
    wire = pipe(Link(), bits_per_second=8000)
    wire.offer(packet(1000), 0.0)
    for _ in range(2):
        wire.offer(packet(1000), 100.0)
    assert [arrival.at for arrival in wire.arrivals(200)] == [1.0, 101.0, 102.0]


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(20, 1500), st.booleans()), max_size=60),
    st.floats(1e3, 1e6),
)
def test_a_wire_never_carries_more_than_rate_times_time_however_late_one_looks(
    offers: list[tuple[float, int, bool]], rate: float
) -> None:
    """No more than rate × time in any stretch, give or take the packet that it begins with."""
    wire = pipe(Link(buffer_bytes=20_000), bits_per_second=rate)
    arrived, now = [], 0.0
    for gap, size, is_looked_at in offers:
        now += gap
        arrived += wire.arrivals(now) if is_looked_at else []
        wire.offer(packet(size), now)
    arrived += wire.arrivals(math.inf)
    for first in range(len(arrived)):
        num_bytes = 0
        for later in arrived[first + 1 :]:
            num_bytes += len(later.packet.content)
            stretch = later.at - arrived[first].at
            assert num_bytes * 8 <= rate * stretch * (1 + 1e-9) + 1e-3


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(20, 1500)), min_size=1, max_size=40))
def test_who_looks_late_sees_the_same_times_as_who_looks_often(
    offers: list[tuple[float, int]],
) -> None:
    link = Link(delay_seconds=0.1, jitter_seconds=0.1, loss=0.2, buffer_bytes=3000)
    often, late = (pipe(link, bits_per_second=20e3) for _ in range(2))
    seen, now = [], 0.0
    for gap, size in offers:
        now += gap
        seen += often.arrivals(now)
        assert often.offer(packet(size), now) == late.offer(packet(size), now)
    assert seen + often.arrivals(1e9) == late.arrivals(1e9)


def test_what_does_not_fit_into_the_buffer_is_dropped() -> None:
    wire = pipe(Link(buffer_bytes=2500), bits_per_second=8000)
    assert [wire.offer(packet(1000), 0.0) for _ in range(3)] == [True, True, False]
    assert wire.offer(packet(1000), 1.0)  # the first has left by now
    assert len(wire.arrivals(10)) == 3


def test_a_packet_larger_than_the_buffer_passes_an_empty_one() -> None:
    wire = pipe(Link(buffer_bytes=10), bits_per_second=8000)
    assert wire.offer(packet(1000), 0.0)
    assert not wire.offer(packet(1), 0.0)


def test_jitter_delays_by_no_more_than_it_says_and_nothing_overtakes() -> None:
    wire = pipe(Link(delay_seconds=1.0, jitter_seconds=0.5))
    for number in range(200):
        wire.offer(packet(20, number), number / 100)
    arrived = wire.arrivals(1e9)
    assert [arrival.packet.content[0] for arrival in arrived] == list(range(200))
    late = [arrival.at - number / 100 - 1.0 for number, arrival in enumerate(arrived)]
    assert min(late) >= 0 and 0.4 < max(late) <= 0.5
    assert sorted(arrival.at for arrival in arrived) == [arrival.at for arrival in arrived]


def lost(link: Link, *, seed: int) -> list[bool]:
    wire = pipe(link, seed=seed)
    for _ in range(2000):
        wire.offer(packet(20), 0.0)
    return [arrival.is_lost for arrival in wire.arrivals(1e9)]


def test_the_seed_says_which_packets_are_lost_and_jitter_does_not() -> None:
    assert lost(Link(loss=0.1), seed=1) == lost(Link(loss=0.1), seed=1)
    assert lost(Link(loss=0.1), seed=1) != lost(Link(loss=0.1), seed=2)
    assert lost(Link(loss=0.1), seed=1) == lost(Link(loss=0.1, jitter_seconds=1), seed=1)
    assert 0.08 < sum(lost(Link(loss=0.1), seed=1)) / 2000 < 0.12
    assert not any(lost(Link(), seed=1))
    assert all(lost(Link(loss=1), seed=1))


def test_loss_leaves_jitter_alone() -> None:
    def times(link: Link) -> list[float]:
        wire = pipe(link)
        for number in range(50):
            wire.offer(packet(20), float(number))
        return [arrival.at for arrival in wire.arrivals(1e9)]

    assert times(Link(jitter_seconds=0.5)) == times(Link(jitter_seconds=0.5, loss=0.5))


def test_every_direction_of_every_link_has_its_own_luck() -> None:
    def arrived(source: str, target: str, lossy: str, seed: int = 0) -> list[bytes]:
        links = dict.fromkeys(ADDRESSES, Link()) | {lossy: Link(loss=0.5)}
        net = Network(links, ADDRESSES, seed=seed, now=0.0)
        for number in range(64):
            net.send(source, ipv4(target, body=bytes([number])), 0.0)
        return [content[-1:] for _, content in net.deliveries(0.0)]

    lucks = [
        arrived("one", "other", lossy="one"),  # up
        arrived("other", "one", lossy="one"),  # down
        arrived("third", "other", lossy="third"),
        arrived("other", "third", lossy="third"),
        arrived("one", "other", lossy="one", seed=1),
        arrived("other", "one", lossy="one", seed=1),
    ]
    assert all(10 < len(luck) < 54 for luck in lucks)
    assert len({tuple(luck) for luck in lucks}) == len(lucks)


def test_a_faster_link_frees_what_waits_for_a_slow_one() -> None:
    wire = pipe(Link(), bits_per_second=8)
    for _ in range(3):
        wire.offer(packet(1000), 0.0)
    wire.set(Link(delay_seconds=0.25), bits_per_second=8000, now=10.0)
    assert [arrival.at for arrival in wire.arrivals(20)] == [11.25, 12.25, 13.25]


def test_what_left_the_wire_before_a_change_keeps_its_delay() -> None:
    wire = pipe(Link(delay_seconds=5.0))
    wire.offer(packet(20), 1.0)
    wire.set(Link(delay_seconds=1.0), bits_per_second=math.inf, now=2.0)
    wire.offer(packet(20), 2.0)
    assert [arrival.at for arrival in wire.arrivals(20)] == [6.0, 6.0]  # and nothing overtakes


def test_a_path_takes_the_senders_uplink_and_the_receivers_downlink() -> None:
    net = network(
        one=Link(up_bits_per_second=8000, down_bits_per_second=80, delay_seconds=0.25),
        other=Link(up_bits_per_second=800, down_bits_per_second=4000, delay_seconds=0.5),
    )
    net.send("one", ipv4("other", size=1000), 0.0)
    assert net.deliveries(3.74) == []  # 1 s + 0.25 s up, 2 s + 0.5 s down
    assert hosts_reached(net, 3.75) == ["other"]
    net.send("other", ipv4("one", size=1000), 10.0)
    assert hosts_reached(net, 10 + 10 + 0.5 + 100 + 0.24) == []
    assert hosts_reached(net, 10 + 10 + 0.5 + 100 + 0.25) == ["one"]


def test_two_senders_share_the_receivers_downlink_in_the_order_of_arrival() -> None:
    net = network(
        one=Link(delay_seconds=0.2),
        third=Link(delay_seconds=0.1),
        other=Link(down_bits_per_second=8000),
    )
    net.send("one", ipv4("other", size=1000), 0.0)
    net.send("third", ipv4("other", size=500), 0.0)
    assert [len(content) for _, content in net.deliveries(0.6)] == [500]
    assert [len(content) for _, content in net.deliveries(1.6)] == [1000]


def test_a_network_says_when_it_wants_to_be_looked_at() -> None:
    net = network(one=Link(delay_seconds=0.25), other=Link(delay_seconds=0.5))
    assert net.next_at() == math.inf
    net.send("one", ipv4("other"), 1.0)
    assert net.next_at() == 1.25
    assert net.deliveries(1.25) == []
    assert net.next_at() == 1.75
    assert hosts_reached(net, 1.75) == ["other"]
    assert net.next_at() == math.inf


def test_a_cut_of_one_direction_leaves_the_other() -> None:
    net = network()
    net.cut([("one", "other")])
    for source, target in (("one", "other"), ("other", "one"), ("one", "third")):
        net.send(source, ipv4(target), 0.0)
    assert sorted(hosts_reached(net, 0.0)) == ["one", "third"]
    assert net.traffic["one", "other"] == Traffic(cut_packets=1)
    net.mend([("one", "other")])
    net.send("one", ipv4("other"), 1.0)
    assert hosts_reached(net, 1.0) == ["other"]


def test_a_router_that_forgets_passes_only_what_begins_later() -> None:
    net = network()
    began = ipv4("other", protocol=TCP, body=tcp(SYN))
    net.send("one", began, 0.0)
    assert hosts_reached(net, 0.0) == ["other"]
    net.forget_conversations("one")
    net.send("one", ipv4("third", protocol=TCP, body=tcp(ACK)), 1.0)
    net.send("other", ipv4("third", protocol=TCP, body=tcp(ACK)), 1.0)
    assert hosts_reached(net, 1.0) == ["third"]  # another host's
    net.send("one", began, 2.0)
    net.send("one", ipv4("other", protocol=TCP, body=tcp(ACK)), 2.0)
    assert hosts_reached(net, 2.0) == ["other", "other"]
    assert net.traffic["one", "third"].cut_packets == 1


def test_what_is_sent_to_the_address_before_goes_nowhere() -> None:
    net = network()
    net.move("other", IPv4Address("10.99.0.9"))
    net.send("one", ipv4("other"), 0.0)
    assert net.deliveries(0.0) == []
    assert net.num_strays == 1
    moved = bytearray(ipv4("other"))
    moved[16:20] = IPv4Address("10.99.0.9").packed
    net.send("one", bytes(moved), 1.0)
    assert hosts_reached(net, 1.0) == ["other"]


def test_what_is_past_the_middle_when_the_cut_comes_still_arrives() -> None:
    net = network(one=Link(delay_seconds=1.0), other=Link(delay_seconds=1.0))
    net.send("one", ipv4("other"), 0.0)
    net.send("one", ipv4("other"), 0.5)
    assert net.deliveries(1.2) == []
    net.cut([("one", "other")])
    assert hosts_reached(net, 9.0) == ["other"]
    assert net.traffic["one", "other"].cut_packets == 1


def test_every_packet_is_counted_once_whatever_becomes_of_it() -> None:
    net = network(
        one=Link(up_bits_per_second=8e5, loss=0.2, buffer_bytes=5000),
        other=Link(down_bits_per_second=4e5, loss=0.2, buffer_bytes=3000),
    )
    net.set_firewall("other", is_up=True)
    delivered = []
    for number in range(400):
        body = tcp(SYN) if number % 5 == 0 else tcp(ACK)
        net.send("one", ipv4("other", protocol=TCP, body=body, size=1000), number / 200)
        delivered += net.deliveries(number / 200)
        if number == 300:
            net.cut([("one", "other")])
    delivered += net.deliveries(1e9)
    traffic = net.traffic["one", "other"]
    assert traffic.delivered_packets == len(delivered)
    assert traffic.delivered_bytes == 1000 * len(delivered)
    assert traffic.delivered_packets + traffic.dropped_packets == 400
    for kind in ("lost", "overflowed", "cut", "refused"):
        assert getattr(traffic, f"{kind}_packets") > 0


@pytest.mark.parametrize(
    ("content", "opens"),
    [
        (ipv4(protocol=TCP, body=tcp(SYN)), True),
        (ipv4(protocol=TCP, body=tcp(SYN | 0xC0)), True),  # with the bits of congestion control
        (ipv4(protocol=TCP, body=tcp(SYN | ACK)), False),
        (ipv4(protocol=TCP, body=tcp(ACK)), False),
        (ipv4(protocol=TCP, body=tcp(FIN | ACK)), False),
        (ipv4(protocol=TCP, body=tcp(RST)), False),
        (ipv4(protocol=TCP, body=tcp(SYN), options=bytes(8)), True),
        (ipv4(protocol=TCP, body=tcp(ACK), options=b"\x02" * 40), False),
        (ipv4(protocol=TCP, body=b"\0" * 8), True),  # flags cut off: nothing honest
        (ipv4(protocol=TCP, fragment_offset=185), False),
        (ipv4(protocol=TCP, body=tcp(SYN), fragment_offset=0x4000), True),  # "do not fragment"
        (ipv4(protocol=UDP, body=bytes(8)), True),
        (ipv4(protocol=ICMP, body=b"\x08" + bytes(7)), True),
        (ipv4(protocol=ICMP, body=b"\x00" + bytes(7)), False),
        (ipv4(protocol=ICMP, body=b"\x03" + bytes(7)), False),  # "too big" must get through
    ],
)
def test_a_firewall_refuses_what_may_open_a_conversation(content: bytes, opens: bool) -> None:
    assert opens_a_conversation(content) is opens
    net = network()
    net.set_firewall("other", is_up=True)
    net.send("one", content, 0.0)
    assert hosts_reached(net, 0.0) == ([] if opens else ["other"])
    assert net.traffic["one", "other"].refused_packets == opens
    net.set_firewall("other", is_up=False)
    net.send("one", content, 1.0)
    assert hosts_reached(net, 1.0) == ["other"]


def test_a_firewall_may_let_out_one_port_of_tcp_alone() -> None:
    def to(port: int, flags: int = SYN) -> bytes:
        body = bytearray(tcp(flags))
        body[2:4] = port.to_bytes(2)
        return ipv4("other", protocol=TCP, body=bytes(body))

    net = network()
    net.set_firewall("one", is_up=True, lets_out=443)
    for content, passes in (
        (to(443), True),
        (to(7700), False),
        (to(7700, ACK), True),  # of what has been let in
        (ipv4("other", protocol=UDP, body=bytes([0, 9, 1, 187]) + bytes(4)), False),
    ):
        net.send("one", content, 0.0)
        assert hosts_reached(net, 0.0) == (["other"] if passes else [])
    net.set_firewall("one", is_up=False)
    net.send("one", to(7700), 1.0)
    assert hosts_reached(net, 1.0) == ["other"]


def test_a_firewalled_host_may_open_conversations_itself() -> None:
    net = network()
    net.set_firewall("one", is_up=True)
    net.send("one", ipv4("other", protocol=TCP, body=tcp(SYN)), 0.0)
    net.send("other", ipv4("one", protocol=TCP, body=tcp(SYN | ACK)), 0.0)
    assert sorted(hosts_reached(net, 0.0)) == ["one", "other"]


@pytest.mark.parametrize(
    "content",
    [b"", ipv4()[:19], bytes([0x60]) + ipv4()[1:], ipv4("one"), ipv4()[:16] + bytes([8, 8, 8, 8])],
    ids=["empty", "cut off", "IPv6", "for the sender", "for nobody here"],
)
def test_what_is_for_nobody_in_the_lab_is_a_stray(content: bytes) -> None:
    net = network()
    net.send("one", content, 0.0)
    assert (net.deliveries(0.0), net.num_strays) == ([], 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"up_bits_per_second": 0},
        {"down_bits_per_second": -1.0},
        {"delay_seconds": -0.1},
        {"jitter_seconds": math.inf},
        {"loss": 1.01},
        {"loss": math.nan},
        {"buffer_bytes": 0},
    ],
)
def test_a_link_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(UsageError, match=f"{name} is {value}"):
        Link(**wrong)  # type: ignore[arg-type]
