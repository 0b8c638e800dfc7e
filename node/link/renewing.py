"""The calls of a session over a channel that is opened anew with each new certificate.

A certificate is renewed in the session, or, where the coordinator refuses the one that there is, by the
identity on the joining port. Calls in flight go on over the channel on which they began, the stream of
messages too.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import structlog

from protocol.errors import (
    AtollError,
    CertificateRefusedError,
    HeldBackError,
    NotPermittedError,
    TemporaryError,
)
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import renew_by_identity, renewal_request, taken
from protocol.trust.identity import Identity
from protocol.v1.session_pb2_grpc import SessionServiceStub
from protocol.wire.channel import DEADLINE_SECONDS, open_channel
from protocol.wire.wire_count import WireCounts

log = structlog.get_logger()


class RenewingCalls:
    """A SessionStub. Leave it as a context manager: it closes its channels."""

    def __init__(self, credentials: Credentials, identity: Identity, counts: WireCounts) -> None:
        self._credentials = credentials
        self._identity = identity
        self._counts = counts
        self._channel = open_channel(credentials, counts)
        self._stream_channel: grpc.aio.Channel | None = (
            None  # that messages came over the last time
        )
        self._turn = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RenewingCalls":
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in {self._channel, self._stream_channel}:
            if channel is not None:
                await channel.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def credentials(self) -> Credentials:
        """Those that new connections are made with."""
        return self._credentials

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        """The call of that name."""
        if method.startswith("_"):
            raise AttributeError(method)
        return self._streamed if method == "Subscribe" else self._unary(method)

    def _unary(self, method: str) -> Callable[[Any], Any]:
        async def call(request: Any) -> Any:
            used = self._credentials
            try:
                return await getattr(SessionServiceStub(self._channel), method)(request)
            except CertificateRefusedError as error:
                await self._renew_refused(used, error)
                answer = await getattr(SessionServiceStub(self._channel), method)(request)
                log.info("the certificate was refused, and the identity has got a new one")
                return answer

        return call

    def _streamed(self, request: Any) -> Any:
        """A stream that breaks is not opened again here: the session attaches before."""
        before, self._stream_channel = self._stream_channel, self._channel
        if before is not None and before is not self._channel:
            self._close(before)
        return SessionServiceStub(self._channel).Subscribe(request)

    async def renew(self) -> float:
        """A new certificate by the one that there is; returns in how many seconds to do so again."""
        async with self._turn:
            stub = SessionServiceStub(self._channel)
            answer = await stub.Renew(renewal_request(self._credentials, self._identity))
            self._go_on_with(taken(self._credentials, answer))
            return answer.renew_in_seconds

    async def _renew_refused(self, used: Credentials, refusal: CertificateRefusedError) -> None:
        """By the identity. Raises why not, or the refusal where nobody of ours answers there."""
        async with self._turn:
            if used is not self._credentials:
                return  # another call has done it meanwhile
            try:
                renewed = await renew_by_identity(self._credentials, self._identity)
            except (NotPermittedError, HeldBackError, TemporaryError):
                raise
            except AtollError as error:
                log.debug("no new certificate", why=error.what)
                raise refusal from error
            self._go_on_with(renewed)

    def _go_on_with(self, renewed: Credentials) -> None:
        renewed.save_renewed()
        before, self._credentials = self._channel, renewed
        self._channel = open_channel(renewed, self._counts)
        if before is not self._stream_channel:
            self._close(before)

    def _close(self, channel: grpc.aio.Channel) -> None:
        """When the calls on it have ended."""
        task = asyncio.create_task(channel.close(DEADLINE_SECONDS))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
