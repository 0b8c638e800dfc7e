"""Sockets hold nothing up, whatever names and addresses they are given."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from coordinator.relay.stream import Connection
from node.exchange.transport.p2pd import knocked
from node.exchange.transport.streams import TransferStream
from node.hosts.wire import Wire
from node.island.loops.door import Visitor
from protocol.wire.sockets import MOST_AT_ONCE, connection_to, in_own_thread, looked_up
from tests.integration.test_transport_hostile import unpaced


class HangingResolver:
    """Answers no name until it is told to end."""

    def __init__(self) -> None:
        self._may_end = threading.Event()
        self._lock = threading.Lock()
        self.num_asked = self.num_answered = 0

    def getaddrinfo(self, host: str, *_: Any, flags: int = 0, **__: Any) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        with self._lock:
            self.num_asked += 1
        self._may_end.wait(60)
        self.num_answered += 1
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    def end(self) -> None:
        self._may_end.set()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingResolver]:
    hanging = HangingResolver()
    monkeypatch.setattr(socket, "getaddrinfo", hanging.getaddrinfo)
    yield hanging
    hanging.end()


async def _dialled(member: int) -> list[tuple[str, str]]:
    told = [f"/dns4/{member}-{place}.example/tcp/7710" for place in range(16)]
    return [each async for each in knocked(told, here=(), seconds=0.5)]


async def test_members_whose_names_nobody_resolves_hold_no_work_of_a_round_up(
    resolver: HangingResolver,
) -> None:
    found = await asyncio.gather(*(_dialled(member) for member in range(4)))
    assert all("no answer within" in why for told in found for _, why in told)
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(lambda: "hashed") == "hashed"


async def test_names_of_one_member_leave_places_for_those_of_others(
    resolver: HangingResolver,
) -> None:
    await _dialled(0)
    assert 0 < resolver.num_asked <= 2


async def test_no_more_names_are_looked_up_at_once_than_there_are_places(
    resolver: HangingResolver,
) -> None:
    asked = [looked_up(f"{n}.example", 1, seconds=0.5) for n in range(3 * MOST_AT_ONCE)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all("no name server answers in time" in str(error) for error in found)
    assert resolver.num_asked == MOST_AT_ONCE


def test_a_process_ends_while_a_resolver_hangs(resolver: HangingResolver) -> None:
    with pytest.raises(socket.gaierror, match="no name server answers in time"):
        asyncio.run(looked_up("slow.example", 1, seconds=0.1))
    assert (resolver.num_asked, resolver.num_answered) == (1, 0)


async def test_an_address_is_no_name() -> None:
    assert await looked_up("192.0.2.7", 80) == ["192.0.2.7"]
    assert await looked_up("2001:db8::7", 80) == ["2001:db8::7"]


async def test_a_name_leads_to_addresses_of_the_family_that_is_asked_for() -> None:
    assert await looked_up("localhost", 80, family=socket.AF_INET) == ["127.0.0.1"]


async def test_an_address_that_swallows_packets_does_not_hold_the_next_one_up() -> None:
    with ExitStack() as opened:
        full = opened.enter_context(closing(socket.socket()))
        full.bind(("127.0.0.3", 0))
        full.listen(0)
        place = full.getsockname()
        for _ in range(4):  # Linux drops what comes beyond the queue
            waiting = opened.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(place)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", place[1])
        async with server, asyncio.timeout(30):
            _, writer = await connection_to(["127.0.0.3", "127.0.0.1"], place[1])
            assert writer.get_extra_info("peername")[0] == "127.0.0.1"
            writer.close()


@pytest.mark.parametrize("other", ["127.0.0.2", "224.0.0.1"])
async def test_where_no_address_answers_a_reason_of_one_that_something_leads_to_is_told(
    other: str,
) -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await connection_to(["127.0.0.1", other], bound.getsockname()[1])


HOLDERS: dict[str, Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]] = {
    "a relay's connection": Connection,
    "a stream between members": lambda reader, writer: TransferStream(
        reader, writer, idle_seconds=1, traffic=unpaced()
    ),
    "hosts of an island": Wire,
    "a training loop": lambda reader, writer: Visitor(reader, writer, 1),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
async def test_nobody_is_told_of_a_broken_connection_that_nobody_waits_for(
    holder: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object],
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        dialled = socket.create_connection(listener.getsockname())
        with closing(listener.accept()[0]):
            reader, writer = await asyncio.open_connection(sock=dialled)
            held = holder(reader, writer)
            protocol: Any = writer.transport.get_protocol()
            end = protocol._get_close_waiter(writer)
            dialled.shutdown(socket.SHUT_WR)  # so that what is written finds a broken pipe
            writer.write(b"x")
            await asyncio.wait([end])
            await asyncio.sleep(0)
    assert held is not None and end.done()
    assert not end._log_traceback  # which asyncio prints when its collector comes to it first
    assert isinstance(end.exception(), BrokenPipeError)


def test_who_stops_does_not_wait_for_a_look_at_a_silent_host() -> None:
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def look() -> None:
        has_begun.set()
        may_end.wait(60)
        has_ended.set()

    async def stopped_while_looking() -> None:
        looking = asyncio.create_task(in_own_thread(look))
        await asyncio.to_thread(has_begun.wait, 60)
        looking.cancel()
        await asyncio.wait([looking])

    asyncio.run(stopped_while_looking())
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(60)


async def test_what_a_thread_of_its_own_finds_comes_back() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    assert await in_own_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_own_thread(fails)
