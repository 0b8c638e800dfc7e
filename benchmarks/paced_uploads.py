"""How long heartbeats take while transfers fill a slow uplink, with and without --max-upload.

    python -m benchmarks.paced_uploads

A node is behind a router, itself a network namespace, whose uplink has 10 Mbit/s and a buffer of
500 kB; the way back is free. Beyond it are the peer that the node pushes to, and a gRPC server for
heartbeats, each as large as ours and over a connection of their own. (A slow link on the node's own
machine would not do: Linux keeps queues short that it can see.) Needs the right to make network
namespaces, and tc. Prints a table and, last, JSON.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from benchmarks.network_namespace import enter
from benchmarks.wire_transport import Desk, seal
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.channel import channel_options
from protocol.identity import Identity
from protocol.payload import CONTRIBUTION
from protocol.rounds import PeerAddress, RosterEntry
from protocol.wire_count import WireCounts

UPLINK_MBIT = 10
BUFFER_BYTES = 500_000
PACED_SHARE = 0.8

NEAR, LAN = "10.99.1.2", "10.99.1.1"
WAN, FAR = "10.99.2.1", "10.99.2.2"
"""Addresses of the node, the router's two sides, and the peer."""

NUM_STREAMS = 4
HEARTBEAT_BYTES = 400
HEARTBEAT_SECONDS = 0.1  # between two of them: many more than a node sends, for the statistics
SETTLE_SECONDS = 1.0

CONGESTION_CONTROL = "cubic"
"""What most machines use; it fills any buffer. With BBR heartbeats suffer less without a limit."""

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12

_METHOD = "/benchmark/heartbeat"


class Namespaces:
    """Two network namespaces beside our own: a router, and what lies beyond it."""

    def __init__(self) -> None:
        self.router, self.far = _new_namespace(), _new_namespace()
        link = "mtu 1500 gso_max_segs 1 up"  # packets as a network card sends them
        _run(f"ip link add home type veth peer name lan netns {_path(self.router)}")
        _run(f"ip addr add {NEAR}/24 dev home", f"ip link set home {link}")
        _run(f"ip route add default via {LAN} congctl {CONGESTION_CONTROL}")
        with inside(self.router):
            _run(f"ip link add wan type veth peer name net netns {_path(self.far)}")
            _run(f"ip addr add {LAN}/24 dev lan", f"ip link set lan {link}")
            _run(f"ip addr add {WAN}/24 dev wan", f"ip link set wan {link}")
            _run(
                f"tc qdisc add dev wan root tbf rate {UPLINK_MBIT}mbit burst 4k limit {BUFFER_BYTES}"
            )
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        with inside(self.far):
            _run("ip link set lo up", f"ip addr add {FAR}/24 dev net", f"ip link set net {link}")
            _run(f"ip route add default via {WAN}")

    def uplink_bytes(self) -> int:
        """Bytes that passed the uplink, with the 14 of Ethernet in each packet."""
        with inside(self.router):
            shown = subprocess.run(
                ["tc", "-s", "-j", "qdisc", "show", "dev", "wan"], check=True, capture_output=True
            ).stdout
        return int(json.loads(shown)[0]["bytes"])


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Sockets and processes that this thread makes meanwhile belong to that namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    _enter(namespace)
    try:
        yield
    finally:
        _enter(home)
        os.close(home)


def _new_namespace() -> int:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    _must(_LIBC.unshare(_CLONE_NEWNET))
    made = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    _enter(home)
    os.close(home)
    return made


def _enter(namespace: int) -> None:
    _must(_LIBC.setns(namespace, _CLONE_NEWNET))


def _must(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)


class Uplink:
    """A node before its slow uplink, and behind it a peer and a coordinator's heartbeat service."""

    def __init__(self, namespaces: Namespaces, max_upload_bytes_per_second: float | None) -> None:
        self._namespaces = namespaces
        self._identities = (Identity.generate(), Identity.generate())
        self._near, self._far = (
            Libp2pTransport(
                identity=identity,
                counts=WireCounts(),
                listen_multiaddrs=(f"/ip4/{host}/tcp/0",),
                max_upload_bytes_per_second=max_upload_bytes_per_second,
            )
            for identity, host in zip(self._identities, (NEAR, FAR), strict=True)
        )
        self._server = grpc.aio.server()  # its threads begin here: in our own namespace

    async def start(self) -> None:
        """Starts all three, and connects."""

        async def heartbeat(request: bytes, context: object) -> bytes:
            return request[:8]

        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "benchmark", {"heartbeat": grpc.unary_unary_rpc_method_handler(heartbeat)}
                ),
            )
        )
        await self._near.start(Desk())
        with inside(self._namespaces.far):
            port = self._server.add_insecure_port(f"{FAR}:0")
            await self._server.start()
            await self._far.start(Desk())
        self._channel = grpc.aio.insecure_channel(f"{FAR}:{port}", channel_options("benchmark"))
        transports = (self._near, self._far)
        roster = tuple(
            RosterEntry(
                node_id=identity.node_id,
                node_name="benchmark",
                address=PeerAddress(
                    public_key=identity.public_key, multiaddrs=transport.multiaddrs
                ),
            )
            for identity, transport in zip(self._identities, transports, strict=True)
        )
        for transport in transports:
            transport.set_roster(roster)
        await self._upload(1000)
        await self._heartbeat()
        await asyncio.sleep(SETTLE_SECONDS)

    async def stop(self) -> None:
        """Ends all three."""
        await self._channel.close()
        await self._server.stop(None)
        await self._near.stop()
        await self._far.stop()

    async def measure(self, num_bytes: int, idle_seconds: float) -> dict[str, float]:
        """Sends heartbeats while so much is uploaded, or for some time when that is nothing."""
        work = self._upload(num_bytes) if num_bytes else asyncio.sleep(idle_seconds)
        latencies: list[float] = []
        started, bytes_before = time.monotonic(), self._namespaces.uplink_bytes()
        working = asyncio.create_task(work)
        heartbeats: set[asyncio.Task[None]] = set()

        async def one_heartbeat() -> None:
            latencies.append(await self._heartbeat())

        while not working.done():
            heartbeats.add(asyncio.create_task(one_heartbeat()))
            await asyncio.wait([working], timeout=HEARTBEAT_SECONDS)
        seconds = time.monotonic() - started
        passed = self._namespaces.uplink_bytes() - bytes_before
        await working
        await asyncio.gather(*heartbeats)
        return {
            "seconds": round(seconds, 2),
            "uplink_mbit": round(passed * 8 / seconds / 1e6, 2),
            "heartbeats": len(latencies),
            "median_ms": round(1e3 * statistics.median(latencies), 1),
            "p95_ms": round(1e3 * statistics.quantiles(latencies, n=20)[-1], 1),
            "worst_ms": round(1e3 * max(latencies), 1),
        }

    async def _upload(self, num_bytes: int) -> None:
        near, far = self._identities
        body_bytes = num_bytes // NUM_STREAMS
        payloads = [seal(CONTRIBUTION, near.node_id, body_bytes) for _ in range(NUM_STREAMS)]
        await asyncio.gather(
            *(self._near.push(far.node_id, payload, timeout_seconds=600) for payload in payloads)
        )

    async def _heartbeat(self) -> float:
        started = time.monotonic()
        call: Any = self._channel.unary_unary(_METHOD)  # of bytes, which gRPC's types do not know
        await call(os.urandom(HEARTBEAT_BYTES), timeout=60)
        return time.monotonic() - started


async def measure(namespaces: Namespaces, num_bytes: int) -> list[dict[str, object]]:
    """Three rows: nothing uploaded, uploads without a limit, uploads within it."""
    rows: list[dict[str, object]] = []
    paced = PACED_SHARE * UPLINK_MBIT * 1e6 / 8
    for what, limit, body_bytes in (
        ("idle", None, 0),
        ("no limit", None, num_bytes),
        (f"--max-upload {PACED_SHARE * UPLINK_MBIT:g}mbit", paced, num_bytes),
    ):
        uplink = Uplink(namespaces, limit)
        try:
            await uplink.start()
            rows.append({"what": what, **await uplink.measure(body_bytes, idle_seconds=3.0)})
        finally:
            await uplink.stop()
    return rows


def main() -> None:
    """Enters a namespace, makes the uplink, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=20_000_000, help="to upload (default 20 MB)")
    num_bytes = parser.parse_args().bytes
    enter(mtu=1500)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = asyncio.run(measure(Namespaces(), num_bytes))
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    about = {
        "machine": platform.platform(),
        "congestion_control": CONGESTION_CONTROL,
        "uploaded_bytes": num_bytes,
    }
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
