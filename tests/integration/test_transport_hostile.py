"""Members that break the protocol, strangers, and deaths: against the libp2p transport."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import pytest
from structlog.testing import capture_logs

from node.exchange.peers import (
    FalseAnswerError,
    Limits,
    NotHeldError,
    PeerUnreachableError,
    TransferRefusedError,
    Want,
    WantChunk,
    WantManifest,
)
from node.exchange.transport.libp2p import PROTOCOL, Libp2pTransport
from node.exchange.transport.p2pd import DaemonError, P2pd
from node.exchange.transport.rates.traffic import Traffic
from node.exchange.transport.receiver import StreamAdmission
from node.exchange.transport.streams import TransferStream
from protocol.trust.identity import Identity, peer_id_of
from protocol.v1 import transfer_pb2 as wire
from protocol.wire.payload import CHUNK, MANIFEST, Payload, PayloadHeader, WireCounts
from protocol.wire.rounds import Digest, PeerAddress, RosterEntry
from tests.integration.transport_peers import BIG, Peer, introduce, make_payload, start_transport

SECONDS = 20.0
ANSWER_SECONDS = 5.0


def unpaced() -> Traffic:
    return Traffic(WireCounts(), limits=Limits())


@dataclass
class Raw:
    """A libp2p peer that says whatever a test wants it to say."""

    identity: Identity = field(default_factory=Identity.generate)
    answer: Callable[[TransferStream], Awaitable[None]] | None = None
    daemon: P2pd | None = None

    async def start(self) -> None:
        async def on_stream(
            _: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            stream = TransferStream(
                reader,
                writer,
                idle_seconds=ANSWER_SECONDS,
                traffic=unpaced(),
            )
            assert self.answer is not None
            await self.answer(stream)
            await stream.outlast()

        self.daemon = await P2pd.start(
            self.identity,
            listen_multiaddrs=("/ip4/127.0.0.1/tcp/0",),
            on_streams={PROTOCOL: on_stream},
        )

    async def entry(self) -> RosterEntry:
        assert self.daemon is not None
        return RosterEntry(
            node_id=self.identity.node_id,
            node_name="raw",
            address=PeerAddress(
                public_key=self.identity.public_key, multiaddrs=await self.daemon.multiaddrs()
            ),
        )

    async def open(self, victim: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self.daemon is not None
        address = victim.entry.address
        async with asyncio.timeout(30):
            while True:
                try:
                    await self.daemon.connect(peer_id_of(address.public_key), address.multiaddrs)
                    break
                except DaemonError:  # the victim dialled at the same instant (see introduce)
                    await asyncio.sleep(1)
        return await self.daemon.open_stream(peer_id_of(address.public_key), PROTOCOL)

    async def offer(self, victim: Peer, payload: Payload) -> tuple[TransferStream, int, str]:
        """Offers a payload; gives the stream, and the status and reason of the answer."""
        offer = wire.Offer(header=payload.header.encode())
        return await self.ask(victim, wire.TransferRequest(offer=offer))

    async def ask(
        self, victim: Peer, request: wire.TransferRequest
    ) -> tuple[TransferStream, int, str]:
        """Asks for anything; gives the stream, and the status and reason of the answer."""
        stream = TransferStream(
            *await self.open(victim),
            idle_seconds=ANSWER_SECONDS,
            traffic=unpaced(),
        )
        await stream.send(request)
        response = await stream.receive(wire.TransferResponse)
        return stream, response.status, response.reason


class Scene:
    """A node with short patience, and others about it."""

    def __init__(self, victim: Peer, limits: Limits) -> None:
        self.victim = victim
        self.limits = limits
        self.raw = Raw()
        self.others: list[Libp2pTransport] = []

    async def make_member(self) -> None:
        self.victim.transport.set_roster((self.victim.entry, await self.raw.entry()))

    async def still_serves(self) -> None:
        """A new member's payload gets through."""
        transport, member = await start_transport()
        self.others.append(transport)
        await introduce(member, self.victim)
        payload = make_payload(body=b"from a good member")
        await transport.push(self.victim.node_id, payload, timeout_seconds=SECONDS)
        assert (member.node_id, payload) in self.victim.desk.received


@pytest.fixture
async def scene(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Scene]:
    limits = getattr(request, "param", Limits())
    transport, victim = await start_transport(limits)
    scene = Scene(victim, limits)
    await scene.raw.start()
    yield scene
    for one in [transport, *scene.others]:
        await one.stop()
    assert scene.raw.daemon is not None
    await scene.raw.daemon.stop()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def is_dropped(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the stream, without another word, before our patience ends."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await reader.read(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_a_stranger_is_refused_before_its_body_is_read(scene: Scene) -> None:
    _, status, reason = await scene.raw.offer(scene.victim, make_payload(body=bytes(BIG)))
    assert status == wire.TRANSFER_STATUS_REFUSED
    assert reason == "you are not on the roster"
    assert not scene.victim.desk.admitted


async def test_a_node_that_was_a_member_is_refused_by_its_name_and_called_no_stranger(
    scene: Scene,
) -> None:
    transport, member = await start_transport()
    scene.others.append(transport)
    await introduce(member, scene.victim)
    scene.victim.transport.set_roster((scene.victim.entry,))
    with capture_logs() as logs, pytest.raises(TransferRefusedError, match="not on the roster"):
        await transport.push(scene.victim.node_id, make_payload(), timeout_seconds=SECONDS)
    refused = [entry for entry in logs if entry["event"].startswith("refused a stream")]
    assert [(entry["log_level"], entry.get("of")) for entry in refused] == [
        ("info", member.entry.node_name)
    ]
    await introduce(member, scene.victim)
    await transport.push(scene.victim.node_id, make_payload(), timeout_seconds=SECONDS)


@pytest.mark.parametrize("scene", [Limits(max_streams=2)], indirect=True)
async def test_silent_strangers_do_not_keep_members_out(scene: Scene) -> None:
    streams = [await scene.raw.open(scene.victim) for _ in range(10)]
    await scene.still_serves()
    assert [await is_dropped(reader) for reader, _ in streams] == [True] * 10


async def test_a_frame_that_claims_two_gigabytes_is_not_waited_for(scene: Scene) -> None:
    await scene.make_member()
    reader, writer = await scene.raw.open(scene.victim)
    writer.write((2**31).to_bytes(4, "little") + b"x" * 1000)
    assert await is_dropped(reader)
    await scene.still_serves()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (wire.TransferRequest(), "the request is empty"),
        (wire.TransferRequest(offer=wire.Offer(header=b"\xff")), "not a payload header"),
        (wire.TransferRequest(offer=wire.Offer(header=bytes(5000))), "longer than 4096"),
    ],
)
async def test_nonsense_is_refused_with_the_reason(
    scene: Scene, request_: wire.TransferRequest, reason: str
) -> None:
    await scene.make_member()
    stream = TransferStream(
        *await scene.raw.open(scene.victim),
        idle_seconds=ANSWER_SECONDS,
        traffic=unpaced(),
    )
    await stream.send(request_)
    response = await stream.receive(wire.TransferResponse)
    assert response.status == wire.TRANSFER_STATUS_REFUSED
    assert reason in response.reason


async def test_a_body_shorter_than_announced_is_not_taken(scene: Scene) -> None:
    await scene.make_member()
    stream, status, _ = await scene.raw.offer(scene.victim, make_payload(body=bytes(1000)))
    assert status == wire.TRANSFER_STATUS_GO_ON
    await stream.send_body(bytes(999))
    stream.abort()
    await scene.still_serves()
    assert len(scene.victim.desk.received) == 1


async def test_a_body_longer_than_announced_is_not_taken(scene: Scene) -> None:
    await scene.make_member()
    payload = make_payload(body=bytes(1001))
    short = Payload(header=replace(payload.header, body_bytes=1000), body=payload.body)
    stream, status, _ = await scene.raw.offer(scene.victim, short)
    assert status == wire.TRANSFER_STATUS_GO_ON
    await stream.send_body(short.body)
    response = await stream.receive(wire.TransferResponse)
    assert response.status == wire.TRANSFER_STATUS_REFUSED
    assert "is damaged" in response.reason
    assert not scene.victim.desk.received


@pytest.mark.parametrize(
    "scene", [Limits(idle_seconds=0.5, floor_bytes_per_second=0.1)], indirect=True
)
async def test_a_body_that_never_comes_frees_its_place(scene: Scene) -> None:
    await scene.make_member()
    reader, writer = await scene.raw.open(scene.victim)
    stream = TransferStream(reader, writer, idle_seconds=ANSWER_SECONDS, traffic=unpaced())
    offer = wire.Offer(header=make_payload(body=bytes(1000)).header.encode())
    await stream.send(wire.TransferRequest(offer=offer))
    answer = await stream.receive(wire.TransferResponse)
    assert answer.status == wire.TRANSFER_STATUS_GO_ON
    assert await is_dropped(reader)


@pytest.mark.parametrize(
    "scene", [Limits(idle_seconds=0.5, floor_bytes_per_second=1e6)], indirect=True
)
async def test_a_body_that_trickles_is_cut_off(scene: Scene) -> None:
    await scene.make_member()
    stream, status, _ = await scene.raw.offer(scene.victim, make_payload(body=bytes(1000)))
    assert status == wire.TRANSFER_STATUS_GO_ON

    async def trickle() -> None:
        while True:
            await stream.send_body(b"\0")
            await asyncio.sleep(scene.limits.idle_seconds / 10)

    with pytest.raises(OSError, match=r"(?i)connection|pipe"):
        await asyncio.wait_for(trickle(), ANSWER_SECONDS)
    assert not scene.victim.desk.received


@pytest.mark.parametrize("scene", [Limits(max_streams_per_peer=2)], indirect=True)
async def test_a_member_opens_no_more_streams_than_its_share(scene: Scene) -> None:
    await scene.make_member()
    scene.victim.desk.gate = asyncio.Event()
    kept = []
    for _ in range(2):
        stream, status, _ = await scene.raw.offer(scene.victim, make_payload(body=b""))
        assert status == wire.TRANSFER_STATUS_GO_ON
        kept.append(stream)  # its handler waits at the gate
    _, status, reason = await scene.raw.offer(scene.victim, make_payload(body=b""))
    assert status == wire.TRANSFER_STATUS_REFUSED
    assert reason == "busy with 2 transfers of yours already"
    scene.victim.desk.gate.set()
    for stream in kept:
        answer = await stream.receive(wire.TransferResponse)
        assert answer.status == wire.TRANSFER_STATUS_RECEIVED


@pytest.mark.parametrize("scene", [Limits(max_streams_per_peer=12)], indirect=True)
async def test_a_node_with_few_places_left_refuses_another_fetch_and_takes_an_offer(
    scene: Scene,
) -> None:
    await scene.make_member()
    scene.victim.desk.gate = asyncio.Event()
    kept = []
    for _ in range(10):  # more than three quarters of the places
        stream, status, _ = await scene.raw.offer(scene.victim, make_payload(body=b""))
        assert status == wire.TRANSFER_STATUS_GO_ON
        kept.append(stream)  # its handler waits at the gate
    fetch = wire.TransferRequest(want_result=wire.WantResult(digest=bytes(32)))
    _, status, reason = await scene.raw.ask(scene.victim, fetch)
    assert status == wire.TRANSFER_STATUS_REFUSED
    assert reason == "busy; go on with the transfers that you have"
    assert not scene.victim.desk.wanted
    stream, status, _ = await scene.raw.offer(scene.victim, make_payload(body=b""))
    assert status == wire.TRANSFER_STATUS_GO_ON
    kept.append(stream)
    scene.victim.desk.gate.set()
    for stream in kept:
        answer = await stream.receive(wire.TransferResponse)
        assert answer.status == wire.TRANSFER_STATUS_RECEIVED


def test_when_places_run_out_each_peer_still_has_two_fetches() -> None:
    admission = StreamAdmission(Limits(max_streams=8, max_streams_per_peer=8))

    def may_fetch(peer: str) -> bool:
        with suppress(TransferRefusedError), admission.fetch(peer, is_large=True):
            return True
        return False

    with ExitStack() as streams:
        for _ in range(6):
            streams.enter_context(admission.fetch("greedy", is_large=True))
        assert may_fetch("greedy")
        streams.enter_context(admission.fetch("modest", is_large=True))  # now they run out
        assert not may_fetch("greedy")
        assert may_fetch("modest")
        streams.enter_context(admission.fetch("modest", is_large=True))
        assert not may_fetch("modest")
    assert may_fetch("greedy")


async def fetched_from(scene: Scene, want: Want, *answer: wire.TransferResponse | bytes) -> Payload:
    """Fetches from a raw member that answers with these messages and bytes."""

    async def say(stream: TransferStream) -> None:
        await stream.receive(wire.TransferRequest)
        for part in answer:
            await (stream.send_body(part) if isinstance(part, bytes) else stream.send(part))
        with suppress(EOFError, OSError):
            await stream.receive(wire.TransferRequest)  # open until the other side is done

    scene.raw.answer = say
    await scene.make_member()
    return await scene.victim.transport.fetch(
        scene.raw.identity.node_id, want, max_body_bytes=BIG, timeout_seconds=SECONDS
    )


def go_on(header: PayloadHeader) -> wire.TransferResponse:
    return wire.TransferResponse(status=wire.TRANSFER_STATUS_GO_ON, header=header.encode())


@pytest.mark.parametrize("body_bytes", [BIG + 1, 2**62])
@pytest.mark.parametrize("kind", [MANIFEST, CHUNK])
async def test_an_answer_that_announces_too_much_is_not_allocated(
    scene: Scene, kind: int, body_bytes: int
) -> None:
    header = replace(make_payload(kind).header, body_bytes=body_bytes)
    wants: dict[int, Want] = {
        MANIFEST: WantManifest(oldest_round=1),
        CHUNK: WantChunk(round=7, index=0, digest=header.body_digest),
    }
    with pytest.raises(FalseAnswerError, match=f"{body_bytes} bytes offered, at most {BIG}"):
        await fetched_from(scene, wants[kind], go_on(header))


async def test_a_chunk_longer_than_announced_is_not_taken(scene: Scene) -> None:
    honest = make_payload(CHUNK, body=bytes(1001))
    want = WantChunk(round=7, index=0, digest=honest.header.body_digest)
    short = replace(honest.header, body_bytes=1000)
    with pytest.raises(FalseAnswerError, match="is damaged"):
        await fetched_from(scene, want, go_on(short), honest.body)


async def test_a_chunk_that_ends_early_is_not_taken(scene: Scene) -> None:
    honest = make_payload(CHUNK, body=bytes(1000))
    want = WantChunk(round=7, index=0, digest=honest.header.body_digest)
    long = replace(honest.header, body_bytes=1001)

    async def say(stream: TransferStream) -> None:
        await stream.receive(wire.TransferRequest)
        await stream.send(go_on(long))
        await stream.send_body(honest.body)

    scene.raw.answer = say
    await scene.make_member()
    with pytest.raises(PeerUnreachableError, match="1 of 1001 bytes"):
        await scene.victim.transport.fetch(
            scene.raw.identity.node_id, want, max_body_bytes=BIG, timeout_seconds=SECONDS
        )


async def test_a_round_that_nobody_knows_is_not_held(scene: Scene) -> None:
    not_held = wire.TransferResponse(status=wire.TRANSFER_STATUS_NOT_HELD)
    for round_ in (0, 2**63, 2**64 - 1):
        want = WantChunk(round=round_, index=2**32 - 1, digest=Digest(bytes(32)))
        with pytest.raises(NotHeldError):
            await fetched_from(scene, want, not_held)
        stream = TransferStream(
            *await scene.raw.open(scene.victim),
            idle_seconds=ANSWER_SECONDS,
            traffic=unpaced(),
        )
        chunk = wire.WantChunk(round=round_, index=2**32 - 1, digest=b"short")
        await stream.send(wire.TransferRequest(want_chunk=chunk))
        assert await stream.receive(wire.TransferResponse) == not_held


async def test_an_answer_in_another_language_is_refused(scene: Scene) -> None:
    async def answer(stream: TransferStream) -> None:
        await stream.receive(wire.TransferRequest)
        await stream.send(wire.TransferResponse(status=wire.TRANSFER_STATUS_RECEIVED))

    scene.raw.answer = answer
    await scene.make_member()
    with pytest.raises(TransferRefusedError, match="speaks another protocol"):
        await scene.victim.transport.push(
            scene.raw.identity.node_id, make_payload(), timeout_seconds=SECONDS
        )


async def test_a_node_that_cannot_be_dialled_is_reached_over_its_own_connection(
    scene: Scene,
) -> None:
    transport, hidden = await start_transport()
    scene.others.append(transport)
    nowhere = replace(hidden.entry.address, multiaddrs=("/ip4/127.0.0.1/tcp/9",))
    scene.victim.transport.set_roster((scene.victim.entry, replace(hidden.entry, address=nowhere)))
    transport.set_roster((scene.victim.entry, hidden.entry))  # which makes it dial
    payload = make_payload()
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await scene.victim.transport.push(hidden.node_id, payload, timeout_seconds=SECONDS)
                break
            except PeerUnreachableError:
                await asyncio.sleep(0.1)
    assert hidden.desk.received == [(scene.victim.node_id, payload)]
