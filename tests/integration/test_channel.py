"""Real servers on loopback with real TLS."""

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protocol import errors, pki
from protocol.channel import (
    ANSWER_RECEIVED_BYTES,
    CALL_SENT_BYTES,
    CONNECTION_RECEIVED_BYTES,
    CONNECTION_SENT_BYTES,
    MESSAGE_RECEIVED_BYTES,
    MESSAGE_SENT_BYTES,
    _StreamInterceptor,
    _Traffic,
    open_blocking_channel,
    open_channel,
    retried,
)
from protocol.credentials import Credentials
from protocol.enrolment import enrol
from protocol.errors import (
    AtollError,
    NotPermittedError,
    ProtocolMismatchError,
    SessionEndedError,
    SystemRefusedError,
    TemporaryError,
    UnavailableError,
)
from protocol.handshake import Diagnosis
from protocol.identity import Identity, is_signed_by, node_id_of
from protocol.invite import Invite
from protocol.server import SERVER_OPTIONS, bind_control, bind_enrolment, caller
from protocol.status_codes import abort
from protocol.v1 import enrolment_pb2, enrolment_pb2_grpc, session_pb2, session_pb2_grpc
from protocol.wire_count import WireCounts

NOW = datetime.now(UTC)
GET_RUN = session_pb2.GetRunRequest()
SUBSCRIBE = session_pb2.SubscribeRequest(session_id=1)


class Coordinator(
    session_pb2_grpc.SessionServiceServicer, enrolment_pb2_grpc.EnrolmentServiceServicer
):
    """Two real servers with one authority. `answer` is what GetRun does, and Subscribe ends with."""

    def __init__(self) -> None:
        self.authority = pki.Authority.create(pki.new_swarm_id(), NOW)
        self.certificate = self.authority.issue_server(NOW)
        self.control = grpc.aio.server(options=SERVER_OPTIONS)
        self.enrolment = grpc.aio.server(options=SERVER_OPTIONS)
        self.control_port = self.bind(0)
        self.enrolment_port = bind_enrolment(
            self.enrolment,
            "127.0.0.1",
            0,
            certificate_pem=self.certificate.certificate_pem,
            key_pem=self.certificate.key_pem,
        )
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(self, self.enrolment)
        self.answer: Callable[[Any], Awaitable[str]] = self.name_of_caller
        self.subscriptions_ended = asyncio.Semaphore(0)

    async def __aenter__(self) -> "Coordinator":
        await self.control.start()
        await self.enrolment.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.control.stop(None)
        await self.enrolment.stop(None)

    def bind(self, port: int) -> int:
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self.control)
        return bind_control(
            self.control,
            "127.0.0.1",
            port,
            authority_pem=self.authority.certificate_pem,
            certificate_pem=self.certificate.certificate_pem,
            key_pem=self.certificate.key_pem,
        )

    async def restart(self) -> None:
        self.control = grpc.aio.server(options=SERVER_OPTIONS)
        self.bind(self.control_port)
        await self.control.start()

    async def name_of_caller(self, context: Any) -> str:
        return caller(context).uri

    async def GetRun(self, request: Any, context: Any) -> session_pb2.GetRunResponse:  # noqa: N802
        return session_pb2.GetRunResponse(run_json=await self.answer(context))

    async def Subscribe(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[session_pb2.SubscribeResponse]:
        try:
            for number in (1, 2):
                yield session_pb2.SubscribeResponse(evaluate=session_pb2.Evaluate(round=number))
            await self.answer(context)
        finally:
            self.subscriptions_ended.release()

    async def Enrol(self, request: Any, context: Any) -> enrolment_pb2.EnrolResponse:  # noqa: N802
        statement = pki.enrolment_statement(request.invite_id, request.certificate_request)
        assert is_signed_by(request.public_key, statement, request.proof)
        node_id = node_id_of(request.public_key)
        return enrolment_pb2.EnrolResponse(
            swarm_id=self.authority.swarm_id,
            node_id=node_id,
            control_port=self.control_port,
            certificate_pem=self.authority.issue_node(request.certificate_request, node_id, NOW),
            authority_pem=self.authority.certificate_pem,
            run_name="a run",
        )

    Attach = Heartbeat = Report = ListCommits = Detach = GetRun

    def credentials(self) -> Credentials:
        """Those of one of its nodes."""
        request = pki.make_request()
        node_id = Identity.generate().node_id
        return Credentials(
            swarm_id=self.authority.swarm_id,
            run_name="a run",
            host="127.0.0.1",
            control_port=self.control_port,
            authority_pem=self.authority.certificate_pem,
            certificate_pem=self.authority.issue_node(request.request_der, node_id, NOW),
            key_pem=request.key_pem,
        )

    def invite(self) -> Invite:
        return Invite(
            host="127.0.0.1",
            port=self.enrolment_port,
            pin=pki.pin_of(self.certificate.certificate_pem),
            invite_id="k3v9",
            secret=bytes(32),
        )


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator() as running:
        yield running


async def get_run(credentials: Credentials, counts: WireCounts | None = None) -> str:
    async with open_channel(credentials, counts) as channel:
        answer = await session_pb2_grpc.SessionServiceStub(channel).GetRun(GET_RUN)
        return str(answer.run_json)


def get_run_blocking(credentials: Credentials) -> str:
    with open_blocking_channel(credentials) as channel:
        return session_pb2_grpc.SessionServiceStub(channel).GetRun(GET_RUN).run_json


async def both_ways(credentials: Credentials) -> AsyncIterator[Awaitable[str]]:
    """The same question over both kinds of channels: they must answer alike."""
    yield get_run(credentials)
    yield asyncio.to_thread(get_run_blocking, credentials)


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_member_gets_through_and_is_known_by_its_certificate(
    coordinator: Coordinator,
) -> None:
    member = coordinator.credentials()
    async for answer in both_ways(member):
        assert await answer == member.principal.uri


async def test_a_coordinator_of_another_swarm_is_refused_by_us(coordinator: Coordinator) -> None:
    async with Coordinator() as another:
        lost = replace(another.credentials(), control_port=coordinator.control_port)
        async for answer in both_ways(lost):
            with pytest.raises(ProtocolMismatchError, match=f"is not of swarm {lost.swarm_id}"):
                await answer


async def test_a_member_of_another_swarm_is_refused_by_the_coordinator(
    coordinator: Coordinator,
) -> None:
    async with Coordinator() as another:
        foreign = another.credentials()
        intruder = replace(
            coordinator.credentials(),
            certificate_pem=foreign.certificate_pem,
            key_pem=foreign.key_pem,
        )
        async for answer in both_ways(intruder):
            with pytest.raises(ProtocolMismatchError, match="refuses this certificate"):
                await answer


async def test_a_caller_without_a_certificate_never_reaches_the_control_plane(
    coordinator: Coordinator,
) -> None:
    reached: list[object] = []

    async def note(context: object) -> str:
        reached.append(context)
        return "reached"

    coordinator.answer = note
    tls = grpc.ssl_channel_credentials(root_certificates=coordinator.authority.certificate_pem)
    name = pki.server_name(coordinator.authority.swarm_id)
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{coordinator.control_port}",
        tls,
        options=[("grpc.ssl_target_name_override", name)],
    ) as channel:
        with pytest.raises(grpc.RpcError):
            await session_pb2_grpc.SessionServiceStub(channel).GetRun(GET_RUN, timeout=10)
    assert not reached
    assert await get_run(coordinator.credentials()) == "reached"


async def test_where_nothing_listens_the_next_step_is_to_start_a_coordinator(
    coordinator: Coordinator,
) -> None:
    lonely = replace(coordinator.credentials(), control_port=unused_port())
    async for answer in both_ways(lonely):
        with pytest.raises(UnavailableError, match=f"no coordinator answers at {lonely.endpoint}"):
            await answer


async def test_what_listens_but_is_no_coordinator_is_called_so(coordinator: Coordinator) -> None:
    async def chat(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org at your service\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(chat, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolMismatchError, match="is not a coordinator"):
            await get_run(replace(coordinator.credentials(), control_port=port))
        with pytest.raises(ProtocolMismatchError, match="is not a coordinator"):
            await enrol(replace(coordinator.invite(), port=port), Identity.generate(), "node")


async def test_a_connection_that_is_cut_in_the_handshake_may_be_tried_again(
    coordinator: Coordinator,
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match="broke off"):
            await get_run(replace(coordinator.credentials(), control_port=port))


async def test_a_coordinator_that_stops_is_not_taken_for_one_that_refuses_us(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    async def stop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stopping.close()
        writer.close()

    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(coordinator.certificate.certificate_pem)
    key.write_bytes(coordinator.certificate.key_pem)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    stopping = await asyncio.start_server(stop, "127.0.0.1", 0, ssl=tls)
    port = stopping.sockets[0].getsockname()[1]
    diagnosis = Diagnosis(replace(coordinator.credentials(), control_port=port))
    assert isinstance(await asyncio.to_thread(diagnosis.find), UnavailableError)


async def test_a_coordinator_that_dies_in_a_call_can_be_called_again() -> None:
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(Coordinator())
        asked = asyncio.Event()

        async def never(_: object) -> str:
            asked.set()
            return await asyncio.get_running_loop().create_future()

        coordinator.answer = never
        call = asyncio.create_task(get_run(coordinator.credentials()))
        await asked.wait()
        await stack.aclose()
        with pytest.raises((UnavailableError, TemporaryError)):
            await call


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AtollError)
    ],
)
async def test_a_domain_error_travels_with_class_text_and_next_step(
    coordinator: Coordinator, kind: type[AtollError]
) -> None:
    class Deeper(kind):  # type: ignore[misc, valid-type] # a class that callers do not know
        pass

    async def refuse(context: Any) -> str:
        await abort(context, Deeper("round 41 refused: 9f3c… ≠ 77ab…", next_step="type 'atöll'"))

    coordinator.answer = refuse
    async with open_channel(coordinator.credentials()) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        with pytest.raises(AtollError) as unary:
            await stub.GetRun(GET_RUN)
        with pytest.raises(AtollError) as streamed:
            async for _ in stub.Subscribe(SUBSCRIBE):
                pass
    with pytest.raises(AtollError) as blocking:
        await asyncio.to_thread(get_run_blocking, coordinator.credentials())
    for caught in (unary.value, streamed.value, blocking.value):
        assert type(caught) is kind
        assert str(caught) == "round 41 refused: 9f3c… ≠ 77ab…; type 'atöll'"


async def test_an_endless_sentence_is_cut_rather_than_lost(coordinator: Coordinator) -> None:
    async def refuse(context: Any) -> str:
        await abort(context, NotPermittedError("ü" * 100_000, next_step="ü" * 100_000))

    coordinator.answer = refuse
    with pytest.raises(NotPermittedError, match=r"^üüü.*…; üüü.*…$"):
        await get_run(coordinator.credentials())


async def test_a_bug_of_the_coordinator_is_not_blamed_on_the_network(
    coordinator: Coordinator,
) -> None:
    async def stumble(_: object) -> str:
        raise ZeroDivisionError

    coordinator.answer = stumble
    with pytest.raises(AtollError, match="coordinator's log") as caught:
        await get_run(coordinator.credentials())
    assert type(caught.value) is AtollError


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


async def test_a_second_coordinator_cannot_take_the_port(coordinator: Coordinator) -> None:
    tls = {
        "certificate_pem": coordinator.certificate.certificate_pem,
        "key_pem": coordinator.certificate.key_pem,
    }
    second = grpc.aio.server(options=SERVER_OPTIONS)
    port = coordinator.enrolment_port
    with pytest.raises(SystemRefusedError, match=f"port {port} of 127.0.0.1 is in use; .*--port"):
        bind_enrolment(second, "127.0.0.1", port, **tls)
    with pytest.raises(SystemRefusedError, match=r"192\.0\.2\.1 is not an address of this machine"):
        bind_enrolment(second, "192.0.2.1", 0, **tls)


async def test_an_invite_becomes_credentials_that_work(coordinator: Coordinator) -> None:
    identity = Identity.generate()
    credentials = await enrol(coordinator.invite(), identity, "node")
    assert credentials.principal.node_id == identity.node_id
    assert credentials.run_name == "a run"
    assert await get_run(credentials) == credentials.principal.uri


async def test_an_invite_for_another_certificate_is_refused_before_its_secret_is_sent(
    coordinator: Coordinator,
) -> None:
    async with Coordinator() as another:
        elsewhere = replace(another.invite(), port=coordinator.enrolment_port)
        with pytest.raises(ProtocolMismatchError, match="the invite is for"):
            await enrol(elsewhere, Identity.generate(), "node")
    gone = replace(coordinator.invite(), port=unused_port())
    with pytest.raises(UnavailableError, match="no coordinator answers"):
        await enrol(gone, Identity.generate(), "node")


async def test_a_certificate_for_somebody_else_is_not_accepted(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue = coordinator.authority.issue_node
    somebody = Identity.generate().node_id
    monkeypatch.setattr(
        pki.Authority,
        "issue_node",
        lambda self, request, node_id, now: issue(request, somebody, now),
    )
    with pytest.raises(ProtocolMismatchError, match=somebody):
        await enrol(coordinator.invite(), Identity.generate(), "node")


async def test_a_call_is_retried_with_growing_jitter_while_it_is_wanted() -> None:
    errors_ahead: list[AtollError] = [UnavailableError("down")] * 7 + [TemporaryError("busy")]
    slept: list[float] = []

    async def call() -> str:
        if errors_ahead:
            raise errors_ahead.pop(0)
        return "answer"

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Longest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            assert a == 0.0
            return b

    answer = await retried(call, is_wanted=lambda: True, random=Longest(), sleep=sleep)
    assert answer == "answer"
    assert slept == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


@pytest.mark.parametrize(
    ("error", "is_wanted"),
    [
        (UnavailableError("down"), False),
        (SessionEndedError("attach again"), True),
        (NotPermittedError("revoked"), True),
    ],
)
async def test_what_waiting_cannot_mend_is_not_retried(error: AtollError, is_wanted: bool) -> None:
    async def call() -> str:
        raise error

    async def sleep(_: float) -> None:
        pytest.fail("waited")

    with pytest.raises(type(error)) as caught:
        await retried(call, is_wanted=lambda: is_wanted, random=random.Random(0), sleep=sleep)
    assert caught.value is error
