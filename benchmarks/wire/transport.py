"""What a transfer costs on the wire, against what WireCounts says it costs; and how fast it is.

    python -m benchmarks.wire.transport

Runs two transports in a network namespace of its own, whose loopback has the MTU of the internet
and no segmentation offload, so that the interface's counters see packets as a network card sends
them. The constants in node/exchange/transport/rates/traffic.py come from here. Needs the right to make
a network namespace (root, or unprivileged user namespaces). Prints a table and, last, JSON.
"""

import asyncio
import json
import logging
import os
import time

import structlog

from benchmarks.measurement import machine, parser_of
from lab.network.namespace import enter, loopback_counters
from lab.processes.family import nothing_left
from node.exchange.peers import Admission, Want, WantResult
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.trust.identity import Identity
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import Digest, NodeId, PeerAddress, RosterEntry

SIZES_BYTES = (20_000, 200_000, 2_000_000, 20_000_000)
TIMED_BYTES = 100_000_000
REPEATS = 5


class Desk:
    """Takes everything, and holds one payload."""

    held: Payload | None = None

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Admits all."""
        return Admission(take=self._forget)

    async def _forget(self, payload: Payload) -> bytes:
        return b""

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        """Gives what is held."""
        return self.held


async def settled_counters() -> tuple[int, int]:
    """The counters once nothing moves any more: p2pd closes streams after we are done."""
    before = loopback_counters()
    while True:
        await asyncio.sleep(0.15)
        now = loopback_counters()
        if now == before:
            return now
        before = now


def seal(kind: int, sender_id: NodeId, num_bytes: int) -> Payload:
    """A payload of random bytes with realistic header fields."""
    return Payload.seal(
        kind=kind,  # type: ignore[arg-type]  # an enum's value
        run_digest=Digest(os.urandom(32)),
        round=1234,
        fragment=3,
        slice_index=5,
        start=1 << 20,
        num_elements=2 * num_bytes,
        codec="int4/1",
        tokens=1 << 20,
        sender_id=sender_id,
        body=os.urandom(num_bytes),
    )


async def measure() -> list[dict[str, object]]:
    """Pushes and fetches payloads of each size, alone, after one that sets up the connection."""
    identities = [Identity.generate(), Identity.generate()]
    counts = [WireCounts(), WireCounts()]
    desks = [Desk(), Desk()]
    transports = [
        Libp2pTransport(identity=identity, counts=count)
        for identity, count in zip(identities, counts, strict=True)
    ]
    for transport, desk in zip(transports, desks, strict=True):
        await transport.start(desk)
    roster = tuple(
        RosterEntry(
            node_id=identity.node_id,
            node_name=f"node{index}",
            address=PeerAddress(
                public_key=identity.public_key, multiaddrs=transports[index].multiaddrs
            ),
        )
        for index, identity in enumerate(identities)
    )
    one, other = transports

    def counted() -> tuple[int, int]:
        totals = [count.totals().values() for count in counts]
        return (
            sum(sent for total in totals for sent, _ in total),
            sum(received for total in totals for _, received in total),
        )

    rows: list[dict[str, object]] = []

    async def row(what: str, num_bytes: int, repeats: int, act: object) -> None:
        (wire_bytes, packets), (sent, received) = await settled_counters(), counted()
        for _ in range(repeats):
            await act()  # type: ignore[operator]  # an async function
        (now_bytes, now_packets), (now_sent, now_received) = await settled_counters(), counted()
        on_wire = (now_bytes - wire_bytes) / repeats
        rows.append(
            {
                "what": what,
                "body_bytes": num_bytes,
                "wire_bytes": round(on_wire),
                "packets": round((now_packets - packets) / repeats, 1),
                "sent_over_wire": round((now_sent - sent) / repeats / on_wire, 4),
                "received_over_wire": round((now_received - received) / repeats / on_wire, 4),
            }
        )

    async def connect() -> None:
        for transport in transports:
            transport.set_roster(roster)
        await asyncio.sleep(1)

    await row("connection", 0, 1, connect)
    for num_bytes in SIZES_BYTES:
        pushed = seal(CONTRIBUTION, identities[0].node_id, num_bytes)
        desks[1].held = held = seal(RESULT, identities[1].node_id, num_bytes)
        want = WantResult(round=1234, slice_index=5, digest=held.digest)

        async def push(payload: Payload = pushed) -> None:
            await one.push(identities[1].node_id, payload, timeout_seconds=60)

        async def fetch(want: WantResult = want) -> None:
            await one.fetch(identities[1].node_id, want, max_body_bytes=1 << 30, timeout_seconds=60)

        await row("push", num_bytes, REPEATS, push)
        await row("fetch", num_bytes, REPEATS, fetch)

    timed = seal(CONTRIBUTION, identities[0].node_id, TIMED_BYTES)
    speeds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        await one.push(identities[1].node_id, timed, timeout_seconds=120)
        speeds.append(TIMED_BYTES / 1e6 / (time.perf_counter() - started))
    rows.append(
        {"what": "speed", "body_bytes": TIMED_BYTES, "mb_per_s": [round(s, 1) for s in speeds]}
    )
    for transport in (one, other):
        await transport.stop()
    return rows


def main() -> None:
    """Enters a namespace, sets up its loopback, measures, prints."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--mtu", type=int, default=1500, help="of loopback; 65536 leaves it as it is (default 1500)"
    )
    mtu = parser.parse_args().mtu
    enter(mtu=mtu)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with nothing_left():
        rows = asyncio.run(measure())
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    print(json.dumps(machine() | {"mtu": mtu, "rows": rows}))


if __name__ == "__main__":
    main()
