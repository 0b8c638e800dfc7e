"""Streams end with their readers, and every byte of a channel is counted."""

import asyncio
import random
from typing import Any

import pytest

from protocol.errors import UnavailableError
from protocol.v1 import session_pb2_grpc
from protocol.wire.channel import (
    ANSWER_RECEIVED_BYTES,
    CALL_SENT_BYTES,
    CONNECTION_RECEIVED_BYTES,
    CONNECTION_SENT_BYTES,
    MESSAGE_RECEIVED_BYTES,
    MESSAGE_SENT_BYTES,
    _StreamInterceptor,
    _Traffic,
    open_channel,
    retried,
)
from protocol.wire.payload import WireCounts
from tests.integration.tls_coordinator import GET_RUN, SUBSCRIBE, Coordinator


async def test_a_reader_who_stops_early_leaves_no_stream_open(coordinator: Coordinator) -> None:
    async def never(_: object) -> str:
        return await asyncio.get_running_loop().create_future()

    coordinator.answer = never
    async with open_channel(coordinator.credentials()) as channel:
        stream = session_pb2_grpc.SessionServiceStub(channel).Subscribe(SUBSCRIBE)
        async for message in stream:
            assert message.evaluate.round == 1
            break
        stream.cancel()
        await asyncio.wait_for(coordinator.subscriptions_ended.acquire(), 10)


async def test_a_reader_who_is_cancelled_leaves_no_stream_open(coordinator: Coordinator) -> None:
    reached = asyncio.Event()

    async def never(_: object) -> str:
        reached.set()
        return await asyncio.get_running_loop().create_future()

    async def read(stub: Any) -> None:
        async for _ in stub.Subscribe(SUBSCRIBE):
            pass

    coordinator.answer = never
    async with open_channel(coordinator.credentials()) as channel:
        reader = asyncio.create_task(read(session_pb2_grpc.SessionServiceStub(channel)))
        await reached.wait()
        reader.cancel()
        await asyncio.wait([reader])
        await asyncio.wait_for(coordinator.subscriptions_ended.acquire(), 10)


async def test_a_stream_is_closed_where_grpc_itself_forgets_to() -> None:
    """The rare case of the test before: cancelled while gRPC still prepares the request."""

    class Preparing:
        is_cancelled = False
        is_asked = asyncio.Event()

        def __aiter__(self) -> "Preparing":
            return self

        async def __anext__(self) -> object:
            self.is_asked.set()
            return await asyncio.get_running_loop().create_future()

        def cancel(self) -> None:
            self.is_cancelled = True

    call = Preparing()

    async def continuation(details: object, request: object) -> Any:
        return call

    async def read() -> None:
        async for _ in await interceptor.intercept_unary_stream(continuation, None, SUBSCRIBE):
            pass

    interceptor: Any = _StreamInterceptor("host:1", None, _Traffic(WireCounts()))  # type: ignore[arg-type]
    reader = asyncio.create_task(read())
    await call.is_asked.wait()
    reader.cancel()
    await asyncio.wait([reader])
    assert call.is_cancelled


async def test_bytes_are_counted_as_control(coordinator: Coordinator) -> None:
    counts, member = WireCounts(), coordinator.credentials()
    async with open_channel(member, counts) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        answer = await stub.GetRun(GET_RUN)
        assert counts.totals()["control"] == (
            CONNECTION_SENT_BYTES + CALL_SENT_BYTES,
            CONNECTION_RECEIVED_BYTES + answer.ByteSize() + ANSWER_RECEIVED_BYTES,
        )
        before = counts.totals()["control"]
        messages = [message async for message in stub.Subscribe(SUBSCRIBE)]
        assert counts.totals()["control"] == (
            before[0] + CALL_SENT_BYTES + SUBSCRIBE.ByteSize() + 2 * MESSAGE_SENT_BYTES,
            before[1] + sum(message.ByteSize() + MESSAGE_RECEIVED_BYTES for message in messages),
        )
    assert counts.totals()["result"] == (0, 0)
    with pytest.raises(ValueError, match="gossip"):
        counts.sent("gossip", 1)  # type: ignore[arg-type]


async def test_a_connection_is_counted_again_when_the_coordinator_was_away(
    coordinator: Coordinator,
) -> None:
    counts = WireCounts()
    async with open_channel(coordinator.credentials(), counts) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        answers = [await stub.GetRun(GET_RUN), await stub.GetRun(GET_RUN)]
        await coordinator.control.stop(None)
        with pytest.raises(UnavailableError):
            await stub.GetRun(GET_RUN)
        await coordinator.restart()
        answers.append(
            await retried(
                lambda: stub.GetRun(GET_RUN), is_wanted=lambda: True, random=random.Random(0)
            )
        )
    of_answers = sum(answer.ByteSize() + ANSWER_RECEIVED_BYTES for answer in answers)
    assert counts.totals()["control"][1] == 2 * CONNECTION_RECEIVED_BYTES + of_answers
