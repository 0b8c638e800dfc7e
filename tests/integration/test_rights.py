"""Every call of every service, by every role, with every certificate that is not right. Over real TLS.

The calls come from the descriptors of proto/: one that is new fails here until RIGHTS says who may make it.
"""

import importlib
import pkgutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

import protocol.v1
from coordinator.config import Home
from protocol.errors import AtollError
from protocol.trust.credentials import Credentials
from protocol.trust.identity import Identity
from protocol.trust.invite import Invite, endpoint_of
from protocol.trust.pki import ENDLESS, Authority, Validity, make_request, server_name
from protocol.v1 import operator_pb2
from protocol.v1.operator_pb2_grpc import OperatorServiceStub
from protocol.wire.channel import channel_options, open_channel
from protocol.wire.status_codes import translated
from tests.integration.coordinator_scene import authority_of, invite_from, joined, new_home, serving

ANYBODY = {"owner", "viewer", "node", "helper", "nobody"}
NODE, MEMBERS, OWNER = {"node", "helper"}, {"owner", "viewer", "node", "helper"}, {"owner"}

RIGHTS = {
    "EnrolmentService.Enrol": ANYBODY,
    "EnrolmentService.Challenge": ANYBODY,
    "EnrolmentService.Renew": ANYBODY,
    "SessionService.GetRun": NODE,
    "SessionService.Attach": NODE,
    "SessionService.Heartbeat": NODE,
    "SessionService.Subscribe": NODE,
    "SessionService.Report": NODE,
    "SessionService.ListCommits": NODE,
    "SessionService.SubmitCommits": NODE,
    "SessionService.SubmitRulings": NODE,
    "SessionService.Renew": NODE,
    "SessionService.Detach": NODE,
    "StatusService.GetStatus": MEMBERS,
    "StatusService.ListRounds": MEMBERS,
    "StatusService.GetRound": MEMBERS,
    "OperatorService.CreateInvite": OWNER,
    "OperatorService.ListInvites": OWNER,
    "OperatorService.RevokeInvite": OWNER,
    "OperatorService.OwnInvite": OWNER,
    "OperatorService.LimitInvite": OWNER,
    "OperatorService.SkipSamples": OWNER,
    "OperatorService.RuleNode": OWNER,
    "OperatorService.SteerRun": OWNER,
    "OperatorService.AmendRun": OWNER,
    "OperatorService.RollBackRun": OWNER,
    "OperatorService.ListRulings": OWNER,
}
"""Who may make which call, with a certificate that holds. "nobody" has none at all."""

AT_THE_DOOR = {"CertificateRefusedError", "ProtocolMismatchError"}
IN_THE_HANDSHAKE = {
    *("none", "expired", "of the future", "other authority", "other run", "wrong key"),
    "of a replaced coordinator",
}
"""Certificates with which nobody gets as far as a call."""

IN_THE_CALL = {
    "expelled": "ExpelledError",
    "quarantined": "HeldBackError",
    "unapproved": "HeldBackError",
    "never enrolled": "TemporaryError",  # for a minute after a start: its ruling may yet come back
}
"""Certificates that the handshake takes and calls refuse, with what nodes are told."""


def methods() -> dict[str, MethodDescriptor]:
    """All calls that there are, by service and name."""
    found = {}
    for module in pkgutil.iter_modules(protocol.v1.__path__):
        if not module.name.endswith("_pb2"):
            continue
        described = importlib.import_module(f"protocol.v1.{module.name}").DESCRIPTOR
        for service in described.services_by_name.values():
            for method in service.methods:
                found[f"{service.name}.{method.name}"] = method
    return found


def test_every_call_of_the_protocol_says_who_may_make_it() -> None:
    assert set(methods()) == set(RIGHTS)


async def outcome(channel: grpc.aio.Channel, method: MethodDescriptor) -> AtollError | None:
    """What an empty request comes to; None when it is answered."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    request = GetMessageClass(method.input_type)()
    kinds: dict[str, Any] = {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    try:
        if method.server_streaming:
            await anext(channel.unary_stream(path, **kinds)(request).__aiter__())
        else:
            await channel.unary_unary(path, **kinds)(request)
    except AtollError as error:
        return error
    except grpc.RpcError as error:  # of a channel that is not one of ours
        return translated(error, endpoint="the coordinator")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    home: Home
    roles: dict[str, Credentials]
    wrong: dict[str, Credentials]
    enrolment: str


async def invite_with(home: Home, **wants: object) -> Invite:
    async with open_channel(Credentials.load(home.directory)) as channel:
        request = operator_pb2.CreateInviteRequest(max_uses=2, valid_seconds=60, **wants)  # type: ignore[arg-type]
        return Invite.decode((await OperatorServiceStub(channel).CreateInvite(request)).invite)


async def ruled(home: Home, node: str, verdict: str) -> None:
    async with open_channel(Credentials.load(home.directory)) as channel:
        value = operator_pb2.NodeVerdict.Value(f"NODE_VERDICT_{verdict}")
        request = operator_pb2.RuleNodeRequest(node=node, verdict=value)
        await OperatorServiceStub(channel).RuleNode(request)


@asynccontextmanager
async def every_certificate(tmp_path: Path) -> AsyncIterator[Scene]:
    home, other = new_home(tmp_path / "home"), new_home(tmp_path / "other")
    async with serving(home) as coordinator, serving(other):
        owner = Credentials.load(home.directory)
        invite, _ = await invite_from(home, uses=4)
        fakes = {name: await joined(invite, name) for name in ("node", "expelled", "quarantined")}
        for role in ("viewer", "helper"):
            fakes[role] = await joined(await invite_with(home, role=role), role)
        fakes["unapproved"] = await joined(
            await invite_with(home, needs_approval=True), "unapproved"
        )
        await ruled(home, "expelled", "EXPEL")
        await ruled(home, "quarantined", "QUARANTINE")
        stranger = await joined((await invite_from(other))[0], "stranger")
        node = fakes["node"]
        request_der, key_pem = make_request()

        def shown(certificate_pem: bytes) -> Credentials:
            """As a program does that has any certificate it likes, and knows the coordinator's."""
            return replace(owner, certificate_pem=certificate_pem + home.tail_pem, key_pem=key_pem)

        def issued(validity: Validity = ENDLESS, *, by: Any = home.issuer) -> bytes:
            made: bytes = by.issue_node(request_der, node.node_id, validity=validity)
            return made

        impostor = Authority.create(owner.swarm_id)
        wrong = {
            "expired": shown(issued(Validity.of_member(1e9))),
            "of the future": shown(issued(Validity.of_member(4e9))),
            "other authority": shown(issued(by=impostor)),
            "of a replaced coordinator": shown(issued(by=authority_of(home).issue_coordinator(7))),
            "other run": replace(
                owner,
                certificate_pem=stranger.credentials.leaf_pem + home.tail_pem,
                key_pem=stranger.credentials.key_pem,
            ),
            "wrong key": replace(node.credentials, key_pem=key_pem),
            "never enrolled": shown(
                home.issuer.issue_node(request_der, Identity.generate().node_id)
            ),
            **{name: fakes[name].credentials for name in ("expelled", "quarantined", "unapproved")},
        }
        roles = {"owner": owner, **{n: fakes[n].credentials for n in ("node", "viewer", "helper")}}
        enrolment = endpoint_of("127.0.0.1", coordinator.enrolment_port)
        try:
            yield Scene(home=home, roles=roles, wrong=wrong, enrolment=enrolment)
        finally:
            for fake in (*fakes.values(), stranger):
                await fake.close()


def is_for_members(name: str) -> bool:
    return not name.startswith("EnrolmentService")


async def test_each_role_makes_the_calls_that_it_may_and_no_others(tmp_path: Path) -> None:
    async with every_certificate(tmp_path) as scene, AsyncExitStack() as opened:
        for role, credentials in scene.roles.items():
            channel = await opened.enter_async_context(open_channel(credentials))
            for name, method in methods().items():
                if not is_for_members(name):
                    continue
                error = await outcome(channel, method)
                kind = type(error).__name__
                where = f"{role} calls {name}: {error!r}"
                if role in RIGHTS[name]:
                    assert kind not in {"NotPermittedError", "CertificateRefusedError"}, where
                else:
                    assert kind == "NotPermittedError", where


async def test_no_call_is_answered_for_a_certificate_that_is_not_right(tmp_path: Path) -> None:
    async with every_certificate(tmp_path) as scene, AsyncExitStack() as opened:
        assert set(scene.wrong) == (IN_THE_HANDSHAKE - {"none"}) | set(IN_THE_CALL)
        for why, credentials in scene.wrong.items():
            channel = await opened.enter_async_context(open_channel(credentials))
            for name, method in methods().items():
                if not is_for_members(name):
                    continue
                error = await outcome(channel, method)
                kind = type(error).__name__
                where = f"{why} calls {name}: {error!r}"
                if why in IN_THE_HANDSHAKE:
                    assert kind in AT_THE_DOOR, where
                elif RIGHTS[name] == OWNER:
                    assert kind == "NotPermittedError", where
                else:
                    assert kind == IN_THE_CALL[why], where


async def test_without_a_certificate_there_is_the_joining_port_and_nothing_behind_it(
    tmp_path: Path,
) -> None:
    async with every_certificate(tmp_path) as scene, AsyncExitStack() as opened:
        owner, home = scene.roles["owner"], scene.home
        server = authority_of(
            home
        ).issue_server()  # what the coordinator itself shows, and no member has
        joining, control, as_server = [
            await opened.enter_async_context(
                grpc.aio.secure_channel(
                    endpoint,
                    grpc.ssl_channel_credentials(home.server_pem, key_pem, certificate_pem),
                    options=channel_options(server_name(owner.swarm_id)),
                )
            )
            for endpoint, certificate_pem, key_pem in (
                (scene.enrolment, None, None),
                (owner.endpoint, None, None),
                (owner.endpoint, *server),
            )
        ]
        for name, method in methods().items():
            for channel in (control, as_server):
                error = await outcome(channel, method)
                assert type(error).__name__ == "UnavailableError", f"{name}: {error!r}"
            error = await outcome(joining, method)
            if is_for_members(name):
                assert "does not know this call" in str(error), f"{name}: {error!r}"
            else:  # an empty request is refused by what is in it
                assert type(error).__name__ in {"BadDataError"}, f"{name}: {error!r}"
