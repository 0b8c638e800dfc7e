"""What callers send a coordinator costs it little: messages that nobody can read, and large ones."""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.config import create_home
from coordinator.server import BEGINNING, BYTES_A_SECOND, MOST_READ, ReadableMessages, WholeMessages
from protocol.trust.credentials import Credentials
from protocol.trust.pki import joining_name_in, server_name
from protocol.v1 import session_pb2
from protocol.wire.channel import BYTES_OF_CALLS, MAX_MESSAGE_BYTES, OTHER_BYTES
from tests.integration.coordinator_scene import (
    LOCAL,
    PATIENCE_SECONDS,
    described,
    invite_from,
    joined,
    serving,
)

UNREADABLE = b"\xff\xff\xff"


def raw(channel: grpc.aio.Channel, method: str) -> Any:
    """A call that sends bytes as they are."""
    return channel.unary_unary(method, request_serializer=None, response_deserializer=None)


def channel_of(credentials: Credentials) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        credentials.endpoint,
        grpc.ssl_channel_credentials(
            root_certificates=credentials.server_root_pem,
            private_key=credentials.key_pem,
            certificate_chain=credentials.leaf_pem,
        ),
        options=[("grpc.ssl_target_name_override", server_name(credentials.swarm_id))],
    )


async def code_of(call: Any, message: bytes) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call(message)
    return ended.value.code()


async def test_messages_that_nobody_can_read_end_their_calls_and_leave_nothing_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = create_home(tmp_path / "run", config=LOCAL, text=described)
    async with serving(home) as coordinator:
        options = [("grpc.ssl_target_name_override", joining_name_in(home.server_pem))]
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{coordinator.enrolment_port}",
            grpc.ssl_channel_credentials(home.server_pem),
            options=options,
        ) as channel:
            for name in ("Enrol", "Challenge", "Renew"):
                call = raw(channel, f"/atoll.v1.EnrolmentService/{name}")
                assert await code_of(call, UNREADABLE) is grpc.StatusCode.INVALID_ARGUMENT
        invite, _ = await invite_from(home)
        member = await joined(invite, "node-a")
        member_channel = channel_of(member.credentials)
        call = raw(member_channel, "/atoll.v1.SessionService/Heartbeat")
        assert await code_of(call, UNREADABLE) is grpc.StatusCode.INVALID_ARGUMENT
        await member_channel.close()
        await member.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Request:
    """One that can be seen to go."""


@pytest.fixture
def no_cycles_looked_for() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles_looked_for")
@pytest.mark.parametrize("interceptor", [WholeMessages(), ReadableMessages()])
async def test_of_a_call_that_was_refused_nothing_stays(
    interceptor: grpc.aio.ServerInterceptor,
) -> None:
    requests: list[weakref.ref[Request]] = []

    def deserialized(message: bytes) -> Request:
        request = Request()
        requests.append(weakref.ref(request))
        return request

    async def refused(request: Request, context: Any) -> None:
        try:
            raise ValueError("no")
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")

    server = grpc.aio.server(interceptors=[interceptor])
    handler: Any = grpc.unary_unary_rpc_method_handler(refused, request_deserializer=deserialized)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(3):
            assert await code_of(raw(channel, "/s/Call"), b"") is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)
    assert len(requests) == 3
    assert not any(request() for request in requests)


async def test_of_one_member_a_few_calls_are_answered_at_once_whatever_it_asks() -> None:
    """Or a thousand answers of a megabyte were made before the first is counted."""
    num_begun, may_end, are_there = 0, asyncio.Event(), asyncio.Event()

    async def waits(message: bytes, context: Any) -> bytes:
        nonlocal num_begun
        num_begun += 1
        if num_begun == MOST_READ:
            are_there.set()
        await may_end.wait()
        return b""

    server = grpc.aio.server(interceptors=[WholeMessages()])
    handler: Any = grpc.unary_unary_rpc_method_handler(waits, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [raw(channel, "/s/Call")(b"") for _ in range(2 * MOST_READ)]
        waiting = asyncio.gather(*calls)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await are_there.wait()
            with pytest.raises(grpc.aio.AioRpcError):  # behind all of them, and by its own deadline
                await raw(channel, "/s/Call")(b"", timeout=0.2)
            assert num_begun == MOST_READ
            may_end.set()
            # The one behind may begin yet: its caller has given up, and the server hears that later.
            assert await waiting == [b""] * (2 * MOST_READ)
    await server.stop(None)


def test_a_member_that_sends_or_asks_for_megabytes_waits_for_them_and_another_one_does_not() -> (
    None
):
    messages = WholeMessages()
    longest_seconds = MAX_MESSAGE_BYTES / BYTES_A_SECOND
    messages.count("greedy", MAX_MESSAGE_BYTES, 100.0)
    assert messages.wait_seconds("greedy", 100.0) == 0
    messages.count("greedy", MAX_MESSAGE_BYTES, 100.0)
    assert messages.wait_seconds("greedy", 100.0) == longest_seconds
    assert messages.wait_seconds("greedy", 100.0 + longest_seconds) == 0
    assert messages.wait_seconds("honest", 100.0) == 0


async def test_a_message_that_is_long_for_its_call_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four MiB of empty entries would hold up everybody's heartbeats for as long as they are read."""
    was_read: list[int] = []

    async def noted(handler: Any, message: bytes, context: Any) -> Any:
        was_read.append(len(message))
        return handler.request_deserializer(message)

    home = create_home(tmp_path / "run", config=LOCAL, text=described)
    async with serving(home):
        invite, _ = await invite_from(home)
        member = await joined(invite, "node-a")
        monkeypatch.setattr("coordinator.server.read", noted)
        channel = channel_of(member.credentials)
        for name, most_bytes in {**BYTES_OF_CALLS, "Attach": OTHER_BYTES}.items():
            call = raw(channel, f"/atoll.v1.SessionService/{name}")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call(bytes(most_bytes + 1))
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{most_bytes:,} is the most" in str(ended.value.details())
        assert not was_read
        await channel.close()
        await member.close()


async def test_what_a_member_sends_and_is_answered_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted: list[tuple[str, int]] = []
    monkeypatch.setattr(
        WholeMessages, "count", lambda _, key, num_bytes, now: counted.append((key, num_bytes))
    )
    home = create_home(tmp_path / "run", config=LOCAL, text=described)
    async with serving(home):
        invite, _ = await invite_from(home)
        member = await joined(invite, "node-a")
        answered = await member.session.GetRun(session_pb2.GetRunRequest())
        assert counted[-2:] == [(member.node_id, 0), (member.node_id, answered.ByteSize())]
        await member.attach()
        member.subscribe()
        roster = await member.next("roster")
        assert (member.node_id, roster.ByteSize()) in counted
        await member.close()


async def test_of_a_stream_its_beginning_is_counted_and_not_what_the_coordinator_tells_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a member of a large swarm would wait with its heartbeats for what it never asked for."""
    counted: list[int] = []
    monkeypatch.setattr(
        WholeMessages, "count", lambda _, key, num_bytes, now: counted.append(num_bytes)
    )

    async def tells(message: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(2 * BEGINNING):
            yield bytes(number + 1)

    server = grpc.aio.server(interceptors=[WholeMessages()])
    handler: Any = grpc.unary_stream_rpc_method_handler(tells, bytes, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_stream("/s/Call")
        told = [len(each) async for each in call(b"")]
    await server.stop(None)
    assert told == [*range(1, 2 * BEGINNING + 1)]
    assert counted == [0, *range(1, BEGINNING + 1)]
