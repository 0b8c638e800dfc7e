"""An invite against a certificate, over real TLS; and ports that are taken."""

from dataclasses import replace

import grpc
import grpc.aio
import pytest
from tls_coordinator import (
    Coordinator,
    get_run,
    unused_port,
)

from protocol.errors import (
    ProtocolMismatchError,
    SystemRefusedError,
    UnavailableError,
)
from protocol.server import SERVER_OPTIONS, bind_enrolment
from protocol.trust import pki
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity


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
        lambda self, request, node_id: issue(request, somebody),
    )
    with pytest.raises(ProtocolMismatchError, match=somebody):
        await enrol(coordinator.invite(), Identity.generate(), "node")


async def test_certificates_of_another_authority_that_calls_itself_the_same_swarm_are_not_accepted(
    coordinator: Coordinator,
) -> None:
    # All that the answer holds fits together; only the pinned server is of somebody else's swarm.
    ours = coordinator.authority
    coordinator.authority = pki.Authority.create(ours.swarm_id)
    with pytest.raises(ProtocolMismatchError, match=r"not for .* of its own swarm"):
        await enrol(coordinator.invite(), Identity.generate(), "node")


async def test_a_certificate_that_the_answers_own_authority_did_not_sign_is_not_accepted(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = pki.Authority.create(coordinator.authority.swarm_id)
    signed = another.issue_node
    monkeypatch.setattr(
        pki.Authority, "issue_node", lambda self, request, node_id: signed(request, node_id)
    )
    with pytest.raises(ProtocolMismatchError, match="not signed by the swarm's authority"):
        await enrol(coordinator.invite(), Identity.generate(), "node")
