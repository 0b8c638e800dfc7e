"""The kernel paces p2pd's connections, or it is said why it does not."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from node.doctor.checks import pacing_finding
from node.exchange.peers import Limits
from node.exchange.transport.libp2p import Libp2pTransport
from node.exchange.transport.rates import tcp
from node.exchange.transport.rates.tcp import (
    LEAST_GAIN,
    MANY,
    MOST_OF_A_CORE,
    NEVER_REACHED,
    TcpCount,
    TcpPacing,
    copy_of,
    pause_after,
    sockets_of,
)
from tests.integration.transport_peers import introduce, make_payload, start_transport

SECONDS = 20.0
LOOK_SECONDS = Limits().tcp_look_seconds
NOBODY = 65534
SO_MAX_PACING_RATE = 47


def pacing_rate_of(connection: socket.socket) -> int:
    """In bytes per second; the highest number of 64 bits for a connection that has none."""
    raw = connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
    return int.from_bytes(raw, sys.byteorder)


def pacing_rates(pid: int) -> dict[tuple[str, bool], int]:
    """Of the TCP sockets of a process, by their names and whether they listen."""
    rates = {}
    for name, descriptor in sockets_of(pid):
        with copy_of(pid, descriptor) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                is_listener = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                rates[name, is_listener] = pacing_rate_of(copy)
    return rates


def p2pd_pid(transport: Libp2pTransport) -> int:
    return transport._running.daemon.pid


async def test_connections_are_paced_whoever_dialled() -> None:
    first, peer = await start_transport()
    second, other = await start_transport()
    try:
        pacing = first._running.daemon.tcp_pacing
        if "Operation not permitted" in (why_not := pacing.why_not):
            pytest.skip(f"a container that forbids it: {why_not}")
        await introduce(peer, other)
        await first.push(other.node_id, make_payload(), timeout_seconds=SECONDS)
        for transport in (first, second):
            rates = pacing_rates(p2pd_pid(transport))
            assert {is_listener for _, is_listener in rates} == {True, False}
            assert set(rates.values()) == {NEVER_REACHED}
            assert transport._traffic.is_paced_by_kernel
        pacing.why_not = "forbidden"
        assert not first._traffic.is_paced_by_kernel
    finally:
        await first.stop()
        await second.stop()


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one, and one of them is not read from."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        far, _ = server.accept()
        with closing(far):
            yield near, far


def skip_where_forbidden(why_not: str) -> None:
    if why_not:
        pytest.skip(f"a container that forbids copies of another process's sockets: {why_not}")


def allowed_pacing() -> TcpPacing:
    """Of this process's own sockets."""
    pacing = TcpPacing(os.getpid(), Limits())
    pacing.look()
    skip_where_forbidden(pacing.why_not)
    return pacing


def name_of(connection: socket.socket) -> str:
    return f"socket:[{os.fstat(connection.fileno()).st_ino}]"


def test_what_waits_in_a_connection_is_counted_and_a_listener_is_none(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, far = connection
    pacing = allowed_pacing()
    assert not pacing.counts()[name_of(near)].is_busy
    near.setblocking(False)
    num_bytes = 0
    while True:
        try:
            num_bytes += near.send(bytes(1 << 20))
        except BlockingIOError:
            break
    count = pacing.counts()[name_of(near)]
    assert 0 < count.waiting_bytes < num_bytes
    assert count.window_bytes > 0
    # On a busy machine the kernel probes for answers that come late, and counts that.
    assert count.num_resent < count.num_sent
    assert 0 < count.round_trip_seconds < 1
    assert not pacing.counts()[name_of(far)].is_busy
    for sock in (near, far):
        assert pacing_rate_of(sock) == NEVER_REACHED


def test_a_look_copies_each_connection_once_and_keeps_only_what_holds_the_process(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    pacing = allowed_pacing()
    opened: list[int] = []
    open_process, copy = os.pidfd_open, tcp._Child.copy_of

    def counted(child: tcp._Child, descriptor: int, **known: Any) -> socket.socket:
        opened.append(descriptor)
        return copy(child, descriptor, **known)

    monkeypatch.setattr(tcp._Child, "copy_of", counted)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: pytest.fail("it is held already"))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    counts = pacing.counts()
    assert {name_of(one) for one in connection} <= counts.keys()
    assert len(opened) == len(set(opened)) == len(pacing._tcp)
    pacing.counts()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    pacing.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open - 1
    monkeypatch.setattr(os, "pidfd_open", open_process)
    assert pacing.counts().keys() == counts.keys()
    pacing.close()


def test_a_connection_ends_when_its_other_end_is_silent_for_seconds_and_not_for_a_quarter_of_an_hour(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = connection
    allowed_pacing()
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1  # at rest it asks
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3


def test_looking_takes_a_tenth_of_a_core_at_most() -> None:
    assert pause_after(0.0, LOOK_SECONDS) == LOOK_SECONDS
    assert pause_after(LOOK_SECONDS / 9, LOOK_SECONDS) == LOOK_SECONDS
    for spent in (0.002, 0.01, 1.0):
        assert spent / (spent + pause_after(spent, LOOK_SECONDS)) == pytest.approx(MOST_OF_A_CORE)


def test_a_connection_that_is_closed_is_forgotten_and_its_peer_hears_of_it(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, far = connection
    pacing = allowed_pacing()
    name = name_of(near)
    assert name in pacing.counts()
    near.close()
    far.settimeout(SECONDS)
    assert far.recv(1) == b""  # no copy of ours keeps it open
    with socket.socket():  # which may have the descriptor now
        assert name not in pacing.counts()
        pacing.pace({name: 1e6})


async def test_once_many_packets_were_lost_connections_are_kept_to_what_the_uplink_carries(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = connection
    pacing = allowed_pacing()
    sharing = asyncio.create_task(pacing.share(lambda: 1e6))
    counts = pacing.counts
    num_lost = 0

    def with_losses() -> dict[str, TcpCount]:
        return {name: count._replace(num_resent=num_lost) for name, count in counts().items()}

    monkeypatch.setattr(pacing, "counts", with_losses)
    try:
        pacing.wake()
        await asyncio.sleep(3 * LOOK_SECONDS)
        assert pacing_rate_of(near) == NEVER_REACHED
        num_lost = MANY
        async with asyncio.timeout(SECONDS):
            while pacing_rate_of(near) == NEVER_REACHED:
                pacing.wake()
                await asyncio.sleep(LOOK_SECONDS)
        assert pacing_rate_of(near) == LEAST_GAIN * 1e6
    finally:
        sharing.cancel()
        await asyncio.wait([sharing])


def test_a_socket_that_was_not_asked_for_is_not_paced() -> None:
    with socket.socket() as ordinary:
        assert pacing_rate_of(ordinary) == 2**64 - 1


def test_a_process_that_has_ended_is_no_fault() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        pacing = TcpPacing(process.pid, Limits())
        pacing.look()
    assert pacing.why_not == ""


def test_a_lack_of_descriptors_is_no_reason_to_give_up(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(child: object, descriptor: int) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    near, _ = connection
    pacing = TcpPacing(os.getpid(), Limits())
    with monkeypatch.context() as short:
        short.setattr(tcp._Child, "copy_of", lacking)
        pacing.look()
    assert pacing.why_not == ""
    pacing.look()
    skip_where_forbidden(pacing.why_not)
    assert pacing_rate_of(near) == NEVER_REACHED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_where_it_is_not_allowed_the_reason_is_kept_and_the_doctor_gives_advice() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        pacing = TcpPacing(process.pid, Limits())
        os.seteuid(NOBODY)
        try:
            pacing.look()
        finally:
            os.seteuid(0)
        assert "Permission denied" in pacing.why_not
        pacing.look()  # now it would be: it is not tried again
        assert "Permission denied" in pacing.why_not
        process.kill()
    finding = pacing_finding(pacing.why_not, "cubic")
    assert finding.verdict == "advice"
    assert "Permission denied" in finding.what
    assert pacing_finding("", "cubic").verdict == "fine"
    assert pacing_finding(pacing.why_not, "bbr").verdict == "fine"  # it paces anyway
