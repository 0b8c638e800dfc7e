"""What follows from a commit: which members hold the state after it, what it counts, how far it leads. Pure.

Counted are tokens, in all and per member, work, and samples in the ledger. So is what reducers have left out
of members' contributions: the run owner sees by that whom to expel. So is what rounds cost on the wire,
against averaging gradients at every inner step. Nodes tell with each applied round what their process has
sent and received so far, so a report that is lost or comes twice changes nothing: what counts is how far the
totals have grown.

No more of a slice's result is applied than the run's results were lately. A reducer may lie. What its result
decodes to has the norm that its signed header declares: whoever holds it has checked that. So the
coordinator can bound what a result does to the model without seeing a weight, and since the factor stands in
the signed commit, all nodes apply the same, and so does who replays it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_high, median_low

from coordinator.swarm.events import HistoryTold, Tell, Turn
from coordinator.swarm.ledger import committed_samples, lease_again, reopen, settle
from coordinator.swarm.members import PRESENT, Member, MemberState, Screening, Work
from coordinator.swarm.state import (
    Round,
    RoundPhase,
    Rules,
    SeenNorm,
    SeenNorms,
    SwarmState,
    T,
    last_sure_round,
    present_members,
)
from coordinator.swarm.weighing import (
    credited,
    earned,
    heaviest,
    say_of,
    taken_back,
    unchecked,
    weight_of,
)
from protocol.run.schedule import StepsTaken
from protocol.trust.rulings import undoes
from protocol.wire.messages import CommitsWanted, RefetchAsked, Trained
from protocol.wire.payload import WireTotals, grown
from protocol.wire.rounds import WHOLE, Commit, Digest, NodeId, Plan, SliceOutcome, training_in


def note_outer_state(
    turn: Turn, node_id: NodeId, outer_round: int, digest: Digest, incarnation: int
) -> None:
    """Takes note of the outer state that a present member says it holds.

    Messages overtake each other: a READY member that seems to go back is an old message. Others
    may go back, because a node that fetches its state anew may pass through an older snapshot.
    """
    member = turn.state.members[node_id]
    if member.state is MemberState.READY and outer_round < member.outer_round:
        return
    is_news = (outer_round, digest) != (member.outer_round, member.outer_digest)
    turn.put_member(
        replace(
            member,
            outer_round=outer_round,
            outer_digest=digest,
            outer_incarnation=incarnation,
        )
    )
    judge(turn, node_id, is_news=is_news)


def agree_on(turn: Turn, digest: Digest) -> None:
    """Makes `digest` the committed state's, and sorts all present members by it."""
    turn.state = replace(turn.state, outer_digest=digest)
    for member in present_members(turn.state):
        if member.outer_round > turn.state.committed_round:  # what it told may be of use only now
            judge(turn, member.node_id, is_news=member.has_told_history)
        elif member.outer_round == turn.state.committed_round:
            judge(turn, member.node_id, is_news=True)
        elif member.state is MemberState.READY:
            turn.put_member(replace(member, state=MemberState.JOINING))


def judge_all(turn: Turn) -> None:
    """Compares all present members' states with the committed one, which has just changed."""
    for member in present_members(turn.state):
        judge(turn, member.node_id, is_news=False)


def agree_on_initial_state(turn: Turn) -> None:
    """Chooses the initial state among the nodes that are here, until the first round opens.

    Where the run begins with given weights there is nothing to choose. Else it is what has most weight,
    and chosen anew when another one has more, or nobody who holds it is left: nothing is lost yet, and
    waiting for a node that may never come back would hold up the run. Nobody is told to fetch it before
    as many nodes are here as a round opens with: who comes first has no more say than others.
    """
    state = turn.state
    if state.rules.first_digest is not None or state.committed_round or state.open_round:
        return
    here = _choosing(state)
    if not here:
        return
    say = say_of(here, 0, unchecked(state))
    digest = heaviest(say, {m.node_id: m.outer_digest for m in here})
    for_it, for_what_is_agreed = (
        weight_of(say, (m.node_id for m in here if m.outer_digest == each))
        for each in (digest, state.outer_digest)
    )
    if for_it > for_what_is_agreed:
        agree_on(turn, digest)
    elif not _may_be_outweighed(state):
        for member in present_members(state):  # until now nobody was told to fetch it
            if member.state is MemberState.JOINING and member.outer_round == 0:
                judge(turn, member.node_id, is_news=True)


def _may_be_outweighed(state: SwarmState) -> bool:
    """Whether the first state is chosen by fewer nodes than a round opens with, so that it may change."""
    if state.rules.first_digest is not None or state.committed_round or state.open_round:
        return False
    return len(_choosing(state)) < state.rules.min_nodes


def _choosing(state: SwarmState) -> list[Member]:
    """Who chooses the first state: helpers have no say in it."""
    here = present_members(state)
    return [member for member in here if member.outer_round == 0 and not member.is_helper]


def judge(turn: Turn, node_id: NodeId, *, is_news: bool) -> None:
    """Compares a present member's outer state with the committed one.

    Asks for a refetch when it differs and that is news, so that heartbeats do not repeat the request.
    """
    state = turn.state
    member = state.members[node_id]
    current = state.open_round
    is_found_out = is_news or member.state is not MemberState.DIVERGED
    if holds_undone(state, member):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, f"round {member.outer_round}, which it holds, is undone")
        return
    if member.outer_round < state.committed_round:
        if current is not None and node_id in current.applied:  # it has gone back
            turn.put_round(replace(current, applied=without(current.applied, node_id)))
        if is_news and may_bring_commits(state, member):
            _ask_commits(turn, node_id)
        return  # it catches up by itself
    if member.outer_round > state.committed_round:
        # Only a coordinator restored from an old copy of its database sees an honest node ahead.
        turn.put_member(replace(member, state=MemberState.JOINING))
        if is_news or member.state is MemberState.READY:  # or what was learned has taken us back
            _ask_commits(turn, node_id)
    elif (
        current is not None
        and current.phase is RoundPhase.APPLYING
        and (_is_outdated(member, current) or _has_applied_what_is_left(state, member))
    ):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, f"round {member.outer_round} was taken back")
    elif current is not None and current.phase is RoundPhase.APPLYING:
        reports = {**current.applied, node_id: member.outer_digest}
        turn.put_round(replace(current, applied=reports))
    elif state.outer_digest is None:
        return  # agree_on_initial_state decides
    elif member.outer_digest == state.outer_digest:
        turn.put_member(replace(member, state=MemberState.READY))
    elif _may_be_outweighed(state):
        turn.put_member(replace(member, state=MemberState.JOINING))
    elif may_bring_commits(state, member) and member.state is not MemberState.DIVERGED:
        turn.put_member(replace(member, state=MemberState.JOINING))
        if is_news:  # what becomes of it shows when it has told all that it knows
            _ask_commits(turn, node_id)
    else:
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, _differs(state, member))


def history_told(turn: Turn, event: HistoryTold) -> None:
    """Sends a node back whose state builds on commits that it could not bring back."""
    state = turn.state
    member = state.members.get(event.node_id)
    if member is None or member.state not in PRESENT:
        return
    member = replace(member, has_told_history=True)
    turn.put_member(member)
    if member.outer_round > state.committed_round:
        _ask_refetch(turn, member, f"ahead of the swarm: it holds round {member.outer_round}")
    elif (
        member.outer_round == state.committed_round
        and state.outer_digest is not None
        and state.outer_digest != member.outer_digest
    ):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        _ask_refetch(turn, member, _differs(state, member))


def may_bring_commits(state: SwarmState, member: Member) -> bool:
    """Whether the member's state shows that it knows commits which hold over those here.

    It is ahead; or it holds another state after one of the newest rounds, which are void here.
    """
    if member.outer_round > state.committed_round:
        return True
    if not state.recent or not state.recent[-1].is_void:
        return False
    newest = state.recent[0].commit
    is_known = newest.outer_digest is not None and member.outer_round >= newest.round
    return is_known and member.outer_digest != newest.outer_digest


def _ask_commits(turn: Turn, node_id: NodeId) -> None:
    turn.put_member(replace(turn.state.members[node_id], has_told_history=False))
    turn.act(Tell(message=commits_wanted(turn.state), to=(node_id,)))


def commits_wanted(state: SwarmState) -> CommitsWanted:
    """What asks nodes for all commits that this coordinator may lack."""
    return CommitsWanted(after_round=last_sure_round(state))


def awaits_first_weights(state: SwarmState, member: Member) -> bool:
    """Whether a member has yet to fetch the weights that the run begins with, as all but one have to."""
    begins = state.rules.first_digest is not None and not state.committed_round
    return begins and member.state is MemberState.DIVERGED and not member.outer_round


def _differs(state: SwarmState, member: Member) -> str:
    assert state.outer_digest is not None
    return (
        f"its digest {member.outer_digest.hex()[:8]} at round {member.outer_round} "
        f"is not the swarm's {state.outer_digest.hex()[:8]}"
    )


def _is_outdated(member: Member, current: Round) -> bool:
    """Whether the member applied a version of the round that was taken back since.

    Its digest must not count among those that the nodes agree on.
    """
    return current.commit is not None and member.outer_incarnation < current.commit.incarnation


def _has_applied_what_is_left(state: SwarmState, member: Member) -> bool:
    """Whether its state is one from before, under the number of a void round that has given way."""
    at = member.outer_round, member.outer_digest
    return any(at[0] >= left.first_round and at[1] == left.digest for left in state.left)


def _ask_refetch(turn: Turn, member: Member, what: str) -> None:
    reason = f"the outer state of {member.node_name} was refused: {what}"
    if (refetch := refetch_of(turn.state, reason)) is not None:
        turn.act(Tell(message=refetch, to=(member.node_id,)))


def refetch_of(state: SwarmState, reason: str) -> RefetchAsked | None:
    """What sends a node to the newest state whose digest is known, if there is one."""
    if state.outer_digest is not None:
        target, digest = state.committed_round, state.outer_digest
    elif state.open_round is not None:  # nodes have yet to agree on the newest; this one is certain
        target, digest = state.open_round.number - 1, state.open_round.base_digest
    else:
        return None
    return RefetchAsked(round=target, outer_digest=digest, reason=reason)


SCREENED_ROUNDS = 20
"""What screening did is remembered for so many rounds: as many as 'atoll rounds' shows."""


def book(state: SwarmState, commit: Commit) -> SwarmState:
    """Counts what the commit took; the rest of its leases is free again."""
    samples = committed_samples(commit, batch=state.rules.batch)
    credit = credited(state, commit)
    works = {n: earned(m.work, commit.round, credit.get(n, 0)) for n, m in state.members.items()}
    screened = screenings_of(commit)
    state = _with_tokens(state, commit, works, screened, sign=1)
    return replace(state, ledger=settle(state.ledger, commit.assignments, samples))


def unbook(state: SwarmState, commit: Commit) -> SwarmState:
    """Undoes `book`: its samples are leased as they were when the round was in flight."""
    samples = committed_samples(commit, batch=state.rules.batch)
    credit = credited(state, commit)
    works = {
        n: taken_back(m.work, commit.round, at_most=credit.get(n, 0))
        for n, m in state.members.items()
    }
    state = _with_tokens(state, commit, works, {}, sign=-1)
    return replace(
        state,
        ledger=reopen(state.ledger, commit.assignments, samples),
        audits=tuple(audit for audit in state.audits if audit.round != commit.round),
    )


def book_learned(state: SwarmState, commit: Commit) -> SwarmState:
    """Books a commit whose plan this coordinator has no memory of."""
    state = replace(state, ledger=lease_again(state.ledger, commit.assignments))
    return book(state, commit)


def screenings_of(commit: Commit) -> Mapping[NodeId, Screening]:
    """What reducers took of each contributor; that nodes apply a result only in part is another's fault."""
    found: dict[NodeId, list[int]] = {}
    alike: dict[int, int] = {}  # slices that took all of the same contributors, which most do
    for outcome in commit.slices:
        if not outcome.factors:
            alike[id(outcome.contributors)] = alike.get(id(outcome.contributors), 0) + 1
            continue
        for contributor, factor in zip(outcome.contributors, outcome.factors, strict=True):
            counts = found.setdefault(contributor.node_id, [0, 0, 0])
            counts[0] += 1
            counts[1] += 0 < factor < WHOLE
            counts[2] += factor == 0
    for outcome in commit.slices:
        num_slices = alike.pop(id(outcome.contributors), 0) if not outcome.factors else 0
        for contributor in outcome.contributors if num_slices else ():
            found.setdefault(contributor.node_id, [0, 0, 0])[0] += num_slices
    return {
        node_id: Screening(
            round=commit.round, num_contributions=whole, num_clipped=clipped, num_left_out=left_out
        )
        for node_id, (whole, clipped, left_out) in found.items()
    }


def recent_screening(member: Member, committed_round: int) -> Screening:
    """The sums of what became of a member's contributions to the latest rounds; the round is the newest."""
    recent = [s for s in member.screenings if s.round > committed_round - SCREENED_ROUNDS]
    return Screening(
        round=max((s.round for s in recent), default=0),
        num_contributions=sum(s.num_contributions for s in recent),
        num_clipped=sum(s.num_clipped for s in recent),
        num_left_out=sum(s.num_left_out for s in recent),
    )


def _screenings(member: Member, commit: Commit, now: Screening | None) -> tuple[Screening, ...]:
    """What is remembered of a member with what this commit says, or once it says nothing any more."""
    before = tuple(s for s in member.screenings if s.round != commit.round)
    if now is None:
        return before
    return (*(s for s in before if s.round > commit.round - SCREENED_ROUNDS), now)


def _with_tokens(
    state: SwarmState,
    commit: Commit,
    works: Mapping[NodeId, Work],
    screened: Mapping[NodeId, Screening],
    *,
    sign: int,
) -> SwarmState:
    tokens = commit.tokens
    members = {
        node_id: replace(
            m,
            committed_tokens=m.committed_tokens + sign * tokens.get(node_id, 0),
            work=works[node_id],
            screenings=_screenings(m, commit, screened.get(node_id)),
        )
        for node_id, m in state.members.items()
    }
    token_clock = state.token_clock + sign * sum(tokens.values())
    averaging_bytes = state.all_reduce_bytes + sign * all_reduce_bytes(state, commit)
    return replace(
        state, members=members, token_clock=token_clock, all_reduce_bytes=averaging_bytes
    )


FP32_BYTES = 4


def note_wire(turn: Turn, node_id: NodeId, round: int, told: WireTotals) -> None:
    """Books what a member's totals have grown by, and for the round in flight if it is about that."""
    member = turn.state.members[node_id]
    news = grown(member.wire_told, told)
    if not any(map(any, news.values())):
        return
    turn.put_member(replace(member, wire_told=_sum(member.wire_told, news)))
    turn.state = replace(turn.state, wire=_sum(turn.state.wire, news))
    current = turn.state.open_round
    if current is not None and current.number == round:
        turn.state = replace(turn.state, round_wire=_sum(turn.state.round_wire, news))


def all_reduce_bytes(state: SwarmState, commit: Commit) -> int:
    """What all nodes would have sent for the same inner steps, had they averaged their gradients.

    By a ring all-reduce in fp32 at every inner step, in which each of N participants sends
    2 (N - 1) / N of the vector (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"). Framing is left out for it and counted for us.
    """
    num_nodes = len(training_in(commit.assignments))
    if not num_nodes:
        return 0
    batch = state.rules.batch
    num_node_steps = sum(committed_samples(commit, batch=batch).values()) / batch
    vector_bytes = FP32_BYTES * sum(state.rules.layout.fragment_elements)
    return round(num_node_steps * 2 * (num_nodes - 1) / num_nodes * vector_bytes)


def _sum(one: WireTotals, other: WireTotals) -> WireTotals:
    return {
        kind: (
            one.get(kind, (0, 0))[0] + other.get(kind, (0, 0))[0],
            one.get(kind, (0, 0))[1] + other.get(kind, (0, 0))[1],
        )
        for kind in sorted({*one, *other})
    }


# How far results lead

KEPT_COMMITS = 5
"""Of each fragment so many results are remembered: a lie has to be told in most of them to be the usual."""

MOST_TIMES_USUAL = 4.0
"""A result longer than so many times the median of these is cut to it, of two the lower. Fewer nodes and late
work make honest ones longer, by less than that.

More inner steps at higher rates lead further, as in a warm-up: the bound grows as their stride does
(protocol.run.schedule). What makes all results of a round longer is no lie either: it grows as the median of
several reducers' has. One reducer alone says nothing of others, in however many slices."""

MOST_TIMES_OTHERS = 32.0
"""In a fragment's first round a result is compared with its round's others, by the root of their elements:
rarely used rows and matrices differ by ten."""


def stride_of(rules: Rules, plan: Plan, trained: Mapping[NodeId, Trained]) -> float:
    """How far the inner steps lead that a round's results are of: see Schedule.stride.

    By the part of the steps asked for that most of those have taken who have said it; of two the larger,
    for one may lie. Of several fragments each gathers the steps of as many rounds.
    """
    asked = {a.node_id: a.inner_steps for a in plan.assignments if a.trains}
    parts = [told.inner_steps / asked[n] for n, told in trained.items() if n in asked]
    taken = StepsTaken(
        round=plan.round,
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        asked=tuple(asked.values()),
        part=min(1.0, median_high(parts)) if parts else 1.0,
    )
    num_rounds = min(plan.round, max(1, len(rules.layout.fragment_elements)))
    return rules.schedule.stride(taken, num_rounds=num_rounds)


def norms_after(seen: Sequence[SeenNorms], commit: Commit, stride: float) -> tuple[SeenNorms, ...]:
    """What is remembered once this commit is the newest."""
    before = [each for each in seen if each.round < commit.round]
    slices = tuple(
        SeenNorm(
            start=outcome.start,
            num_elements=outcome.num_elements,
            norm=outcome.norm * outcome.factor / WHOLE,
        )
        for outcome in commit.slices
        if outcome.digest is not None and outcome.norm > 0
    )
    if not slices:
        return tuple(before)
    same = [each for each in before if each.fragment == commit.fragment]
    dropped = set(map(id, same[: max(0, len(same) + 1 - KEPT_COMMITS)]))
    kept = [each for each in before if id(each) not in dropped]
    now = SeenNorms(round=commit.round, fragment=commit.fragment, slices=slices, stride=stride)
    return (*kept, now)


def norms_of(commits: Iterable[tuple[Commit, float]]) -> tuple[SeenNorms, ...]:
    """The same after all of these, oldest first, with their strides."""
    seen: tuple[SeenNorms, ...] = ()
    for commit, stride in commits:
        seen = norms_after(seen, commit, stride)
    return seen


def bounded(
    seen: Sequence[SeenNorms], commit: Commit, stride: float, reducers: Sequence[NodeId]
) -> Commit:
    """The commit with a factor for each result: 1 where it is no longer than results are.

    `reducers` are those of its slices, and `stride` is of the inner steps that led to it.
    """
    before = [each for each in seen if each.fragment == commit.fragment]
    usual = [_usual(outcome, before, stride) for outcome in commit.slices]
    grown: dict[NodeId, list[float]] = {}
    sizes: dict[NodeId, list[float]] = {}
    for outcome, norm, reducer in zip(commit.slices, usual, reducers, strict=True):
        if outcome.digest is not None and outcome.norm > 0:
            sizes.setdefault(reducer, []).append(outcome.norm / math.sqrt(outcome.num_elements))
            if norm:
                grown.setdefault(reducer, []).append(outcome.norm / norm)
    growth = max(1.0, _of_most(grown)) if len(grown) > 1 else 1.0
    others = _of_most(sizes) if sum(map(len, sizes.values())) > 1 else None
    return replace(
        commit,
        slices=tuple(
            replace(outcome, factor=_factor(outcome, norm and norm * growth, others))
            for outcome, norm in zip(commit.slices, usual, strict=True)
        ),
    )


def _of_most(told: Mapping[NodeId, Sequence[float]]) -> float:
    """The median of reducers, of whom each counts once; of two the lower, for one may lie."""
    return median_low([median_low(each) for each in told.values()])


def _usual(outcome: SliceOutcome, before: Sequence[SeenNorms], stride: float) -> float | None:
    """The lower median of what was applied to a slice's elements lately; None: nothing was.

    Each as long as it would be by now, where steps lead further. Where they lead less far, late work is there
    from before, and no bound falls.
    """
    known = [
        norm * (max(1.0, stride / each.stride) if each.stride > 0 else 1.0)
        for each in before
        if (norm := _norm_there(each, outcome)) is not None and norm > 0
    ]
    return median_low(known) if known else None


def _factor(outcome: SliceOutcome, usual: float | None, others: float | None) -> int:
    if outcome.digest is None or outcome.norm == 0:
        return WHOLE
    if usual is not None:
        most = MOST_TIMES_USUAL * usual
    elif others is not None:
        most = MOST_TIMES_OTHERS * others * math.sqrt(outcome.num_elements)
    else:
        return WHOLE
    return WHOLE if outcome.norm <= most else int(most / outcome.norm * WHOLE)


def _norm_there(seen: SeenNorms, outcome: SliceOutcome) -> float | None:
    """What a commit applied to the elements of a slice; None where it applied nothing to most of them.

    Slices are mostly cut as before. Where they are not, a stretch's squares are taken as even in it.
    """
    first, past = outcome.start, outcome.start + outcome.num_elements
    squares, covered = 0.0, 0
    for each in seen.slices:
        shared = min(past, each.start + each.num_elements) - max(first, each.start)
        if shared > 0:
            squares += each.norm**2 * shared / each.num_elements
            covered += shared
    if 2 * covered < outcome.num_elements:
        return None
    return math.sqrt(squares * outcome.num_elements / covered)


def holds_undone(state: SwarmState, member: Member) -> bool:
    """Whether the member holds the state after a round that is undone."""
    return undoes(state.rolled_back, member.outer_round, member.outer_incarnation)


def without(reports: Mapping[NodeId, T], node_id: NodeId) -> dict[NodeId, T]:
    """What all nodes but one have reported."""
    return {other: report for other, report in reports.items() if other != node_id}
