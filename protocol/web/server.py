"""A small web server of read-only pages on the event loop.

Imported only where pages are asked for. Plain HTTP without a password: it listens where its owner
says, on loopback unless told otherwise, and its pages hold nothing secret.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from protocol.errors import SystemRefusedError
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

_GRACE_SECONDS = 1

MISDIRECTED = 421

_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
"""A page runs no script and asks nobody else for anything, whatever stands in it."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a page shows now."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Page = Callable[[], Awaitable[Answer]]


class WebServer:
    """Serves pages until it is closed. Make one with `open`."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listening]))

    @classmethod
    def open(cls, address: tuple[str, int], pages: Mapping[str, Page], *, option: str) -> Self:
        """Listens on host and port; 0 picks a port. `option` is what people change it with.

        Raises SystemRefusedError when it cannot.
        """
        listening = _listening(*address, option=option)
        host = address[0]
        if not _is_loopback(host):
            _log.warning("anybody who reaches this address can read these pages", address=host)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        may_ask = _asks_loopback if _is_loopback(host) else _anybody
        config = uvicorn.Config(
            Starlette(
                routes=[Route(path, _endpoint_of(page, may_ask)) for path, page in pages.items()]
            ),
            http=_waiting_in_turn(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CALLS + MAX_WAITING,
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


def _waiting_in_turn() -> type[H11Protocol]:
    """The protocol of one server: its connections wait in turn for their first and only request."""
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
                self._until = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._until.cancel()
            if self in waiting:
                waiting.remove(self)

    return OneRequest


def _endpoint_of(
    page: Page, may_ask: Callable[[Request], bool]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if not may_ask(request):
            host = request.headers.get("host", "")
            why = f"this page is for its own machine: open it as localhost, not as {host[:64]!r}\n"
            return Response(why, status_code=MISDIRECTED, headers=_HEADERS)
        answer = await page()
        headers = {"Content-Type": answer.content_type, **_HEADERS}
        return Response(answer.body, status_code=answer.status, headers=headers)

    return endpoint


def _anybody(_: Request) -> bool:
    return True


def _asks_loopback(request: Request) -> bool:
    """Whether a browser was told to come here, and not to a stranger's name that points here.

    A page of that name could read ours (DNS rebinding).
    """
    return _is_loopback(request.url.hostname or "")


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


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
