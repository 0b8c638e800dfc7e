"""Values on the wire and back. Pure; nothing else knows both forms.

Most values have a message with the same fields under the same names: `to_wire` and `from_wire` go by their
annotations, so a field is declared twice, in the value and in proto/, and nowhere else. Mappings are lists of
messages there. A field of a kind that this room does not know names its conversions (`converted_by`). Written
out here are the few values whose messages are otherwise: commits and contributors.

What comes from the wire is checked for the size of its digests and keys and raises
ProtocolMismatchError. Whether the values make sense is for who uses them to say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message as WireMessage

from protocol.errors import SAME_VERSION, ProtocolMismatchError
from protocol.trust.identity import PUBLIC_KEY_BYTES
from protocol.v1 import round_pb2, session_pb2
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import (
    CONTRIBUTION_DIGEST_BYTES,
    WHOLE,
    Assignment,
    Commit,
    ContributionDigest,
    Contributor,
    Digest,
    NodeId,
    PeerAddress,
    Plan,
    SliceOutcome,
)

DIGEST_BYTES = 32

MOST_WIRE_KINDS = 64
"""In one message: a later release may have more than this one, and a member may repeat itself."""

T = TypeVar("T")
W = TypeVar("W", bound=WireMessage)


def to_wire(value: Any, kind: type[W]) -> W:
    """A value as the message of its fields."""
    return kind(**fields_to_wire(value))


def fields_to_wire(value: Any) -> Any:
    """The same as a dict, which constructors of messages take for a message."""
    return {
        on_wire: write(getattr(value, name)) for name, on_wire, write, _ in _fields_of(type(value))
    }


def from_wire(wire: WireMessage, kind: type[T]) -> T:
    """The value whose message this is."""
    value = kind(**values_from_wire(wire, kind))
    if kind in _CHECKS:
        _CHECKS[kind](value)
    return value


def values_from_wire(wire: WireMessage, kind: type) -> dict[str, Any]:
    """Fields of a value as its message says them, unchecked: for one that has more than they."""
    return {name: read(wire) for name, _, _, read in _fields_of(kind)}


class _Field(NamedTuple):
    """A value's field: its name in the message, and how it is written, and read off the whole message."""

    name: str
    on_wire: str
    write: Callable[[Any], Any]
    read: Callable[[WireMessage], Any]


_FIELDS: dict[type, tuple[_Field, ...]] = {}


def _fields_of(kind: Any) -> tuple[_Field, ...]:
    if kind not in _FIELDS:
        hints = get_type_hints(kind)
        _FIELDS[kind] = tuple(
            _by(field.name, *field.metadata[_CONVERTED])
            if _CONVERTED in field.metadata
            else _field(kind.__name__, field.name, hints[field.name])
            for field in fields(kind)
        )
    return _FIELDS[kind]


_CONVERTED = "converted by"


def converted_by(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Mapping[str, Any]:
    """The metadata of a field that is written and read by these two."""
    return {_CONVERTED: (write, read)}


def _by(name: str, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> _Field:
    return _Field(name=name, on_wire=name, write=write, read=lambda wire: read(getattr(wire, name)))


def _field(kind: str, name: str, hint: Any) -> _Field:
    """A list of node ids is named so on the wire; an empty digest is none; other None are not there."""
    of = f"{name.replace('_', ' ')} of {kind}"
    within = get_args(hint)[0] if get_args(hint) else hint  # of a list, or of what may be None
    is_list, may_be_none = get_origin(hint) is tuple, type(None) in get_args(hint)
    has_fields = is_dataclass(within)
    on_wire = name
    if hint in _MAPPINGS:
        return _by(name, *_MAPPINGS[hint])
    if is_list and within is NodeId and not name.endswith("_ids"):
        on_wire = f"{name}_ids"
    told: Callable[[Any], Any] = attrgetter(on_wire)
    field = partial(_Field, name, on_wire)
    if is_list and has_fields:
        return field(
            partial(map, fields_to_wire),
            lambda wire: tuple([from_wire(each, within) for each in told(wire)]),
        )
    if is_list:
        return field(_as_it_is, lambda wire: tuple(told(wire)))
    if may_be_none and has_fields:
        return field(
            lambda value: None if value is None else fields_to_wire(value),
            lambda wire: from_wire(told(wire), within) if wire.HasField(name) else None,
        )
    if has_fields:
        return field(fields_to_wire, lambda wire: from_wire(told(wire), within))
    if within is Digest and not may_be_none:
        return field(_as_it_is, lambda wire: digest_from_wire(told(wire), of=of))
    if within is Digest:
        return field(_as_it_is, lambda wire: optional_digest_from_wire(told(wire), of=of))
    if may_be_none:
        return field(_as_it_is, lambda wire: told(wire) if wire.HasField(name) else None)
    return field(_as_it_is, told)


def wire_counts_to_wire(totals: WireTotals) -> list[session_pb2.WireCount]:
    """Bytes sent and received by kind (`WireCounts.totals`), in the order of their names.

    Without "carried" where nothing was: coordinators that ask nobody to carry may not know that kind.
    """
    return [
        session_pb2.WireCount(kind=kind, sent_bytes=sent, received_bytes=received)
        for kind, (sent, received) in sorted(totals.items())
        if kind != "carried" or sent or received
    ]


def wire_counts_from_wire(wire: Sequence[session_pb2.WireCount]) -> WireTotals:
    """Bytes sent and received by kind."""
    if len(wire) > MOST_WIRE_KINDS:
        raise _unlike(
            f"there are {len(wire)} kinds of bytes; {MOST_WIRE_KINDS} is the most there may be"
        )
    return {count.kind: (count.sent_bytes, count.received_bytes) for count in wire}


_MAPPINGS: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    WireTotals: (wire_counts_to_wire, wire_counts_from_wire),
    Mapping[NodeId, NodeId]: (  # who carries to each
        lambda carriers: [
            session_pb2.Through(node_id=n, through_id=by) for n, by in sorted(carriers.items())
        ],
        lambda wire: {NodeId(each.node_id): NodeId(each.through_id) for each in wire},
    ),
}


def _as_it_is(value: Any) -> Any:
    return value


def _check_votes(plan: Plan) -> None:
    if plan.assignments and len(plan.votes) not in (0, len(plan.assignments)):
        raise _unlike(f"a plan of {len(plan.assignments)} participants has {len(plan.votes)} votes")


def _check_key(address: PeerAddress) -> None:
    if len(address.public_key) != PUBLIC_KEY_BYTES:
        raise _unlike(
            f"a public key has {len(address.public_key)} bytes instead of {PUBLIC_KEY_BYTES}"
        )


_CHECKS: Mapping[type, Callable[[Any], None]] = {Plan: _check_votes, PeerAddress: _check_key}


def _unlike(what: str) -> ProtocolMismatchError:
    return ProtocolMismatchError(what, next_step=SAME_VERSION)


def digest_from_wire(wire: bytes, *, of: str) -> Digest:
    """A digest that must be there."""
    if len(wire) != DIGEST_BYTES:
        raise _unlike(f"the digest of {of} has {len(wire)} bytes instead of {DIGEST_BYTES}")
    return Digest(wire)


def optional_digest_to_wire(digest: Digest | None) -> bytes:
    """Writes None as no bytes."""
    return digest or b""


def optional_digest_from_wire(wire: bytes, *, of: str) -> Digest | None:
    """Reads no bytes as None."""
    return digest_from_wire(wire, of=of) if wire else None


def contributors_to_wire(
    contributors: Sequence[Contributor],
    contributions: Sequence[ContributionDigest],
    factors: Sequence[int] = (),
) -> list[round_pb2.Contributor]:
    """Who contributed what to a result."""
    return [
        round_pb2.Contributor(
            node_id=contributor.node_id,
            samples=contributor.samples,
            tokens=contributor.tokens,
            contribution=contribution,
            cut=WHOLE - factor,
        )
        for contributor, contribution, factor in zip(
            contributors, contributions, factors or [WHOLE] * len(contributors), strict=True
        )
    ]


def contributors_from_wire(
    wire: Sequence[round_pb2.Contributor],
) -> tuple[tuple[Contributor, ...], tuple[ContributionDigest, ...], tuple[int, ...]]:
    """Who contributed what to a result, and how much of it is in there."""
    for contributor in wire:
        if len(contributor.contribution) != CONTRIBUTION_DIGEST_BYTES:
            raise _unnamed_contributions(f"the contribution of {contributor.node_id}")
        _check_cut(contributor.cut, of=f"the contribution of {contributor.node_id}")
    return (
        tuple(
            Contributor(node_id=NodeId(each.node_id), samples=each.samples, tokens=each.tokens)
            for each in wire
        ),
        tuple(ContributionDigest(each.contribution) for each in wire),
        tuple(WHOLE - each.cut for each in wire) if any(each.cut for each in wire) else (),
    )


def _check_cut(cut: int, *, of: str) -> None:
    if cut > WHOLE:
        raise _unlike(f"of {of} {cut} of {WHOLE} parts are cut off")


def commit_to_wire(commit: Commit) -> round_pb2.Commit:
    """A whole commit. Its slices name nodes, and sets of them, by their places in one list."""
    # By identity first: a commit that came over the wire has as many sets as that named, and its
    # sender must not make us look at each of them once for every slice.
    told = {id(outcome.contributors): outcome.contributors for outcome in commit.slices}
    sets: dict[tuple[Contributor, ...], int] = {}
    places_of_sets = {
        key: sets.setdefault(contributors, len(sets)) for key, contributors in told.items()
    }
    named = (*sets, commit.without_tokens)
    contributor_ids = {c.node_id for contributors in named for c in contributors}
    holder_ids = {node_id for outcome in commit.slices for node_id in outcome.holder_ids}
    node_ids = sorted(contributor_ids | holder_ids)
    places = {node_id: place for place, node_id in enumerate(node_ids)}
    return round_pb2.Commit(
        round=commit.round,
        fragment=commit.fragment,
        base_digest=commit.base_digest,
        slices=[
            _slice_outcome_to_wire(outcome, places, places_of_sets[id(outcome.contributors)])
            for outcome in commit.slices
        ],
        outer_digest=optional_digest_to_wire(commit.outer_digest),
        incarnation=commit.incarnation,
        assignments=map(fields_to_wire, commit.assignments),
        signature=commit.signature,
        node_ids=node_ids,
        contributor_sets=[_contributor_set_to_wire(contributors, places) for contributors in sets],
        without_tokens=_contributor_set_to_wire(commit.without_tokens, places)
        if commit.without_tokens
        else None,
    )


def commit_from_wire(wire: round_pb2.Commit) -> Commit:
    """A whole commit."""
    node_ids = tuple(map(NodeId, wire.node_ids))
    sets = [
        _contributors_from_wire(contributors, node_ids) for contributors in wire.contributor_sets
    ]
    return Commit(
        round=wire.round,
        fragment=wire.fragment,
        base_digest=digest_from_wire(wire.base_digest, of="a commit's base"),
        slices=tuple(_slice_outcome_from_wire(outcome, node_ids, sets) for outcome in wire.slices),
        outer_digest=optional_digest_from_wire(wire.outer_digest, of="a commit's outer state"),
        incarnation=wire.incarnation,
        assignments=tuple(from_wire(each, Assignment) for each in wire.assignments),
        without_tokens=_contributors_from_wire(wire.without_tokens, node_ids),
        signature=wire.signature,
    )


def _slice_outcome_to_wire(
    outcome: SliceOutcome, places: Mapping[NodeId, int], contributor_set: int
) -> round_pb2.SliceOutcome:
    return round_pb2.SliceOutcome(
        index=outcome.index,
        start=outcome.start,
        num_elements=outcome.num_elements,
        digest=optional_digest_to_wire(outcome.digest),
        contributor_set=contributor_set,
        holders=[places[node_id] for node_id in outcome.holder_ids],
        void_reason=outcome.void_reason,
        contributions=b"".join(outcome.contributions),
        factors=outcome.factors,
        norm=outcome.norm,
        cut=WHOLE - outcome.factor,
    )


def _contributions_from_wire(wire: round_pb2.SliceOutcome) -> tuple[ContributionDigest, ...]:
    size = CONTRIBUTION_DIGEST_BYTES
    return tuple(
        ContributionDigest(wire.contributions[start : start + size])
        for start in range(0, len(wire.contributions), size)
    )


def _unnamed_contributions(what: str) -> ProtocolMismatchError:
    return _unlike(f"{what} is not named by {CONTRIBUTION_DIGEST_BYTES} bytes of its digest")


def _contributor_set_to_wire(
    contributors: Sequence[Contributor], places: Mapping[NodeId, int]
) -> round_pb2.ContributorSet:
    return round_pb2.ContributorSet(
        nodes=[places[contributor.node_id] for contributor in contributors],
        tokens=[contributor.tokens for contributor in contributors],
        samples=[contributor.samples for contributor in contributors],
    )


def _contributors_from_wire(
    wire: round_pb2.ContributorSet, node_ids: Sequence[NodeId]
) -> tuple[Contributor, ...]:
    if any(place >= len(node_ids) for place in wire.nodes):
        raise _names_nobody("a set of contributors")
    if not len(wire.nodes) == len(wire.tokens) == len(wire.samples):
        raise _unlike(
            f"a set of contributors of a commit has {len(wire.nodes)} nodes, {len(wire.tokens)} "
            f"counts of tokens and {len(wire.samples)} of samples"
        )
    return tuple(
        Contributor(node_id=node_ids[place], samples=samples, tokens=tokens)
        for place, samples, tokens in zip(wire.nodes, wire.samples, wire.tokens, strict=True)
    )


def _names_nobody(who: str) -> ProtocolMismatchError:
    return _unlike(f"{who} of a commit speaks of nodes that the commit does not name")


def _slice_outcome_from_wire(
    wire: round_pb2.SliceOutcome,
    node_ids: Sequence[NodeId],
    contributor_sets: Sequence[tuple[Contributor, ...]],
) -> SliceOutcome:
    is_named = all(place < len(node_ids) for place in wire.holders)
    if not is_named or wire.contributor_set >= len(contributor_sets):
        raise _names_nobody(f"slice {wire.index}")
    contributors = contributor_sets[wire.contributor_set]
    # None at all in commits from before there were any, which nodes and databases still keep.
    if len(wire.contributions) not in (0, CONTRIBUTION_DIGEST_BYTES * len(contributors)):
        raise _unnamed_contributions(f"one of the contributions to slice {wire.index}")
    if wire.factors and len(wire.factors) != len(contributors):
        raise _unlike(
            f"slice {wire.index} of a commit has {len(wire.factors)} factors of "
            f"{len(contributors)} contributors"
        )
    for factor in wire.factors:
        _check_cut(factor, of=f"a contribution to slice {wire.index}")
    _check_cut(wire.cut, of=f"the result of slice {wire.index}")
    return SliceOutcome(
        index=wire.index,
        start=wire.start,
        num_elements=wire.num_elements,
        digest=optional_digest_from_wire(wire.digest, of="a slice's result"),
        contributors=contributors,
        contributions=_contributions_from_wire(wire),
        holder_ids=tuple(node_ids[place] for place in wire.holders),
        void_reason=wire.void_reason,
        factors=tuple(wire.factors),
        norm=wire.norm,
        factor=WHOLE - wire.cut,
    )
