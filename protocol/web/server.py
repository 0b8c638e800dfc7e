"""A small web server of read-only pages on the event loop.

Imported only where pages are asked for. Plain HTTP: it listens where its owner says, on loopback unless
told otherwise. Beyond loopback a page is shown to who has its token, where it has one; it comes with the
first link, and a cookie keeps it.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.errors import SystemRefusedError
from protocol.terminal.console import is_loopback
from protocol.trust.invite import endpoint_of

MAX_CALLS = 32
"""Answered at once; more are told to come back."""

MAX_WAITING = 32
"""Connections without a whole request. One more ends the oldest of them, so that sockets which ask
nothing, or a byte at a time, keep nobody out."""

REQUEST_SECONDS = 10.0
"""Until a connection's request is whole, or the connection ends."""

ANSWER_SECONDS = 60.0
"""From then until its answer is read."""

MAX_READERS = 64
"""Of streams at once, which stay; one more is told to come back."""

_GRACE_SECONDS = 1

FORBIDDEN, MISDIRECTED, BUSY = 403, 421, 503

COOKIE = "atoll-page"

_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""A page runs its own files alone and asks nobody else for anything, whatever stands in it."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a page shows now."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Page = Callable[[], Awaitable[Answer]]

Stream = Callable[[], AsyncIterator[bytes]]
"""Server-sent events, one after the other, for as long as its reader stays."""


class WebServer:
    """Serves pages until it is closed. Make one with `open`."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listening]))

    @classmethod
    def open(
        cls,
        address: tuple[str, int],
        pages: Mapping[str, Page],
        *,
        option: str,
        streams: Mapping[str, Stream] | None = None,
        token: str = "",
        open_pages: Collection[str] = (),
    ) -> Self:
        """Listens on host and port; 0 picks a port. `option` is what people change it with.

        Beyond loopback all but `open_pages` want the token, where there is one.

        Raises SystemRefusedError when it cannot.
        """
        listening = _listening(*address, option=option)
        is_here = is_loopback(address[0])
        if not is_here and not token:
            _log.warning(
                "anybody who reaches this address can read these pages", address=address[0]
            )
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of what any stranger sends
        streams = {} if streams is None else streams

        def door(path: str) -> _Door:
            return _Door(
                only_loopback=is_here, token="" if is_here or path in open_pages else token
            )

        readers = _Readers()
        config = uvicorn.Config(
            Starlette(
                routes=[
                    *(Route(path, _endpoint_of(page, door(path))) for path, page in pages.items()),
                    *(
                        Route(path, _stream_endpoint_of(stream, door(path), readers))
                        for path, stream in streams.items()
                    ),
                ]
            ),
            http=_waiting_in_turn(frozenset(streams)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CALLS + MAX_WAITING + MAX_READERS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        return cls(_Server(config), listening)

    async def close(self) -> None:
        """Ends calls in flight after a moment, and stops listening."""
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of whoever runs the event loop."""
        yield


def _waiting_in_turn(lasting: frozenset[str]) -> type[H11Protocol]:
    """The protocol of one server: its connections wait in turn for their first and only request.

    Answers at `lasting` paths go on, and look themselves whether they are read.
    """
    waiting: deque[H11Protocol] = deque()

    class OneRequest(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._until = self.loop.call_later(REQUEST_SECONDS, transport.abort)
            waiting.append(self)
            if len(waiting) > MAX_WAITING:
                waiting.popleft().transport.abort()

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and self in waiting:
                waiting.remove(self)
                self._until.cancel()
                if self.scope["path"] not in lasting:
                    self._until = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._until.cancel()
            if self in waiting:
                waiting.remove(self)

    return OneRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """Whom a page is shown to."""

    only_loopback: bool
    token: str  # empty: anybody's who comes that far

    def refusal(self, request: Request) -> Response | None:
        """What somebody hears who is not let in; the first link with the token becomes a cookie."""
        host = request.url.hostname or ""
        if self.only_loopback and not is_loopback(host):
            # A page of that name could read ours (DNS rebinding).
            why = f"this page is for its own machine: open it as localhost, not as {host[:64]!r}\n"
            return Response(why, status_code=MISDIRECTED, headers=_HEADERS)
        if not self.token or any(map(self._is_token, self._shown(request))):
            return None
        if self._is_token(request.query_params.get("token", "")):
            cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=31536000"
            headers = {**_HEADERS, "Location": request.url.path, "Set-Cookie": cookie}
            return Response(status_code=303, headers=headers)
        why = "this page wants its token: open the link that 'atoll coordinator start' prints\n"
        return Response(why, status_code=FORBIDDEN, headers=_HEADERS)

    def _shown(self, request: Request) -> tuple[str, str]:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return request.cookies.get(COOKIE, ""), bearer

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self.token.encode())


Endpoint = Callable[[Request], Awaitable[Response]]


def _endpoint_of(page: Page, door: _Door) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if (refusal := door.refusal(request)) is not None:
            return refusal
        answer = await page()
        headers = {"Content-Type": answer.content_type, **_HEADERS}
        return Response(answer.body, status_code=answer.status, headers=headers)

    return endpoint


@dataclass(slots=True)
class _Readers:
    """How many read streams now."""

    number: int = 0


def _stream_endpoint_of(stream: Stream, door: _Door, readers: _Readers) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if (refusal := door.refusal(request)) is not None:
            return refusal
        if readers.number >= MAX_READERS:
            why = f"{MAX_READERS} people watch already; try again later\n"
            return Response(why, status_code=BUSY, headers=_HEADERS)
        return _Streamed(stream, readers)

    return endpoint


class _Streamed(Response):
    """Events until its reader has gone, or has not read one for ANSWER_SECONDS."""

    def __init__(self, stream: Stream, readers: _Readers) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream", **_HEADERS})
        del self.headers["content-length"]
        self._stream = stream
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readers.number += 1
        telling = asyncio.create_task(self._tell(send))
        try:
            leaving = asyncio.create_task(_gone(receive))
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
        finally:
            telling.cancel()
            self._readers.number -= 1
        with contextlib.suppress(asyncio.CancelledError, TimeoutError, OSError):
            await telling

    async def _tell(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for event in self._stream():
            async with asyncio.timeout(ANSWER_SECONDS):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)  # to who has gone it is sent at once: others have their turn
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _listening(host: str, port: int, *, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        # Python adds the address to the system's words; ours says it already.
        is_of_system = not isinstance(error, socket.gaierror)
        why = os.strerror(error.errno) if is_of_system and error.errno else error.strerror
        raise SystemRefusedError(
            f"cannot serve pages on {endpoint_of(host, port)}: {why}",
            next_step=f"choose another address with {option} HOST:PORT, or leave it out",
        ) from error
