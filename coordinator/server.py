"""What a coordinator's gRPC servers need: options, ports with TLS, and who is calling.

Control and enrolment are two servers on two ports: a gRPC port either demands client certificates
or never asks for them, and a machine that enrols has none yet.
"""

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from protocol.errors import (
    SAME_VERSION,
    AtollError,
    BadDataError,
    NotPermittedError,
    SystemRefusedError,
)
from protocol.trust.invite import endpoint_of
from protocol.trust.pki import Principal, principal_of
from protocol.wire.channel import MAX_MESSAGE_BYTES, most_bytes_of
from protocol.wire.status_codes import CROWDED, abort

Options = tuple[tuple[str, int], ...]

HANDSHAKE_SECONDS = 10.0
"""Until TLS and HTTP/2 are agreed on; gRPC's default of two minutes lets strangers fill the file table."""


JOINING_SECONDS = 60.0
"""A connection to the port for joining lasts no longer, and its calls GRACE_SECONDS more."""

GRACE_SECONDS = 15.0

JOINING_BYTES = 1 << 16
"""Of a message to the port for joining: keys, a request for a certificate, a name."""

MOST_READ, MOST_BEGUN = 8, 64
"""Calls of one key whose messages are read and answered at once, and that it may have begun: the others wait
unread. A stream counts until its message is read."""

BYTES_A_SECOND = 1 << 20
"""Of one key's messages and the answers to them, and MAX_MESSAGE_BYTES at once: the next message waits.

Four MiB of empty entries have 180 MB for as long as they are looked at. And who
asks for all commits again and again is not to fill the coordinator's uplink."""

BEGINNING = 4
"""Messages with which a stream begins, and which count: roster, commit and plan, for who subscribes again and
again. What is told later is the coordinator's to send, and in a large swarm it is much."""

WHOLE_SECONDS = 60.0
"""From when a call begins its message must be here in so long. At 1 Mbit/s the longest takes half of it."""

Context = grpc.aio.ServicerContext[Any, Any]


def server_options(
    *,
    idle_seconds: float,
    streams: int,
    most_bytes: int = MAX_MESSAGE_BYTES,
    handshake_seconds: float = HANDSHAKE_SECONDS,
) -> Options:
    """Options of a server that ends connections without a call after `idle_seconds`.

    `streams` bounds the calls of one connection that are answered at once; more wait. `most_bytes` bounds a
    message that comes.
    """
    return (
        # With SO_REUSEPORT, gRPC's default, a second coordinator shares the port and steals calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", most_bytes),
        # Of a message that nobody reads yet 64 KiB come, and not what gRPC finds the path to hold.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Nodes ping every 20 s, calls or none; by default gRPC would end such a connection for it.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        # Finds nodes that vanished without a word, so that their event streams do not pile up.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.server_handshake_timeout_ms", round(1000 * handshake_seconds)),
        ("grpc.max_connection_idle_ms", round(1000 * idle_seconds)),
        ("grpc.max_concurrent_streams", streams),
    )


CONTROL_OPTIONS: Options = (
    *server_options(idle_seconds=600, streams=64),
    # A machine that stalls reads a node's pings of a minute at once, and gRPC would end it as a flood.
    ("grpc.http2.max_ping_strikes", 0),
)
"""Of the port for members; a node's connection is never idle, for it reads its events."""

ENROLMENT_OPTIONS: Options = (
    *server_options(idle_seconds=20, streams=2, most_bytes=JOINING_BYTES),
    # A call whose body never comes keeps its connection from being idle.
    ("grpc.max_connection_age_ms", round(1000 * JOINING_SECONDS)),
    ("grpc.max_connection_age_grace_ms", round(1000 * GRACE_SECONDS)),
)
"""Of the port that strangers reach: nobody has more than one short call to make."""


class WholeMessages(grpc.aio.ServerInterceptor):
    """Bounds what one key has a server hold of messages that are not whole: 32 MiB, and 64 KiB of each more.

    gRPC reads a call's message before anybody here hears of the call, up to 4 MiB of each, for as long as
    the caller likes. So each call is answered as one that streams its message: on the wire that is the same,
    and nothing is read before it is asked for. Whole ones are taken apart at BYTES_A_SECOND, if they are no
    longer than protocol.wire.channel says of their call. Not for
    strangers, who share an address with who joins: of their messages JOINING_BYTES come.
    """

    def __init__(self, *, whole_seconds: float = WHOLE_SECONDS) -> None:
        self._whole_seconds = whole_seconds
        self._begun: Counter[str] = Counter()
        self._reading: dict[str, asyncio.Semaphore] = {}
        self._even_at: dict[str, float] = {}  # when each key's bytes until now come to that pace

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        most_bytes = most_bytes_of(handler_call_details.method, most=MAX_MESSAGE_BYTES)

        async def answer(messages: AsyncIterator[bytes], context: Context) -> Any:
            try:
                return await self._answered(handler, messages, context, most_bytes)
            except grpc.aio.AbortError as error:
                raise forgetful(error) from None

        async def stream(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            try:
                streamed = self._streamed(handler, messages, context, most_bytes)
                async with aclosing(streamed) as answers:
                    async for each in answers:
                        yield each
            except grpc.aio.AbortError as error:
                raise forgetful(error) from None

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(answer)

    async def _answered(
        self, handler: Any, messages: AsyncIterator[bytes], context: Context, most_bytes: int
    ) -> bytes:
        key = key_of(context)
        async with self._turn(key, messages, context, most_bytes) as message:
            request = await read(handler, message, context)
            answered = await handler.unary_unary(request, context)
            return self._written(key, handler, answered)

    async def _streamed(
        self, handler: Any, messages: AsyncIterator[bytes], context: Context, most_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        key = key_of(context)
        async with self._turn(key, messages, context, most_bytes) as message:
            answers = handler.unary_stream(await read(handler, message, context), context)
        num_counted = 0
        async with aclosing(answers):
            async for each in answers:
                if num_counted < BEGINNING:
                    num_counted += 1
                    yield self._written(key, handler, each)
                else:
                    yield handler.response_serializer(each)

    @asynccontextmanager
    async def _turn(
        self, key: str, messages: AsyncIterator[bytes], context: Context, most_bytes: int
    ) -> AsyncIterator[Any]:
        """The call's only message, when it is its turn, and one of the key's places meanwhile."""
        if self._begun[key] >= MOST_BEGUN:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{CROWDED}: {MOST_BEGUN} calls of yours have begun, and their messages are not here",
            )
        self._begun[key] += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(self._whole_seconds):
                        places = self._reading.setdefault(key, asyncio.Semaphore(MOST_READ))
                        await held.enter_async_context(places)
                        message = await self._read(key, messages)
                except TimeoutError:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        f"the call's message did not come in {self._whole_seconds:g} s",
                    )
                if message is None:
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a message"
                    )
                if len(message) > most_bytes:
                    await abort(context, too_long(len(message), most_bytes))
                yield message
        finally:
            self._begun[key] -= 1
            if not self._begun[key]:
                del self._begun[key], self._reading[key]

    async def _read(self, key: str, messages: AsyncIterator[bytes]) -> bytes | None:
        async for message in messages:
            now = asyncio.get_running_loop().time()
            wait_seconds = self.wait_seconds(key, now)
            self.count(key, len(message), now)
            if wait_seconds:
                await asyncio.sleep(wait_seconds)
            return message
        return None

    def _written(self, key: str, handler: Any, answered: Any) -> bytes:
        message: bytes = handler.response_serializer(answered)
        self.count(key, len(message), asyncio.get_running_loop().time())
        return message

    def wait_seconds(self, key: str, now: float) -> float:
        """Until a key's message, which has come now, is taken apart."""
        return max(0.0, self._even_at.get(key, now) - now - MAX_MESSAGE_BYTES / BYTES_A_SECOND)

    def count(self, key: str, num_bytes: int, now: float) -> None:
        """Counts what has come of a key, or goes there."""
        self._even_at[key] = max(now, self._even_at.get(key, now)) + num_bytes / BYTES_A_SECOND


def too_long(num_bytes: int, most_bytes: int) -> BadDataError:
    """What a caller is told whose message is not read."""
    return BadDataError(
        f"the call's message has {num_bytes:,} bytes, and {most_bytes:,} is the most there may be",
        next_step=SAME_VERSION,
    )


class ReadableMessages(grpc.aio.ServerInterceptor):
    """Ends strangers' calls whose message cannot be read; WholeMessages does so for members.

    gRPC writes a traceback to the log for each, so that three bytes of anybody make many.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        async def answer(message: bytes, context: Context) -> Any:
            try:
                return await handler.unary_unary(await read(handler, message, context), context)
            except grpc.aio.AbortError as error:
                raise forgetful(error) from None

        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)


async def read(handler: Any, message: bytes, context: Context) -> Any:
    """The request that a message holds; ends the call where it holds none."""
    try:
        return handler.request_deserializer(message)
    except DecodeError:
        return await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the call's message cannot be read"
        )


def forgetful(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """The error that ends a call, holding nothing of the call but what the frame has that raises it.

    gRPC keeps it in the call's context, which its traceback names: until Python looks for cycles, which is
    rare, each refused call would have its request stay, of up to 300 MB.
    """
    error.__context__ = None
    return error.with_traceback(None)


def key_of(context: Context) -> str:
    """Whose calls count together: a member's by its id, whatever certificate it shows; else an address's."""
    try:
        principal = caller(context)
    except AtollError:
        return context.peer().rpartition(":")[0]
    return principal.node_id or principal.role


def with_most(options: Options, most: int) -> Options:
    """The same of a server that has no more connections than that at once; it closes others unread."""
    return (*options, ("grpc.max_allowed_incoming_connections", most))


def bind_control(
    server: grpc.aio.Server,
    host: str,
    port: int,
    *,
    issuers_pem: bytes,
    certificate_pem: bytes,
    key_pem: bytes,
) -> int:
    """Listens for members: only certificates of these issuers get through the handshake.

    Returns the port, which is a free one when `port` is 0. Raises SystemRefusedError.
    """
    credentials = grpc.ssl_server_credentials(
        [(key_pem, certificate_pem)],
        root_certificates=issuers_pem,
        require_client_auth=True,
    )
    return _bind(server, host, port, credentials, called="control_port")


def bind_enrolment(
    server: grpc.aio.Server, host: str, port: int, *, certificate_pem: bytes, key_pem: bytes
) -> int:
    """Listens for anybody: encrypted, with the certificate that invites pin.

    Returns the port, which is a free one when `port` is 0. Raises SystemRefusedError.
    """
    credentials = grpc.ssl_server_credentials([(key_pem, certificate_pem)])
    return _bind(server, host, port, credentials, called="enrolment_port")


def caller(context: Context) -> Principal:
    """Who calls, by the certificate that TLS verified.

    Raises NotPermittedError when there is none, ProtocolMismatchError when it names nobody.
    """
    return _principal_of(certificate_of(context))


def certificate_of(context: Context) -> bytes:
    """The caller's certificate, PEM; raises NotPermittedError when there is none."""
    certificates = list(context.auth_context().get("x509_pem_cert", ()))
    if not certificates:
        raise NotPermittedError(
            "the caller shows no certificate", next_step="join the swarm with 'atoll join INVITE'"
        )
    return bytes(certificates[0])


@lru_cache(maxsize=4096)
def _principal_of(certificate_pem: bytes) -> Principal:
    """A node shows the same certificate at every call, and reading it costs as much as the answer."""
    return principal_of(certificate_pem)


def _bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials,
    *,
    called: str,
) -> int:
    bound = 0
    with contextlib.suppress(RuntimeError):
        bound = server.add_secure_port(endpoint_of(host, port), credentials)
    if not bound:
        option = "--port" if called == "control_port" else "--enrolment-port"
        raise refusal_to_listen(
            host, port, choice=f"{option}, for good with {called} in coordinator.toml"
        )
    return bound


def refusal_to_listen(host: str, port: int, *, choice: str = "--port") -> SystemRefusedError:
    """Why nobody can listen there, found by binding a plain socket: gRPC tells its reason to its log only.

    `choice` says how another port is chosen.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except socket.gaierror as error:
        return SystemRefusedError(
            f"{host} is not a host ({error.strerror})", next_step="choose another with --host"
        )
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                return SystemRefusedError(
                    f"port {port} of {host} is in use",
                    next_step=f"stop what listens there, or choose another port with {choice}",
                )
            case errno.EADDRNOTAVAIL:
                return SystemRefusedError(
                    f"{host} is not an address of this machine",
                    next_step="choose another with --host; 0.0.0.0 means all",
                )
            case errno.EACCES:
                return SystemRefusedError(
                    f"port {port} of {host} is for root alone on this machine",
                    next_step="choose one above 1023, or let everybody have it: "
                    f"'sudo sysctl -w net.ipv4.ip_unprivileged_port_start={port}'",
                )
            case _:
                return SystemRefusedError(
                    f"cannot listen on port {port} of {host}: {error.strerror or error}",
                    next_step=f"choose another with {choice}",
                )
    return SystemRefusedError(
        f"cannot listen on port {port} of {host}: gRPC refuses without a reason",
        next_step="try again; if it stays so, check the swarm's certificates",
    )
