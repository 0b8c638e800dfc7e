"""What an event does to a round as this node knows it: (state, event, now) -> (state, actions, refusal).

This node contributes to every slice, reduces its own, and holds the results for the commit. All that is
decided about it is decided here: no I/O, no clock and no waiting. Events that are repeated, late or of
an earlier takeover change nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from node.exchange.reduction import Reduction, SliceResult
from node.exchange.round.admission import refusal
from node.exchange.round.state import (
    Action,
    Closed,
    Committed,
    ContributionBegan,
    ContributionEncoded,
    ContributionEnded,
    Drop,
    Event,
    Fetch,
    FetchEnded,
    Hold,
    MeanTaken,
    PayloadCame,
    Phase,
    PushBegan,
    PushEnded,
    ReceiptCame,
    Reduce,
    ResultFetched,
    ResultUndecodable,
    RoundState,
    Send,
    SliceState,
    Tell,
    TimePassed,
)
from node.exchange.round.waiting import (
    collecting,
    collects_until,
    due_times,
    late_for,
    silent_times,
    wakes_at,
)
from protocol.wire.findings import LeftOutSeen, ResultRefused
from protocol.wire.messages import (
    Held,
    ParticipantsDeparted,
    ParticipantsIdle,
    Reduced,
    ResultOffered,
    ResultsSilent,
    SliceTakenOver,
    TrainingEnded,
)
from protocol.wire.payload import CONTRIBUTION, RESULT, Payload, PayloadHeader
from protocol.wire.rounds import WHOLE, NodeId, SliceOutcome, contribution_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What an event led to: the state, what the edge does in this order, and why a payload is not taken."""

    state: RoundState
    actions: tuple[Action, ...]
    wake_at: float | None = None  # when time alone would do something next; None: never
    refusal: str = ""  # of the payload that came


def step(state: RoundState, event: Event, now: float) -> Transition:
    """What `event` does at `now`, which is never less than before."""
    turn = _Turn(state=state, now=now)
    why = ""
    if isinstance(event, PayloadCame):
        header, admitted_in = event.payload.header, event.admitted_in
        why = refusal(state.rules, state, event.sender, header, admitted_in=admitted_in)
    if state.is_closed:
        return Transition(state=state, actions=(), refusal=why)
    if isinstance(event, Closed):
        # Bodies leave the memory; what is being pushed goes on its way.
        return Transition(state=replace(state, is_closed=True, slices={}), actions=())
    if not why:
        _take_in(turn, event)
    _reduce_what_is_here(turn)
    _fetch_what_is_due(turn)
    _tell_what_is_silent(turn)
    wake_at = wakes_at(turn.state, now)
    return Transition(state=turn.state, actions=tuple(turn.actions), wake_at=wake_at, refusal=why)


def is_wanted(state: RoundState, send: Send) -> bool:
    """Whether a payload is still to be sent: its slice has not been taken over, and the peer is here.

    Once the round is committed, who lacks a result fetches it.
    """
    known = state.slices.get(send.payload.header.slice_index)
    is_present = send.peer not in state.departed
    return known is not None and known.attempt == send.attempt and is_present


def is_complete(state: RoundState) -> bool:
    """Whether all that will come of the committed results is here; what nobody delivers is missing."""
    missing = state.missing
    return not missing or (all(known.is_fetched for known in missing) and not state.num_fetches)


@dataclass(slots=True, kw_only=True)
class _Turn:
    """The state as it changes, and the actions so far."""

    state: RoundState
    now: float
    actions: list[Action] = field(default_factory=list)

    def put(self, index: int, **changes: Any) -> None:
        changed = replace(self.state.slices[index], **changes)
        self.state = replace(self.state, slices={**self.state.slices, index: changed})


def _take_in(turn: _Turn, event: Event) -> None:
    match event:
        case ContributionEncoded(payload=payload):
            if turn.state.slices[payload.header.slice_index].own is None:
                turn.put(payload.header.slice_index, own=payload)
                _contribute(turn, payload.header.slice_index)
        case ReceiptCame(index=index, attempt=attempt, receipt=receipt):
            if turn.state.slices[index].attempt == attempt:
                turn.put(index, receipt=receipt)
                _tell_if_left_out(turn, index)
        case PayloadCame(payload=payload) if payload.header.kind == CONTRIBUTION:
            _keep(turn, payload)
        case PayloadCame(payload=payload) if payload.header.kind == RESULT:
            if turn.state.slices[payload.header.slice_index].held is None:
                _hold(turn, payload, agreement=event.agreement)
        case ContributionBegan(sender=sender):
            _note_coming(turn, sender, 1)
        case ContributionEnded(sender=sender):
            came_at = {**turn.state.came_at, sender: turn.now}
            turn.state = replace(turn.state, came_at=came_at)
            _note_coming(turn, sender, -1)
        case PushBegan(index=index):
            num_arriving = turn.state.slices[index].num_arriving + 1
            turn.put(index, num_arriving=num_arriving, is_broken=False)
        case PushEnded():
            _push_ended(turn, event)
        case MeanTaken():
            _hand_out(turn, event)
        case ResultUndecodable(header=header):
            _refuse(turn, header)
        case ResultFetched(payload=payload):
            known = turn.state.slices[payload.header.slice_index]
            if known.wanted and known.wanted.digest == payload.digest and known.is_missing:
                _hold(turn, payload, agreement=event.agreement)
        case FetchEnded(is_committed=is_committed):
            turn.state = replace(turn.state, num_fetches=turn.state.num_fetches - is_committed)
        case ParticipantsDeparted() | ParticipantsIdle():
            _excuse(turn, event)
        case TrainingEnded():
            if turn.state.training_ended_at is None:
                turn.state = replace(turn.state, training_ended_at=turn.now)
        case SliceTakenOver():
            _take_over(turn, event)
        case ResultOffered():
            _note_offer(turn, event)
        case Committed():
            _commit(turn, event)
        case TimePassed(links=links):
            turn.state = replace(turn.state, links=links)


# Contributions


def _contribute(turn: _Turn, index: int) -> None:
    """Brings our contribution to who reduces the slice now; nothing before it is encoded."""
    known = turn.state.slices[index]
    if known.own is None:
        return
    reducer = known.part.reducer_id
    if reducer == turn.state.rules.node_id:
        _keep(turn, known.own)
    elif reducer not in turn.state.departed:
        send = Send(peer=reducer, payload=known.own, attempt=known.attempt, until=known.deadline)
        turn.actions.append(send)


def _keep(turn: _Turn, payload: Payload) -> None:
    """Takes a contribution for the mean; one that comes too late is left to its sender's residual."""
    header = payload.header
    known = turn.state.slices[header.slice_index]
    if known.phase is Phase.COLLECTING:
        contributions = {header.sender_id: payload, **known.contributions}  # the first one counts
        is_less_awaited = header.sender_id in turn.state.awaited
        others_at = known.others_at if is_less_awaited else turn.now
        most_at = known.most_at
        if most_at is None and _are_most(turn.state, contributions):
            most_at = turn.now
        turn.put(
            header.slice_index, contributions=contributions, others_at=others_at, most_at=most_at
        )


def _are_most(state: RoundState, node_ids: Collection[NodeId]) -> bool:
    """Whether those have more than half of the plan's votes; of its members, while none has any."""
    plan = state.plan
    if not plan.votes:
        return 2 * len(node_ids) > plan.num_training
    of_each = zip(plan.assignments, plan.votes, strict=True)
    return 2 * sum(votes for a, votes in of_each if a.node_id in node_ids) > WHOLE


def _note_coming(turn: _Turn, sender: NodeId, more: int) -> None:
    num_coming = {**turn.state.num_coming}
    num_coming[sender] = num_coming.get(sender, 0) + more
    turn.state = replace(turn.state, num_coming=num_coming)


def _excuse(turn: _Turn, event: ParticipantsDeparted | ParticipantsIdle) -> None:
    """Waits for no contribution of these any longer; what has come of them counts."""
    is_gone = isinstance(event, ParticipantsDeparted)
    departed = turn.state.departed.union(event.node_ids if is_gone else ())
    silent = turn.state.silent.union(event.node_ids)
    turn.state = replace(turn.state, departed=departed, silent=silent)


def _take_over(turn: _Turn, event: SliceTakenOver) -> None:
    """Another node reduces a slice from now on, or the same one anew: it is sent our contribution."""
    index, rules = event.slice_index, turn.state.rules
    known = turn.state.slices.get(index)
    if known is None or event.attempt <= known.attempt:
        return
    is_ours = event.reducer_id == rules.node_id
    deadline = turn.now + event.contribute_seconds
    goes_on = is_ours and known.phase is Phase.COLLECTING  # what has come to it counts
    changed = SliceState(
        part=replace(known.part, reducer_id=event.reducer_id),
        attempt=event.attempt,
        phase=Phase.COLLECTING if is_ours else Phase.ELSEWHERE,
        deadline=max(deadline, known.deadline) if goes_on else deadline,
        begun_at=known.begun_at if goes_on else turn.now,
        others_at=known.others_at if goes_on else None,
        most_at=known.most_at if goes_on else None,
        own=known.own,
        contributions=known.contributions if goes_on else {},
    )
    turn.state = replace(
        turn.state,
        slices={**turn.state.slices, index: changed},
        departed=turn.state.departed - {event.reducer_id},  # if it was gone, it is back
    )
    if known.held is not None:
        turn.actions.append(Drop(index=index))
    _contribute(turn, index)


# Means


def _reduce_what_is_here(turn: _Turn) -> None:
    """Takes the mean of each slice of ours of which all is here, or whose time has passed."""
    while True:  # whom one slice gives up, another one does not wait for
        for known in collecting(turn.state):
            late = late_for(turn.state, known)
            if not late or turn.now >= collects_until(turn.state, known):
                _reduce(turn, known, late)
                break
        else:
            return


def _reduce(turn: _Turn, known: SliceState, late: frozenset[NodeId]) -> None:
    turn.put(known.part.index, phase=Phase.AVERAGING)
    plan, rules = turn.state.plan, turn.state.rules
    if turn.now < known.deadline and 2 * len(late) < plan.num_training:
        given_up = turn.state.given_up | (late - {rules.node_id})
        turn.state = replace(turn.state, given_up=given_up)
    reduction = Reduction(
        plan=plan,
        slice=known.part,
        contributions=known.contributions,
        late=late,
        uplink=rules.uplink,
        context=rules.context,
        attempt=known.attempt,
    )
    turn.actions.append(Reduce(reduction=reduction, attempt=known.attempt))


def _hand_out(turn: _Turn, event: MeanTaken) -> None:
    """A result of ours is held, reported and sent to all.

    Unless another node reduces the slice now, or an earlier process of this node has made its result.
    """
    known = turn.state.slices[event.index]
    if known.attempt != event.attempt or known.phase is not Phase.AVERAGING:
        return
    if known.held is not None or turn.state.commit is not None:
        return
    turn.put(event.index, phase=Phase.REDUCED)
    made = event.result
    if made is None:
        nothing = Reduced(slice_index=event.index, digest=None, contributors=(), contributions=())
        turn.actions.append(Tell(report=nothing))
        return
    turn.actions.append(Tell(report=made.report))
    _hold(turn, made.payload, made=made)
    until = turn.state.commit_deadline + turn.state.patience_seconds  # then nobody waits for a push
    turn.actions += [
        Send(peer=peer, payload=made.payload, attempt=known.attempt, until=until)
        for peer in turn.state.plan.participants
        if peer != turn.state.rules.node_id and peer not in turn.state.departed
    ]


# Results


def _hold(
    turn: _Turn,
    payload: Payload,
    *,
    made: SliceResult | None = None,
    agreement: float | None = None,
) -> None:
    index = payload.header.slice_index
    turn.put(index, held=payload)
    num_held = sum(known.held is not None for known in turn.state.slices.values())
    if turn.state.most_held_at is None and 2 * num_held > len(turn.state.slices):
        turn.state = replace(turn.state, most_held_at=turn.now)
    turn.actions.append(Hold(payload=payload, made=made))
    held = Held(slice_index=index, digest=payload.digest, agreement=agreement)
    turn.actions.append(Tell(report=held))


def _refuse(turn: _Turn, header: PayloadHeader) -> None:
    """Tells of a result of the slice's reducer that does not decode; its bytes are not taken again."""
    known = turn.state.slices.get(header.slice_index)
    if known is None or known.part.reducer_id != header.sender_id or known.refused == header:
        return
    turn.put(header.slice_index, refused=header)
    refused = ResultRefused(
        slice_index=header.slice_index, digest=header.digest, header=header.encode()
    )
    turn.actions.append(Tell(report=refused))


def _push_ended(turn: _Turn, event: PushEnded) -> None:
    known, ended_at = turn.state.slices[event.index], turn.state.push_ended_at
    turn.state = replace(turn.state, push_ended_at={**ended_at, event.sender: turn.now})
    if event.attempt == known.attempt:
        turn.put(event.index, num_arriving=known.num_arriving - 1, is_broken=known.held is None)


def _note_offer(turn: _Turn, event: ResultOffered) -> None:
    """Wants a result that its reducer did not hand out, and that is with these holders."""
    known = turn.state.slices.get(event.slice_index)
    if known is not None and turn.state.commit is None:
        offered = SliceOutcome(
            index=event.slice_index,
            start=known.part.start,
            num_elements=known.part.num_elements,
            digest=event.digest,
            holder_ids=tuple(n for n in event.holder_ids if n != turn.state.rules.node_id),
        )
        turn.put(event.slice_index, wanted=offered, is_fetched=False)


def _commit(turn: _Turn, event: Committed) -> None:
    """Wants the committed results. Of slices of another plan they are for the catch-up."""
    turn.state = replace(turn.state, commit=event.commit, committed_at=turn.now, links=event.links)
    for outcome in event.commit.slices:
        if outcome.index in turn.state.slices:
            turn.put(outcome.index, wanted=outcome, is_fetched=False)
            _tell_if_left_out(turn, outcome.index)


def _tell_if_left_out(turn: _Turn, index: int) -> None:
    """Shows a reducer's receipt for a contribution that its committed result does not name."""
    known, commit = turn.state.slices[index], turn.state.commit
    if commit is None or known.own is None or not known.receipt or known.wanted is None:
        return
    sent = contribution_digest(known.own.header.body_digest)
    named = known.wanted.contribution_of(turn.state.rules.node_id)
    if known.wanted.digest is not None and named != sent:
        turn.actions.append(Tell(report=LeftOutSeen(receipt=known.receipt)))


def _fetch_what_is_due(turn: _Turn) -> None:
    """Fetches the missing results that are not worth waiting for any longer.

    Links differ by a thousand: what arrives is waited for as long as it does, for fetching would send its
    bytes once more over the link that is slow. A push that stalls is broken off by the transport, and one
    that takes longer than the patience has a donor beside it.
    """
    due = {index for index, at in due_times(turn.state).items() if at <= turn.now}
    outcomes = tuple(k.wanted for i, k in turn.state.slices.items() if i in due and k.wanted)
    for index in due:
        turn.put(index, is_fetched=True)
    if turn.state.commit is None:
        turn.actions += [Fetch(outcomes=(each,), is_committed=False) for each in outcomes]
    elif outcomes:
        turn.actions.append(Fetch(outcomes=outcomes, is_committed=True))
        turn.state = replace(turn.state, num_fetches=turn.state.num_fetches + 1)


def _tell_what_is_silent(turn: _Turn) -> None:
    """Says of which results nothing comes, and when that changes."""
    times = silent_times(turn.state)
    silent = tuple(sorted(index for index, at in times.items() if at <= turn.now))
    if silent != turn.state.silent_slices and turn.state.commit is None:
        turn.state = replace(turn.state, silent_slices=silent)
        turn.actions.append(Tell(report=ResultsSilent(slice_indexes=silent)))
