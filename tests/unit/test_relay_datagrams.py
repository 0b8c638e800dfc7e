"""Datagrams of nodes behind routers, whose places a coordinator hears through its relay."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.relay.server import MOST_DATAGRAMS
from coordinator.relay.through import Through
from coordinator.services.outside import TOKEN_BYTES, Lookout
from protocol.errors import ProtocolMismatchError
from protocol.wire.rounds import NodeId
from tests.relay_scene import AT_HOME, HOST, World, free_port, said, until

NODE, TOKEN = NodeId("a" * 64), b"t" * TOKEN_BYTES


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@contextmanager
def datagram_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind((HOST, 0))
        made.setblocking(False)
        yield made


def here(node: socket.socket) -> tuple[str]:
    return (f"/ip4/{HOST}/udp/{node.getsockname()[1]}/quic-v1",)


async def test_a_coordinator_hears_through_its_relay_from_where_datagrams_come(
    world: World,
) -> None:
    port, lookout = free_port(), Lookout(asyncio.get_running_loop().time)
    async with world.relay(), world.coordinator(port, lookout=lookout):
        assert lookout.ports == (port,)
        assert lookout.of(NODE, TOKEN) == ()
        with datagram_socket() as node:
            for foreign in (b"", b"short", b"x" * TOKEN_BYTES, TOKEN + b"more"):
                node.sendto(foreign, (HOST, port))
            node.sendto(TOKEN, (HOST, port))
            await until(lambda: lookout.of(NODE, TOKEN) == here(node))
            with pytest.raises(BlockingIOError):
                node.recv(100)  # nobody can have it send anything to anybody
        with datagram_socket() as node:  # its router has given it another port
            node.sendto(TOKEN, (HOST, port))
            await until(lambda: lookout.of(NODE, TOKEN) == here(node))
        assert await said(port) == b"hello"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HOST, port))  # a relay that is gone has left it


async def test_streams_are_carried_whole_while_strangers_send_datagrams(world: World) -> None:
    port, lookout = free_port(), Lookout(asyncio.get_running_loop().time)
    async with world.relay(), world.coordinator(port, lookout=lookout):
        with datagram_socket() as stranger:
            for number in range(40):
                for _ in range(20):
                    stranger.sendto(b"s" * TOKEN_BYTES, (HOST, port))
                word = b"%d" % number * 1000
                assert await said(port, word) == word


async def test_of_a_flood_of_datagrams_a_coordinator_hears_no_more_than_it_bears(
    world: World,
) -> None:
    heard: list[bytes] = []

    class Counting(Lookout):
        def saw(self, datagram: bytes, host: str, port: int, on_port: int) -> None:
            heard.append(datagram)

    port, loop = free_port(), asyncio.get_running_loop()
    began = loop.time()
    async with world.relay(), world.coordinator(port, lookout=Counting(loop.time)):
        with datagram_socket() as stranger:
            for _ in range(3 * MOST_DATAGRAMS):
                stranger.sendto(b"s" * TOKEN_BYTES, (HOST, port))
                await asyncio.sleep(0)
        assert await said(port) == b"hello"
        seconds = 2 + int(loop.time() - began)  # that were begun
        assert 0 < len(heard) <= seconds * MOST_DATAGRAMS


async def test_without_its_port_of_udp_a_relay_carries_streams_alone(world: World) -> None:
    port, lookout = free_port(), Lookout(asyncio.get_running_loop().time)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, port))
        async with world.relay(), world.coordinator(port, lookout=lookout):
            assert lookout.ports == ()
            assert await said(port) == b"hello"


@pytest.mark.parametrize(
    "message",
    [
        {"saw": "zz", "host": HOST, "port": 1},
        {"saw": "00", "host": "nowhere", "port": 1},
        {"saw": "00", "host": HOST, "port": 0},
        {"saw": "00", "host": HOST, "port": "1"},
        {"saw": 3, "host": HOST, "port": 1},
        {"saw": "00"},
    ],
)
async def test_what_no_relay_can_have_seen_is_not_believed(
    world: World, message: dict[str, object]
) -> None:
    lookout = Lookout(asyncio.get_running_loop().time)
    port = free_port()
    through = Through(
        world.carriage(), name="run", host=AT_HOME, ports={port: port}, lookout=lookout
    )
    with pytest.raises(ProtocolMismatchError, match="what cannot be"):
        through._saw(message)
