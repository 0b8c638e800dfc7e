"""A real coordinator in this process, and nodes that reach it by a relay alone."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from coordinator.config import Home, create_home
from coordinator.relay.line import RelayKey
from coordinator.swarm.members import MemberState
from protocol.errors import AtollError, CertificateRefusedError, ProtocolMismatchError
from protocol.trust.enrolment import enrol, renew_by_identity
from protocol.trust.identity import Identity
from protocol.trust.pki import Authority
from protocol.v1 import status_pb2
from tests.integration.coordinator_scene import (
    LOCAL,
    described,
    invite_from,
    joined,
    new_home,
    serving,
)
from tests.integration.typed_commands import Running
from tests.relay_scene import AT_HOME, HOST, World, free_port, until


async def test_nodes_join_and_attach_by_a_relay_and_are_not_given_up_while_it_is_away(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "relay")
    home = new_home(tmp_path / "run", host=AT_HOME)
    async with world.relay() as relay, serving(home, world.carriage()) as coordinator:
        invite, _ = await invite_from(home)
        assert (invite.host, invite.port) == (HOST, coordinator.enrolment_port)
        node = await joined(invite, "node-a")
        assert node.credentials.endpoint == f"{HOST}:{coordinator.control_port}"
        await node.attach()
        node.subscribe()
        await node.next("roster")

        async def relay_in_words() -> str:
            answer = await node.status.GetStatus(status_pb2.GetStatusRequest())
            return str(answer.run.relay)

        assert await relay_in_words() == f"through relay {HOST}:{world.port}"
        driver = coordinator.driver
        lease_until = driver.state.members[node.node_id].lease_until
        await relay.stop()
        through = coordinator.through
        assert through is not None
        await until(lambda: through.is_away and not driver.has_streams)
        stood_at = driver.clock.now()
        with pytest.raises(AtollError, match="no coordinator answers"):
            await node.beat()
        await asyncio.sleep(1.5)  # longer than what is looked at in between
        assert driver.clock.now() == stood_at
        member = driver.state.members[node.node_id]
        assert (member.state, member.lease_until) == (MemberState.READY, lease_until)
        async with world.relay():
            await until(lambda: not through.is_away)
            await node.close()
            node.connect()
            await node.beat()
            assert driver.state.members[node.node_id].lease_until > lease_until
            assert driver.clock.now() > stood_at
            await node.close()


async def test_nodes_are_not_given_up_while_their_relay_hangs_and_its_connections_stay_open(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "relay")
    home = new_home(tmp_path / "run", host=AT_HOME)
    relay = Running(
        *("relay", "start", world.folder, "--host", HOST, "--advertise", HOST),
        *("--port", str(world.port), "--ports", "1024-65535"),
    )
    try:
        await asyncio.to_thread(relay.says, "relay ready")
        async with serving(home, world.carriage()) as coordinator:
            invite, _ = await invite_from(home)
            node = await joined(invite, "node-a")
            await node.attach()
            node.subscribe()
            await node.next("roster")
            driver, through = coordinator.driver, coordinator.through
            assert through is not None
            relay.process.send_signal(signal.SIGSTOP)
            await until(lambda: through.is_away)
            assert "it is silent" in through.in_words()
            await until(lambda: not driver.has_streams)
            stood_at = driver.clock.now()
            await asyncio.sleep(1.5)  # longer than what is looked at in between
            assert driver.clock.now() == stood_at
            assert driver.state.members[node.node_id].state is MemberState.READY
            relay.process.send_signal(signal.SIGCONT)
            await until(lambda: not through.is_away)
            await node.close()
            node.connect()
            await node.beat()
            assert driver.clock.now() > stood_at
            await node.close()
    finally:
        relay.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(relay.stop, signal.SIGTERM)


async def test_one_port_serves_members_and_who_joins_also_through_a_relay(tmp_path: Path) -> None:
    world, port = World(tmp_path / "relay"), free_port()
    config = LOCAL.with_changes(host=AT_HOME, control_port=port, enrolment_port=port)
    home = create_home(tmp_path / "run", config=config, text=described)
    with socket.create_server((AT_HOME, port)):  # the relay's number is not taken at home
        await _serves_members_and_who_joins(world, home, port)


async def _serves_members_and_who_joins(world: World, home: Home, port: int) -> None:
    async with world.relay(), serving(home, world.carriage()) as coordinator:
        assert (coordinator.control_port, coordinator.enrolment_port) == (port, port)
        invite, _ = await invite_from(home)
        assert (invite.host, invite.port) == (HOST, port)
        node = await joined(invite, "node-a")
        assert node.credentials.endpoint == f"{HOST}:{port}"
        await node.attach()
        node.subscribe()
        await node.next("roster")
        await node.beat()
        renewed = await renew_by_identity(node.credentials, node.identity)
        assert renewed.leaf_pem != node.credentials.leaf_pem
        await node.close()


async def test_what_is_no_tls_gets_nowhere_at_one_port_and_keeps_nobody_out(tmp_path: Path) -> None:
    port = free_port()
    config = LOCAL.with_changes(control_port=port, enrolment_port=port)
    home = create_home(tmp_path / "run", config=config, text=described)
    async with serving(home):
        waiting = [await asyncio.open_connection(HOST, port) for _ in range(8)]
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\0\0"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(words)
            assert await reader.read() == b""
            writer.close()
        node = await joined((await invite_from(home))[0], "node-a")
        await node.attach()
        await node.beat()
        await node.close()
        for _, writer in waiting:
            writer.close()


async def test_a_relay_that_answers_in_its_coordinators_place_is_found_out(tmp_path: Path) -> None:
    world = World(tmp_path / "relay")
    home = new_home(tmp_path / "run", host=AT_HOME)
    async with world.relay(), serving(home, world.carriage()) as coordinator:
        invite, _ = await invite_from(home)
        node = await joined(invite, "node-a")
    swarm_id = node.credentials.swarm_id  # a relay sees that name in each handshake
    server = Authority.create(swarm_id).issue_server()
    forged = RelayKey(
        certificate_pem=server.certificate_pem, key_pem=server.key_pem, secret=bytes(32)
    )
    context = forged.server_context()
    heard = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.close()

    for port in (coordinator.control_port, coordinator.enrolment_port):
        await asyncio.start_server(listen, HOST, port, ssl=context)
    with pytest.raises(ProtocolMismatchError, match="has certificate"):
        await enrol(invite, Identity.generate(), "node-b")
    with pytest.raises(CertificateRefusedError, match="is not of swarm"):
        await node.attach()
    assert not any(heard), "nobody has told it anything"
    await node.close()
