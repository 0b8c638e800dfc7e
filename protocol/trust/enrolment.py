"""How a machine with an invite gets its certificate, and a member a new one: the node's side of both.

An invite pins the server's certificate; what comes through that connection is believed, the swarm's authority
first of all, and checked to fit together. A renewal believes nobody before the answer has shown certificates
that the authority vouches for, the one of the connection among them.
"""

from dataclasses import replace
from functools import partial

import grpc
import grpc.aio

from protocol.errors import (
    AnswerLostError,
    AtollError,
    CertificateRefusedError,
    OtherSwarmError,
    ProtocolMismatchError,
    UnavailableError,
)
from protocol.trust.credentials import Credentials
from protocol.trust.handshake import fetch_certificate, fetch_pinned_certificate
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite, endpoint_of
from protocol.trust.pki import (
    JOINING,
    Principal,
    Role,
    enrolment_statement,
    has_issued,
    joining_name_in,
    make_request,
    name_in,
    renewal_statement,
    server_name,
)
from protocol.trust.proxy import Proxy
from protocol.v1 import enrolment_pb2, enrolment_pb2_grpc
from protocol.wire.channel import DEADLINE_SECONDS, channel_options
from protocol.wire.sockets import in_own_thread
from protocol.wire.status_codes import is_domain_error, translated


def _channel_to(endpoint: str, certificate_pem: bytes, proxy: Proxy | None) -> grpc.aio.Channel:
    """A channel to whoever holds the key of this very certificate, and to nobody else."""
    return grpc.aio.secure_channel(
        endpoint,
        grpc.ssl_channel_credentials(root_certificates=certificate_pem),
        options=channel_options(joining_name_in(certificate_pem), proxy),
    )


async def enrol(
    invite: Invite, identity: Identity, node_name: str, proxy: Proxy | None = None
) -> Credentials:
    """Trades an invite for credentials. The same identity may do so again with the same invite.

    Raises UnavailableError when nothing answers, AnswerLostError when the invite may be used now,
    ProtocolMismatchError when the coordinator is not the invite's or contradicts itself, and what
    the coordinator refuses with.
    """
    pinned = await in_own_thread(partial(fetch_pinned_certificate, invite, proxy))
    request_der, key_pem = make_request()
    request = enrolment_pb2.EnrolRequest(
        invite_id=invite.invite_id,
        invite_secret=invite.secret,
        public_key=identity.public_key,
        certificate_request=request_der,
        proof=identity.sign(enrolment_statement(invite.invite_id, request_der)),
        node_name=node_name,
    )
    async with _channel_to(invite.endpoint, pinned, proxy) as channel:
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
        enrolment_port=invite.port,
        proxy=proxy,
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


async def renew_by_identity(credentials: Credentials, identity: Identity) -> Credentials:
    """A new certificate from the joining port, where the old one has ended or is of keys that were changed.

    Raises UnavailableError when nothing answers, OtherSwarmError when it is another run's coordinator,
    ProtocolMismatchError when it contradicts itself, and what the coordinator refuses with.
    """
    host, port = credentials.host, credentials.enrolment_port
    if not port:
        raise UnavailableError(
            f"the joining port of the coordinator at {host} is not known here",
            next_step="ask the run owner for an invite: 'atoll invite create'",
        )
    shown = await in_own_thread(partial(fetch_certificate, host, port, credentials.proxy))
    if name_in(shown) != server_name(credentials.swarm_id):
        raise OtherSwarmError(
            f"the coordinator at {endpoint_of(host, port)} is not of swarm {credentials.swarm_id}",
            next_step="check host and port, or join its swarm with 'atoll join INVITE'",
        )
    async with _channel_to(endpoint_of(host, port), shown, credentials.proxy) as channel:
        stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        try:
            asked = enrolment_pb2.ChallengeRequest(public_key=identity.public_key)
            challenge = (await stub.Challenge(asked, timeout=DEADLINE_SECONDS)).challenge
            request = renewal_request(credentials, identity, challenge)
            answer = await stub.Renew(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            raise translated(error, endpoint=endpoint_of(host, port)) from error
    renewed = taken(credentials, answer)
    if renewed.bundle.server_pem != shown:
        raise ProtocolMismatchError(
            f"what answers at {endpoint_of(host, port)} hands certificates of another server on",
            next_step="check host and port, or ask the run owner what answers there",
        )
    return renewed


def no_new_one(
    credentials: Credentials, refusal: CertificateRefusedError, why: AtollError
) -> AtollError:
    """What a refused certificate comes to where the identity gets no new one either.

    Where nothing answers on the joining port that may pass: the coordinator has just started, or a firewall
    lets nobody in there once all have joined. So may another run's coordinator that is in its place.
    """
    if isinstance(why, OtherSwarmError):
        return why
    if not isinstance(why, UnavailableError) or not credentials.enrolment_port:
        return refusal
    return UnavailableError(
        f"{refusal.what}, and a new one is not to be had: {why.what}",
        next_step=f"have the run owner open the joining port, TCP {credentials.enrolment_port}: members that "
        "were away for more than a day need it too",
    )


def renewal_request(
    credentials: Credentials, identity: Identity, challenge: bytes = b""
) -> enrolment_pb2.RenewRequest:
    """Asks for a new certificate for the same key; without a challenge it is for a session."""
    request_der, _ = make_request(credentials.key_pem)
    return enrolment_pb2.RenewRequest(
        public_key=identity.public_key,
        certificate_request=request_der,
        challenge=challenge,
        proof=identity.sign(renewal_statement(credentials.swarm_id, challenge, request_der)),
    )


def taken(credentials: Credentials, answer: enrolment_pb2.RenewResponse) -> Credentials:
    """What a renewal's answer makes of credentials; raises ProtocolMismatchError where it does not fit."""
    renewed = credentials.renewed(answer.certificate_pem)
    return replace(renewed, enrolment_port=answer.enrolment_port)
