"""What participants report of a round: trained, reduced, held, or why not; and what reducers keep. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.swarm.events import LeftOutProven, RefusalSeen, Tell, Turn
from coordinator.swarm.members import KeptError, Refusal
from coordinator.swarm.penalties import convict, strike
from coordinator.swarm.retraction import go_back_before
from coordinator.swarm.shares import device_of, measured
from coordinator.swarm.state import (
    Round,
    RoundPhase,
    SliceProgress,
    SwarmState,
    as_set,
    assignments_of,
    in_exchange,
    is_present,
    name_of,
    others_in,
)
from coordinator.swarm.takeover import offer_to_deceived
from coordinator.swarm.weighing import deciders, is_enough, say_in
from protocol.wire.messages import Held, ParticipantsIdle, Reduced, ResultsSilent, Trained
from protocol.wire.rounds import (
    Assignment,
    Commit,
    Contributor,
    Digest,
    NodeId,
    Result,
    same_fields,
)


def training_done(turn: Turn, node_id: NodeId, round: int, report: Trained) -> None:
    """Remembers a participant's first report of its training; impossible ones are ignored.

    How fast it was decides how many inner steps the next plans ask of it.
    """
    current = in_exchange(turn.state, round, node_id)
    if current is None or node_id in current.trained:
        return
    asked = assignments_of(current)[node_id]
    if not asked.trains or not _is_possible(report, asked, turn.state.rules.context):
        return  # a helper says by its results that it is there
    if report.inner_steps > asked.inner_steps:
        return
    member = turn.state.members[node_id]
    is_ahead = turn.state.rules.has_overlap  # then it may have begun before the plan
    found = measured(
        member.inner_steps_per_second,
        report,
        seen_seconds=0.0 if is_ahead else turn.now - current.opened_at,
        usual=current.usual_speeds.get(device_of(member)),
    )
    turn.put_member(replace(member, inner_steps_per_second=found.speed))
    if found.credible_steps < report.inner_steps:
        credible = {**current.credible_steps, node_id: found.credible_steps}
        current = replace(current, credible_steps=credible)
    trained = {**current.trained, node_id: report}
    trained_at = {**current.trained_at, node_id: turn.now}
    turn.put_round(
        replace(current, trained=trained, trained_at=trained_at, phase=RoundPhase.EXCHANGING)
    )
    if report.tokens == 0:
        idle = ParticipantsIdle(round=current.number, node_ids=(node_id,))
        turn.act(Tell(message=idle, to=others_in(current, (node_id,))))


def slice_reduced(turn: Turn, node_id: NodeId, round: int, report: Reduced) -> None:
    """Fixes a slice's digest or that it is empty: the first valid report of its reducer counts.

    The reducer holds what it has encoded, so the report counts as its Held too. A report with contributors
    who did not take part, with more samples than they were leased or more tokens than these have, or without
    saying which bytes each of them contributed, leaves the slice open.
    """
    current = in_exchange(turn.state, round, node_id)
    if current is None or not 0 <= report.slice_index < len(current.slices):
        return
    progress = current.slices[report.slice_index]
    if progress.slice.reducer_id != node_id:
        return
    is_news = False
    if not progress.is_empty and progress.digest is None:
        if report.digest is None:
            current = replace(current, reduced_at=turn.now)
            turn.put_slice(current, replace(progress, is_empty=True))
            return
        if not _is_valid(report, current, turn.state.rules.context):
            return
        report = report.in_order
        progress = replace(
            progress,
            **same_fields(report, Result),
            reduced_at=turn.now,
            reduced=report if turn.state.rules.audited_share else None,
        )
        is_news = True
        current = replace(current, reduced_at=turn.now)
    if report.digest is not None and report.digest == progress.digest:
        held = _with_held(current.held, node_id, {report.slice_index: report.digest})
        turn.put_slice(replace(current, held=held), progress)
        if is_news:
            refuse_untraced(turn, report.slice_index)
            refusing = (refusal.node_id for refusal in progress.refusals)
            offer_to_deceived(turn, report.slice_index, {*current.held, *refusing})


def _is_valid(report: Reduced, current: Round, context: int) -> bool:
    """Whether a result of this round can be of what its reducer says."""
    asked, num_told = assignments_of(current), len(report.contributors)
    named = {contributor.node_id for contributor in report.contributors}
    return (
        num_told > 0
        and len(named) == num_told
        and len(report.contributions) == num_told
        and len(report.factors) in (0, num_told)
        and named.isdisjoint(report.late)
        and all(_is_possible(c, asked.get(c.node_id), context) for c in report.contributors)
    )


def _is_possible(told: Trained | Contributor, asked: Assignment | None, context: int) -> bool:
    """Whether a participant can have used up so many samples, and found so many tokens in them."""
    return (
        asked is not None
        and 0 <= told.samples <= asked.num_samples
        and 0 <= told.tokens <= told.samples * context
    )


def results_held(turn: Turn, node_id: NodeId, told: Sequence[tuple[int, Held]]) -> None:
    """Remembers what a participant holds, by round; it may come before the reducer's own report.

    After the commit as well: who holds a result then can supply it to others.
    """
    current = turn.state.open_round
    if current is None or node_id not in assignments_of(current):
        return
    reports = {
        report.slice_index: report
        for round, report in told
        if round == current.number and 0 <= report.slice_index < len(current.slices)
    }
    news = {index: report.digest for index, report in reports.items()}
    if news and is_present(turn.state, node_id):
        turn.put_round(
            replace(
                current,
                held=_with_held(current.held, node_id, news),
                agreements=_with_agreements(current.agreements, node_id, reports),
            )
        )
        if current.phase is not RoundPhase.APPLYING:
            before = current.held.get(node_id, {})
            for index in (index for index, digest in news.items() if before.get(index) != digest):
                offer_to_deceived(turn, index, (node_id,))


def _with_held(
    held: Mapping[NodeId, Mapping[int, Digest]], node_id: NodeId, news: Mapping[int, Digest]
) -> Mapping[NodeId, Mapping[int, Digest]]:
    return {**held, node_id: {**held.get(node_id, {}), **news}}


def _with_agreements(
    before: Mapping[NodeId, Mapping[int, float]], node_id: NodeId, reports: Mapping[int, Held]
) -> Mapping[NodeId, Mapping[int, float]]:
    """What was told of other results of these slices holds no more."""
    own = before.get(node_id, {})
    told = {i: r.agreement for i, r in reports.items() if r.agreement is not None}
    if not told and own.keys().isdisjoint(reports):
        return before
    kept = {index: agreement for index, agreement in own.items() if index not in reports}
    return {**before, node_id: kept | told}


def left_out(turn: Turn, event: LeftOutProven) -> None:
    """A reducer has left out a contribution that it gave a receipt for; heard until its round is settled."""
    omission, current = event.omission, turn.state.open_round
    if current is None or current.number != omission.round:
        return
    progress = current.slices[omission.slice_index]
    place = progress.slice.reducer_id, progress.digest
    is_known = any(c.node_id == omission.reducer_id for c in turn.state.convicted)
    if place != (omission.reducer_id, omission.result) or progress.refused or is_known:
        return
    name, left = (name_of(turn.state, n) for n in (omission.reducer_id, omission.contributor_id))
    reason = (
        f"it left {left} out of slice {omission.slice_index} of round {omission.round}, whose "
        f"contribution it had signed a receipt for"
    )
    convict(turn, omission.reducer_id, reason, event.evidence)
    commit, index = current.commit, omission.slice_index
    if commit is not None and commit.slices[index].digest is not None:
        go_back_before(turn, omission.round, f"{name} is convicted: {reason}", event.evidence)
    elif commit is None:
        turn.put_slice(current, replace(progress, refused=f"{name} is convicted: {reason}"))


def refusal_seen(turn: Turn, event: RefusalSeen) -> None:
    """Remembers who has signed that the result of a slice's reducer does not decode: of each the latest.

    It may come before the reducer's own report, and of another result than that: then it was lied to.
    """
    told, member_id, index = event.refused, event.node_id, event.refused.slice_index
    current = in_exchange(turn.state, told.round, member_id)
    if current is None or not 0 <= index < len(current.slices):
        return
    progress = current.slices[index]
    if event.result.sender_id != progress.slice.reducer_id or member_id == event.result.sender_id:
        return
    before = {refusal.node_id: refusal for refusal in progress.refusals}
    known = before.get(member_id)
    if known is not None and known.refused.digest in (progress.digest, told.digest):
        return
    before[member_id] = Refusal(node_id=member_id, refused=told)
    after = tuple(before[node_id] for node_id in sorted(before))
    turn.put_slice(current, replace(progress, refusals=after))
    offer_to_deceived(turn, index, (member_id,))


def note_most_held(turn: Turn, node_id: NodeId) -> None:
    """Remembers since when members that decide hold more than half of the results, each of them.

    The node has just said what it holds.
    """
    state, current = turn.state, turn.state.uncommitted_round
    if current is None or current.most_held_at is not None:
        return
    half = len(current.slices) / 2
    if len(current.held.get(node_id, ())) <= half:
        return
    among = deciders(state, current, is_late=False)
    holding = [n for n, results in current.held.items() if len(results) > half]
    here = as_set(among).intersection(holding)
    if is_enough(say_in(state, current, among), here, among):
        turn.put_round(replace(current, most_held_at=turn.now))


def results_silent(turn: Turn, node_id: NodeId, round: int, report: ResultsSilent) -> None:
    """Remembers of which results nothing comes to a participant."""
    current = in_exchange(turn.state, round, node_id)
    if current is None:
        return
    silent = tuple(sorted({i for i in report.slice_indexes if i < len(current.slices)}))
    if silent != current.silent.get(node_id, ()):
        told = {**current.silent, node_id: silent}
        turn.put_round(replace(current, silent=told, silent_at=turn.now))


# What reducers keep: the error that one adds must be what a committed result of its own has left.

UNKNOWN_ROUNDS = 64
"""For so many rounds after history was taken back or learnt, reducers may keep what is not known here."""


def refuse_untraced(turn: Turn, index: int) -> None:
    """Refuses a result that was just reported if it has in it what no committed result has left."""
    state, current = turn.state, turn.current
    progress = current.slices[index]
    if progress.reduced is None or not (why := _untraced(state, current, progress)):
        return
    turn.put_slice(current, replace(progress, refused=why))
    strike(turn, progress.slice.reducer_id)


def errors_after(state: SwarmState, current: Round, commit: Commit) -> tuple[KeptError, ...]:
    """What reducers keep once a commit is settled: of each slice that it took, what its result left."""
    errors = list(state.errors)
    for progress, outcome in zip(current.slices, commit.slices, strict=True):
        if outcome.digest is None or progress.reduced is None:
            continue
        part = progress.slice
        first, past = part.start, part.start + part.num_elements
        errors = [
            e
            for e in errors
            if (e.reducer_id, e.fragment) != (part.reducer_id, current.fragment)
            or e.start >= past
            or e.start + e.num_elements <= first
        ]
        if progress.reduced.error_after:
            kept = KeptError(
                reducer_id=part.reducer_id,
                fragment=current.fragment,
                start=part.start,
                num_elements=part.num_elements,
                digest=progress.reduced.error_after,
            )
            errors.append(kept)
    return tuple(errors)


def forget_errors(state: SwarmState) -> SwarmState:
    """The state after history was taken back, or learnt from a node: who keeps what shows again."""
    return replace(
        state,
        errors=(),
        errors_unknown_until=state.committed_round + UNKNOWN_ROUNDS,
        errors_incarnation=state.incarnation,
    )


def _untraced(state: SwarmState, current: Round, progress: SliceProgress) -> str:
    """Why the error that a reducer adds is none that a committed result has left; empty when it is one."""
    told = progress.reduced
    assert told is not None
    if not told.error_before or state.errors_incarnation != state.incarnation:
        return ""  # after history was taken back, what is known here is of undone rounds
    part = progress.slice
    place = part.reducer_id, current.fragment, part.start, part.num_elements
    for error in state.errors:
        if (error.reducer_id, error.fragment, error.start, error.num_elements) == place:
            return "" if error.digest == told.error_before else _UNTRACED
    return "" if current.number <= state.errors_unknown_until else _UNTRACED


_UNTRACED = "its reducer adds an error that no committed result of its own has left"
