"""The values of protocol.wire.rounds on the wire and back. Pure; nothing else knows both forms.

What comes from the wire is checked for the size of its digests and keys and raises
ProtocolMismatchError. Whether the values make sense is for who uses them to say.
"""

from collections.abc import Iterable, Mapping, Sequence

from protocol.errors import ProtocolMismatchError
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
    CorpusSummary,
    Digest,
    LayoutSummary,
    NodeId,
    PeerAddress,
    Plan,
    RosterEntry,
    Slice,
    SliceOutcome,
    Way,
)

DIGEST_BYTES = 32


def digest_from_wire(wire: bytes, *, of: str) -> Digest:
    """A digest that must be there."""
    if len(wire) != DIGEST_BYTES:
        raise ProtocolMismatchError(
            f"the digest of {of} has {len(wire)} bytes instead of {DIGEST_BYTES}",
            next_step="use the same version of Atoll on both sides",
        )
    return Digest(wire)


def optional_digest_to_wire(digest: Digest | None) -> bytes:
    """Writes None as no bytes."""
    return digest or b""


def optional_digest_from_wire(wire: bytes, *, of: str) -> Digest | None:
    """Reads no bytes as None."""
    return digest_from_wire(wire, of=of) if wire else None


def slice_to_wire(part: Slice) -> round_pb2.Slice:
    """One slice of a plan."""
    return round_pb2.Slice(
        index=part.index,
        start=part.start,
        num_elements=part.num_elements,
        reducer_id=part.reducer_id,
    )


def slice_from_wire(wire: round_pb2.Slice) -> Slice:
    """One slice of a plan."""
    return Slice(
        index=wire.index,
        start=wire.start,
        num_elements=wire.num_elements,
        reducer_id=NodeId(wire.reducer_id),
    )


def assignment_to_wire(assignment: Assignment) -> round_pb2.Assignment:
    """One participant's part in a plan."""
    return round_pb2.Assignment(
        node_id=assignment.node_id,
        inner_steps=assignment.inner_steps,
        first_sample=assignment.first_sample,
        num_samples=assignment.num_samples,
    )


def assignment_from_wire(wire: round_pb2.Assignment) -> Assignment:
    """One participant's part in a plan."""
    return Assignment(
        node_id=NodeId(wire.node_id),
        inner_steps=wire.inner_steps,
        first_sample=wire.first_sample,
        num_samples=wire.num_samples,
    )


def plan_to_wire(plan: Plan) -> round_pb2.Plan:
    """A whole plan."""
    return round_pb2.Plan(
        round=plan.round,
        fragment=plan.fragment,
        base_digest=plan.base_digest,
        assignments=[assignment_to_wire(assignment) for assignment in plan.assignments],
        slices=[slice_to_wire(part) for part in plan.slices],
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        train_seconds=plan.train_seconds,
        contribute_seconds=plan.contribute_seconds,
        commit_seconds=plan.commit_seconds,
        reason=plan.reason,
        ahead=[assignment_to_wire(assignment) for assignment in plan.ahead],
        num_rulings=plan.num_rulings,
        opened_at=plan.opened_at,
        ways=[
            round_pb2.Way(one=way.one, other=way.other, through_ids=way.through)
            for way in plan.ways
        ],
        votes=plan.votes,
    )


def plan_from_wire(wire: round_pb2.Plan) -> Plan:
    """A whole plan."""
    if wire.assignments and len(wire.votes) not in (0, len(wire.assignments)):
        raise ProtocolMismatchError(
            f"a plan of {len(wire.assignments)} participants has {len(wire.votes)} votes",
            next_step="use the same version of Atoll on both sides",
        )
    return Plan(
        round=wire.round,
        fragment=wire.fragment,
        base_digest=digest_from_wire(wire.base_digest, of="a plan's base"),
        assignments=tuple(assignment_from_wire(assignment) for assignment in wire.assignments),
        slices=tuple(slice_from_wire(part) for part in wire.slices),
        token_clock=wire.token_clock,
        round_tokens=wire.round_tokens,
        train_seconds=wire.train_seconds,
        contribute_seconds=wire.contribute_seconds,
        commit_seconds=wire.commit_seconds,
        reason=wire.reason,
        ahead=tuple(assignment_from_wire(assignment) for assignment in wire.ahead),
        num_rulings=wire.num_rulings,
        opened_at=wire.opened_at,
        ways=tuple(
            Way(
                one=NodeId(way.one),
                other=NodeId(way.other),
                through=tuple(NodeId(node_id) for node_id in way.through_ids),
            )
            for way in wire.ways
        ),
        votes=tuple(wire.votes),
    )


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
        raise ProtocolMismatchError(
            f"of {of} {cut} of {WHOLE} parts are cut off",
            next_step="use the same version of Atoll on both sides",
        )


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
        assignments=[assignment_to_wire(assignment) for assignment in commit.assignments],
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
        assignments=tuple(assignment_from_wire(assignment) for assignment in wire.assignments),
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
    return ProtocolMismatchError(
        f"{what} is not named by {CONTRIBUTION_DIGEST_BYTES} bytes of its digest",
        next_step="use the same version of Atoll on both sides",
    )


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
        raise ProtocolMismatchError(
            f"a set of contributors of a commit has {len(wire.nodes)} nodes, {len(wire.tokens)} "
            f"counts of tokens and {len(wire.samples)} of samples",
            next_step="use the same version of Atoll on both sides",
        )
    return tuple(
        Contributor(node_id=node_ids[place], samples=samples, tokens=tokens)
        for place, samples, tokens in zip(wire.nodes, wire.samples, wire.tokens, strict=True)
    )


def _names_nobody(who: str) -> ProtocolMismatchError:
    return ProtocolMismatchError(
        f"{who} of a commit speaks of nodes that the commit does not name",
        next_step="use the same version of Atoll on both sides",
    )


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
        raise ProtocolMismatchError(
            f"slice {wire.index} of a commit has {len(wire.factors)} factors of "
            f"{len(contributors)} contributors",
            next_step="use the same version of Atoll on both sides",
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


def address_to_wire(address: PeerAddress) -> session_pb2.PeerAddress:
    """Where a node's peers find it."""
    return session_pb2.PeerAddress(public_key=address.public_key, multiaddrs=address.multiaddrs)


def address_from_wire(wire: session_pb2.PeerAddress) -> PeerAddress:
    """Where a node's peers find it."""
    if len(wire.public_key) != PUBLIC_KEY_BYTES:
        raise ProtocolMismatchError(
            f"a public key has {len(wire.public_key)} bytes instead of {PUBLIC_KEY_BYTES}",
            next_step="use the same version of Atoll on both sides",
        )
    return PeerAddress(public_key=wire.public_key, multiaddrs=tuple(wire.multiaddrs))


def roster_entry_to_wire(entry: RosterEntry) -> session_pb2.RosterEntry:
    """One member."""
    return session_pb2.RosterEntry(
        node_id=entry.node_id,
        node_name=entry.node_name,
        address=address_to_wire(entry.address),
        process_id=entry.process_id,
    )


def roster_entry_from_wire(wire: session_pb2.RosterEntry) -> RosterEntry:
    """One member."""
    return RosterEntry(
        node_id=NodeId(wire.node_id),
        node_name=wire.node_name,
        address=address_from_wire(wire.address),
        process_id=wire.process_id,
    )


def roster_to_wire(members: tuple[RosterEntry, ...]) -> session_pb2.Roster:
    """Who is a member now."""
    return session_pb2.Roster(members=[roster_entry_to_wire(member) for member in members])


def layout_to_wire(layout: LayoutSummary) -> session_pb2.LayoutSummary:
    """How a node cuts the model."""
    return session_pb2.LayoutSummary(
        digest=layout.digest, fragment_elements=layout.fragment_elements
    )


def layout_from_wire(wire: session_pb2.LayoutSummary) -> LayoutSummary:
    """How a node cuts the model."""
    return LayoutSummary(
        digest=digest_from_wire(wire.digest, of="a layout"),
        fragment_elements=tuple(wire.fragment_elements),
    )


def corpus_to_wire(corpus: CorpusSummary) -> session_pb2.CorpusSummary:
    """What a node trains on."""
    return session_pb2.CorpusSummary(
        digest=corpus.digest,
        num_samples=corpus.num_samples,
        num_bytes=corpus.num_bytes,
        num_held_out_tokens=corpus.num_held_out_tokens,
        num_held_out_bytes=corpus.num_held_out_bytes,
        held_out_digest=corpus.held_out_digest or b"",
    )


def corpus_from_wire(wire: session_pb2.CorpusSummary) -> CorpusSummary:
    """What a node trains on."""
    return CorpusSummary(
        digest=digest_from_wire(wire.digest, of="a corpus"),
        num_samples=wire.num_samples,
        num_bytes=wire.num_bytes,
        num_held_out_tokens=wire.num_held_out_tokens,
        num_held_out_bytes=wire.num_held_out_bytes,
        held_out_digest=digest_from_wire(wire.held_out_digest, of="a held-out split")
        if wire.held_out_digest
        else None,
    )


def wire_counts_to_wire(totals: WireTotals) -> list[session_pb2.WireCount]:
    """Bytes sent and received by kind (`WireCounts.totals`), in the order of their names.

    Without "carried" where nothing was: coordinators that ask nobody to carry may not know that kind.
    """
    return [
        session_pb2.WireCount(kind=kind, sent_bytes=sent, received_bytes=received)
        for kind, (sent, received) in sorted(totals.items())
        if kind != "carried" or sent or received
    ]


def wire_counts_from_wire(wire: Iterable[session_pb2.WireCount]) -> WireTotals:
    """Bytes sent and received by kind."""
    return {count.kind: (count.sent_bytes, count.received_bytes) for count in wire}
