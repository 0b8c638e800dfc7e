"""Peers: how payloads travel between members, what a node lets its peers take, and how long it waits.

A payload is pushed to a peer, or fetched from one. Two transports do that: node.exchange.transport.libp2p
over the network, and lab.simulation.memory_transport within one process. One contract test suite runs
against both. The rules that both keep stand below the interface.

Limits and waits are two values, passed in. Sizes and shares that no link changes stand with the controller
that they belong to.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import blake3
import structlog

from protocol.trust.rulings import Address
from protocol.wire.payload import (
    CHUNK,
    CHUNK_MAP,
    CONTRIBUTION,
    MANIFEST,
    PIECE,
    REDUCER_ERROR,
    RESULT,
    Payload,
    PayloadHeader,
)
from protocol.wire.rounds import Digest, NodeId, RosterEntry, Way
from protocol.wire.vitals import LinkState

if TYPE_CHECKING:
    from protocol.v1 import transfer_pb2


_log = structlog.get_logger(__name__)

PIECES_AT_ONCE = 4
"""Pieces of tokens that a node gives at the same time, to all peers together; who asks for more waits."""


class PeerUnreachableError(Exception):
    """The peer does not answer, or went away in the middle."""


class TransferRefusedError(Exception):
    """The peer, or we, do not want this payload; the text says why."""


class FalseAnswerError(TransferRefusedError):
    """What the peer sends is not what was asked for, or not what it announced itself."""


class NotHeldError(Exception):
    """The peer does not have what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantResult:
    """Asks for the result of a slice, by its digest."""

    round: int
    slice_index: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WantManifest:
    """Asks what the outer state consists of, at the newest round of a range that the peer can serve.

    Without `newest_round` any round from the oldest on will do.
    """

    oldest_round: int
    newest_round: int | None = None

    def includes(self, round: int) -> bool:
        """Whether the state at this round is what is asked for."""
        return self.oldest_round <= round and (
            self.newest_round is None or round <= self.newest_round
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantChunk:
    """Asks for a chunk of the outer state at exactly this round, by the digest in its manifest."""

    round: int
    index: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WantChunkMap:
    """Asks which chunks of the outer state at a round a peer has, that fetches it too: a bit for each."""

    round: int
    outer_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WantTokens:
    """Asks for something of the run's tokens: their manifest, the map of a peer's pieces, or a piece.

    The digest is a piece's own, and else the manifest's.
    """

    kind: "transfer_pb2.PayloadKind.ValueType"
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WantInput:
    """Asks a reducer for what it has made a slice's result of: a contribution, or its own error."""

    round: int
    slice_index: int
    contributor_id: NodeId | None  # None: the reducer's error
    digest: bytes  # of the body: of a contribution as ContributionDigest, of the error whole


Want = WantResult | WantManifest | WantChunk | WantChunkMap | WantTokens | WantInput


def do_nothing() -> None:
    """Where nobody needs to be told."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One payload that may come: made by who will take it, held by the transport until it is here."""

    take: Callable[[Payload], Awaitable[bytes]]
    """Takes the payload, which is whole and has the right digest; returns the receipt that its sender gets,
    or nothing. Raises TransferRefusedError."""
    is_wanted: Callable[[], bool] = _always
    """Whether it will still be taken. A transport may look while the body comes, and refuse the rest."""
    end: Callable[[], None] = do_nothing
    """Nothing more comes of it: it was taken, broke off, or was damaged or refused. Called once."""


class TransferHandler(Protocol):
    """What a node does with transfers that its peers begin."""

    def admit(self, sender: NodeId, header: PayloadHeader) -> Admission:
        """Decides on an offered payload before a byte of its body is read.

        Raises TransferRefusedError with the reason. Must check body_bytes: the transport
        allocates that much. And, where it matters whom the payload speaks for, sender_id.
        """

    async def supply(self, sender: NodeId, want: Want) -> Payload | None:
        """The payload that a peer asks for, or None when it is not held."""


class Transport(Protocol):
    """The link to all peers. Only members on the roster are talked to or listened to.

    What is written out here is so where there are no sockets: nothing is narrow, behind routers, or outside.
    """

    async def start(self, handler: TransferHandler) -> None:
        """Begins to listen. Raises AtollError when it cannot."""

    async def stop(self) -> None:
        """Ends all transfers and stops listening; safe to call more than once."""

    async def wait_failed(self) -> str:
        """Returns, with the reason, when the transport can no longer work; waits until then."""

    @property
    def multiaddrs(self) -> tuple[str, ...]:
        """Where peers find us, without the peer id; known once started."""

    async def heed_addresses(self) -> bool:
        """Sees to it that this machine's addresses have changed, if they have.

        Ends connections where one is gone: they go nowhere. Returns whether to tell the coordinator.
        """
        return False

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Says who is a member now. Anyone else is refused before a body is read."""

    def seen(self) -> LinkState:
        """How the link is to all peers, for heartbeats and for who asks them."""

    def set_ways(self, ways: tuple[Way, ...]) -> None:
        """Says, with each plan, who carries between members that do not reach each other."""

    async def show_outside(self, observers: Sequence[tuple[str, int]]) -> bool:
        """Sends them datagrams while a member is out of reach, or punched; hosts, and ports of UDP.

        Returns whether it did, for the first time since all were connected directly.
        """
        return False

    def heed_outside(self, seen: Sequence[str]) -> None:
        """Heeds where they see us: elsewhere than before, and holes lead nowhere any more."""
        return

    def punch(self, peer: NodeId, multiaddr: str) -> None:
        """Dials a member that dials us at the same time."""
        return

    async def coordinator_addresses(self, pin: bytes) -> Sequence[Address]:
        """Where members that are connected say that the coordinator of this pin is: hints alone."""
        return ()

    def round_trip_seconds(self, peer: NodeId) -> float:
        """How long a peer lately took to answer an offer of ours, or a guess where that is not known."""

    async def push(self, peer: NodeId, payload: Payload, *, timeout_seconds: float) -> bytes:
        """Returns once the peer holds the payload and has checked its digest; its receipt, if it gives one.

        Raises PeerUnreachableError, also at the timeout, or TransferRefusedError.
        """

    async def fetch(
        self,
        peer: NodeId,
        want: Want,
        *,
        max_body_bytes: int,
        timeout_seconds: float,
        heard: Callable[[], None] = do_nothing,
    ) -> Payload:
        """Fetches a payload and checks its digest; calls `heard` whenever some of the answer comes.

        Raises PeerUnreachableError, also at the timeout, NotHeldError, TransferRefusedError when
        the peer refuses, or FalseAnswerError when it sends something else, something damaged, or
        a body larger than `max_body_bytes`.
        """


# Rules that every transport keeps.


def check_answer(want: Want, header: PayloadHeader, *, max_body_bytes: int) -> None:
    """Decides on an answer before its body is read; raises FalseAnswerError."""
    if header.kind != kind_of(want) or not _is_wanted(want, header):
        raise FalseAnswerError(
            f"asked for {want}, offered a {header.kind_name} of round {header.round}"
        )
    if header.body_bytes > max_body_bytes:
        raise FalseAnswerError(
            f"{header.kind_name} of {header.body_bytes} bytes offered, at most {max_body_bytes} fit"
        )


def _is_wanted(want: Want, header: PayloadHeader) -> bool:
    match want:
        case WantResult(digest=digest):
            return blake3.blake3(header.encode()).digest() == digest
        case WantManifest():
            return want.includes(header.round)
        case WantChunk(round=round, digest=digest):
            return (header.round, header.body_digest) == (round, digest)
        case WantChunkMap(round=round):
            return header.round == round
        case WantTokens(kind=kind, digest=digest):
            return kind != PIECE or header.body_digest == digest
        case WantInput(contributor_id=contributor, digest=digest):
            place = (header.round, header.slice_index)
            is_of = contributor in (None, header.sender_id)
            is_it = header.body_digest[: len(digest)] == digest and len(digest) > 0
            return place == (want.round, want.slice_index) and is_of and is_it


def kind_of(want: Want) -> "transfer_pb2.PayloadKind.ValueType":
    """What kind of payload answers it."""
    match want:
        case WantResult():
            return RESULT
        case WantManifest():
            return MANIFEST
        case WantChunk():
            return CHUNK
        case WantChunkMap():
            return CHUNK_MAP
        case WantTokens(kind=kind):
            return kind
        case WantInput(contributor_id=contributor):
            return REDUCER_ERROR if contributor is None else CONTRIBUTION


@contextmanager
def refusing_on_fault(sender: NodeId) -> Iterator[None]:
    """Keeps a fault of our own handler from looking like the peer's, or like a lost link."""
    try:
        yield
    except TransferRefusedError:
        raise
    except Exception as error:
        _log.exception("a transfer failed inside this node", sender=sender)
        raise TransferRefusedError("this node failed inside; its log says how") from error


def turn_of(want: Want, pieces: asyncio.Semaphore) -> AbstractAsyncContextManager[None]:
    """Held from before a piece is read until it is sent; nothing else waits."""
    is_piece = isinstance(want, WantTokens) and want.kind == PIECE
    return pieces if is_piece else nullcontext()


WINDOW_BYTES = 256 * 1024
"""What one fresh stream lets be under way, before libp2p widens its window (go-yamux)."""

PARTS_IN_WINDOW = 2

LEAST_PART_BYTES = WINDOW_BYTES // PARTS_IN_WINDOW - 2048
"""A part is sent again when its stream breaks, and acknowledged alone: small against a body, large
against the acknowledgement. Two fit into a fresh stream's window, with all that is said around them:
for the last few bytes it would otherwise wait a round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one node's transport.

    Raise `idle_seconds` when links stall for longer without being dead, and lower
    `floor_bytes_per_second` when honest peers are slower still: many streams share an uplink. A body
    in parts takes nine streams at most, and gives way to other transfers when most are taken.
    """

    # What peers may take.
    floor_bytes_per_second: float = 2048.0
    ahead_seconds: float = 1.0
    """A sender that is ahead of others waits so long for them, before each part, at most."""
    max_streams_per_peer: int = 24
    max_streams: int = 128
    """That are served at once: 64 contributors with a body in parts each."""
    max_waiting_streams: int = 1024
    """Offers in line besides, and streams whose request is being read."""
    max_streams_per_body: int = 8
    """More brought nothing on any link that we measured (docs/decisions.md)."""
    most_early_bytes: int = 4 << 20
    """Parts of one sender that are kept for their offer: a third of a second at 100 Mbit/s."""
    most_early_bytes_of_all: int = 32 << 20
    most_early_part_bytes: int = LEAST_PART_BYTES
    """A larger part is not kept for its offer."""
    most_dropped_bytes: int = 256 << 20
    """Of one stream, one after the other: more that nobody asked for ends it."""

    # Streams.
    idle_seconds: float = 30.0
    """A stream that does not get on for so long is given up."""
    early_seconds: float = 5.0
    """How long parts are kept for an offer; it should come within a few round trips."""
    kept_seconds: float = 60.0
    """How long the parts of a body that broke off are kept for its sender to come back."""
    unused_seconds: float = 600.0
    """A sender closes a stream that had nothing to carry for so long: longer than most pauses of rounds."""
    at_rest_seconds: float = 1200.0
    """A receiver gives up a stream that had nothing to carry for so long."""

    # The sender.
    first_round_trip_seconds: float = 0.1
    """What a round trip is thought to take before an offer was answered."""
    widen_seconds: float = 0.5
    """How often it is looked at whether another stream pays."""
    window_seconds: float = 0.5
    """What a peer acknowledged in so long, or in two round trips, may be under way to it besides; pauses do
    not count."""

    # Connections.
    look_seconds: float = 10.0
    """How often it is looked at who is connected."""
    silent_seconds: float = 3.0
    """A connection whose other end acknowledges nothing for so long is given up, and dialled anew: a
    router between has forgotten it. At rest it is asked as often. The kernel must let us (TcpPacing)."""
    restless_seconds: float = 10.0
    """For so long after a node has moved it is looked more often, and who is missing is dialled at once."""
    restless_look_seconds: float = 0.5
    yield_seconds: float = 3.0
    """Of two members one dials first; both at once make a connection too many."""
    unreachable_seconds: float = 10.0
    """A member that is away for so long is told of; one that cannot be dialled dials us meanwhile."""
    first_redial_seconds: float = 2.0
    last_redial_seconds: float = 60.0
    """A member that is away is dialled ever less often, so often in the end."""
    knock_seconds: float = 10.0
    """An address that does not answer within so long is not dialled."""
    dial_seconds: float = 20.0

    # Connections through home routers.
    punch_seconds: float = 10.0
    """A dial by QUIC that meets the other's; p2pd gives it up after 5 s."""
    punched_look_seconds: float = 2.0
    """How often it is looked at who is connected that way."""

    # Rates: what the uplink carries.
    measured_seconds: float = 0.5
    """A busy time that is shorter, and of few bytes, says more of round trips than of the link."""
    burst_seconds: float = 0.05
    """What may leave at once, in seconds of the rate: so long a heartbeat may wait behind a chunk."""
    epoch_seconds: float = 0.2
    """So often it is looked at how answers come."""
    queue_seconds: float = 0.06
    """What the quickest answer of an epoch may take longer than the quickest of all lately. Less finds a
    queue where data only waits for data that goes the other way; LEDBAT++ allows as much."""
    lasting_seconds: float = 3.0
    """So long nothing is paced above TCP where the kernel paces: most exchanges are over then."""

    # Rates: the kernel's part.
    tcp_look_seconds: float = 0.0125
    """So often connections are looked at while something is sent, if that takes little of a core."""
    tcp_new_seconds: float = 1.0
    """So often it is looked for new connections meanwhile."""
    tcp_pause_seconds: float = 0.25
    """When nothing was sent for so long a busy time is over."""
    tcp_quiet_seconds: float = 0.5
    """After so long without anything to send nobody looks any more."""


SLOWEST_BYTES_PER_SECOND = 16_000
"""A fetch that is slower is given up, and another donor is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of one node's exchange."""

    grace_seconds: float = 2.0
    """A result that does not come of itself is fetched so long after the commit."""
    first_retry_seconds: float = 0.2
    last_retry_seconds: float = 3.0
    """The longest pauses before a push is repeated: the first one, and all from the fifth on. Each pause is
    drawn from zero to its longest ("full jitter"): what failed together would otherwise be tried together."""
    soon_seconds: float = 3.0
    """When a piece takes less, its donor is asked for one more at a time. A chunk that has the way for
    itself takes about six round trips, whatever the link carries."""
    late_seconds: float = 6.0
    """When a piece takes longer, its donor is asked for one less at a time: the link is full, or others
    fetch from it too."""
    overdue_seconds: float = 10.0
    """A piece that takes longer, and much longer than those that came, is asked of another donor too, once
    nothing else is left to ask for."""
    silent_seconds: float = 1.0
    """A donor that is asked and of which nothing comes for longer, and for some round trips, is silent. A
    slow donor sends a few kilobytes several times a second, so only bytes count and not pieces."""
    asked_last_seconds: float = 600.0
    """How long a silent donor is asked only where nobody else is left, unless something comes from it."""
    fetch_seconds: float = 60.0
    """A fetch may take so long, and what its bytes take at SLOWEST_BYTES_PER_SECOND."""
    pause_seconds: float = 1.0
    """Between the first two times of asking everybody; later ones are longer."""
    settle_seconds: float = 120.0
    """How long a snapshot may wait to be fetched until the swarm has agreed on its round's digest."""
    recruit_seconds: float = 15.0
    """How often more donors are looked for while there are too few."""
    look_seconds: float = 2.0
    """How often joiners ask each other which chunks they have: less than most chunks take over slow links."""
    distrust_seconds: float = 600.0
    """How long a donor that lied is not asked again. It may have been its memory that lied."""

    def for_fetch_of(self, num_bytes: int) -> float:
        """How long the fetch of a piece of so many bytes may take."""
        return self.fetch_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND


LONGEST_PAUSE_SECONDS = 60.0
"""Between two times of asking everybody, if there are no news."""


class Patience:
    """Pauses that double, with jitter, so that nodes that wait together do not ask together.

    News from the coordinator ends a pause at once: somebody may have come who supplies what is missing.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._news = asyncio.Event()

    def tell(self) -> None:
        """The coordinator has told something. Heard by the next pause, if there is none now."""
        self._news.set()

    async def pause(self, asked: int, *, first_seconds: float) -> None:
        """Waits after everybody was asked for the `asked`-th time in vain."""
        longest = min(LONGEST_PAUSE_SECONDS, first_seconds * 2.0 ** min(asked - 1, 10))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(longest / 2, longest)):
                await self._news.wait()
        self._news.clear()
