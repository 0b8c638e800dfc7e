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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.errors import SystemRefusedError
from protocol.trust.invite import endpoint_of

MAX_CALLS = 32
"""Answered at once; more are told to come back, so that strangers cannot take all sockets."""

_GRACE_SECONDS = 1

_HEADERS = {
    "Cache-Control": "no-store",
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
        config = uvicorn.Config(
            Starlette(routes=[Route(path, _endpoint_of(page)) for path, page in pages.items()]),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CALLS,
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


def _endpoint_of(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        answer = await page()
        headers = {"Content-Type": answer.content_type, **_HEADERS}
        return Response(answer.body, status_code=answer.status, headers=headers)

    return endpoint


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
