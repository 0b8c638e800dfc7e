"""From where nodes' datagrams come: what strangers send says nothing, and what is old neither."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from coordinator.services.outside import FRESH_SECONDS, TOKEN_BYTES, Lookout, listen
from protocol.errors import BadDataError
from protocol.wire.rounds import NodeId

ME, OTHER = NodeId("me"), NodeId("other")
MINE, THEIRS = b"m" * TOKEN_BYTES, b"t" * TOKEN_BYTES
HERE = "/ip4/203.0.113.1/udp/20000/quic-v1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookout(clock: Clock) -> Lookout:
    lookout = Lookout(clock)
    assert lookout.of(ME, MINE) == ()
    return lookout


def see(lookout: Lookout, datagram: bytes = MINE, *, port: int = 20_000, on_port: int = 1) -> None:
    lookout.saw(datagram, "203.0.113.1", port, on_port)


def test_a_node_is_where_its_datagrams_come_from(lookout: Lookout) -> None:
    see(lookout)
    assert lookout.of(ME, MINE) == (HERE,)
    see(lookout, port=7, on_port=2)
    assert lookout.of(ME, MINE) == (HERE, HERE.replace("20000", "7"))


def test_what_a_stranger_sends_is_not_kept(lookout: Lookout) -> None:
    see(lookout, THEIRS)
    assert lookout.of(OTHER, THEIRS) == ()  # it came before a session told the token
    see(lookout, MINE + b"more")
    see(lookout, b"")
    assert lookout.of(ME, MINE) == ()


def test_what_was_seen_long_ago_does_not_count(lookout: Lookout, clock: Clock) -> None:
    see(lookout)
    clock.now += FRESH_SECONDS + 1
    assert lookout.of(ME, MINE) == ()


def test_a_token_that_another_node_has_is_not_taken_from_it(lookout: Lookout) -> None:
    lookout.of(OTHER, MINE)
    see(lookout)
    assert lookout.of(OTHER, MINE) == ()
    assert lookout.of(ME, MINE) == (HERE,)


def test_a_new_token_and_none_forget_what_was_seen_by_the_one_before(lookout: Lookout) -> None:
    see(lookout)
    assert lookout.of(ME, THEIRS) == ()
    see(lookout)
    assert lookout.of(ME, THEIRS) == ()
    see(lookout, THEIRS)
    assert lookout.of(ME, b"") == ()
    assert lookout.of(ME, THEIRS) == ()


def test_what_is_no_token_is_refused(lookout: Lookout) -> None:
    with pytest.raises(BadDataError, match="a token of 3 bytes, where 16 are wanted"):
        lookout.of(ME, b"abc")


async def test_datagrams_are_heard_by_udp_on_the_ports_and_never_answered(
    lookout: Lookout,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listening = await listen(lookout.saw, "127.0.0.1", (port,))
    try:
        assert listening.ports == (port,)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            node.bind(("127.0.0.1", 0))
            node.setblocking(False)
            node.sendto(b"a stranger", ("127.0.0.1", port))
            node.sendto(MINE, ("127.0.0.1", port))
            here = f"/ip4/127.0.0.1/udp/{node.getsockname()[1]}/quic-v1"
            while not (seen := lookout.of(ME, MINE)):  # noqa: ASYNC110 - the socket sets no event
                await asyncio.sleep(0)
            assert seen == (here,)
            with pytest.raises(BlockingIOError):
                node.recv(100)
    finally:
        listening.close()


async def test_a_port_that_is_taken_is_left_out(lookout: Lookout) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        listening = await listen(lookout.saw, "127.0.0.1", (taken.getsockname()[1],))
        listening.close()
    assert listening.ports == ()


async def test_a_coordinator_by_ipv6_alone_hears_no_datagrams_and_blames_no_port(
    lookout: Lookout,
) -> None:
    with capture_logs() as said:
        listening = await listen(lookout.saw, "fd99::1", (7700,))
    assert listening.ports == ()
    assert [line["log_level"] for line in said] == ["info"] and "IPv6 alone" in said[0]["event"]
