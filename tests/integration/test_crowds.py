"""Crowds of connections at a real coordinator's ports: they are held to limits, and members get in."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator import ports
from coordinator.app import Coordinator
from coordinator.config import Home, create_home
from coordinator.ports import Connection, Connections, Limits, most_connections, too_many
from coordinator.server import MOST_BEGUN, MOST_READ, WholeMessages
from coordinator.services.enrolment import MAX_AT_ONCE
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from protocol.trust.pki import server_name
from tests.integration.coordinator_scene import (
    LOCAL,
    FakeNode,
    described,
    invite_from,
    joined,
    serving,
)
from tests.relay_scene import free_port, until

PER_ADDRESS = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

Dial = Callable[[int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def literal(name: bytes, value: bytes) -> bytes:
    """A header without compression (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_without_a_body(stream: int, path: bytes = b"/atoll.v1.EnrolmentService/Enrol") -> bytes:
    """HEADERS of a call to join, or another, after which nothing comes."""
    headers = b"".join(
        literal(*header)
        for header in (
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":path", path),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    return len(headers).to_bytes(3, "big") + b"\x01\x04" + stream.to_bytes(4, "big") + headers


async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def half_a_handshake(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await silent(port)
    writer.write(b"\x16\x03\x01")
    return reader, writer


async def over_tls(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def slow_preface(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await over_tls(port)
    writer.write(PREFACE[:5])
    return reader, writer


async def no_call(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await over_tls(port)
    writer.write(PREFACE)
    return reader, writer


def hello_to(name: str) -> Dial:
    """A stranger who has read what the coordinator is called, and wants what members want."""

    async def dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
        reader, writer = await silent(port)
        writer.write(outgoing.read())
        return reader, writer

    return dial


async def calls_without_bodies(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await over_tls(port)
    writer.write(PREFACE + call_without_a_body(1) + call_without_a_body(3))
    return reader, writer


class Crowd:
    """Connections, and how many of them the other end still has."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def comes(self, dial: Dial, port: int, num: int) -> None:
        self._tasks += [asyncio.create_task(self._stay(dial, port)) for _ in range(num)]
        await asyncio.sleep(0)

    @staticmethod
    async def _stay(dial: Dial, port: int) -> None:
        with contextlib.suppress(OSError):  # ended while it shook hands
            reader, writer = await dial(port)
            with contextlib.closing(writer), contextlib.suppress(OSError):
                while await reader.read(1 << 12):
                    pass

    @property
    def num_left(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def leaves(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    crowd = Crowd()
    yield crowd
    await crowd.leaves()


def home_of_few(folder: Path, *, host: str = "127.0.0.1") -> Home:
    config = LOCAL.with_changes(connections_per_address=PER_ADDRESS, host=host)
    return create_home(folder, config=config, text=described)


async def members_of(home: Home, coordinator: Coordinator, num: int) -> list[FakeNode]:
    invite, _ = await invite_from(home, uses=num)
    nodes = [await joined(invite, f"node-{number}") for number in range(num)]
    for node in nodes:
        await node.attach()
        node.subscribe()
        await node.next("roster")
    return nodes


@pytest.mark.parametrize(
    "dial", [silent, half_a_handshake, slow_preface, no_call, calls_without_bodies]
)
async def test_strangers_of_one_address_hold_few_connections_and_others_of_it_join(
    dial: Dial, crowd: Crowd, tmp_path: Path
) -> None:
    home = home_of_few(tmp_path / "run")
    async with serving(home) as coordinator:
        invite, _ = await invite_from(home)
        await crowd.comes(dial, coordinator.enrolment_port, 10 * PER_ADDRESS)
        await until(lambda: crowd.num_left <= PER_ADDRESS)
        # On a busy machine gRPC ends one or another of them first, for its handshake took long.
        assert coordinator.connections.num_ended >= 8 * PER_ADDRESS
        credentials = await enrol(invite, Identity.generate(), "node")
        assert credentials.run_name == "tested"


async def test_calls_whose_bodies_never_come_keep_nobody_from_joining(
    crowd: Crowd, tmp_path: Path
) -> None:
    config = LOCAL.with_changes(connections_per_address=2 * MAX_AT_ONCE)
    home = create_home(tmp_path / "run", config=config, text=described)
    async with serving(home) as coordinator:
        invite, _ = await invite_from(home)
        await crowd.comes(calls_without_bodies, coordinator.enrolment_port, MAX_AT_ONCE + 2)
        await asyncio.sleep(1.0)  # they are there
        assert crowd.num_left == MAX_AT_ONCE + 2
        for name in ("node-a", "node-b"):
            await enrol(invite, Identity.generate(), name)
        assert crowd.num_left == MAX_AT_ONCE + 2, "nobody had to go for it"


@pytest.mark.parametrize(
    ("dial", "host"), [(silent, "127.0.0.1"), (half_a_handshake, "0.0.0.0"), (silent, "::")]
)
async def test_members_behind_one_address_outnumber_what_a_stranger_may_hold_there(
    dial: Dial, host: str, crowd: Crowd, tmp_path: Path
) -> None:
    """Where all addresses are listened at, IPv4 comes by sockets of IPv6."""
    home = home_of_few(tmp_path / "run", host=host)
    async with serving(home) as coordinator:
        nodes = await members_of(home, coordinator, 2 * PER_ADDRESS)
        await crowd.comes(dial, coordinator.control_port, 10 * PER_ADDRESS)
        await until(lambda: crowd.num_left <= PER_ADDRESS)
        assert coordinator.connections.num_ended >= 8 * PER_ADDRESS
        for node in nodes:  # by the connection that each has had all the time
            await node.beat()
        streams = [asyncio.ensure_future(anext(node.events)) for node in nodes]
        await asyncio.sleep(1.0)
        assert not any(stream.done() and stream.exception() for stream in streams)
        late = (await members_of(home, coordinator, 1))[0]
        await late.beat()
        for stream in streams:
            stream.cancel()
        for node in (*nodes, late):
            await node.close()


async def test_a_member_holds_as_many_connections_as_one_needs_and_others_lose_none(
    tmp_path: Path,
) -> None:
    home = home_of_few(tmp_path / "run")
    async with serving(home) as coordinator:
        honest, greedy = await members_of(home, coordinator, 2)
        per_key = Limits().per_key
        copies = [
            FakeNode(greedy.identity, greedy.credentials, "greedy") for _ in range(2 * per_key)
        ]
        for copy in copies:
            copy.session_id = greedy.session_id
            await copy.beat()
        await until(lambda: coordinator.connections.num_ended >= per_key + 1)
        await honest.beat()
        await asyncio.sleep(0.2)
        assert coordinator.connections.num_ended == per_key + 1
        for node in (honest, greedy, *copies):
            await node.close()


@pytest.mark.parametrize("dial", [silent, half_a_handshake, no_call, None])
async def test_an_office_behind_one_address_is_as_many_members_as_it_is_at_one_port_too(
    dial: Dial | None, crowd: Crowd, tmp_path: Path
) -> None:
    port = free_port()
    config = LOCAL.with_changes(
        connections_per_address=PER_ADDRESS, control_port=port, enrolment_port=port
    )
    home = create_home(tmp_path / "run", config=config, text=described)
    async with serving(home) as coordinator:
        nodes = await members_of(home, coordinator, 2 * PER_ADDRESS)
        dial = dial or hello_to(server_name(home.issuer.swarm_id))
        await crowd.comes(dial, port, 5 * PER_ADDRESS)
        await until(lambda: crowd.num_left <= PER_ADDRESS)
        streams = [asyncio.ensure_future(anext(node.events)) for node in nodes]
        for node in nodes:  # by the connection that each has had all the time
            await node.beat()
        (late,) = await members_of(home, coordinator, 1)  # beside the strangers
        await late.beat()
        assert not any(stream.done() and stream.exception() for stream in streams)
        for stream in streams:
            stream.cancel()
        for node in (*nodes, late):
            await node.close()


async def test_a_member_holds_no_more_connections_at_one_port_than_at_two(tmp_path: Path) -> None:
    port, per_key = free_port(), Limits().per_key
    config = LOCAL.with_changes(control_port=port, enrolment_port=port)
    home = create_home(tmp_path / "run", config=config, text=described)
    async with serving(home) as coordinator:
        honest, greedy = await members_of(home, coordinator, 2)
        copies = [
            FakeNode(greedy.identity, greedy.credentials, "greedy") for _ in range(2 * per_key)
        ]
        for copy in copies:
            copy.session_id = greedy.session_id
            await copy.beat()
        await until(lambda: coordinator.connections.num_ended >= per_key + 1)
        await honest.beat()
        for node in (honest, greedy, *copies):
            await node.close()


def connection(
    number: int, host: str = "192.0.2.1", port: int = 7700, since: float = 0.0
) -> Connection:
    return Connection(
        descriptor=number,
        inode=number,
        port=port,
        peer=(host, 40_000 + number),
        is_from_here=False,
        since=since,
    )


FEW = Limits(per_address=2, per_key=3)
AMPLE = {7700: 100, 7701: 100}


def ended(
    connections: list[Connection], keys: dict[tuple[str, int], str] | None = None
) -> list[int]:
    found = too_many(connections, keys or {}, FEW, most_strangers=AMPLE)
    return sorted(one.inode for one in found)


def test_the_oldest_of_an_address_go_and_each_port_counts_apart() -> None:
    three = [connection(number, since=float(-number)) for number in (1, 2, 3)]
    assert ended(three) == [3]
    assert ended([*three[:2], connection(4, port=7701)]) == []
    assert ended([*three[:2], connection(5, host="192.0.2.2")]) == []


def test_a_network_of_ipv6_is_one_address_and_the_next_is_another() -> None:
    ours = [connection(number, host=f"2001:db8::{number}") for number in (1, 2, 3)]
    assert ended(ours) == [1]
    assert ended([*ours[:2], connection(3, host="2001:db8:0:1::3")]) == []


def test_members_count_by_key_wherever_they_come_from() -> None:
    office = [connection(number) for number in range(1, 9)]
    keys = {one.peer: f"key {number // 3}" for number, one in enumerate(office)}
    assert ended(office, keys) == []
    roaming = [connection(number, host=f"192.0.2.{number}") for number in range(1, 6)]
    assert ended(roaming, {one.peer: "one key" for one in roaming}) == [1, 2]


def test_strangers_of_many_addresses_together_have_a_bound_and_members_stand_outside_of_it() -> (
    None
):
    crowd = [connection(number, host=f"198.51.100.{number}") for number in range(1, 7)]
    found = too_many(crowd, {}, FEW, most_strangers={7700: 4})
    assert sorted(one.inode for one in found) == [1, 2]
    keys = {one.peer: str(one.inode) for one in crowd[:3]}
    assert not too_many(crowd, keys, FEW, most_strangers={7700: 4})


def test_of_few_files_joining_takes_a_quarter() -> None:
    assert most_connections(16) == (12, 4)
    assert most_connections(0) == (1, 1)
    assert most_connections(1 << 20) == (8192, 512)


async def test_a_look_that_fails_is_told_and_the_next_one_counts(
    crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, num_failed = os.listdir, 0

    def full(folder: str) -> list[str]:
        nonlocal num_failed
        if folder == "/dev/fd" and num_failed < 2:
            num_failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return listed(folder)

    monkeypatch.setattr(os, "listdir", full)
    with capture_logs() as told:
        async with serving(home_of_few(tmp_path / "run")) as coordinator:
            await crowd.comes(silent, coordinator.enrolment_port, 2 * PER_ADDRESS)
            await until(lambda: coordinator.connections.num_ended >= PER_ADDRESS)
    failed = [line for line in told if line["event"] == "nobody counts connections now"]
    assert num_failed == 2 and len(failed) == 1, "once a minute"


@pytest.mark.parametrize(("spares_own", "num_ended"), [(False, 3), (True, 0)])
def test_what_a_relay_brings_from_this_machine_is_the_relays_to_bound(
    spares_own: bool, num_ended: int
) -> None:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        for _ in range(5):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            opened.enter_context(listener.accept()[0])
        watched = Connections({port: 100}, Limits(per_address=2), spares_own=spares_own)
        watched.look(0.0)
        watched.look(0.5)
        assert watched.num_ended == num_ended


MESSAGE_BYTES = 4 << 20
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8


class HalfSentCalls:
    """Calls of a member whose messages lack their last byte, on one connection of plain HTTP/2."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._first_window, self._window = 65_535, 65_535
        self._windows: dict[int, int] = {}  # by call that goes on
        self._left: dict[int, int] = {}
        self.sent: dict[int, int] = {}  # of calls that go on
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def begun(cls, node: FakeNode, port: int, num: int, folder: Path) -> "HalfSentCalls":
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        key.write_bytes(node.credentials.key_pem)
        certificate.write_bytes(node.credentials.certificate_pem)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(certificate, key)
        context.set_alpn_protocols(["h2"])
        calls = cls(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
        calls._writer.write(PREFACE)
        path = b"/atoll.v1.SessionService/Heartbeat"
        for stream in range(1, 2 * num, 2):
            calls._writer.write(call_without_a_body(stream, path))
            calls._windows[stream], calls._left[stream] = calls._first_window, MESSAGE_BYTES + 4
            calls.sent[stream] = 0
        calls._send()
        calls._reading = asyncio.create_task(calls._read())
        return calls

    def _send(self) -> None:
        for stream, left in list(self._left.items()):
            while (most := min(left, self._window, self._windows[stream], 1 << 14)) > 0:
                told = b"\0" + MESSAGE_BYTES.to_bytes(4, "big") if not self.sent[stream] else b""
                most = max(most, len(told))
                frame = told + bytes(most - len(told))
                header = len(frame).to_bytes(3, "big") + bytes([DATA, 0])
                self._writer.write(header + stream.to_bytes(4, "big") + frame)
                left -= most
                self._window -= most
                self._windows[stream] -= most
                self.sent[stream] += most
            self._left[stream] = left

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await self._reader.readexactly(9)
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:9], "big")
                body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(kind, flags, stream, body)
                self._send()
                await self._writer.drain()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & 1:
            for start in range(0, len(body), 6):
                if int.from_bytes(body[start : start + 2], "big") == 4:
                    window = int.from_bytes(body[start + 2 : start + 6], "big")
                    for each in self._windows:
                        self._windows[each] += window - self._first_window
                    self._first_window = window
            self._writer.write(b"\0\0\0\4\1\0\0\0\0")
        elif kind == PING and not flags & 1:
            self._writer.write(b"\0\0\x08\6\1\0\0\0\0" + body)
        elif kind == WINDOW and not stream:
            self._window += int.from_bytes(body, "big")
        elif kind == WINDOW and stream in self._windows:
            self._windows[stream] += int.from_bytes(body, "big")
        elif kind == RESET or (kind == HEADERS and flags & 1):
            for of_calls in (self._windows, self._left, self.sent):
                of_calls.pop(stream, None)

    async def end(self) -> None:
        assert self._reading is not None
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)


async def rests(figure: Callable[[], int]) -> int:
    """The figure once it has not changed for a second."""
    while True:
        before = figure()
        await asyncio.sleep(1.0)
        if figure() == before:
            return before


async def test_of_half_sent_calls_the_coordinator_holds_a_few_of_a_member_and_none_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "WholeMessages", partial(WholeMessages, whole_seconds=6.0))
    home = create_home(tmp_path / "run", config=LOCAL, text=described)
    async with serving(home) as coordinator:
        honest, greedy = await members_of(home, coordinator, 2)
        port = coordinator.control_port
        crowd = [await HalfSentCalls.begun(greedy, port, 40, tmp_path) for _ in range(2)]
        held = await rests(lambda: sum(sum(calls.sent.values()) for calls in crowd))
        assert sum(len(calls.sent) for calls in crowd) <= MOST_BEGUN
        assert MESSAGE_BYTES < held <= MOST_READ * (MESSAGE_BYTES + 5) + MOST_BEGUN * (1 << 16)
        await honest.beat()
        await until(lambda: not any(calls.sent for calls in crowd))
        await greedy.beat()
        for calls in crowd:
            await calls.end()
        for node in (honest, greedy):
            await node.close()
