"""The web server of pages, while others on the machine or the network keep its sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protocol.web import server
from protocol.web.server import MAX_WAITING, MISDIRECTED, Answer, WebServer

PATIENCE_SECONDS = 60.0
BODY = b"all is well"


async def page() -> Answer:
    return Answer(body=BODY)


@contextlib.asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[int]:
    served = WebServer.open((host, 0), {"/": page}, option="--dashboard")
    try:
        yield served.port
    finally:
        await served.close()


async def ask(port: int, host: str = "localhost") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = await reader.read()  # to the end: the server closes
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n"])
async def test_connections_that_ask_nothing_keep_nobody_out(said: bytes) -> None:
    async with serving() as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * MAX_WAITING)]
        for _, writer in idle:
            with contextlib.suppress(ConnectionError):
                writer.write(said)
                await writer.drain()
        assert await ask(port) == (200, BODY)
        for _, writer in idle:
            writer.close()


async def test_a_request_that_is_never_whole_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_an_answer_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.2)
    large = b"x" * (64 << 20)  # more than sockets hold

    async def much() -> Answer:
        return Answer(body=large)

    served = WebServer.open(("127.0.0.1", 0), {"/": much}, option="--dashboard")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.5)
        with pytest.raises((ConnectionError, AssertionError)):
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert len(await reader.read()) > len(large)
        writer.close()
    finally:
        await served.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:9000"])
async def test_names_of_this_machine_are_answered(host: str) -> None:
    async with serving() as port:
        assert await ask(port, host) == (200, BODY)


@pytest.mark.parametrize("host", ["rebound.example", "10.0.0.1"])
async def test_a_page_on_loopback_is_not_read_through_a_strangers_name(host: str) -> None:
    async with serving() as port:
        status, words = await ask(port, host)
    assert status == MISDIRECTED and b"open it as localhost" in words


async def test_a_page_for_others_is_answered_by_any_name() -> None:
    async with serving("0.0.0.0") as port:
        assert await ask(port, "atoll.example") == (200, BODY)
