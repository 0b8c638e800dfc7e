"""The libp2p transport itself: its processes, its ports, its end and its death."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from node.exchange.peers import (
    Limits,
    PeerUnreachableError,
)
from node.exchange.transport import libp2p
from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.p2pd import DaemonError, P2pd
from node.machine.addresses import OwnAddress, Reachability, announced
from protocol.errors import SystemRefusedError
from protocol.trust.identity import Identity, peer_id_of
from protocol.wire.payload import WireCounts
from tests.integration.transport_peers import Desk, Peer, introduce, make_payload, start_transport

SECONDS = 20.0
PUSHES = 6


def has_process(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def p2pd_of(transport: Libp2pTransport) -> P2pd:
    return transport._running.daemon


def libp2p_id(peer: Peer) -> str:
    return peer_id_of(peer.public_key)


async def test_stopping_leaves_neither_process_nor_folder() -> None:
    transport, _ = await start_transport()
    daemon = p2pd_of(transport)
    folder = daemon._folder
    assert has_process(daemon.pid)
    assert os.getsid(daemon.pid) != os.getsid(0)  # a Ctrl-C does not reach it
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (folder / "key").exists()
    await transport.stop()
    assert not has_process(daemon.pid)
    assert not folder.exists()


async def test_the_death_of_p2pd_is_told_and_fails_transfers() -> None:
    transport, peer = await start_transport()
    other_transport, other = await start_transport()
    await introduce(peer, other)
    os.kill(p2pd_of(transport).pid, signal.SIGKILL)
    reason = await asyncio.wait_for(transport.wait_failed(), SECONDS)
    assert "libp2p daemon died" in reason
    with pytest.raises(PeerUnreachableError):
        await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    await transport.stop()
    await other_transport.stop()


async def test_how_long_a_peer_takes_to_answer_is_known_from_the_first_push_on() -> None:
    transport, peer = await start_transport()
    other_transport, other = await start_transport()
    await introduce(peer, other)
    assert transport.round_trip_seconds(other.node_id) == Limits().first_round_trip_seconds
    began_at = time.monotonic()
    await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    seconds = time.monotonic() - began_at
    assert 0 < transport.round_trip_seconds(other.node_id) <= seconds
    assert transport.round_trip_seconds(other.node_id) != Limits().first_round_trip_seconds
    await transport.stop()
    await other_transport.stop()


async def test_a_push_to_a_peer_that_has_moved_begins_anew_over_a_connection_to_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, peer = await start_transport()
    other_transport, other = await start_transport()
    here = other.entry.address
    elsewhere = replace(here, multiaddrs=(*here.multiaddrs, "/ip4/127.0.0.1/tcp/9"))
    other.desk.gate = asyncio.Event()  # what it is sent has no end
    await introduce(peer, other)
    transport.set_roster((peer.entry, replace(other.entry, address=elsewhere)))
    pushing = asyncio.ensure_future(
        transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    )
    await asyncio.wait_for(other.desk.has_admitted.wait(), SECONDS)
    made: list[int] = []
    monkeypatch.setattr(transport._running.connections, "_on_connection", lambda: made.append(1))
    transport.set_roster((peer.entry, other.entry))
    with pytest.raises(PeerUnreachableError, match="bytes"):
        await pushing  # at once, and not at its timeout: what tries again finds it
    other.desk.gate.set()
    await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    assert made
    assert other.desk.received
    await transport.stop()
    await other_transport.stop()


async def test_a_peer_that_comes_back_is_reached_at_once_though_it_was_dialled_in_vain() -> None:
    transport, peer = await start_transport()
    identity = Identity.generate()
    other_transport, other = await start_transport(identity=identity)
    at = other.entry.address.multiaddrs
    await introduce(peer, other)
    await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    await other_transport.stop()
    # A stream on a connection that ends at this instant has p2pd dial by itself, and wait 5 s after that.
    async with asyncio.timeout(SECONDS):
        p2pd = p2pd_of(transport)
        while libp2p_id(other) in await p2pd.connected_peer_ids():  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.02)
    for _ in range(3):
        with pytest.raises(PeerUnreachableError):
            await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    back = Libp2pTransport(
        identity=identity, counts=WireCounts(), reachability=Reachability(listen_multiaddrs=at)
    )
    desk = Desk()
    await back.start(desk)
    back.set_roster(())  # nor does it dial
    back.set_roster((replace(peer.entry, address=replace(peer.entry.address, multiaddrs=())),))
    await transport.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
    assert desk.received
    await transport.stop()
    await back.stop()


async def test_of_a_peers_addresses_the_one_that_answers_as_it_is_dialled() -> None:
    transport, _ = await start_transport()
    other_transport, other = await start_transport()
    stranger_transport, stranger = await start_transport()
    dead = "/ip4/127.0.0.1/tcp/9"
    (right,) = other.entry.address.multiaddrs
    (wrong,) = stranger.entry.address.multiaddrs
    refused: tuple[tuple[tuple[str, ...], str], ...] = (
        ((), "told no address"),
        ((dead,), "9: Connection refused"),
        ((wrong,), "peer id mismatch"),
        (("/ip4/127.0.0.1/tcp/port",), "port"),
        (("nonsense",), "no address of TCP"),
    )
    for addresses, why in refused:
        with pytest.raises(DaemonError, match=why):
            await transport._running.daemon.connect(libp2p_id(other), addresses)
    for addresses in ((dead, right), (wrong, right), (right, "/ip4/127.0.0.1/tcp/0")):
        await transport._running.daemon.connect(libp2p_id(other), addresses)
        await transport._running.daemon.disconnect(libp2p_id(other))
    for each in (transport, other_transport, stranger_transport):
        await each.stop()


async def test_a_start_that_fails_leaves_no_p2pd(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    async def refuse(daemon: P2pd) -> tuple[str, ...]:
        pids.append(daemon.pid)
        raise DaemonError("it does not say where it listens")

    monkeypatch.setattr(P2pd, "multiaddrs", refuse)
    transport = Libp2pTransport(identity=Identity.generate(), counts=WireCounts())
    with pytest.raises(DaemonError, match="does not say"):
        await transport.start(Desk())
    assert len(pids) == 1 and not has_process(pids[0])
    await transport.stop()


async def test_a_machine_that_loses_an_address_ends_its_connections_and_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def has(*addresses: str) -> None:
        own = tuple(OwnAddress(address, "eth0") for address in addresses)
        monkeypatch.setattr(libp2p, "interface_addresses", lambda: own)

    has("10.0.0.1")
    other_transport, other = await start_transport()
    transport = Libp2pTransport(
        identity=Identity.generate(),
        counts=WireCounts(),
        reachability=Reachability(listen_multiaddrs=("/ip4/0.0.0.0/tcp/0",)),
    )
    await transport.start(Desk())
    transport.set_roster((other.entry,))
    began: list[int] = []
    monkeypatch.setattr(transport._running.connections, "begin_anew", lambda: began.append(1))
    assert not await transport.heed_addresses() and not began
    has("10.0.0.1", "10.0.0.2")  # a cable beside the Wi-Fi: nothing breaks, and peers learn of it
    assert await transport.heed_addresses() and not began
    assert [address[:14] for address in transport.multiaddrs] == [
        "/ip4/10.0.0.1/",
        "/ip4/10.0.0.2/",
    ]
    has()  # none for a moment
    assert await transport.heed_addresses() and len(began) == 1
    assert len(transport.multiaddrs) == 2  # nobody could be told of anything else
    has("10.0.0.3")
    assert await transport.heed_addresses() and len(began) == 1
    assert [address[:14] for address in transport.multiaddrs] == ["/ip4/10.0.0.3/"]
    await transport.stop()
    await other_transport.stop()


async def test_streams_that_stay_open_over_a_pause_serve_again_and_end_with_the_transport() -> None:
    tasks_before = asyncio.all_tasks()
    transport, peer = await start_transport()
    other_transport, other = await start_transport()
    await introduce(peer, other)
    resting: set[object] = set()
    for number in range(PUSHES):
        payload = make_payload(body=os.urandom(9_000_000), round=number)
        await transport.push(other.node_id, payload, timeout_seconds=SECONDS)
        before, resting = resting, set(transport._sendings[other.node_id]._tasks)
        if before & resting:
            break  # on a starved machine all streams may break between two pushes, but not each time
    else:
        pytest.fail("no stream outlived a push")
    assert len(other.desk.received) == number + 1
    await transport.stop()
    await other_transport.stop()
    assert asyncio.all_tasks() == tasks_before


def test_p2pd_does_not_outlive_a_killed_node_which_has_loaded_neither_torch_nor_averagers() -> None:
    program = """
import asyncio, sys
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.trust.identity import Identity, peer_id_of
from protocol.wire.payload import WireCounts

async def main():
    transport = Libp2pTransport(identity=Identity.generate(), counts=WireCounts())
    await transport.start(None)
    heavy = [name for name in sys.modules if name.startswith(("hivemind.averaging", "scipy", "torch"))]
    p2pd = transport._running.daemon
    print("p2pd", p2pd.pid, p2pd._folder, len(heavy), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    node = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    said = next(line for line in node.stdout if line.startswith("p2pd "))
    _, number, folder, num_heavy = said.split()
    pid = int(number)
    assert has_process(pid)
    assert num_heavy == "0"
    node.kill()
    node.wait()
    node.stdout.close()
    ends = time.monotonic() + SECONDS
    while has_process(pid):
        assert time.monotonic() < ends, "p2pd is an orphan"
        time.sleep(0.05)
    shutil.rmtree(folder)  # only sockets: a killed node cannot tidy up


async def test_a_port_in_use_is_a_sentence_for_people() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        transport = Libp2pTransport(
            identity=Identity.generate(),
            counts=WireCounts(),
            reachability=Reachability(listen_multiaddrs=(f"/ip4/127.0.0.1/tcp/{port}",)),
        )
        with pytest.raises(SystemRefusedError, match="did not start"):
            await transport.start(Desk())


def test_an_announced_host_replaces_what_is_visible() -> None:
    visible = ("/ip4/127.0.0.1/tcp/77", "/ip4/10.0.0.2/tcp/77")
    assert announced(visible, None) == ("/ip4/10.0.0.2/tcp/77",)
    assert announced(visible[:1], None) == visible[:1]
    assert announced(visible, "203.0.113.7") == ("/ip4/203.0.113.7/tcp/77",)
    assert announced(visible, "gpu.example.org") == ("/dns/gpu.example.org/tcp/77",)
    assert announced(visible, "2001:db8::7") == ("/ip6/2001:db8::7/tcp/77",)
