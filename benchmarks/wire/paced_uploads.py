"""How long heartbeats take while transfers fill a slow uplink, with and without --max-upload.

    python -m benchmarks.wire.paced_uploads

A node is a host of the network lab, whose uplink has 10 Mbit/s and a buffer of 500 kB; the way back
is free. Beyond it are the peer that the node pushes to, and a gRPC server for heartbeats, each as
large as ours and over a connection of their own. Needs root. Prints a table and, last, JSON.
"""

import asyncio
import json
import logging
import os
import statistics
import sys
import time
from typing import Any

import grpc
import grpc.aio
import structlog

from benchmarks.measurement import machine, parser_of
from benchmarks.wire.transport import Desk, seal
from lab.network.lab import LabUnavailableError, NetworkLab
from lab.network.links import Link
from lab.processes.family import nothing_left
from node.exchange.transport.libp2p import Libp2pTransport
from node.machine.addresses import Reachability
from protocol.trust.identity import Identity, peer_id_of
from protocol.wire.channel import channel_options
from protocol.wire.payload import CONTRIBUTION, WireCounts
from protocol.wire.rounds import PeerAddress, RosterEntry

UPLINK_MBIT = 10
BUFFER_BYTES = 500_000
PACED_SHARE = 0.8

NEAR, FAR = "node", "peer"

NUM_STREAMS = 4
HEARTBEAT_BYTES = 400
HEARTBEAT_SECONDS = 0.1  # between two of them: many more than a node sends, for the statistics
SETTLE_SECONDS = 1.0

CONGESTION_CONTROL = "cubic"
"""What most machines use; it fills any buffer. With BBR heartbeats suffer less without a limit."""

_METHOD = "/benchmark/heartbeat"


class Uplink:
    """A node before its slow uplink, and behind it a peer and a coordinator's heartbeat service."""

    def __init__(self, lab: NetworkLab, max_upload_bytes_per_second: float | None) -> None:
        self._lab = lab
        # The one with the smaller peer id dials at once, the other later: if both dialled, the two
        # SYNs could cross, and libp2p would take itself for the dialler at both ends, and give up.
        self._identities = sorted(
            (Identity.generate(), Identity.generate()),
            key=lambda identity: peer_id_of(identity.public_key),
        )
        self._near, self._far = (
            Libp2pTransport(
                identity=identity,
                counts=WireCounts(),
                reachability=Reachability(listen_multiaddrs=(f"/ip4/{lab.address(host)}/tcp/0",)),
                max_upload_bytes_per_second=max_upload_bytes_per_second,
            )
            for identity, host in zip(self._identities, (NEAR, FAR), strict=True)
        )
        self._server = grpc.aio.server()  # its threads begin here: in the node's namespace

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
        far = self._lab.address(FAR)
        with self._lab.inside(FAR):
            port = self._server.add_insecure_port(f"{far}:0")
            await self._server.start()
            await self._far.start(Desk())
        self._channel = grpc.aio.insecure_channel(f"{far}:{port}", channel_options("benchmark"))
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
        started, bytes_before = time.monotonic(), self._uplink_bytes()
        working = asyncio.create_task(work)
        heartbeats: set[asyncio.Task[None]] = set()

        async def one_heartbeat() -> None:
            latencies.append(await self._heartbeat())

        while not working.done():
            heartbeats.add(asyncio.create_task(one_heartbeat()))
            await asyncio.wait([working], timeout=HEARTBEAT_SECONDS)
        seconds = time.monotonic() - started
        passed = self._uplink_bytes() - bytes_before
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

    def _uplink_bytes(self) -> int:
        return self._lab.traffic(NEAR, FAR).delivered_bytes

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


async def measure(lab: NetworkLab, num_bytes: int) -> list[dict[str, object]]:
    """Three rows: nothing uploaded, uploads without a limit, uploads within it."""
    rows: list[dict[str, object]] = []
    paced = PACED_SHARE * UPLINK_MBIT * 1e6 / 8
    for what, limit, body_bytes in (
        ("idle", None, 0),
        ("no limit", None, num_bytes),
        (f"--max-upload {PACED_SHARE * UPLINK_MBIT:g}mbit", paced, num_bytes),
    ):
        uplink = Uplink(lab, limit)
        try:
            await uplink.start()
            rows.append({"what": what, **await uplink.measure(body_bytes, idle_seconds=3.0)})
        finally:
            await uplink.stop()
    return rows


def main() -> None:
    """Makes the uplink, measures before it, prints."""
    parser = parser_of(__doc__)
    parser.add_argument("--bytes", type=int, default=20_000_000, help="to upload (default 20 MB)")
    num_bytes = parser.parse_args().bytes
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    links = {
        NEAR: Link(up_bits_per_second=UPLINK_MBIT * 1e6, buffer_bytes=BUFFER_BYTES),
        FAR: Link(),
    }
    try:
        with NetworkLab(links, congestion_control=CONGESTION_CONTROL) as lab, lab.inside(NEAR):
            rows = asyncio.run(measure(lab, num_bytes))
    except LabUnavailableError as error:
        sys.exit(str(error))
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    about = machine() | {
        "congestion_control": CONGESTION_CONTROL,
        "uploaded_bytes": num_bytes,
    }
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    with nothing_left():
        main()
