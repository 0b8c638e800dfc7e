"""Bounds on what callers send, checked before anything is done with it. All raise BadDataError."""

import contextlib
import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from ipaddress import IPv6Address

from google.protobuf.message import Message

from coordinator.swarm.opening import MOST_SLICES
from protocol.errors import BadDataError
from protocol.run.run_spec import MOST_PROMPTS
from protocol.terminal.console import printable
from protocol.trust.identity import node_id_of
from protocol.v1.session_pb2 import RoundSpan as RoundSpanWire
from protocol.wire.findings import Audited, Finding, ResultRefused, SpotChecked
from protocol.wire.messages import (
    Applied,
    Evaluated,
    Reduced,
    Report,
    ResultsSilent,
    Trained,
    Wrote,
)
from protocol.wire.payload import RESULT, WIRE_KINDS, PayloadError, PayloadHeader, WireTotals
from protocol.wire.rounds import (
    MOST_MULTIADDRS,
    MOST_SOURCES,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
    RoundSpan,
    SourceLoss,
)
from protocol.wire.vitals import LONG_WORDS, SHORT_WORDS, Announcement

MAX_NAME_LENGTH = SHORT_WORDS
MAX_WORDS_LENGTH = LONG_WORDS
MAX_MULTIADDR_LENGTH = 256
MAX_FRAGMENTS = 1024
MAX_RANKS = 1 << 16
MAX_SPANS = 256
MAX_TEXT_LENGTH = 2000  # of what a model writes on from a prompt
MAX_SOURCE_LENGTH = 100
MAX_COUNT = 1 << 53
"""Of anything that is counted: beyond it JSON readers lose digits, and no honest run comes near."""


def name(text: str, *, of: str) -> str:
    """A name that fits a table: printable, not empty, at most 64 characters."""
    if not text.strip():
        raise BadDataError(f"{of} is empty", next_step="give it a name of 1 to 64 characters")
    return words(text, of=of, max_length=MAX_NAME_LENGTH)


def words(text: str, *, of: str, max_length: int = MAX_WORDS_LENGTH) -> str:
    """Printable text of a bounded length; may be empty."""
    if len(text) > max_length:
        raise BadDataError(
            f"{of} has {len(text)} characters", next_step=f"{max_length} is the most it may have"
        )
    if not text.isprintable():
        raise BadDataError(f"{of} {text!r} has characters that cannot be shown")
    return text


def finite(number: float, *, of: str) -> float:
    """A number that is neither infinite nor NaN."""
    if not math.isfinite(number):
        raise BadDataError(f"{of} is {number}, which is not a finite number")
    return number


def count(number: int, *, of: str, most: int = MAX_COUNT) -> int:
    """A number of things that can be; the wire has no negative ones."""
    if number > most:
        raise BadDataError(f"{of} is {number}; {most} is the most it may be")
    return number


_LENGTHS = {"waiting_for": MAX_WORDS_LENGTH, "outside_by_ipv6": MAX_MULTIADDR_LENGTH}
"""Of texts that may be longer than a name."""


def said(message: Message, *, of: str) -> None:
    """What a node says of itself can be shown: numbers are finite, counts can be, texts are short words.

    All fields, also those of messages within, whatever a later release adds; but not lists.
    """
    for field, value in message.ListFields():
        what = f"{of}'s {field.name.replace('_', ' ')}"
        match value:
            case Message():
                said(value, of=what)
            case str():
                words(value, of=what, max_length=_LENGTHS.get(field.name, MAX_NAME_LENGTH))
            case float():
                finite(value, of=what)
            case int() if not field.name.endswith("_id"):  # these are drawn, and count nothing
                count(value, of=what)


def at_most(items: Sized, most: int, *, of: str) -> None:
    """A list of bounded length, none of whose items is looked at."""
    if len(items) > most:
        raise BadDataError(f"there are {len(items)} {of}; {most} is the most there may be")


def round_spans(spans: Sequence[RoundSpanWire]) -> tuple[RoundSpan, ...]:
    """Rounds in order, a bounded number of stretches."""
    at_most(spans, MAX_SPANS, of="stretches of rounds")
    found = tuple(
        RoundSpan(
            first=count(span.first, of="a round that it can go back to"),
            last=count(span.last, of="a round that it can go back to"),
        )
        for span in spans
    )
    if any(span.last < span.first for span in found):
        raise BadDataError("a stretch of rounds ends before it begins")
    return found


def address_of(node_id: NodeId, address: PeerAddress) -> PeerAddress:
    """An address that is the node's own: its key is the one that its id is derived from."""
    if node_id_of(address.public_key) != node_id:
        raise BadDataError(
            f"the address of node {node_id} has the key of node {node_id_of(address.public_key)}",
            next_step="join again with 'atoll join INVITE'",
        )
    at_most(address.multiaddrs, MOST_MULTIADDRS, of="multiaddresses")
    for multiaddr in address.multiaddrs:
        words(multiaddr, of="a multiaddress", max_length=MAX_MULTIADDR_LENGTH)
    return address


def announced(told: Announcement, node_id: NodeId) -> None:
    """What a node says of itself when it attaches, beyond what `said` looks at."""
    name(told.node_name, of="the node's name")
    address_of(node_id, told.address)
    count(told.num_ranks, of="the number of ranks", most=MAX_RANKS)
    layout(told.layout)
    codecs(told.codecs)


def place_by_ipv6(multiaddr: str) -> str:
    """Where one machine can be dialled by QUIC over IPv6, or nothing."""
    if not multiaddr:
        return ""
    words(multiaddr, of="a multiaddress", max_length=MAX_MULTIADDR_LENGTH)
    match multiaddr.split("/"):
        case ["", "ip6", host, "udp", port, "quic-v1"] if port.isascii() and port.isdigit():
            with contextlib.suppress(ValueError):
                address = IPv6Address(host)
                is_one = not (
                    address.is_multicast
                    or address.is_unspecified
                    or address.is_loopback
                    or address.is_link_local
                    or address.ipv4_mapped
                    or address.scope_id
                )
                if is_one and 0 < int(port) < 1 << 16:
                    return multiaddr
    raise BadDataError(f"{multiaddr!r} is no place of QUIC over IPv6")


def layout(summary: LayoutSummary) -> LayoutSummary:
    """A layout with a bounded number of fragments, none of them empty."""
    at_most(summary.fragment_elements, MAX_FRAGMENTS, of="fragments")
    if not summary.fragment_elements or min(summary.fragment_elements) < 1:
        raise BadDataError("the layout has no fragment, or an empty one")
    for num_elements in summary.fragment_elements:
        count(num_elements, of="a fragment's number of elements")
    return summary


def codecs(names: Sequence[str]) -> tuple[str, ...]:
    """The names of a codec up and one down."""
    at_most(names, 2, of="codecs")
    return tuple(words(name, of="a codec", max_length=MAX_NAME_LENGTH) for name in names)


def wire(totals: WireTotals) -> WireTotals:
    """Bytes by kind, of kinds that there are."""
    for kind, (sent, received) in totals.items():
        if kind not in WIRE_KINDS:
            raise BadDataError(f"there is no kind of bytes {name(kind, of='a kind')!r}")
        count(sent, of="the bytes sent")
        count(received, of="the bytes received")
    return totals


def report(told: Report) -> Report:
    """A report whose figures can be."""
    match told:
        case Trained():
            count(told.samples, of="the number of samples")
            count(told.tokens, of="the number of tokens")
            finite(told.loss, of="the loss")
            finite(told.seconds, of="the training time")
        case Reduced(contributors=contributors):
            for _, rounds in told.missed:
                count(rounds, of="the rounds missed")
            for contributor in contributors:
                count(contributor.samples, of="the number of samples")
                count(contributor.tokens, of="the number of tokens")
        case ResultsSilent():
            at_most(told.slice_indexes, MOST_SLICES, of="results")
        case Applied():
            wire(told.wire)
        case Audited():
            words(told.why, of="what an audit found")
        case SpotChecked():
            name(told.contributor_id, of="a member")
            count(told.num_samples, of="the number of samples")
            finite(told.gap, of="what more was learned")
            finite(told.score, of="the score")
        case Wrote():
            # A model writes what it writes; no honest node is refused for it.
            at_most(told.texts, MOST_PROMPTS, of="texts")
            texts = tuple(printable(text, most=MAX_TEXT_LENGTH) for text in told.texts)
            why_not = " ".join(printable(told.why_not, most=MAX_WORDS_LENGTH).split())
            told = replace(told, texts=texts, why_not=why_not)
        case Evaluated():
            count(told.tokens, of="the number of tokens")
            if math.isfinite(told.held_out_loss):  # else the model is ruined: worth knowing
                finite(told.metric or 0.0, of="the metric")
            else:
                told = replace(told, held_out_loss=math.inf, metric=None)
            told = replace(told, by_source=_by_source(told.by_source))
    return told


def _by_source(told: tuple[SourceLoss, ...]) -> tuple[SourceLoss, ...]:
    """Losses by source as people may see them; none where one is no number."""
    at_most(told, MOST_SOURCES, of="sources")
    for one in told:
        count(one.tokens, of="the number of tokens")
    if not all(math.isfinite(one.loss) for one in told):
        return ()
    return tuple(
        replace(one, source=" ".join(printable(one.source, most=MAX_SOURCE_LENGTH).split()))
        for one in told
    )


def reduced(told: Reduced, *, node_id: NodeId, round: int) -> Reduced:
    """A report whose result is the one that its signed header is of; the norm is what that declares."""
    if told.digest is None:
        return told
    what = f"the report on slice {told.slice_index} of round {round}"
    try:
        header = PayloadHeader.decode(told.header)
    except PayloadError as error:
        raise BadDataError(f"{what} has no header of a result: {error}") from error
    place = (header.kind, header.round, header.slice_index, header.sender_id)
    if place != (RESULT, round, told.slice_index, node_id) or header.digest != told.digest:
        raise BadDataError(f"{what} has the header of another payload")
    if why := header.forgery():
        raise BadDataError(f"{what}: {why}")
    if header.report_digest and header.report_digest != told.statement_digest:
        raise BadDataError(f"{what} is not the one that is signed with its result")
    return replace(told, norm=header.norm)


def refused_result(told: ResultRefused) -> PayloadHeader:
    """The header of a result that a member refuses, which must be of that slice, and signed."""
    try:
        header = PayloadHeader.decode(told.header)
    except PayloadError as error:
        raise BadDataError(f"{told.subject} has no header of a result: {error}") from error
    place = (header.kind, header.run_digest, header.round, header.slice_index, header.digest)
    if place != (RESULT, told.run_digest, told.round, told.slice_index, told.digest):
        raise BadDataError(f"{told.subject} has the header of another payload")
    if why := header.forgery():
        raise BadDataError(f"{told.subject} is of no signed result: {why}")
    return header


def finding(told: Finding, *, node_id: NodeId, round: int, run_digest: Digest) -> None:
    """What a member has found out and signed, of this round of this run."""
    if (told.round, told.run_digest) != (round, run_digest):
        raise BadDataError(f"{told.subject} is signed for another round, or another run")
    if why := told.forgery(node_id):
        raise BadDataError(why)
