"""What the coordinator knows of the run and its rounds, as immutable values, and who takes part in them.

Times are seconds of the coordinator's own clock, which stands still while it is down. What the run
waits for is not stored: coordinator.swarm.explain says it for any instant.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from operator import is_
from typing import TypeVar, TypeVarTuple

from coordinator.swarm.ledger import Ledger
from coordinator.swarm.members import (
    PRESENT,
    Audit,
    Conviction,
    KeptError,
    Member,
    Members,
    MemberState,
    Refusal,
    SpotCheck,
)
from protocol.run.schedule import ALWAYS_ALIKE, Schedule
from protocol.trust.rulings import Ruling
from protocol.wire.messages import Reduced, Trained
from protocol.wire.payload import WireTotals
from protocol.wire.rounds import (
    Assignment,
    Commit,
    Digest,
    LayoutSummary,
    NodeId,
    Plan,
    Planned,
    Result,
    Slice,
    SourceLoss,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """How much each of some members weighs when they decide together: coordinator.swarm.weighing."""

    weights: Mapping[NodeId, int] = field(default_factory=dict)
    is_confirmed: bool = False  # by work; else each invite weighs alike


class RoundPhase(StrEnum):
    """How far a round has come."""

    TRAINING = "training"
    EXCHANGING = "exchanging"  # at least one participant has finished training
    APPLYING = "applying"  # committed; participants apply


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceProgress(Result):
    """One slice on its way to a commit, with its result as its reducer reported it."""

    slice: Slice
    digest: Digest | None = None
    is_empty: bool = False  # its reducer had nothing to reduce
    attempt: int = 0  # takeovers so far
    contribute_deadline: float | None = None  # of its latest takeover; the round's own before
    is_orphaned: bool = False  # its reducer's process began anew, and with it its memory
    is_offered: bool = False  # the others were told to fetch the result of a gone reducer
    reduced: Reduced | None = None  # the report as it was made, where it may be audited
    refused: str = ""  # why the result counts for nothing, or empty
    refusals: tuple[Refusal, ...] = ()  # of its reducer's results, in the order of node ids
    reduced_at: float | None = None  # when its reducer said so
    moved_at: float | None = None  # when it was last offered, or given to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Planned):
    """The round in flight."""

    number: int
    phase: RoundPhase
    train_deadline: float
    contribute_deadline: float
    commit_deadline: float
    slices: tuple[SliceProgress, ...]
    cannot_commit: str = ""  # why nothing of it can, or empty
    trained: Mapping[NodeId, Trained] = field(default_factory=dict)
    # Which results of which slices each node holds, as one report tells of all, and how far these agree.
    held: Mapping[NodeId, Mapping[int, Digest]] = field(default_factory=dict)
    agreements: Mapping[NodeId, Mapping[int, float]] = field(default_factory=dict)
    commit: Commit | None = None  # set when the phase is APPLYING
    committed_at: float = 0.0
    apply_deadline: float = 0.0
    undecided: int = 0  # a slice that was, when it was last asked whether the round closes
    returns_until: float | None = None  # while all have applied but those whom the next plan tries
    applied: Mapping[NodeId, Digest] = field(default_factory=dict)  # until the digest is settled
    say: Say | None = None  # of its participants when it was opened; None: it was learned
    on_trial: tuple[NodeId, ...] = ()  # participants that nobody waits for
    has_trained: bool = False  # all that are waited for, and participants were told
    most_held_at: float | None = None  # since when members that decide hold most of the results
    silent: Mapping[NodeId, tuple[int, ...]] = field(default_factory=dict)  # of what nothing comes
    silent_at: float = 0.0  # when that was told last
    stuck_seen_at: float = 0.0  # when it was last looked whether a few slices are stuck
    hurried_at: float | None = None  # those that are late were told to hand in what they have
    is_excused: bool = False  # the others were told not to wait for them
    usual_speeds: Mapping[str, float] = field(default_factory=dict)  # inner steps/s, by device
    credible_steps: Mapping[NodeId, int] = field(default_factory=dict)  # of who told of more
    is_prolonged: bool = False  # nodes have more time to apply: too few agreed on a digest
    # What coordinator.swarm.deadlines measures by:
    apply_seconds: float | None = None  # planned, from the commit; None: as the rules have it
    later_session_id: int = 0  # sessions from this one on began after the phase in flight did
    trained_at: Mapping[NodeId, float] = field(default_factory=dict)  # when `trained` came
    reduced_at: float | None = None  # when the latest slice was reduced
    gone_at: float | None = None  # when the latest participant left or was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How long one phase of one round took, in seconds."""

    given_seconds: float  # what it could have taken
    seconds: float | None  # of the slowest node that finished; None when nobody is known to have
    cut_session_ids: tuple[int, ...] = ()  # sessions of the nodes that were not done by then
    num_elements: int | None = None  # of the round's fragment; None where a phase does not go by it

    def times_for(self, num_elements: float) -> float:
        """How many times as long the same takes for a fragment of so many elements."""
        return num_elements / self.num_elements if self.num_elements else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """What the latest rounds took, oldest first; kept and read by coordinator.swarm.deadlines."""

    train: tuple[Measured, ...] = ()
    exchange: tuple[Measured, ...] = ()
    commit: tuple[Measured, ...] = ()
    apply: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound:
    """A round that is committed; its outer digest is None until nodes have agreed on it."""

    plan: Plan
    commit: Commit
    trained: Mapping[NodeId, Trained]
    tokens: int
    seconds: float  # from plan to commit
    reason: str
    wire: WireTotals = field(default_factory=dict)  # of all nodes, since the round before

    @property
    def is_void(self) -> bool:
        """Whether it left the state as it was."""
        return self.commit.is_void


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderLoss:
    """What one data holder's held-out split says of the committed model, by one of its nodes."""

    node_id: NodeId
    loss: float
    weight: int  # tokens of its held-out split
    tokens: int  # evaluated
    metric: float | None = None
    by_source: tuple[SourceLoss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One evaluation of the committed model; the metric is what a run's own function measures.

    Where data are private, of all holders that answered, each by the tokens of its held-out split.
    """

    round: int
    loss: float
    tokens: int
    metric: float | None = None
    holders: tuple[HolderLoss, ...] = ()  # by their nodes' ids; none where all have the same data
    by_source: tuple[SourceLoss, ...] = ()  # where the data have several


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """An evaluation that was asked for: of one node, or of one of each holder of private data."""

    node_ids: tuple[NodeId, ...]  # who has yet to answer, in order
    round: int
    until: float  # then who has not answered is given up
    found: tuple[HolderLoss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """A node was asked to have a state's model write on from the run's prompts."""

    node_id: NodeId
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What it wrote, a text for each prompt; or why it did not."""

    round: int
    node_id: NodeId
    texts: tuple[str, ...] = ()
    why_not: str = ""


KEPT_WRITTEN = 64
"""Rounds of which texts are kept; see coordinator.swarm.evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A loss is implausible, or a result was false: the run goes back by itself, or pauses.

    No round opens before it does.
    """

    round: int | None  # to go back to; None: to pause
    reason: str
    until: float | None = None  # so long nodes may say that they reach there; None: sounded
    evidence: tuple[str, ...] = ()  # that a result was false: protocol.trust.evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfollowed:
    """The run went back, and too few members hold that state: coordinator.swarm.retraction."""

    since: float  # when one more came to hold it, or the run went back
    incarnation: int  # of the ruling
    ready_ids: tuple[NodeId, ...] = ()  # who holds it, or did


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Whom a coordinator that has just started waits for: see coordinator.swarm.start."""

    node_ids: tuple[NodeId, ...]  # in order
    until: float  # then the run goes on without them
    living_until: float = 0.0  # likewise, where enough of them are back
    from_session_id: int  # sessions from this one on began after the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Void rounds that gave way to commits which nodes brought back; some nodes have applied them.

    They hold the state from before, under a later number, until they hear of it.
    """

    first_round: int
    digest: Digest
    incarnation: int = 0


KEPT_LEFT = 8
"""So many times in a row void rounds give way before nodes that were away meanwhile may be misjudged."""


NO_LAYOUT = LayoutSummary(digest=Digest(b""), fragment_elements=())
"""No node has it. Rules in a database of a release before have it until the run file's take their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What of the run file the core goes by. Amendments change it: see coordinator.swarm.steering."""

    total_rounds: int
    min_nodes: int
    inner_steps: int  # of a node as fast as the fastest; by `round_steps` where min_nodes share
    batch: int  # samples that a node trains in one inner step
    context: int  # tokens of a sample
    train_seconds: float
    contribute_seconds: float
    commit_seconds: float
    apply_seconds: float
    lease_seconds: float
    evaluate_every_rounds: int
    layout: LayoutSummary = NO_LAYOUT  # how the model is cut
    codecs: tuple[str, str] = ("", "")  # up and down, with their versions
    num_prompts: int = 0  # from which the model writes on where it is evaluated
    adapts_deadlines: bool = False  # whether those above are caps, and plans follow measurements
    floor_seconds: float = 0.0  # the least of each phase, when they do
    has_overlap: bool = False  # whether nodes train for the next round while this one is exchanged
    schedule: Schedule = ALWAYS_ALIKE  # of learning rates, with its amendments
    round_steps: int | None = None  # inner steps of all nodes in a round; None: each has its own
    slice_elements: int = 1 << 62  # a reducer's part of a fragment is cut into slices no smaller
    has_private_data: bool = False  # whether each node trains samples of its own
    compares_samples: bool = False  # whether a loss is of samples together, and of one says nothing
    first_digest: Digest | None = None  # of the state that the run begins with, where it is given
    watches_loss: bool = False  # whether the run goes back by itself: coordinator.swarm.losses
    bounds_results: bool = True  # whether no result moves the model by much more than others did
    audited_share: float = 0.0  # of slices and contributors, drawn when they are committed
    tokens_before: int = 0  # on the token clock where the run begins, as a fork's does
    trained_before: tuple[int, ...] = ()  # places: the first, the one after the last, and so on

    @property
    def checks_training(self) -> bool:
        """Whether members check what others have trained, as far as samples show it."""
        return self.audited_share > 0 and not (self.has_private_data or self.compares_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNorm:
    """What was applied to a stretch of a fragment."""

    start: int
    num_elements: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNorms:
    """What one commit applied."""

    round: int
    fragment: int
    slices: tuple[SeenNorm, ...]
    stride: float  # of the inner steps that led to it


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmState:
    """All of it."""

    rules: Rules
    run_digest: Digest
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    committed_round: int = 0
    outer_digest: Digest | None = None  # of the committed round; None while nodes still agree on it
    token_clock: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    phase_times: PhaseTimes = field(default_factory=PhaseTimes)
    next_session_id: int = 1
    open_round: Round | None = None
    norms: tuple[SeenNorms, ...] = ()  # what the latest commits of each fragment applied
    recent: tuple[ClosedRound, ...] = ()  # the newest that is not void, and the void ones after it
    earlier: tuple[ClosedRound, ...] = ()  # likewise before the round that is being applied
    held_out: tuple[HeldOut, ...] = ()
    held_out_text: str = ""  # what the latest of them is of, by its digests; "": nobody knows
    held_out_text_from: int = 0  # the first round that was evaluated on it
    differing: HeldOut | None = None  # of one state, by all who were asked; until they agree
    evaluating: Evaluating | None = None
    writing: tuple[Writing, ...] = ()  # who has yet to answer, the latest last
    written: tuple[Written, ...] = ()  # by rounds
    alarm: Alarm | None = None  # until it is ruled what follows from it
    convicted: tuple[Conviction, ...] = ()  # until it is ruled what follows from it
    end_waits_until: float | None = None  # at the end, while somebody here holds the final state
    finished_at: float | None = None
    incarnation: int = 0  # how often history was taken back
    unsupplied_since: float | None = None  # nobody here holds the committed state
    unfollowed: Unfollowed | None = None  # until a going back is seen to be followed
    awaited: Awaited | None = None  # since a start, until the newest round's nodes are back
    left: tuple[Left, ...] = ()  # void rounds that have given way, the latest last
    has_untold: bool = False  # whether nodes that are behind were not told of commits learned
    wire: WireTotals = field(default_factory=dict)  # what all rounds have cost, on all nodes
    round_wire: WireTotals = field(default_factory=dict)  # the part of it that the open round has
    all_reduce_bytes: int = 0  # what averaging gradients would have: coordinator.swarm.books
    rulings: tuple[Ruling, ...] = ()  # all of them; what follows is what they come to
    latest_rulings: Mapping[NodeId, Ruling] = field(default_factory=dict)  # the latest on each node
    own_invites: tuple[str, ...] = ()  # by which the run owner's own machines join
    invite_limits: Mapping[str, int] = field(default_factory=dict)
    """How many of an invite's members take part at once, where that is bounded."""
    rolled_back: tuple[Ruling, ...] = ()  # by which rounds were undone
    audit_secret: bytes = b""  # draws audits: nobody but the coordinator knows it
    audits: tuple[Audit, ...] = ()  # that go on, and those that ended since the latest commit
    spot_checks: tuple[SpotCheck, ...] = ()  # that go on
    errors: tuple[KeptError, ...] = ()  # what reducers keep, as far as it is known
    errors_unknown_until: int = 0  # of rounds before, reducers may keep what is not known here
    errors_incarnation: int = 0  # of the history that they are of
    paused: Ruling | None = None
    stopped: Ruling | None = None

    def __post_init__(self) -> None:
        """Members may be given in any mapping."""
        if not isinstance(self.members, Members):
            object.__setattr__(self, "members", Members(self.members))

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self.finished_at is not None

    @property
    def is_at_end(self) -> bool:
        """Whether the last round is over: its state is agreed on."""
        return self.committed_round == self.rules.total_rounds and self.outer_digest is not None

    @property
    def uncommitted_round(self) -> Round | None:
        """The round in flight until it is committed: nodes train or exchange, and do not apply."""
        current = self.open_round
        return None if current is None or current.phase is RoundPhase.APPLYING else current

    @property
    def last_closed(self) -> ClosedRound | None:
        """The newest closed round."""
        return self.recent[-1] if self.recent else None


KEPT_ROUNDS = 1000
"""Closed rounds whose commits are kept whole, and for which a member that is gone is remembered."""


def trimmed(closed: Sequence[ClosedRound]) -> tuple[ClosedRound, ...]:
    """Of closed rounds in order: the newest that is not void, and the void ones after it.

    However many these are: without the round that led to the state nothing could be taken back, nor
    could void rounds give way to the commits that nodes bring back.
    """
    recent: list[ClosedRound] = []
    for candidate in reversed(closed):
        recent.insert(0, candidate)
        if not candidate.is_void:
            break
    return tuple(recent)


def last_sure_round(state: SwarmState) -> int:
    """The last round that cannot have been taken back since a copy of this state was made."""
    return state.recent[0].commit.round - 1 if state.recent else state.committed_round


T = TypeVar("T")
Values = TypeVarTuple("Values")

REMEMBERED = 4


def remembered(work: Callable[[*Values], T]) -> Callable[[*Values], T]:
    """The function, which knows its latest results for the very same values, as they are never changed.

    Many decisions in a row ask for the same: a report changes neither sessions nor assignments. To compare a
    thousand ids would take as long as to look at them.
    """
    known: tuple[tuple[tuple[object, ...], T], ...] = ()

    @wraps(work)
    def found(*values: *Values) -> T:
        nonlocal known
        for had, result in known:
            if all(map(is_, had, values)):
                return result
        result = work(*values)
        known = ((values, result), *known[: REMEMBERED - 1])
        return result

    return found


@remembered
def as_set(node_ids: tuple[NodeId, ...]) -> frozenset[NodeId]:
    """The same ids, to be looked up in."""
    return frozenset(node_ids)


# Who is here, and who takes part


@remembered
def _by_node(assignments: tuple[Assignment, ...]) -> Mapping[NodeId, Assignment]:
    return {a.node_id: a for a in assignments}


@remembered
def _present_among(
    assignments: tuple[Assignment, ...], present_ids: tuple[NodeId, ...]
) -> tuple[NodeId, ...]:
    present = frozenset(present_ids)
    return tuple(sorted(a.node_id for a in assignments if a.node_id in present))


@remembered
def _awaited_among(
    assignments: tuple[Assignment, ...],
    present_ids: tuple[NodeId, ...],
    on_trial: tuple[NodeId, ...],
) -> tuple[NodeId, ...]:
    left_out = frozenset(on_trial)
    awaited = tuple(n for n in _present_among(assignments, present_ids) if n not in left_out)
    asked = _by_node(assignments)
    return awaited if any(asked[node_id].trains for node_id in awaited) else ()


def members_of(state: SwarmState) -> Members:
    """The members, with what is known of all of them."""
    assert isinstance(state.members, Members)  # any mapping may be given, and this is made of it
    return state.members


def present_members(state: SwarmState) -> list[Member]:
    """Members with a live session, in the order of their ids."""
    members = members_of(state)
    return [members[node_id] for node_id in members.present_ids]


def ready_members(state: SwarmState) -> list[Member]:
    """Members that hold the committed state, in the order of their ids."""
    members = members_of(state)
    return [member for n in members.ids if (member := members[n]).state is MemberState.READY]


def available_members(state: SwarmState) -> list[Member]:
    """Ready members that stay: who may be asked for anything new, in the order of their ids."""
    return [member for member in ready_members(state) if not member.is_draining]


def training_among(current: Round, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Those of a round's participants that train, in the order given: all but helpers."""
    asked = assignments_of(current)
    return tuple(node_id for node_id in node_ids if asked[node_id].trains)


def is_present(state: SwarmState, node_id: NodeId) -> bool:
    """Whether the node is a member with a live session."""
    member = state.members.get(node_id)
    return member is not None and member.state in PRESENT


def others_in(current: Round, node_ids: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Who takes part in the round beside these, in the order of the plan."""
    left_out = frozenset(node_ids)
    return tuple(a.node_id for a in current.assignments if a.node_id not in left_out)


def present_participants(state: SwarmState, current: Round) -> tuple[NodeId, ...]:
    """The round's participants that have a live session, in the order of their ids."""
    return _present_among(current.assignments, members_of(state).present_ids)


def awaited_participants(state: SwarmState, current: Round) -> tuple[NodeId, ...]:
    """The present participants that the round waits for: all but those on trial.

    All of them where nobody else trains: helpers alone have nothing to reduce.
    """
    present_ids = members_of(state).present_ids
    awaited = _awaited_among(current.assignments, present_ids, current.on_trial)
    return awaited or present_participants(state, current)


def assignments_of(current: Round) -> Mapping[NodeId, Assignment]:
    """What the round asks of each participant."""
    return _by_node(current.assignments)


def num_of(number: int, noun: str) -> str:
    """How many of something, for people."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_of(state: SwarmState, node_id: NodeId) -> str:
    """What people call the node."""
    member = state.members.get(node_id)
    return member.node_name if member else node_id


def names_of(state: SwarmState, node_ids: Iterable[NodeId]) -> str:
    """What people call several nodes, in their order."""
    return ", ".join(name_of(state, node_id) for node_id in node_ids)


def is_held_by(node_id: NodeId, current: Round, progress: SliceProgress) -> bool:
    """Whether the node says that it holds the result which the slice's reducer reported."""
    results = current.held.get(node_id, {})
    return progress.digest is not None and results.get(progress.slice.index) == progress.digest


def in_exchange(state: SwarmState, number: int, node_id: NodeId) -> Round | None:
    """The round in flight, if a report of this node about round `number` can still matter to it."""
    current = state.uncommitted_round
    if current is None or current.number != number:
        return None
    is_participant = node_id in assignments_of(current)
    return current if is_participant and is_present(state, node_id) else None


def next_round(state: SwarmState) -> int:
    """The first round that has no plan yet."""
    current = state.open_round
    return 1 + (state.committed_round if current is None else current.number)
