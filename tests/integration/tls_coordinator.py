"""A coordinator's two servers over real TLS, whose answers a test chooses; and how to call them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from coordinator.server import (
    CONTROL_OPTIONS,
    ENROLMENT_OPTIONS,
    bind_control,
    bind_enrolment,
    caller,
)
from protocol.trust import pki
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity, is_signed_by, node_id_of
from protocol.trust.invite import Invite
from protocol.v1 import enrolment_pb2, enrolment_pb2_grpc, session_pb2, session_pb2_grpc
from protocol.wire.channel import open_blocking_channel, open_channel
from protocol.wire.payload import WireCounts
from tests.ports import free_port

GET_RUN = session_pb2.GetRunRequest()
SUBSCRIBE = session_pb2.SubscribeRequest(session_id=1)


class Coordinator(
    session_pb2_grpc.SessionServiceServicer, enrolment_pb2_grpc.EnrolmentServiceServicer
):
    """Two real servers with one authority. `answer` is what GetRun does, and Subscribe ends with."""

    def __init__(self, *, most_enrolments: int | None = None) -> None:
        self.authority = pki.Authority.create(pki.new_swarm_id())
        self.certificate = self.authority.issue_server()
        self.control = grpc.aio.server(options=CONTROL_OPTIONS)
        self.enrolment = grpc.aio.server(
            options=ENROLMENT_OPTIONS, maximum_concurrent_rpcs=most_enrolments
        )
        self.may_enrol = asyncio.Event()
        self.may_enrol.set()
        self.control_port = self.bind(free_port())
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
            issuers_pem=self.authority.certificate_pem,
            certificate_pem=self.certificate.certificate_pem,
            key_pem=self.certificate.key_pem,
        )

    async def restart(self) -> None:
        self.control = grpc.aio.server(options=CONTROL_OPTIONS)
        self.bind(self.control_port)
        await self.control.start()

    async def name_of_caller(self, context: Any) -> str:
        return caller(context).uri

    async def GetRun(self, request: Any, context: Any) -> Any:  # noqa: N802
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
        await self.may_enrol.wait()
        statement = pki.enrolment_statement(request.invite_id, request.certificate_request)
        assert is_signed_by(request.public_key, statement, request.proof)
        node_id = node_id_of(request.public_key)
        return enrolment_pb2.EnrolResponse(
            swarm_id=self.authority.swarm_id,
            node_id=node_id,
            control_port=self.control_port,
            certificate_pem=self.authority.issue_node(request.certificate_request, node_id),
            authority_pem=self.authority.certificate_pem,
            run_name="a run",
        )

    Attach = Heartbeat = Report = ListCommits = Detach = GetRun
    Challenge = Renew = SubmitCommits = SubmitRulings = GetRun

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
            certificate_pem=self.authority.issue_node(request.request_der, node_id),
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
