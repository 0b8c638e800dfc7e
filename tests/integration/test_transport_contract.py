"""What every transport promises, held against each: in memory, and over libp2p on loopback."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from lab.simulation.memory_transport import MemoryNetwork, MemoryTransport
from node.exchange.peers import (
    PIECES_AT_ONCE,
    FalseAnswerError,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Transport,
    Want,
    WantChunk,
    WantChunkMap,
    WantManifest,
    WantTokens,
)
from node.exchange.transport.libp2p import Libp2pTransport
from protocol.trust.identity import Identity
from protocol.wire.payload import (
    CHUNK,
    CHUNK_MAP,
    CONTRIBUTION,
    MANIFEST,
    PIECE,
    PIECE_MAP,
    TOKENS_MANIFEST,
    Payload,
    WireCounts,
)
from tests.integration.transport_peers import BIG, Peer, introduce, make_payload, want

SECONDS = 20.0


class Swarm:
    """Makes peers of one kind of transport, and stops them all at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()
        self.transports: list[Transport] = []

    async def start(self, identity: Identity | None = None) -> Peer:
        identity = identity or Identity.generate()
        counts = WireCounts()
        transport: Transport
        if self.kind == "memory":
            transport = MemoryTransport(
                network=self.network, node_id=identity.node_id, counts=counts
            )
        else:
            transport = Libp2pTransport(identity=identity, counts=counts)
        self.transports.append(transport)
        peer = Peer(identity.node_id, identity.public_key, transport, counts)
        await transport.start(peer.desk)
        return peer

    async def pair(self) -> tuple[Peer, Peer]:
        one, other = await self.start(), await self.start()
        await introduce(one, other)
        return one, other

    async def stop(self) -> None:
        for transport in self.transports:
            await transport.stop()


@pytest.fixture(params=["memory", "libp2p"])
async def swarm(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Swarm]:
    swarm = Swarm(request.param)
    yield swarm
    await swarm.stop()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def push(sender: Peer, receiver: Peer, payload: Payload, seconds: float = SECONDS) -> None:
    await sender.transport.push(receiver.node_id, payload, timeout_seconds=seconds)


async def fetch(sender: Peer, holder: Peer, wanted: Want, max_body_bytes: int = BIG) -> Payload:
    return await sender.transport.fetch(
        holder.node_id, wanted, max_body_bytes=max_body_bytes, timeout_seconds=SECONDS
    )


async def test_a_pushed_payload_arrives_whole_and_is_counted_on_both_sides(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    payload = make_payload(CONTRIBUTION, sender_id=one.node_id, body=bytes(range(250)) * 12_000)
    await push(one, other, payload)
    assert other.desk.received == [(one.node_id, payload)]
    assert payload.header.body_bytes == BIG
    for num_bytes in (
        one.counts.totals()["contribution"][0],
        other.counts.totals()["contribution"][1],
    ):
        assert BIG <= num_bytes < 1.1 * BIG


async def test_a_piece_of_tokens_is_fetched_by_its_digest_and_another_one_is_refused(
    swarm: Swarm,
) -> None:
    one, other = await swarm.pair()
    piece = make_payload(PIECE, body=bytes(range(250)) * 8_000)
    wanted = WantTokens(kind=PIECE, digest=piece.header.body_digest)
    other.desk.held = piece
    assert await fetch(one, other, wanted) == piece
    assert other.desk.wanted == [wanted]
    assert one.counts.totals()["data"][1] >= piece.header.body_bytes
    other.desk.held = make_payload(PIECE, body=b"other bytes")
    with pytest.raises(FalseAnswerError):
        await fetch(one, other, wanted)
    for kind in (TOKENS_MANIFEST, PIECE_MAP):  # what these are only who asks can tell
        other.desk.held = make_payload(kind, body=b"anything")
        assert await fetch(one, other, WantTokens(kind=kind, digest=wanted.digest))
        with pytest.raises(FalseAnswerError):
            await fetch(one, other, wanted)
    other.desk.held = None
    with pytest.raises(NotHeldError):
        await fetch(one, other, wanted)


async def test_only_so_many_pieces_are_given_at_once_and_nothing_else_waits_for_them(
    swarm: Swarm,
) -> None:
    one, other = await swarm.pair()
    piece = make_payload(PIECE, body=b"a piece")
    wanted = WantTokens(kind=PIECE, digest=piece.header.body_digest)
    other.desk.held = piece
    other.desk.supply_gate = asyncio.Event()
    fetches = [asyncio.create_task(fetch(one, other, wanted)) for _ in range(2 * PIECES_AT_ONCE)]
    while len(other.desk.wanted) < PIECES_AT_ONCE:  # noqa: ASYNC110 (the desk tells nobody)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert len(other.desk.wanted) == PIECES_AT_ONCE
    result = make_payload()
    other.desk.held, other.desk.supply_gate = result, None
    assert await fetch(one, other, want(result)) == result
    for fetching in fetches:
        assert not fetching.done()
        fetching.cancel()
    await asyncio.gather(*fetches, return_exceptions=True)


async def test_a_fetch_tells_of_bytes_as_they_come_and_of_none_before(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    payload = make_payload(body=bytes(BIG))
    other.desk.held = payload
    other.desk.supply_gate = asyncio.Event()
    swarm.network.slow_down(other.node_id, 2 * BIG)
    heard = asyncio.Event()
    num_heard = 0

    def hear() -> None:
        nonlocal num_heard
        num_heard += 1
        heard.set()

    fetching = asyncio.create_task(
        one.transport.fetch(
            other.node_id,
            want(payload),
            max_body_bytes=BIG,
            timeout_seconds=SECONDS,
            heard=hear,
        )
    )
    while not other.desk.wanted:  # noqa: ASYNC110 (the desk tells nobody)
        await asyncio.sleep(0.01)
    assert not heard.is_set()
    other.desk.supply_gate.set()
    await heard.wait()
    assert not fetching.done()
    assert await fetching == payload
    assert num_heard > 1


async def test_an_empty_body_is_a_payload_too(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    payload = make_payload(body=b"")
    other.desk.held = payload
    await push(one, other, payload)
    assert other.desk.received == [(one.node_id, payload)]
    assert await fetch(one, other, want(payload)) == payload


async def test_a_result_is_fetched_by_its_digest(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.held = make_payload(body=bytes(BIG))
    assert await fetch(one, other, want(other.desk.held)) == other.desk.held
    assert other.desk.wanted == [want(other.desk.held)]


async def test_a_manifest_is_fetched_by_its_round(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.held = make_payload(MANIFEST, round=7)
    wanted = (
        WantManifest(oldest_round=6),
        WantManifest(oldest_round=0, newest_round=7),
        WantManifest(oldest_round=7, newest_round=7),
    )
    for want_manifest in wanted:
        assert await fetch(one, other, want_manifest) == other.desk.held
    assert other.desk.wanted == list(wanted)
    with pytest.raises(FalseAnswerError, match="oldest_round=8"):
        await fetch(one, other, WantManifest(oldest_round=8))
    with pytest.raises(FalseAnswerError, match="newest_round=0"):
        await fetch(one, other, WantManifest(oldest_round=0, newest_round=0))


async def test_a_chunk_is_fetched_by_its_round_and_digest(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    chunk = other.desk.held = make_payload(CHUNK, round=7, body=bytes(BIG))
    digest = chunk.header.body_digest
    wanted = WantChunk(round=7, index=3, digest=digest)
    assert await fetch(one, other, wanted) == chunk
    assert other.desk.wanted == [wanted]
    assert one.counts.totals()["snapshot"][1] > BIG
    before = one.counts.totals()["snapshot"][1]
    for wrong in (
        WantChunk(round=8, index=3, digest=digest),
        WantChunk(round=7, index=3, digest=make_payload(body=b"else").header.body_digest),
        WantManifest(oldest_round=7),
        want(chunk),
    ):
        with pytest.raises(FalseAnswerError, match="offered a chunk of round 7"):
            await fetch(one, other, wrong)
    assert one.counts.totals()["snapshot"][1] - before < BIG / 2  # no body was read


async def test_a_chunk_map_is_fetched_by_its_round(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.held = make_payload(CHUNK_MAP, round=7)
    wanted = WantChunkMap(round=7, outer_digest=other.desk.held.digest)
    assert await fetch(one, other, wanted) == other.desk.held
    assert other.desk.wanted == [wanted]
    with pytest.raises(FalseAnswerError, match="offered a chunk map of round 7"):
        await fetch(one, other, WantChunkMap(round=8, outer_digest=wanted.outer_digest))


async def test_what_a_peer_does_not_hold_is_said_so(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    with pytest.raises(NotHeldError):
        await fetch(one, other, WantManifest(oldest_round=0))


async def test_an_offer_that_is_not_admitted_is_refused_with_the_reason(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.max_body_bytes = 100
    with pytest.raises(TransferRefusedError, match="101 bytes are too many"):
        await push(one, other, make_payload(body=bytes(101)))
    assert not other.desk.received
    assert one.counts.totals()["result"][0] < 1500  # no body was sent


async def test_who_is_not_on_the_roster_is_refused(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.transport.set_roster((other.entry,))
    with pytest.raises(TransferRefusedError, match="not on the roster"):
        await push(one, other, make_payload())
    with pytest.raises(TransferRefusedError, match="not on the roster"):
        await fetch(one, other, WantManifest(oldest_round=0))
    with pytest.raises(PeerUnreachableError, match="not on the roster"):
        await push(other, one, make_payload())
    assert not other.desk.admitted
    assert not other.desk.wanted


async def test_an_answer_larger_than_allowed_is_not_read(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.held = make_payload(body=bytes(BIG))
    with pytest.raises(FalseAnswerError, match="at most 2999999"):
        await fetch(one, other, want(other.desk.held), max_body_bytes=BIG - 1)
    assert one.counts.totals()["result"][1] < BIG / 2


async def test_an_answer_that_is_not_what_was_asked_for_is_refused(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.held = make_payload(body=b"another")
    with pytest.raises(FalseAnswerError, match="offered a result of round 7"):
        await fetch(one, other, want(make_payload(body=b"wanted")))


async def test_a_damaged_body_is_refused_on_either_side(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    good = make_payload(body=bytes(BIG))
    bad = Payload(header=good.header, body=bytes(BIG - 1) + b"!")
    other.desk.held = bad
    with pytest.raises(TransferRefusedError, match="is damaged"):
        await push(one, other, bad)
    with pytest.raises(FalseAnswerError, match="is damaged"):
        await fetch(one, other, want(good))
    assert not other.desk.received


async def test_a_fault_inside_the_receiver_is_not_told_as_a_lost_link(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.fault = ZeroDivisionError()
    with pytest.raises(TransferRefusedError, match="failed inside"):
        await push(one, other, make_payload())


async def test_a_peer_that_takes_too_long_is_unreachable(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.gate = asyncio.Event()  # nobody sets it
    with pytest.raises(PeerUnreachableError, match=r"no end within 0\.5 s"):
        await push(one, other, make_payload(), seconds=0.5)


async def test_a_peer_that_stops_in_the_middle_is_unreachable(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    other.desk.gate = asyncio.Event()  # nobody sets it
    pushing = asyncio.create_task(push(one, other, make_payload()))
    await other.desk.has_admitted.wait()
    await other.transport.stop()
    with pytest.raises(PeerUnreachableError):
        await pushing


async def test_a_peer_that_comes_back_elsewhere_is_found_by_its_new_entry(swarm: Swarm) -> None:
    one, identity = await swarm.start(), Identity.generate()
    before = await swarm.start(identity)
    await introduce(one, before)
    await push(one, before, make_payload())
    await before.transport.stop()
    with pytest.raises(PeerUnreachableError):
        await push(one, before, make_payload())

    after = await swarm.start(identity)
    await introduce(one, after)
    await push(one, after, make_payload())
    assert len(after.desk.received) == 1


async def test_a_stopped_transport_reaches_nobody_and_stops_twice(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    await one.transport.stop()
    await one.transport.stop()
    with pytest.raises(PeerUnreachableError, match="stopped"):
        await push(one, other, make_payload())


async def test_both_push_many_payloads_at_once(swarm: Swarm) -> None:
    one, other = await swarm.pair()
    bodies = [bytes([number]) * 300_000 for number in range(8)]
    await asyncio.gather(
        *(push(one, other, make_payload(body=body)) for body in bodies),
        *(push(other, one, make_payload(body=body)) for body in bodies),
    )
    for peer in (one, other):
        assert sorted(payload.body for _, payload in peer.desk.received) == bodies
