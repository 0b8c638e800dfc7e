"""What a commit counts, and what counts no more once rounds are undone. Pure.

Counted are tokens, in all and per member, work, and samples in the ledger. So is what reducers have left out
of members' contributions: the run owner sees by that whom to expel. So is what rounds cost on the wire,
against averaging gradients at every inner step. Nodes tell with each applied round what their process has
sent and received so far, so a report that is lost or comes twice changes nothing: what counts is how far the
totals have grown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.swarm.events import Turn
from coordinator.swarm.ledger import committed_samples, end_ahead, lease_again, reopen, settle
from coordinator.swarm.members import Member, Screening, Work
from coordinator.swarm.state import SwarmState
from coordinator.swarm.weighing import HALF_LIFE_ROUNDS, KEPT_STRETCHES
from protocol.wire.payload import WireTotals, grown
from protocol.wire.rounds import WHOLE, Commit, NodeId, training_in

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


def without_open_round(state: SwarmState) -> SwarmState:
    """Ends all leases of the round in flight, and those ahead of it."""
    ledger = end_ahead(state.ledger, {a.node_id for a in state.ledger.ahead})
    current = state.open_round
    if current is not None and current.commit is None:
        ledger = settle(ledger, current.assignments, {})
    return replace(state, ledger=ledger, open_round=None, earlier=(), round_wire={})


def without_rounds(state: SwarmState, undone: Sequence[Commit]) -> SwarmState:
    """The state before the first of these, the newest in order, was committed, with nothing leased."""
    state = without_open_round(state)
    for commit in reversed(undone):
        state = unbook(state, commit)
        state = replace(state, ledger=settle(state.ledger, commit.assignments, {}))
    first = undone[0]
    return replace(
        without_evaluations_since(state, first.round),
        committed_round=first.round - 1,
        outer_digest=first.base_digest,
        unsupplied_since=None,
        finished_at=None,
    )


def without_evaluations_since(state: SwarmState, number: int) -> SwarmState:
    """Without what is known and asked of the states after round `number` and later: they are no more."""
    asked = state.evaluating
    return replace(
        state,
        held_out=tuple(loss for loss in state.held_out if loss.round < number),
        held_out_text_from=min(state.held_out_text_from, number),
        differing=None
        if state.differing is not None and state.differing.round >= number
        else state.differing,
        evaluating=asked if asked is not None and asked.round < number else None,
        writing=tuple(one for one in state.writing if one.round < number),
        written=tuple(one for one in state.written if one.round < number),
        end_waits_until=None,
    )


# Confirmed work


def credited(state: SwarmState, commit: Commit) -> Mapping[NodeId, int]:
    """Tokens of confirmed work that a commit brings its contributors; of what was clipped its factor."""
    num_elements = max(1, sum(outcome.num_elements for outcome in commit.slices))
    sums: dict[NodeId, int] = {}
    for outcome in commit.slices:
        factors = outcome.factors or [WHOLE] * len(outcome.contributors)
        for contributor, factor in zip(outcome.contributors, factors, strict=True):
            tokens = contributor.tokens * outcome.num_elements * factor // WHOLE
            sums[contributor.node_id] = sums.get(contributor.node_id, 0) + tokens
    current = state.open_round
    most: dict[NodeId, int] = {}
    if current is not None and current.number == commit.round:
        step_tokens = state.rules.batch * state.rules.context
        most = {n: steps * step_tokens for n, steps in current.credible_steps.items()}
        most |= {
            n: min(trained.tokens, most.get(n, trained.tokens))
            for n, trained in current.trained.items()
        }
    return {n: min(tokens // num_elements, most.get(n, tokens)) for n, tokens in sums.items()}


def earned(work: Work, round_number: int, tokens: int) -> Work:
    """A member's work with what a round brought it."""
    if not tokens:
        return work
    stretch = round_number // HALF_LIFE_ROUNDS
    sums = dict(work.by_stretch)
    sums[stretch] = sums.get(stretch, 0) + tokens
    kept = sorted((s, t) for s, t in sums.items() if t and s > stretch - KEPT_STRETCHES)
    return Work(by_stretch=tuple(kept), newest_round=round_number, newest_tokens=tokens)


def taken_back(work: Work, round_number: int, *, at_most: int = 0) -> Work:
    """The same without what that round brought: exactly, where it is the newest that brought anything.

    Of an earlier one the commit says what it brought at most, in the same stretch.
    """
    tokens = work.newest_tokens if work.newest_round == round_number else at_most
    if not tokens:
        return work
    stretch = round_number // HALF_LIFE_ROUNDS
    sums = ((s, max(0, t - tokens * (s == stretch))) for s, t in work.by_stretch)
    newest = (
        (0, 0) if work.newest_round >= round_number else (work.newest_round, work.newest_tokens)
    )
    return Work(
        by_stretch=tuple((s, t) for s, t in sums if t),
        newest_round=newest[0],
        newest_tokens=newest[1],
    )


def without_rounds_after(work: Work, round_number: int) -> Work:
    """The same once what later rounds brought has been taken from it, and is the newest of it no more."""
    stretch = round_number // HALF_LIFE_ROUNDS
    kept = tuple((s, t) for s, t in work.by_stretch if s <= stretch)
    if work.newest_round > round_number:
        return Work(by_stretch=kept)
    return replace(work, by_stretch=kept)


# Screening, and bytes


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
