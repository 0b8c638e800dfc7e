"""A round as this node knows it: one value, what peers may bring to it, what happens and follows. Pure.

First the round itself, then whom it waits for less, what a peer may bring, and its events and actions. What
an event does is in transition.py; who carries actions out is node.exchange.runner. Payloads are referred to
here, and their bodies never looked into.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from node.exchange.codecs.codec import Codec
from node.exchange.peers import Waits
from node.exchange.reduction import Reduction, SliceResult
from protocol.wire.messages import Report, RoundNews
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import Commit, Digest, NodeId, Plan, Slice, SliceOutcome, training_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Who we are, and what payloads of the run look like."""

    node_id: NodeId
    run_digest: Digest
    context: int  # tokens of a sample
    uplink: Codec
    downlink: Codec
    waits: Waits = field(default_factory=Waits)


class Phase(Enum):
    """What this node does with a slice as its reducer."""

    ELSEWHERE = auto()  # nothing: another node reduces it; no contribution but our own is here
    COLLECTING = auto()  # takes contributions, until all are here or the deadline passes
    AVERAGING = auto()  # takes the mean of those that were here; no other counts any more
    REDUCED = auto()  # has made the result, or had nothing to make it of


class Awaited(Enum):
    """How long a reducer waits for somebody's contributions to a round."""

    FULLY = auto()  # until the deadline, or several times as long as others: see transition.py
    BRIEFLY = auto()  # not much longer than for the others', unless they are coming
    NOT = auto()  # no longer than for the others', and not much longer though they are coming


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceState:
    """All that this node knows of a slice."""

    part: Slice  # with who reduces it now
    attempt: int = 0  # the latest takeover that we know of; what belongs to an earlier one is stale
    phase: Phase = Phase.ELSEWHERE
    deadline: float  # until when its reducer collects
    begun_at: float = 0.0  # the round's training, or the takeover
    others_at: float | None = None  # when the latest contribution came that is waited for in full
    most_at: float | None = None  # when those with more than half of the weight were here
    own: Payload | None = None  # our contribution, once it is encoded
    receipt: bytes = b""  # its reducer's, for that
    # By sender; empty where another node reduces.
    contributions: Mapping[NodeId, Payload] = field(default_factory=dict)
    held: Payload | None = None  # its result; only one that its present reducer made
    num_arriving: int = 0  # pushes of its result that are under way to us
    is_broken: bool = False  # the latest such push ended, and the result is not here
    refused: PayloadHeader | None = None  # of its present reducer's result that does not decode
    wanted: SliceOutcome | None = None  # its result as the coordinator names it
    is_fetched: bool = False  # others were asked for what is wanted; that is done once

    @property
    def is_missing(self) -> bool:
        """Whether the coordinator names a result that this node does not have."""
        digest = None if self.wanted is None else self.wanted.digest
        return digest is not None and (self.held is None or self.held.digest != digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the transport knows of the links to reducers."""

    unreachable: frozenset[NodeId] = frozenset()
    round_trip_seconds: Mapping[NodeId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """All that this node knows of a round. Times are of the loop's clock, in seconds."""

    plan: Plan
    rules: Rules
    commit_deadline: float
    patience_seconds: float  # of a push of a result, from the commit
    slices: Mapping[int, SliceState]
    departed: frozenset[NodeId] = frozenset()  # they are sent nothing
    silent: frozenset[NodeId] = frozenset()  # no contribution of theirs is waited for
    awaited: Mapping[NodeId, Awaited] = field(default_factory=dict)  # all others: fully
    num_coming: Mapping[NodeId, int] = field(default_factory=dict)  # contributions, by sender
    came_at: Mapping[NodeId, float] = field(default_factory=dict)  # when one ended to come
    push_ended_at: Mapping[NodeId, float] = field(default_factory=dict)  # the latest of a reducer
    training_ended_at: float | None = None  # when the coordinator said so
    given_up: frozenset[NodeId] = frozenset()  # it took a mean without, as nothing came of them
    most_held_at: float | None = None  # when more than half of the results were here
    silent_slices: tuple[int, ...] = ()  # told: nothing comes of their results
    links: Links = Links()  # as they were seen last
    commit: Commit | None = None
    committed_at: float = 0.0
    num_fetches: int = 0  # of committed results, under way
    is_closed: bool = False  # nothing of the round is taken, sent or waited for any more

    @property
    def missing(self) -> list[SliceState]:
        """The slices whose named result this node does not have."""
        return [known for known in self.slices.values() if known.is_missing]

    @property
    def carried_from(self) -> frozenset[NodeId]:
        """Whose contributions to us come through other members."""
        ours = self.rules.node_id
        ends = [(way.one, way.other) for way in self.plan.ways if ours in (way.one, way.other)]
        return frozenset(end for pair in ends for end in pair if end != ours)

    def goes_by(self, plan: Plan) -> bool:
        """Whether the plan asks the same of everybody, apart from who reduces and until when."""
        ours, theirs = (
            (p.round, p.base_digest, p.assignments, [(s.start, s.num_elements) for s in p.slices])
            for p in (self.plan, plan)
        )
        # Peers take nothing that is signed for another plan, even one that asks the same.
        return ours == theirs and self.plan.opened_at == plan.opened_at


def opened(
    plan: Plan,
    rules: Rules,
    *,
    patience_seconds: float,
    now: float,
    less_awaited: Mapping[NodeId, Awaited] | None = None,
    begun_at: float | None = None,
) -> RoundState:
    """A round as its plan opens it. `begun_at` is when its training began; None: now.

    `less_awaited` are those whose contributions this node does not wait for until the deadline.
    """
    return RoundState(
        plan=plan,
        rules=rules,
        commit_deadline=now + plan.commit_seconds,
        patience_seconds=patience_seconds,
        silent=frozenset(a.node_id for a in plan.assignments if not a.trains),
        awaited={n: a for n, a in (less_awaited or {}).items() if n != rules.node_id},
        slices={
            part.index: SliceState(
                part=part,
                phase=Phase.COLLECTING if part.reducer_id == rules.node_id else Phase.ELSEWHERE,
                deadline=now + plan.contribute_seconds,
                begun_at=now if begun_at is None else begun_at,
            )
            for part in plan.slices
        },
    )


def in_order_of_sending(slices: Sequence[Slice], node_id: NodeId) -> list[Slice]:
    """Each reducer's first slice, then each one's second, and so on: all begin to reduce at once.

    Our own slices come after the others', which have a way to go, and not all nodes begin with
    the same reducer.
    """
    reducers = list(dict.fromkeys(part.reducer_id for part in slices))
    own = reducers.index(node_id) if node_id in reducers else 0
    seen: Counter[NodeId] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for part in slices:
        after_own = (reducers.index(part.reducer_id) - own - 1) % len(reducers)
        places[part.index] = seen[part.reducer_id], after_own
        seen[part.reducer_id] += 1
    return sorted(slices, key=lambda part: places[part.index])


# Whom a round waits for less
#
# A reducer waits more briefly for members that kept some lately. A contribution that does not come shows
# nothing of who is at fault: its node may keep it, or the reducer may refuse it. So this costs neither of the
# two its part. A member whose work a result lacked, of any reducer, is waited for briefly in the next
# BRIEF_ROUNDS: a quarter as long again as the contributions of others took, or for as long as something of
# its own comes, for its link may be slow. A reducer that waited so in vain does not wait for it until its
# work was in time in 1, 2, 4, ... rounds. What comes in time counts, whoever was waited for. Of whom the plan
# asks more steps than of those that are here, as they check somebody's work, it waits as many times as long.

BRIEF_ROUNDS = 16
"""After a round that lacked somebody's work. So who works and idles by turns is in full waited for in one of
17 rounds."""

MOST_IN_TIME = 16
"""So many rounds in time are asked at most of somebody whom a reducer waited for in vain."""

KEPT_ROUNDS = 64
"""After so many, what somebody missed is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """In which rounds committed results lacked a participant's work."""

    newest_round: int  # in which a slice of anybody's lacked it
    after_brief: tuple[int, ...] = ()  # in which this node's slices did: it waited briefly
    num_in_time: int = 0  # rounds since the latest of these in which they had it

    def awaited_in(self, round: int) -> Awaited:
        """How long this node waits for it in a round."""
        if self.after_brief:
            asked = min(MOST_IN_TIME, 1 << (len(self.after_brief) - 1))
            if self.num_in_time < asked:
                return Awaited.NOT
        return Awaited.BRIEFLY if round <= self.newest_round + BRIEF_ROUNDS else Awaited.FULLY


def with_commit(
    before: Mapping[NodeId, Missed], commit: Commit, own_slices: Collection[int]
) -> dict[NodeId, Missed]:
    """What is known of each participant after a commit; `own_slices` are those that this node has reduced.

    Nothing new, where a slice or another lacks most of those that trained: then it was the deadline.
    """
    results = [outcome for outcome in commit.slices if outcome.digest is not None]
    training = set(training_in(commit.assignments))
    lacking = {
        outcome.index: training - {c.node_id for c in outcome.contributors} for outcome in results
    }
    anywhere = frozenset[NodeId]().union(*lacking.values())
    of_own = [lacking[i] for i in own_slices if i in lacking]
    own = frozenset[NodeId]().union(*of_own)
    kept = {n: m for n, m in before.items() if commit.round - m.newest_round < KEPT_ROUNDS}
    for node_id in (kept.keys() & training) - own if of_own else ():
        in_time = min(MOST_IN_TIME, kept[node_id].num_in_time + 1)
        kept[node_id] = replace(kept[node_id], num_in_time=in_time)
    if 2 * len(anywhere) > len(training):
        return kept
    for node_id in anywhere:
        was = kept.get(node_id)
        missed = (
            replace(was, newest_round=commit.round) if was else Missed(newest_round=commit.round)
        )
        if was and node_id in own and was.awaited_in(commit.round) is Awaited.BRIEFLY:
            lately = (r for r in was.after_brief if commit.round - r < KEPT_ROUNDS)
            missed = replace(missed, after_brief=(*lately, commit.round), num_in_time=0)
        kept[node_id] = missed
    return kept


def less_awaited(plan: Plan, missed: Mapping[NodeId, Missed]) -> dict[NodeId, Awaited]:
    """Of those that train, whom this node does not wait for in full; nobody, where that were most of them."""
    training = training_in(plan.assignments)
    found = {n: missed[n].awaited_in(plan.round) for n in training if n in missed}
    less = [node_id for node_id, awaited in found.items() if awaited is not Awaited.FULLY]
    return {n: found[n] for n in less} if 2 * len(less) <= len(training) else {}


# What a peer may bring, by a payload's header and by what the round is at
#
# It is decided once, here, and asked before a byte of a body is read, while it comes, and when it is here: a
# slice may have been taken over, and a mean have begun, since the offer.


def refusal(
    rules: Rules,
    state: RoundState | None,
    sender: NodeId,
    header: PayloadHeader,
    *,
    admitted_in: int | None = None,
) -> str:
    """Why a payload is not taken of its sender, in a sentence; empty when it is.

    `admitted_in` is the slice's attempt when it was admitted; None: it is offered. `state` is of the
    round that is open at this node; None when none is.
    """
    if header.run_digest != rules.run_digest:
        return f"run digest {header.run_digest.hex()[:8]} is not ours, {rules.run_digest.hex()[:8]}"
    if state is None or state.is_closed or state.plan.round != header.round:
        return f"round {header.round} is not open at this node"
    if header.base_digest != state.plan.base_digest:
        return (
            f"{place_of(header)} is from state {header.base_digest.hex()[:8]}, and its plan is on "
            f"{state.plan.base_digest.hex()[:8]}"
        )
    if header.plan_opened_at != state.plan.opened_at:
        return f"{place_of(header)} goes by another plan of the round"
    known = state.slices.get(header.slice_index)
    if header.kind == CONTRIBUTION:
        return _refusal_of_contribution(state, known, sender, header)
    if header.kind == RESULT:
        return _refusal_of_result(state, known, sender, header, admitted_in)
    return f"a {header.kind_name} is fetched, never pushed"


def _refusal_of_contribution(
    state: RoundState, known: SliceState | None, sender: NodeId, header: PayloadHeader
) -> str:
    place, rules = place_of(header), state.rules
    if known is None or known.phase is Phase.ELSEWHERE or header.fragment != state.plan.fragment:
        return f"this node does not reduce {place}"
    if header.sender_id != sender:
        return f"{sender} offers a contribution in the name of {header.sender_id}"
    assignment = state.plan.assignment_of(sender)
    if assignment is None:
        return f"{sender} takes no part in round {header.round}"
    if why := misfit(header, known.part, rules.uplink):
        return why
    if header.samples > assignment.num_samples:
        return f"{header.samples} samples for {place}, where {assignment.num_samples} were assigned"
    most_tokens = header.samples * rules.context
    if not 0 < header.tokens <= most_tokens:
        return (
            f"{header.tokens} tokens in {header.samples} samples for {place}, which have "
            f"{most_tokens}"
        )
    before = known.contributions.get(sender)
    if before is not None and before.header.body_digest != header.body_digest:
        return f"{place} has another contribution of {sender} already"
    if before is None and known.phase is not Phase.COLLECTING:
        return f"{place} is already reduced"
    return ""


def _refusal_of_result(
    state: RoundState,
    known: SliceState | None,
    sender: NodeId,
    header: PayloadHeader,
    admitted_in: int | None,
) -> str:
    place = place_of(header)
    if known is None or known.part.reducer_id != sender or header.sender_id != sender:
        return f"{sender} does not reduce {place}"
    if admitted_in is None and known.is_fetched and state.commit is not None:
        return f"{place} is being fetched already"
    if admitted_in not in (None, known.attempt):  # its reducer makes another result
        return f"{place} has been taken over meanwhile"
    if known.held is not None and known.held.header != header:
        return f"another result of {place} is held already"
    if why := misfit(header, known.part, state.rules.downlink):
        return why
    return f"this result of {place} does not decode" if known.refused == header else ""


def misfit_of_result(state: RoundState, header: PayloadHeader) -> str:
    """What of a result that a slice's reducer has signed for this plan shows that nobody can use it."""
    plan, known = state.plan, state.slices.get(header.slice_index)
    place = header.round, header.base_digest, header.plan_opened_at
    if known is None or place != (plan.round, plan.base_digest, plan.opened_at):
        return ""
    if header.kind != RESULT or header.run_digest != state.rules.run_digest:
        return ""
    if header.sender_id != known.part.reducer_id:
        return ""
    return misfit(header, known.part, state.rules.downlink)


def contradicted(state: RoundState | None, header: PayloadHeader) -> PayloadHeader | None:
    """What is here of the same maker for the same slot, and is another: one of both is a lie."""
    known = None if state is None else state.slices.get(header.slice_index)
    if known is None:
        return None
    held = known.contributions.get(header.sender_id) if header.kind == CONTRIBUTION else known.held
    for here in (held.header if held is not None else None, known.refused):
        if here is not None and header.contradicts(here):
            return here
    return None


def misfit(header: PayloadHeader, part: Slice | SliceOutcome, codec: Codec) -> str:
    """What of a payload is not as its slice must have it, by elements, codec and size; empty for nothing."""
    place = place_of(header)
    if (header.start, header.num_elements) != (part.start, part.num_elements):
        return (
            f"{place} holds elements {part.start}+{part.num_elements}, "
            f"not {header.start}+{header.num_elements}"
        )
    if header.codec != codec.name:
        return f"a {header.kind_name} of {place} comes in {codec.name}, not {header.codec}"
    if not codec.admits(header.body_bytes, header.num_elements):
        return f"{place} has no body of {header.body_bytes} bytes"
    return ""


def place_of(header: PayloadHeader) -> str:
    """Which slice a payload is of, in words."""
    return f"slice {header.slice_index} of round {header.round}"


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionEncoded:
    """What this node contributes to a slice is ready to be sent."""

    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptCame:
    """A slice's reducer says, with its signature, that it has taken our contribution."""

    index: int
    attempt: int  # of the slice when it was taken
    receipt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadCame:
    """A peer has brought a contribution or a result, which is whole; a result decodes."""

    sender: NodeId
    payload: Payload
    admitted_in: int  # the attempt of the slice when it was offered
    agreement: float | None = None  # of a result with our contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionBegan:
    """A contribution to a slice that this node reduces begins to come."""

    sender: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionEnded:
    """Nothing more comes of it: it is here, or it broke off or was refused."""

    sender: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PushBegan:
    """The result of a slice begins to come from its reducer."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushEnded:
    """Nothing more comes of such a push: the result is here, or it broke off or was refused."""

    index: int
    attempt: int  # of the slice when it began
    sender: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTaken:
    """The result of a slice is made, or None when nothing that decodes was contributed."""

    index: int
    attempt: int
    result: SliceResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultUndecodable:
    """A reducer's signed result is nothing that its slice can have.

    No codec takes the bytes, which are whole, or not with the norm that their header says. Or that header is
    of other elements or of another codec.
    """

    header: PayloadHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFetched:
    """A result that was asked for is here, and decodes."""

    payload: Payload
    agreement: float | None = None  # with our contribution


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """Nothing more comes of a fetch."""

    is_committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The coordinator has decided on the round."""

    commit: Commit
    links: Links


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """It is as late as the core wanted to be woken, or later."""

    links: Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The commit's results are here, or the round ends without one: the node goes on."""


Event = (
    RoundNews
    | ContributionEncoded
    | ReceiptCame
    | PayloadCame
    | ContributionBegan
    | ContributionEnded
    | PushBegan
    | PushEnded
    | MeanTaken
    | ResultUndecodable
    | ResultFetched
    | FetchEnded
    | Committed
    | TimePassed
    | Closed
)


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A payload goes to a peer, again and again until it is there, as long as `is_wanted` says so."""

    peer: NodeId
    payload: Payload
    attempt: int  # of the slice
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """The mean of a slice is to be taken."""

    reduction: Reduction
    attempt: int  # of the slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A result is kept for the commit and for peers. With `made` it is ours, and leaves an error."""

    payload: Payload
    made: SliceResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The result of a slice is of no use any more: another node makes it anew."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """The coordinator is told."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Results are fetched: committed ones from whoever has them, an offered one from its holders."""

    outcomes: tuple[SliceOutcome, ...]
    is_committed: bool


Action = Send | Reduce | Hold | Drop | Tell | Fetch
