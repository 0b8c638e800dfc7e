"""Who gets through to a coordinator over real TLS, and what who does not is told."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protocol import errors
from protocol.errors import (
    AtollError,
    NotPermittedError,
    ProtocolMismatchError,
    TemporaryError,
    UnavailableError,
)
from protocol.trust import handshake, pki
from protocol.trust.credentials import Credentials
from protocol.trust.enrolment import enrol
from protocol.trust.handshake import Diagnosis, nothing_answers
from protocol.trust.identity import Identity
from protocol.trust.pki import server_name
from protocol.trust.proxy import Proxy
from protocol.v1 import session_pb2_grpc
from protocol.wire import channel
from protocol.wire.channel import channel_options, open_channel
from protocol.wire.status_codes import abort
from tests.integration.tls_coordinator import (
    GET_RUN,
    SUBSCRIBE,
    Coordinator,
    both_ways,
    get_run,
    get_run_blocking,
)
from tests.ports import free_port
from tests.unit.served_folder import certificate_of


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
    lonely = replace(coordinator.credentials(), control_port=free_port())
    async for answer in both_ways(lonely):
        with pytest.raises(UnavailableError, match=f"no coordinator answers at {lonely.endpoint}"):
            await answer


async def test_a_proxy_that_the_environment_names_is_never_asked(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        async for answer in both_ways(coordinator.credentials()):
            assert await answer
        await enrol(coordinator.invite(), Identity.generate(), "node")
    assert asked == []


@pytest.mark.parametrize("by_tls", [True, False])
async def test_where_a_portal_answers_in_the_coordinators_place_a_node_waits(
    coordinator: Coordinator, tmp_path: Path, by_tls: bool
) -> None:
    async def sign_in(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: https://login.hotel.example/\r\n\r\n")
        writer.close()

    context = certificate_of("login.hotel.example", tmp_path) if by_tls else None
    if context is not None:
        context.set_alpn_protocols(["h2", "http/1.1"])
    async with await asyncio.start_server(sign_in, "127.0.0.1", 0, ssl=context) as portal:
        port = portal.sockets[0].getsockname()[1]
        # Unavailable, which a node waits through: its laptop will be in another network.
        async for answer in both_ways(replace(coordinator.credentials(), control_port=port)):
            with pytest.raises(UnavailableError, match=r"is no coordinator: .*sign in to this"):
                await answer
        with pytest.raises(UnavailableError, match=r"is no coordinator: .*sign in to this"):
            await enrol(replace(coordinator.invite(), port=port), Identity.generate(), "node")


def test_a_coordinator_that_is_down_is_no_network_without_a_family_of_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name has two addresses: one refuses, and nothing leads to the other, as often to IPv6."""
    port = free_port()

    def look_up(host: str, *how: object, **more: object) -> list[Any]:
        found = ("127.0.0.1", "224.0.0.1") if host == "dual.example" else ("224.0.0.1",)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(UnavailableError, match="Connection refused") as told:
        handshake.fetch_certificate("dual.example", port)
    assert "without" not in told.value.next_step
    with pytest.raises(OSError, match=r"dual\.example:\d+ does not answer \(Connection refused\)"):
        Proxy(host="dual.example", port=port).connected("train.example", 7700, timeout=5)
    with pytest.raises(UnavailableError, match="Network is unreachable") as told:
        handshake.fetch_certificate("single.example", port)
    assert "it is one without IPv4:" in told.value.next_step


def test_where_nothing_answers_and_a_proxy_is_set_the_sentence_says_that_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    assert "proxy" not in nothing_answers("192.0.2.1", 7700, refused).next_step
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example:3128/")
    said = nothing_answers("192.0.2.1", 7700, refused).next_step
    assert "only if it is told to: 'atoll join --proxy proxy.example:3128'" in said
    assert "secret" not in said


async def test_what_speaks_tls_and_refuses_ours_is_called_no_coordinator(
    coordinator: Coordinator,
) -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes((21, 3, 3, 0, 2, 2, 40)))  # handshake_failure
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(alert, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolMismatchError, match=r"is not a coordinator .*FAILURE"):
            await get_run(replace(coordinator.credentials(), control_port=port))
        with pytest.raises(ProtocolMismatchError, match=r"is not a coordinator .*FAILURE"):
            await enrol(replace(coordinator.invite(), port=port), Identity.generate(), "node")


async def test_where_a_name_leads_is_said_and_that_a_guest_network_may_lead_it_elsewhere(
    coordinator: Coordinator,
) -> None:
    port = free_port()
    said = rf"localhost:{port}, which is .*127\.0\.0\.1.* here \(.*refused\); .*sign in to this network"
    with pytest.raises(UnavailableError, match=said):
        await get_run(replace(coordinator.credentials(), host="localhost", control_port=port))
    with pytest.raises(UnavailableError, match=said):
        await enrol(
            replace(coordinator.invite(), host="localhost", port=port), Identity.generate(), "node"
        )


async def test_a_name_that_nobody_knows_here_is_called_so(coordinator: Coordinator) -> None:
    name = "no-such-host.invalid"  # which no name server may know (RFC 6761)
    said = rf"no coordinator answers at {name}:7700 \(.*\); check the name, .*'getent hosts {name}'"
    with pytest.raises(UnavailableError, match=said):
        await enrol(
            replace(coordinator.invite(), host=name, port=7700), Identity.generate(), "node"
        )


@contextmanager
def swallowing() -> Iterator[int]:
    """A port on loopback that answers nobody: Linux drops what a queue has no room for."""
    with ExitStack() as opened:
        full = opened.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        for _ in range(4):
            waiting = opened.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield full.getsockname()[1]


async def test_a_coordinator_that_was_not_reached_is_not_said_to_be_slow(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr(channel, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(handshake, "TIMEOUT_SECONDS", 1.0)
    with swallowing() as port:
        lost = replace(coordinator.credentials(), control_port=port)
        with pytest.raises(
            UnavailableError, match=r"no connection to the coordinator .* came to be"
        ):
            await get_run(lost)
        with pytest.raises(UnavailableError, match=r"no coordinator answers .*no answer in time"):
            await asyncio.to_thread(get_run_blocking, lost)


async def test_a_coordinator_that_is_slow_is_said_to_be_so_and_nothing_final_follows(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "DEADLINE_SECONDS", 0.5)

    async def never(_: Any) -> str:
        await asyncio.Event().wait()
        return ""

    coordinator.answer = never
    async for answer in both_ways(coordinator.credentials()):
        with pytest.raises(UnavailableError, match=r"did not answer in time; .*log"):
            await answer


async def test_a_connection_that_is_cut_in_the_handshake_may_be_tried_again(
    coordinator: Coordinator,
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match="broke off"):
            await get_run(replace(coordinator.credentials(), control_port=port))
        with pytest.raises(UnavailableError, match="broke off"):
            await enrol(replace(coordinator.invite(), port=port), Identity.generate(), "node")


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


@pytest.mark.parametrize("character", ["u", "ü", "訓", "🪸", "%"])
async def test_an_endless_sentence_is_cut_rather_than_lost(
    coordinator: Coordinator, character: str
) -> None:
    async def refuse(context: Any) -> str:
        text = character * 100_000
        await abort(context, NotPermittedError(text, next_step=text))

    coordinator.answer = refuse
    for _ in range(30):  # just above its limit gRPC drops one of some ten
        with pytest.raises(
            NotPermittedError, match=f"^{character}{{200,}}…; {character}{{200,}}…$"
        ):
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


async def test_who_joins_with_too_many_others_at_once_is_told_to_try_again() -> None:
    async with Coordinator(most_enrolments=1) as coordinator:
        coordinator.may_enrol.clear()

        async def enrolled() -> Credentials:
            return await enrol(coordinator.invite(), Identity.generate(), "node")

        both = [asyncio.create_task(enrolled()) for _ in range(2)]
        (refused,), (first,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(TemporaryError, match="as many others at once as it can"):
            refused.result()
        coordinator.may_enrol.set()
        assert (await first).run_name == (await enrolled()).run_name == "a run"


async def test_pings_that_are_read_all_at_once_do_not_end_a_members_connection(
    coordinator: Coordinator,
) -> None:
    member = coordinator.credentials()
    options = dict(channel_options(server_name(member.swarm_id)))
    each_second = {"grpc.keepalive_time_ms": 1000, "grpc.http2.max_pings_without_data": 0}
    keys = grpc.ssl_channel_credentials(
        member.authority_pem, member.key_pem, member.certificate_pem
    )
    async with grpc.aio.secure_channel(
        member.endpoint, keys, options=list((options | each_second).items())
    ) as channel:
        await channel.channel_ready()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(6):  # after four of them gRPC would have had enough
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
