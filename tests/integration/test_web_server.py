"""The web server of pages, while others on the machine or the network keep its sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protocol.web import server
from protocol.web.server import BUSY, FORBIDDEN, MAX_WAITING, MISDIRECTED, Answer, WebServer

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


async def test_what_is_no_request_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    async with serving() as port:
        for said in (upgrade, b"GET / HTTP/9.9\r\n\r\n", b"\xff\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert (await reader.read()).startswith(b"HTTP/1.1 ")
            writer.close()
    assert not caplog.records


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


TOKEN = "t0ken"


@contextlib.asynccontextmanager
async def with_token() -> AsyncIterator[int]:
    served = WebServer.open(
        ("0.0.0.0", 0),
        {"/": page, "/healthz": page},
        option="--dashboard",
        streams={"/live": endless},
        token=TOKEN,
        open_pages=("/healthz",),
    )
    try:
        yield served.port
    finally:
        await served.close()


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.01)


async def asked(port: int, path: str, header: str = "") -> tuple[int, str]:
    """The status, and the headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: here\r\n{header}\r\n".encode())
    async with asyncio.timeout(PATIENCE_SECONDS):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    return int(head.split()[1]), head


@pytest.mark.parametrize("path", ["/", "/live"])
@pytest.mark.parametrize(
    "header", ["", "Authorization: Bearer wrong\r\n", "Cookie: atoll-page=wrong\r\n"]
)
async def test_without_the_token_nothing_is_shown(path: str, header: str) -> None:
    async with with_token() as port:
        assert (await asked(port, path, header))[0] == FORBIDDEN
        assert (await asked(port, f"{path}?token=wrong", header))[0] == FORBIDDEN
        assert (await asked(port, "/healthz"))[0] == 200


async def test_a_link_s_token_becomes_a_cookie_and_a_scraper_sends_it_as_bearer() -> None:
    async with with_token() as port:
        status, head = await asked(port, f"/?token={TOKEN}")
        assert status == 303
        assert "location: /\r\n" in head.lower()
        assert "httponly" in head.lower()
        assert (await asked(port, "/", f"Cookie: atoll-page={TOKEN}\r\n"))[0] == 200
        assert (await asked(port, "/live", f"Authorization: Bearer {TOKEN}\r\n"))[0] == 200


async def test_one_reader_too_many_is_told_to_come_back_and_a_place_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_READERS", 2)
    bearer = f"Authorization: Bearer {TOKEN}\r\n"
    async with with_token() as port:
        readers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /live HTTP/1.1\r\nHost: here\r\n{bearer}\r\n".encode())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await reader.readuntil(b"data: 1")
            readers.append(writer)
        assert (await asked(port, "/live", bearer))[0] == BUSY
        readers.pop().close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await asked(port, "/live", bearer))[0] != 200:
                pass
        readers.pop().close()


async def test_a_reader_that_reads_no_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(server, "MAX_READERS", 1)
    bearer = f"Authorization: Bearer {TOKEN}\r\n"

    async def much() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (8 << 20)

    served = WebServer.open(
        ("127.0.0.1", 0), {}, option="--dashboard", streams={"/live": much}, token=TOKEN
    )
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        request = f"GET /live HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n".encode()
        writer.write(request)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                reader, another = await asyncio.open_connection("127.0.0.1", served.port)
                another.write(request)
                status = int((await reader.readline()).split()[1])
                another.transport.abort()
                if status == BUSY:
                    break
            while status == BUSY:
                reader, another = await asyncio.open_connection("127.0.0.1", served.port)
                another.write(request)
                status = int((await reader.readline()).split()[1])
                another.transport.abort()
        assert status == 200
        writer.close()
    finally:
        await served.close()
