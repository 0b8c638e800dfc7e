"""One node of benchmarks/wire/fetch.py: it gives an outer state, or fetches one, over real libp2p.

Runs as a process of its own in a host of the network lab. Orders come as lines of JSON on standard
input, and answers go out the same way. Every node makes the same state from the same seed.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import structlog

from node.disk.snapshots import Snapshot
from node.exchange import fetching
from node.exchange.peers import (
    Admission,
    TransferRefusedError,
    Waits,
    Want,
    WantChunk,
    WantChunkMap,
    WantManifest,
)
from node.exchange.state.donor import Donor
from node.exchange.state.download import Download
from node.exchange.transport.libp2p import Libp2pTransport
from node.heavy import in_thread
from node.machine.addresses import Reachability
from protocol.trust.identity import Identity, node_id_of
from protocol.wire.payload import Payload, PayloadHeader, WireCounts, grown
from protocol.wire.rounds import Digest, NodeId, PeerAddress, RosterEntry

RUN = LAYOUT = Digest(bytes(32))
ROUND = 8

TAKES_NOTHING = "this node only gives: it takes no payloads"


def say(**message: Any) -> None:
    """One line to the benchmark."""
    print(json.dumps(message), flush=True)


def state_of(num_elements: int) -> Snapshot:
    """What all donors hold: no zeros, so nothing on the way can make it shorter."""
    vectors = np.random.default_rng(0).standard_normal((2, num_elements), dtype=np.float32)
    return Snapshot(
        round=ROUND,
        run_digest=RUN,
        layout_digest=LAYOUT,
        parameters=vectors[0],
        momentum=vectors[1],
    )


class Giving:
    """What a node does when it is asked: gives the state, or what has come of it, and takes nothing."""

    def __init__(self, node_id: NodeId, state: Snapshot, *, is_whole: bool) -> None:
        self._state = state
        self.is_whole = is_whole
        self.download: Download | None = None
        self._donor = Donor(
            node_id=node_id,
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=len(state.parameters),
            oldest_round=lambda: ROUND,
            open_state=self._open,
            arriving=lambda: None if self.download is None else self.download.arriving,
            heavy=in_thread,
        )

    async def _open(self, want: WantManifest) -> Snapshot | None:
        return self._state if self.is_whole and want.includes(ROUND) else None

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        match want:
            case WantManifest():
                return await self._donor.manifest(want)
            case WantChunk():
                return await self._donor.chunk(want)
            case WantChunkMap():
                return await self._donor.chunk_map(want)
            case _:
                return None

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        raise TransferRefusedError(TAKES_NOTHING)

    def drop(self) -> None:
        self._donor.drop()


class FetchNode:
    """Listens from the start; fetches when it is told to."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._identity = Identity.generate()
        self._address: str = order["address"]
        self._num_elements: int = order["num_elements"]
        self._state = state_of(self._num_elements)
        self._digest = self._state.outer_digest()
        self._giving = Giving(self._identity.node_id, self._state, is_whole=order["is_whole"])
        self._roster: tuple[RosterEntry, ...] = ()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Obeys until standard input ends."""
        counts = WireCounts()
        async with self._transport(counts) as transport:
            say(
                said="started",
                public_key=self._identity.public_key.hex(),
                multiaddrs=transport.multiaddrs,
            )
            while line := await reader.readline():
                order = json.loads(line)
                match order["do"]:
                    case "roster":
                        self._roster = tuple(
                            _entry(host, bytes.fromhex(key), tuple(multiaddrs))
                            for host, key, multiaddrs in order["members"]
                        )
                        transport.set_roster(self._roster)
                        say(said="met")
                    case "fetch":
                        say(said="fetched", **await self._fetch_anew())
                    case "join":
                        say(said="joined", **await self._fetched_over(transport, counts))
                    case "count":
                        say(said="counted", sent_bytes=counts.totals()["snapshot"][0])
        self._giving.drop()

    async def _fetch_anew(self) -> dict[str, Any]:
        """Fetches the state over new connections, as a joiner does."""
        counts = WireCounts()
        async with self._transport(counts) as transport:
            transport.set_roster(self._roster)
            return await self._fetched_over(transport, counts)

    async def _fetched_over(self, transport: Libp2pTransport, counts: WireCounts) -> dict[str, Any]:
        """Fetches the state, and gives it as it comes and from then on."""
        me = self._identity.node_id
        donors = tuple(entry.node_id for entry in self._roster if entry.node_id != me)
        download = self._giving.download = Download(
            run_digest=RUN,
            layout_digest=LAYOUT,
            num_elements=self._num_elements,
            heavy=in_thread,
            donors=fetching.Donors(
                node_id=me,
                transport=transport,
                peers=lambda: donors,
                silences=fetching.Silences(transport.round_trip_seconds, Waits()),
            ),
            folder=None,
            say=lambda _: None,
        )
        before = counts.totals()
        began = time.monotonic()
        found = await download.fetch(ROUND, self._is_right)
        seconds = time.monotonic() - began
        assert found is not None
        assert found.outer_digest() == self._digest
        self._giving.is_whole = True
        await download.taken_over()
        _, received = grown(before, counts.totals())["snapshot"]
        return {"seconds": seconds, "received_bytes": received}

    async def _is_right(self, round: int, digest: Digest) -> bool:
        return (round, digest) == (ROUND, self._digest)

    @contextlib.asynccontextmanager
    async def _transport(self, counts: WireCounts) -> AsyncIterator[Libp2pTransport]:
        transport = Libp2pTransport(
            identity=self._identity,
            counts=counts,
            reachability=Reachability(listen_multiaddrs=(f"/ip4/{self._address}/tcp/0",)),
        )
        await transport.start(self._giving)
        try:
            yield transport
        finally:
            await transport.stop()


def _entry(host: str, public_key: bytes, multiaddrs: tuple[str, ...]) -> RosterEntry:
    return RosterEntry(
        node_id=node_id_of(public_key),
        node_name=host,
        address=PeerAddress(public_key=public_key, multiaddrs=multiaddrs),
    )


async def main() -> None:
    """Reads what this node is, then obeys."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await FetchNode(json.loads(await reader.readline())).run(reader)


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(main())
