"""An invite against a certificate, over real TLS; and ports that are taken."""

import asyncio
import contextlib
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from coordinator.server import CONTROL_OPTIONS, ENROLMENT_OPTIONS, bind_enrolment, server_options
from protocol.errors import ProtocolMismatchError, SystemRefusedError, UnavailableError
from protocol.trust import pki
from protocol.trust.enrolment import enrol
from protocol.trust.identity import Identity
from tests.integration.tls_coordinator import Coordinator, get_run
from tests.ports import free_port

ROOT = Path(pki.__file__).parents[2]


async def test_a_second_coordinator_cannot_take_the_port(coordinator: Coordinator) -> None:
    tls = {
        "certificate_pem": coordinator.certificate.certificate_pem,
        "key_pem": coordinator.certificate.key_pem,
    }
    second = grpc.aio.server(options=ENROLMENT_OPTIONS)
    port = coordinator.enrolment_port
    with pytest.raises(
        SystemRefusedError, match=f"port {port} of 127.0.0.1 is in use; .*--enrolment-port"
    ):
        bind_enrolment(second, "127.0.0.1", port, **tls)
    with pytest.raises(SystemRefusedError, match=r"192\.0\.2\.1 is not an address of this machine"):
        bind_enrolment(second, "192.0.2.1", 0, **tls)


UNPRIVILEGED = """
import ctypes, os, subprocess, sys
PR_CAPBSET_DROP, CAP_NET_BIND_SERVICE = 24, 10
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_NET_BIND_SERVICE, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
BIND = """
from coordinator.server import refusal_to_listen
refused = refusal_to_listen("127.0.0.1", 443)
print(refused.what, refused.next_step, sep="\\n")
"""


@pytest.mark.usefixtures("may_make_network_labs")  # which takes root, whose capability is dropped
def test_a_port_for_root_alone_is_said_to_be_one_with_what_opens_it() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 443:
        pytest.skip("here everybody may have port 443")
    command = [sys.executable, "-c", UNPRIVILEGED, BIND]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.splitlines() == [
        "port 443 of 127.0.0.1 is for root alone on this machine",
        "choose one above 1023, or let everybody have it: "
        "'sudo sysctl -w net.ipv4.ip_unprivileged_port_start=443'",
    ], ran.stderr


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
    gone = replace(coordinator.invite(), port=free_port())
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


async def closed_by_the_server(port: int, *, tls: bool, said: bytes) -> bool:
    """Whether a connection that says no more than this is ended by the other side."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(said)
    try:
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 12):
                    pass
        return True
    finally:
        writer.close()


@pytest.mark.parametrize(
    "stage", ["nothing", "half a handshake", "TLS alone", "HTTP/2 and no call"]
)
async def test_a_stranger_that_goes_no_further_is_hung_up_on(
    stage: str, coordinator: Coordinator
) -> None:
    said = {
        "half a handshake": b"\x16\x03\x01",
        "HTTP/2 and no call": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
    }.get(stage, b"")
    options = server_options(idle_seconds=0.2, streams=1, handshake_seconds=0.2)
    server = grpc.aio.server(options=options)
    port = bind_enrolment(
        server,
        "127.0.0.1",
        0,
        certificate_pem=coordinator.certificate.certificate_pem,
        key_pem=coordinator.certificate.key_pem,
    )
    await server.start()
    try:
        is_tls = stage in ("TLS alone", "HTTP/2 and no call")
        assert await closed_by_the_server(port, tls=is_tls, said=said)
    finally:
        await server.stop(None)


def test_the_port_that_strangers_reach_hangs_up_soonest() -> None:
    strangers, members = dict(ENROLMENT_OPTIONS), dict(CONTROL_OPTIONS)
    assert strangers["grpc.server_handshake_timeout_ms"] <= 10_000
    assert members["grpc.server_handshake_timeout_ms"] <= 10_000
    assert strangers["grpc.max_connection_idle_ms"] < members["grpc.max_connection_idle_ms"]
