"""A round as values: its plan, its outcome, its commit. Pure; protocol.wire.convert puts them on the wire.

Round r turns "the state at round r - 1" into "the state at round r"; the state at round 0 is the
model's initial one. Positions and lengths are counted in fp32 elements of the fragment's canonical
vector.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NewType

NodeId = NewType("NodeId", str)
Digest = NewType("Digest", bytes)
ContributionDigest = NewType("ContributionDigest", bytes)

BLOCK = 256
"""Slices begin at multiples of this, so that no codec's block is cut by a slice."""

CONTRIBUTION_DIGEST_BYTES = 16
"""Of a contribution's digest in reports and commits: nobody can guess it, and a commit of a thousand nodes
in 64 slices stays at a megabyte."""


def contribution_digest(body_digest: Digest) -> ContributionDigest:
    """What names a contribution in reports and commits: the first bytes of its body's digest."""
    return ContributionDigest(body_digest[:CONTRIBUTION_DIGEST_BYTES])


AUDIT_ROUNDS = 4
"""A result may be audited until so many later rounds are committed; nodes keep for so long what made it."""

FEW_CHECKED, MOST_CHECKED = 32, 128
"""Of a lease, and as many other samples: each costs two passes without gradients. Between the two a quarter
of the lease, so that a check takes a third of the time that training it did."""

LEAST_CHECKED = 16
"""Of a lease; fewer show nothing."""

PASSES_OF_TRAINING = 3
"""A sample takes so many times as long to train as to pass through the model without gradients."""

PASSES_OF_CHECK = 4
"""Without gradients, for each leased sample that is checked: itself and another one, with the contribution
and against it."""


def num_spot_checked(samples: int) -> int:
    """How many samples of a lease a spot check measures; so many others, and both of them twice."""
    return min(MOST_CHECKED, samples, max(FEW_CHECKED, samples // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A contiguous part of a fragment that one participant reduces."""

    index: int
    start: int
    num_elements: int
    reducer_id: NodeId


WHOLE = 1 << 16
"""A factor of a contribution or a result is a number of 65,536ths: exact on the wire and in fp32."""


BOOK_PLACES = 1 << 40
"""Places of a book of the ledger: more than samples are leased in any run."""


def book_of(place: int) -> int:
    """Whose book a place is in: 0 where all nodes train the same data."""
    return place // BOOK_PLACES


def book_of_data(digest: Digest) -> int:
    """The book of private data: 23 bits of its digest, never 0.

    Two holders hardly ever share one, and lose nothing then: what is leased to either is leased to it alone.
    """
    return int.from_bytes(digest[:3], "little") >> 1 or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one participant trains: inner steps over a leased range of the run's sample order.

    `first_sample` counts from the beginning of book 0; within its own data it is modulo BOOK_PLACES.
    A helper takes part without inner steps: it reduces, holds results, and contributes nothing.
    """

    node_id: NodeId
    inner_steps: int
    first_sample: int
    num_samples: int

    @property
    def trains(self) -> bool:
        """Whether it asks for inner steps, so that a contribution is waited for."""
        return self.inner_steps > 0


def training_in(assignments: Iterable[Assignment]) -> tuple[NodeId, ...]:
    """Those that train, in order: all but helpers."""
    return tuple(a.node_id for a in assignments if a.trains)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Two participants that do not reach each other, in order, and who carries what they exchange.

    The first of the one or two that carry is asked first.
    """

    one: NodeId
    other: NodeId
    through: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a plan says that stays as it is for as long as the round lasts.

    `token_clock` is where schedules in tokens stand when the round begins, and `round_tokens` how far
    they get in it, evenly over each participant's own inner steps. Together they end where the clock
    will stand if commits count all that the plan asks for. Where they counted less, the next plan begins
    at that end all the same and gets less far, so no schedule goes back.

    `ahead` is what participants may train for the next round while this one is exchanged: the next
    plan asks it of those who take part in it. Empty without overlap.
    """

    fragment: int
    base_digest: Digest
    assignments: tuple[Assignment, ...]
    token_clock: int
    reason: str
    ahead: tuple[Assignment, ...] = ()
    round_tokens: int = 0  # as in databases that do not hold it
    num_rulings: int = 0  # made when the round opened: who lacks one does not take part
    opened_at: float = 0.0  # by the coordinator's clock: tells plans of one round apart
    ways: tuple[Way, ...] = ()  # between participants that do not reach each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Planned):
    """Opens a round. The durations count from the moment a node receives the plan."""

    round: int
    slices: tuple[Slice, ...]
    train_seconds: float
    contribute_seconds: float
    commit_seconds: float
    votes: tuple[int, ...] = ()
    """What the word of each participant counts about others' contributions, in order and in 65,536ths of all.

    What they do not make up together speaks for everybody. Empty where nobody says: then all count alike."""

    @property
    def participants(self) -> tuple[NodeId, ...]:
        """Node ids of the participants, in order."""
        return tuple(assignment.node_id for assignment in self.assignments)

    @property
    def num_training(self) -> int:
        """How many participants train: all but helpers."""
        return len(training_in(self.assignments))

    def assignment_of(self, node_id: NodeId) -> Assignment | None:
        """The node's own part, or None when it does not take part."""
        return next((a for a in self.assignments if a.node_id == node_id), None)

    def ahead_of(self, node_id: NodeId) -> Assignment | None:
        """What the node may train for the next round, or None."""
        return next((a for a in self.ahead if a.node_id == node_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """A participant whose pseudo-gradient is in a result.

    `samples` are those that it used up of its assignment, from the first on: what the ledger counts.
    `tokens` are the targets among them that it learned to predict: what it weighs.
    """

    node_id: NodeId
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What is told of a slice's result: the digest of its payload, if there is one, and what it is of.

    `contributions` says of each contributor, in their order, which bytes the reducer took, and `factors` how
    much of them is in the result, in 65,536ths; empty: all of each. What a factor leaves out is let go.
    `norm` is the result's Euclidean norm, as its header declares it and each holder has checked it.
    """

    digest: Digest | None
    contributors: tuple[Contributor, ...] = ()
    contributions: tuple[ContributionDigest, ...] = ()
    factors: tuple[int, ...] = ()
    norm: float = 0.0


def same_fields(value: object, kind: type) -> dict[str, Any]:
    """The fields of that kind by their names, as a value has them that has more: for another such value."""
    return {each.name: getattr(value, each.name) for each in fields(kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOutcome(Result):
    """What became of a slice: its result, of which nodes apply `factor`, or the reason when it is void."""

    index: int
    start: int
    num_elements: int
    holder_ids: tuple[NodeId, ...] = ()
    void_reason: str = ""
    factor: int = WHOLE

    def contribution_of(self, node_id: NodeId) -> ContributionDigest | None:
        """Which bytes of a node are in the result; None when none are, or none are named."""
        for place, contributor in enumerate(self.contributors):
            if contributor.node_id == node_id:
                return self.contributions[place] if place < len(self.contributions) else None
        return None

    def factor_of(self, node_id: NodeId) -> float:
        """How much of a node's contribution the model takes, from 0 to 1; 0 of one that is not in it."""
        for place, contributor in enumerate(self.contributors):
            if contributor.node_id == node_id:
                own = self.factors[place] if self.factors else WHOLE
                return own * self.factor / WHOLE**2
        return 0.0

    @property
    def taken(self) -> tuple[Contributor, ...]:
        """The contributors of whose work something is in the result."""
        if not self.factors:
            return self.contributors
        named = zip(self.contributors, self.factors, strict=True)
        return tuple(contributor for contributor, factor in named if factor > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Closes a round. `outer_digest` is None until nodes have agreed on the state after it.

    `incarnation` counts how often history was taken back before: of two commits of a round the one
    with the higher incarnation holds. `assignments` are the plan's. `without_tokens` are participants
    whose samples held no token to predict: used up, and in no result. `signature` is empty where nobody
    needs it (protocol.trust.signing).
    """

    round: int
    fragment: int
    base_digest: Digest
    slices: tuple[SliceOutcome, ...]
    outer_digest: Digest | None = None
    incarnation: int = 0
    assignments: tuple[Assignment, ...] = ()
    without_tokens: tuple[Contributor, ...] = ()
    signature: bytes = b""

    @property
    def is_void(self) -> bool:
        """Whether it leaves the state as it was: no slice has a result."""
        return all(outcome.digest is None for outcome in self.slices)

    @property
    def tokens(self) -> Mapping[NodeId, int]:
        """Tokens that it takes from each contributor.

        A node's weight may differ between slices (a slow upload misses one reducer and not another).
        Its tokens count as committed when at least one committed slice holds them: its largest weight,
        once. What was left out of a result is in none.
        """
        tokens: dict[NodeId, int] = {}
        for outcome in self.slices:
            for contributor in outcome.taken:
                known = tokens.get(contributor.node_id, 0)
                tokens[contributor.node_id] = max(known, contributor.tokens)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSpan:
    """Rounds first, …, last."""

    first: int
    last: int

    def includes(self, round: int) -> bool:
        """Whether it is one of them."""
        return self.first <= round <= self.last


MOST_MULTIADDRS = 16
"""Of one node, as a coordinator takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where peers find a node: its Ed25519 public key (32 bytes) and libp2p multiaddresses."""

    public_key: bytes
    multiaddrs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """One member, as its peers need to know it."""

    node_id: NodeId
    node_name: str
    address: PeerAddress
    process_id: int = 0  # what it signs goes by this process, and no other is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSummary:
    """How a model is cut into fragments; all nodes must agree on it."""

    digest: Digest
    fragment_elements: tuple[int, ...]


MOST_SOURCES = 64
"""Sources of a run's data that are told apart."""

OTHER_SOURCES = "others"
"""What people are told of samples of no named source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoss:
    """What the held-out samples of one source of the data say of the model."""

    source: str  # its name; empty for samples of no named one
    loss: float  # nats per token
    tokens: int


OWN_LOOP = "own loop"
"""The device of a node whose training is a program of its owner's: only that knows which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """What a node trains on. Sizes are those of the text; 0 where nobody knows."""

    digest: Digest
    num_samples: int
    num_bytes: int
    num_held_out_tokens: int = 0
    num_held_out_bytes: int = 0
    held_out_digest: Digest | None = None  # None: that above covers it, or the node does not tell

    def is_same(self, other: "CorpusSummary") -> bool:
        """Whether samples of the same numbers are the same, held-out ones too, as far as both tell."""
        held_out = {self.held_out_digest, other.held_out_digest} - {None}
        return self.digest == other.digest and len(held_out) < 2


def cut_into_slices(
    num_elements: int,
    reducer_ids: tuple[NodeId, ...],
    shares: tuple[float, ...] | None = None,
    *,
    least_elements: int | None = None,
) -> tuple[Slice, ...]:
    """Cuts a fragment into a stretch for each reducer, as even as whole blocks allow.

    Or by `shares`, which sum to 1: who has none, or less than half a block, gets nothing. A
    fragment with fewer blocks than reducers gets fewer stretches; the last one takes the part of a
    block that is left over. A stretch is one slice, or as many even ones as are possible with
    `least_elements` each. `reducer_ids` must not be empty, nor the fragment.
    """
    if num_elements < 1 or not reducer_ids:
        raise ValueError(f"cannot cut {num_elements} elements for {len(reducer_ids)} reducers")
    num_blocks = -(-num_elements // BLOCK)
    num_slices = min(num_blocks, len(reducer_ids))
    ends = [num_blocks * (i + 1) // num_slices for i in range(num_slices)]
    if shares is not None and len(set(shares)) > 1:
        ends = [round(num_blocks * whole) for whole in accumulate(shares)]
        ends[-1] = num_blocks
    slices: list[Slice] = []
    first = 0
    for reducer_id, end in zip(reducer_ids, ends, strict=False):
        blocks = end - first
        pieces = 1 if least_elements is None else max(1, BLOCK * blocks // least_elements)
        pieces = min(pieces, blocks)
        for piece in range(pieces):
            start, stop = (BLOCK * (first + blocks * i // pieces) for i in (piece, piece + 1))
            slices.append(
                Slice(
                    index=len(slices),
                    start=start,
                    num_elements=min(num_elements, stop) - start,
                    reducer_id=reducer_id,
                )
            )
        first = end
    return tuple(slices)
