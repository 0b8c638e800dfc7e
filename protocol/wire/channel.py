"""gRPC channels to a coordinator: mutual TLS, deadlines, keepalive, sizes, counted bytes, our own errors.

Calls through these channels raise AtollErrors and nothing of gRPC's. Servers are in
coordinator.server, the first contact of a machine that has no certificate yet in protocol.trust.enrolment.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio

from protocol.errors import PASSING, AtollError, SessionEndedError, UnavailableError
from protocol.service.limits import COMMAND_PROCESSES, require_processes
from protocol.trust.credentials import Credentials
from protocol.trust.handshake import Diagnosis, no_connection
from protocol.trust.invite import endpoint_of
from protocol.trust.pki import server_name
from protocol.trust.proxy import Proxy
from protocol.wire.payload import WireCounts
from protocol.wire.sockets import in_own_thread
from protocol.wire.status_codes import is_domain_error, translated

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_MESSAGE_BYTES = 4 << 20

DEADLINE_SECONDS = 10.0
"""Of unary calls that name none."""

CALL_SENT_BYTES = 215
"""Sent with each request beyond the message itself: HTTP/2 frames, TLS records, TCP and IP headers.

This and the five below were measured on one connection over loopback (grpcio 1.85.1, IPv4, TCP
timestamps on): payload and segments from the client socket's TCP_INFO, 52 bytes of headers each,
over 200 heartbeats 0.1 s apart and a stream of 200 messages 0.1 s apart. Their sum is what the
interface's own counter in /proc/net/dev says. Back to back, when acknowledgements ride on data, a
call costs 133 and 139; IPv6 adds 20 for each segment. Not counted: connections that came to no
answer, and keepalive pings, which only a connection idle for 20 s needs. How it adds up over a
whole run: benchmarks/wire.
"""

ANSWER_RECEIVED_BYTES = 165
"""Received with the answer to a unary call beyond the message itself."""

MESSAGE_RECEIVED_BYTES = 93
"""Received with each message of a stream beyond the message itself."""

MESSAGE_SENT_BYTES = 62
"""Sent for each message of a stream: acknowledgements and window updates."""

CONNECTION_SENT_BYTES = 3400
"""Sent to open a connection: TCP and TLS handshakes with our certificate, HTTP/2 settings."""

CONNECTION_RECEIVED_BYTES = 4300
"""Received to open a connection: the same, with the coordinator's certificate and TLS tickets."""

LOOK_SECONDS = 3.0
"""For a look at what keeps a call from its answer, which has had its time."""

RETRY_CAP_SECONDS = 6.0
"""The longest pause between two tries to reach a coordinator."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Answer = TypeVar("_Answer")


def channel_options(name: str, proxy: Proxy | None = None) -> list[tuple[str, Any]]:
    """Options of every channel; `name` is what the server's certificate must say."""
    through: list[tuple[str, Any]] = [("grpc.http_proxy", proxy.url)] if proxy is not None else []
    return [
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        # TCP's too: what the other end's kernel does not acknowledge for so long goes nowhere.
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A coordinator that restarts is found again within seconds, not after gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Channels of one process would otherwise share a connection, and with it bulk delays.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC obeys https_proxy without a word, and nobody who may write an environment may say
        # through whom the coordinator is asked.
        ("grpc.enable_http_proxy", int(proxy is not None)),
        *through,
    ]


def open_channel(
    credentials: Credentials, counts: WireCounts | None = None, *, address: str | None = None
) -> grpc.aio.Channel:
    """A channel to the coordinator for asyncio. Connects at the first call; close it when done.

    Every call raises AtollErrors. Unary calls have a deadline of DEADLINE_SECONDS unless they name
    another; streams have none. Bytes are counted as "control" into `counts`. With an `address` the name
    is not looked up.

    A caller that stops reading a stream early must `cancel()` the call: gRPC's calls are reference cycles, so
    a `break` alone leaves the stream open until the garbage collector comes by.
    """
    diagnosis = Diagnosis(credentials)
    traffic = _Traffic(WireCounts() if counts is None else counts)
    return grpc.aio.secure_channel(
        endpoint_of(address or credentials.host, credentials.control_port),
        _tls(credentials),
        options=channel_options(server_name(credentials.swarm_id), credentials.proxy),
        interceptors=[
            _UnaryInterceptor(credentials.endpoint, diagnosis, traffic),
            _StreamInterceptor(credentials.endpoint, diagnosis, traffic),
        ],
    )


def open_blocking_channel(credentials: Credentials) -> grpc.Channel:
    """The same without asyncio, for commands that ask one thing and end. Unary calls only."""
    require_processes(COMMAND_PROCESSES, of="a question to the coordinator")
    channel = grpc.secure_channel(
        credentials.endpoint,
        _tls(credentials),
        options=channel_options(server_name(credentials.swarm_id), credentials.proxy),
    )
    interceptor = _BlockingInterceptor(credentials.endpoint, Diagnosis(credentials))
    return grpc.intercept_channel(channel, interceptor)


async def retried(
    call: Callable[[], Awaitable[_Answer]],
    *,
    is_wanted: Callable[[], bool],
    random: Random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    on_wait: Callable[[AtollError, float], None] | None = None,
) -> _Answer:
    """Calls until it succeeds, fails for good, or is no longer wanted.

    What is PASSING is tried again, except SessionEndedError: that stays true.
    Waits a random time up to a bound that doubles from half a second to RETRY_CAP_SECONDS ("full
    jitter": Brooker, Exponential Backoff and Jitter, 2015), so that the nodes of a swarm do not
    all return at once to a coordinator that restarts. `on_wait` is told of each error and wait.
    """
    bound = 0.5
    while True:
        try:
            return await call()
        except PASSING as error:
            if isinstance(error, SessionEndedError) or not is_wanted():
                raise
            seconds = random.uniform(0.0, min(bound, RETRY_CAP_SECONDS))
            if on_wait is not None:
                on_wait(error, seconds)
        await sleep(seconds)
        bound = min(2 * bound, RETRY_CAP_SECONDS)


def _tls(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=credentials.server_root_pem,
        private_key=credentials.key_pem,
        certificate_chain=credentials.leaf_pem,
    )


class _Traffic:
    """Counts what the calls of one channel cost, and each connection once it has carried an answer."""

    def __init__(self, counts: WireCounts) -> None:
        self._counts = counts
        self._is_connected = False

    def request(self, message: object) -> None:
        """A call began."""
        self._counts.sent("control", _size_of(message) + CALL_SENT_BYTES)

    def answer(self, message: object) -> None:
        """A unary call was answered."""
        self._connected()
        self._counts.received("control", _size_of(message) + ANSWER_RECEIVED_BYTES)

    def streamed(self, message: object) -> None:
        """A message of a stream came."""
        self._connected()
        self._counts.received("control", _size_of(message) + MESSAGE_RECEIVED_BYTES)
        self._counts.sent("control", MESSAGE_SENT_BYTES)

    def disconnected(self) -> None:
        """A call found the connection gone, so the next answer comes over a new one."""
        self._is_connected = False

    def _connected(self) -> None:
        if not self._is_connected:
            self._is_connected = True
            self._counts.sent("control", CONNECTION_SENT_BYTES)
            self._counts.received("control", CONNECTION_RECEIVED_BYTES)


class _Interceptor:
    """What the interceptors for asyncio share."""

    def __init__(self, endpoint: str, diagnosis: Diagnosis, traffic: _Traffic) -> None:
        self._endpoint = endpoint
        self._diagnosis = diagnosis
        self._traffic = traffic

    async def _explained(self, error: grpc.RpcError) -> AtollError:
        told = translated(error, endpoint=self._endpoint)
        if _has_found_nobody(error):
            self._traffic.disconnected()
            return await in_own_thread(self._diagnosis.find) or told
        if _has_waited_in_vain(error):  # a node that waits is not to wait much longer
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    return _found_after_waiting(await in_own_thread(self._diagnosis.find), told)
            return _found_after_waiting(no_connection(self._endpoint), told)
        return told


class _UnaryInterceptor(_Interceptor, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[
            [grpc.aio.ClientCallDetails, _Request],
            Awaitable[grpc.aio.UnaryUnaryCall[_Request, _Response]],
        ],
        client_call_details: grpc.aio.ClientCallDetails,
        request: _Request,
    ) -> _Response | grpc.aio.UnaryUnaryCall[_Request, _Response]:
        details = client_call_details
        if details.timeout is None:
            details = grpc.aio.ClientCallDetails(
                method=details.method,
                timeout=DEADLINE_SECONDS,
                metadata=details.metadata,
                credentials=details.credentials,
                wait_for_ready=details.wait_for_ready,
            )
        self._traffic.request(request)
        try:
            call = await continuation(details, request)
            answer = await call
        except grpc.RpcError as error:
            raise await self._explained(error) from error
        self._traffic.answer(answer)
        return call


class _StreamInterceptor(_Interceptor, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[
            [grpc.aio.ClientCallDetails, _Request],
            Awaitable[grpc.aio.UnaryStreamCall[_Request, _Response]],
        ],
        client_call_details: grpc.aio.ClientCallDetails,
        request: _Request,
    ) -> AsyncIterator[_Response] | grpc.aio.UnaryStreamCall[_Request, _Response]:
        self._traffic.request(request)
        return self._messages(await continuation(client_call_details, request))

    async def _messages(
        self, call: grpc.aio.UnaryStreamCall[_Request, _Response]
    ) -> AsyncIterator[_Response]:
        try:
            async for message in call:
                self._traffic.streamed(message)
                yield message
        except grpc.RpcError as error:
            raise await self._explained(error) from error
        finally:
            # gRPC cancels a call whose reader is cancelled while it reads, but not before that,
            # while it waits for the request to leave: the stream would stay open.
            call.cancel()


@dataclass(frozen=True, slots=True)
class _BlockingDetails(grpc.ClientCallDetails):
    """gRPC gives its own no public constructor."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _BlockingInterceptor(grpc.UnaryUnaryClientInterceptor):
    def __init__(self, endpoint: str, diagnosis: Diagnosis) -> None:
        self._endpoint = endpoint
        self._diagnosis = diagnosis

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Any], Any],
        client_call_details: grpc.ClientCallDetails,
        request: Any,
    ) -> Any:
        details = client_call_details
        if details.timeout is None:
            details = _BlockingDetails(
                details.method,
                DEADLINE_SECONDS,
                details.metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            )
        call = continuation(details, request)
        error = call.exception()
        if isinstance(error, grpc.RpcError):
            told, found = translated(error, endpoint=self._endpoint), None
            if _has_found_nobody(error):
                found = self._diagnosis.find()
            elif _has_waited_in_vain(error):
                found = _found_after_waiting(self._diagnosis.find(), told)
            raise found or told from error
        return call


def _size_of(message: object) -> int:
    """Serialised size; gRPC's interceptors do not say that what they pass is a protobuf message."""
    return cast("Message", message).ByteSize()


def _has_found_nobody(error: grpc.RpcError) -> bool:
    """Whether a handshake can tell more: the call got no answer from a coordinator."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not is_domain_error(error)


def _has_waited_in_vain(error: grpc.RpcError) -> bool:
    """Whether a handshake may tell more: gRPC does not say if it had a connection."""
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not is_domain_error(error)


def _found_after_waiting(found: AtollError | None, told: AtollError) -> AtollError:
    """A coordinator that is too busy to answer may refuse a handshake as well: nothing final follows."""
    return found if isinstance(found, UnavailableError) else told


# How long a member's messages to the coordinator may be, by call
#
# Reading a message holds up everybody: 4 MiB of empty entries take a core 100 to 300 ms, while a heartbeat
# has hundreds of bytes. So each call has its own bound, which what honest nodes of the largest swarms send
# stays well below. Nodes divide what they report.

OTHER_BYTES = 1 << 16
"""Of calls that are not named here: a layout of 1024 fragments has 10 KB, 16 addresses have 4."""

USUAL_REPORTS_BYTES = 1 << 18
"""A node ends a message with the report before the one that passes this."""

BYTES_OF_CALLS = {
    "Heartbeat": 1 << 18,  # five lists of a thousand members that it does not reach: 170 KB
    "Report": USUAL_REPORTS_BYTES + (1 << 18),  # a mean of a thousand contributors has 150 KB
    "SubmitCommits": 2 << 20,  # to MAX_BROUGHT_BYTES, and the commit that passes that
    "SubmitRulings": 3 << 20,  # of MOST_CHARACTERS, with signatures
}

RUN_OWNER = "OperatorService"
"""What the run owner sends has gRPC's bound alone."""


def most_bytes_of(path: str, *, most: int) -> int:
    """Of a message to a call, by its path in gRPC: /atoll.v1.SessionService/Report."""
    service, _, call = path.rpartition("/")
    if service.endswith(RUN_OWNER):
        return most
    return min(most, BYTES_OF_CALLS.get(call, OTHER_BYTES))
