"""How a machine with an invite gets its certificate: the node's side of EnrolmentService.

The invite pins the server's certificate; what comes through that connection is believed, the
swarm's authority first of all, and checked to fit together.
"""

import asyncio

import grpc
import grpc.aio

from protocol.channel import DEADLINE_SECONDS, channel_options
from protocol.errors import AnswerLostError, ProtocolMismatchError, UnavailableError
from protocol.status_codes import is_domain_error, translated
from protocol.trust.credentials import Credentials
from protocol.trust.handshake import fetch_pinned_certificate
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite
from protocol.trust.pki import (
    JOINING,
    Principal,
    Role,
    enrolment_statement,
    has_issued,
    make_request,
    name_in,
)
from protocol.v1 import enrolment_pb2, enrolment_pb2_grpc


def open_enrolment_channel(invite: Invite, certificate_pem: bytes) -> grpc.aio.Channel:
    """A channel to whoever holds the key of this very certificate, and to nobody else."""
    return grpc.aio.secure_channel(
        invite.endpoint,
        grpc.ssl_channel_credentials(root_certificates=certificate_pem),
        options=channel_options(name_in(certificate_pem)),
    )


async def enrol(invite: Invite, identity: Identity, node_name: str) -> Credentials:
    """Trades an invite for credentials. The same identity may do so again with the same invite.

    Raises UnavailableError when nothing answers, AnswerLostError when the invite may be used now,
    ProtocolMismatchError when the coordinator is not the invite's or contradicts itself, and what
    the coordinator refuses with.
    """
    pinned = await asyncio.to_thread(fetch_pinned_certificate, invite)
    request_der, key_pem = make_request()
    request = enrolment_pb2.EnrolRequest(
        invite_id=invite.invite_id,
        invite_secret=invite.secret,
        public_key=identity.public_key,
        certificate_request=request_der,
        proof=identity.sign(enrolment_statement(invite.invite_id, request_der)),
        node_name=node_name,
    )
    async with open_enrolment_channel(invite, pinned) as channel:
        stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        try:
            answer = await stub.Enrol(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            found = translated(error, endpoint=invite.endpoint)
            if isinstance(found, UnavailableError) and not is_domain_error(error):
                raise AnswerLostError(
                    found.what, next_step="run 'atoll join' again, with the same invite"
                ) from error
            raise found from error
    credentials = Credentials(
        swarm_id=answer.swarm_id,
        run_name=answer.run_name,
        host=invite.host,
        control_port=answer.control_port,
        authority_pem=answer.authority_pem,
        certificate_pem=answer.certificate_pem,
        key_pem=key_pem,
    )
    credentials.check()
    role = credentials.principal.role
    us = Principal(
        swarm_id=answer.swarm_id,
        role=role if role in JOINING else Role.NODE,
        node_id=identity.node_id,
    )
    if credentials.principal != us or not has_issued(answer.authority_pem, pinned):
        raise ProtocolMismatchError(
            f"the coordinator at {invite.endpoint} gave a certificate for "
            f"{credentials.principal.uri}, not for {us.uri} of its own swarm",
            next_step="ask the run owner for a new invite: 'atoll invite create'",
        )
    return credentials
