"""How payloads travel between members: push a payload to a peer, fetch one from a peer.

Two transports implement it: node.exchange.transport.libp2p over the network, and
lab.simulation.memory_transport within one process. One contract test suite runs against both. The rules that
both keep stand at the end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import blake3
import structlog

from protocol.trust.rulings import Address
from protocol.wire.payload import (
    CHUNK,
    CONTRIBUTION,
    MANIFEST,
    PIECE,
    REDUCER_ERROR,
    RESULT,
    Payload,
    PayloadHeader,
)
from protocol.wire.rounds import Digest, NodeId, RosterEntry, Way
from protocol.wire.vitals import LinkRates, UploadPace

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


Want = WantResult | WantManifest | WantChunk | WantTokens | WantInput


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
    """The link to all peers. Only members on the roster are talked to or listened to."""

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

    def set_roster(self, members: tuple[RosterEntry, ...]) -> None:
        """Says who is a member now. Anyone else is refused before a body is read."""

    @property
    def unreachable(self) -> tuple[NodeId, ...]:
        """Members that are not connected, and could not be dialled for a while, and `narrow` ones."""

    @property
    def narrow(self) -> tuple[NodeId, ...]:
        """Members to which only small packets get through, in order."""

    @property
    def punched(self) -> tuple[NodeId, ...]:
        """Members that are reached through holes in routers, in order."""

    @property
    def by_proxy(self) -> tuple[NodeId, ...]:
        """Members that are reached through an HTTP proxy, in order."""

    def set_ways(self, ways: tuple[Way, ...]) -> None:
        """Says, with each plan, who carries between members that do not reach each other."""

    @property
    def through(self) -> Mapping[NodeId, NodeId]:
        """Members among those out of reach that others carry to, and who carries; lately."""

    @property
    def carry_bytes_per_second(self) -> float:
        """What it may carry for others; 0: nothing."""

    @property
    def outside_token(self) -> bytes:
        """What our datagrams to those hold that see from where they come; empty: none is sent."""

    @property
    def outside_by_ipv6(self) -> str:
        """Where our QUIC can be dialled by IPv6, while that is wanted; empty when it cannot."""

    async def show_outside(self, observers: Sequence[tuple[str, int]]) -> bool:
        """Sends them datagrams while a member is out of reach, or punched; hosts, and ports of UDP.

        Returns whether it did, for the first time since all were connected directly.
        """

    def heed_outside(self, seen: Sequence[str]) -> None:
        """Heeds where they see us: elsewhere than before, and holes lead nowhere any more."""

    def punch(self, peer: NodeId, multiaddr: str) -> None:
        """Dials a member that dials us at the same time."""

    async def coordinator_addresses(self, pin: bytes) -> Sequence[Address]:
        """Where members that are connected say that the coordinator of this pin is: hints alone."""

    @property
    def rates(self) -> LinkRates:
        """What our link to all peers carries, as far as transfers have shown it."""

    @property
    def upload_pace(self) -> UploadPace:
        """What keeps our uploads from going faster now."""

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
