"""What an event does to a round as this node knows it: (state, event, now) -> (state, actions, refusal).

This node contributes to every slice, reduces its own, and holds the results for the commit. All that is
decided about it is decided here, and how long it waits: no I/O and no clock. Events that are repeated, late
or of an earlier takeover change nothing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from node.exchange.reduction import Reduction, SliceResult
from node.exchange.round.state import (
    Action,
    Awaited,
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
    refusal,
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


# How long what others bring is waited for: contributions first, then results
#
# The member with the slowest link would never be in time again, nor would one whose work another member
# carries. So it waits a quarter as long again while something of theirs comes, and in any case for those whom
# the plan says to be carried here; and no longer: who only lets it trickle costs others what an honest slow
# link does.
#
# Also who is waited for in full is not waited for to the deadline where less than half are late, and nothing
# of its comes or has come. The first deadlines of a run are the run file's, a hundred times a quick round.
# Once the coordinator says that all have trained, nobody's steps are what is slow. Of honest ones something
# comes soon then, however slow their links. So the wait is less than half as long again as those with most of
# the weight took: what comes later does not move the end, or liars that come one after the other would.

TIMES_OTHERS, LEAST_SECONDS = 1.25, 1.0
"""So long, as a multiple of what the others took, is waited briefly; at least so long after them."""

FULL_TIMES_OTHERS, FULL_LEAST_SECONDS = 4.0, 10.0
"""Likewise for a few of whom nothing comes, in full, while some may still train."""

TRAINED_TIMES_OTHERS, TRAINED_LEAST_SECONDS = 1.4, 4.0
"""Likewise once all have trained, from when most of the others' contributions were here. They encode and
connect in this time."""

SILENT_TIMES_OTHERS, SILENT_LEAST_SECONDS = 1.2, 1.0
"""So long, as a multiple of what most results took, a result of which nothing comes is waited for before this
node says so; at least so long after them. To say it is not to give it up: coordinator.swarm.takeover."""

GRACE_ROUND_TRIPS = 8
"""So long, and Waits.grace_seconds, nothing may come from a reducer that should push a result, until we
fetch it from others.

It began to push before the commit, so only its offer's way counts. In round trips, a connection made anew
is five or six of them and a stream one; in seconds, a lost packet is one, and a router's queue of 1 MB
nearly another at 10 Mbit/s. At 500 ms that is 6 s: fetched sooner, a result would often travel twice. Where
a round trip takes a millisecond it is 2 s, and they are lost only when a reducer that lives and can be
reached pushes nothing."""


def collecting(state: RoundState) -> list[SliceState]:
    """The slices that contributions are waited for; none once the round is decided."""
    slices = state.slices.values() if state.commit is None else ()
    return [known for known in slices if known.phase is Phase.COLLECTING]


def late_for(state: RoundState, known: SliceState) -> frozenset[NodeId]:
    """Whose contributions to a slice are waited for."""
    assigned = {assignment.node_id for assignment in state.plan.assignments}
    return frozenset(assigned - known.contributions.keys() - state.silent)


def collects_until(state: RoundState, known: SliceState) -> float:
    """When the reducer takes the mean of what is here, whatever is late: at the deadline at the latest."""
    late = late_for(state, known)
    awaited = {n: _awaited(state, known, n) for n in late}
    coming = [n for n in late if state.num_coming.get(n)]
    if known.others_at is None or any(awaited[n] is not Awaited.NOT for n in coming):
        return known.deadline
    took = (known.others_at - known.begun_at) * _times_as_many_steps(state, known, late)
    if Awaited.FULLY in awaited.values():
        if 2 * len(late) >= state.plan.num_training:
            return known.deadline
        took = _took_in_full(state, known, took)
    elif Awaited.BRIEFLY in awaited.values() or coming or not late.isdisjoint(state.carried_from):
        took = max(TIMES_OTHERS * took, took + LEAST_SECONDS)
    # A node's next contribution begins a little after the one before.
    came = [
        state.came_at[n] + state.rules.waits.grace_seconds
        for n, each in awaited.items()
        if each is not Awaited.NOT and n in state.came_at
    ]
    return min(known.deadline, max([known.begun_at + took, *came]))


def _took_in_full(state: RoundState, known: SliceState, others_took: float) -> float:
    """How long after its beginning a slice waits in full for a few of whom nothing comes."""
    took = max(FULL_TIMES_OTHERS * others_took, others_took + FULL_LEAST_SECONDS)
    if state.training_ended_at is None or known.most_at is None:
        return took
    most_took = known.most_at - known.begun_at
    more = max((TRAINED_TIMES_OTHERS - 1) * most_took, TRAINED_LEAST_SECONDS)
    since = max(known.most_at, state.training_ended_at)
    return min(took, since + more - known.begun_at)


def _times_as_many_steps(state: RoundState, known: SliceState, late: Collection[NodeId]) -> float:
    """What the plan asks of those that are late, over what it asks of those that are here; 1 at least.

    A member that checks others' work is asked for fewer steps, and is here sooner.
    """
    steps = {a.node_id: a.inner_steps for a in state.plan.assignments}
    here = (steps.get(n, 0) for n in known.contributions if n not in state.awaited)
    most_here = max(here, default=0)
    most_late = max((steps.get(n, 0) for n in late), default=0)
    return max(1.0, most_late / most_here) if most_here else 1.0


def _awaited(state: RoundState, known: SliceState, node_id: NodeId) -> Awaited:
    """How long somebody is waited for; not once more where a slice that others reduced comes to this node."""
    is_given_up = known.attempt > 0 and node_id in state.given_up
    if is_given_up and not state.num_coming.get(node_id):
        return Awaited.NOT
    return state.awaited.get(node_id, Awaited.FULLY)


def silent_times(state: RoundState) -> Mapping[int, float]:
    """From when nothing comes of each result that others should bring, for longer than most took."""
    most_at = state.most_held_at
    if most_at is None or state.commit is not None:
        return {}
    begun_at = min(known.begun_at for known in state.slices.values())
    more = max((SILENT_TIMES_OTHERS - 1) * (most_at - begun_at), SILENT_LEAST_SECONDS)
    ours = state.rules.node_id
    bringing = {known.part.reducer_id for known in state.slices.values() if known.num_arriving}
    times = {}
    for index, known in state.slices.items():
        reducer = known.part.reducer_id
        if known.held is None and reducer not in {ours, *bringing}:
            since = max(most_at, known.begun_at, state.push_ended_at.get(reducer, 0.0))
            is_missed = reducer in state.given_up  # it has been waited for in this round
            times[index] = since + (SILENT_LEAST_SECONDS if is_missed else more)
    return times


def due_times(state: RoundState) -> Mapping[int, float]:
    """From when each missing result that nobody was asked for is fetched, by its slice's index."""
    patient_until = math.inf
    if state.commit is not None:
        patient_until = state.committed_at + state.patience_seconds
    return {
        known.part.index: min(_due_at(state, known), patient_until)
        for known in state.missing
        if not known.is_fetched
    }


def _due_at(state: RoundState, known: SliceState) -> float:
    """Until when a missing result is left to its reducer; an offered one is not, unless it does come.

    A push that breaks off is not repeated once the reducer knows of the commit. What goes to one
    peer goes in order: while one result of a reducer arrives, the next one waits behind it.
    """
    if known.num_arriving:
        return math.inf
    if state.commit is None:
        return 0.0
    reducer = known.part.reducer_id
    if reducer in state.departed | state.links.unreachable or known.is_broken:
        return state.committed_at
    if any(o.num_arriving and o.part.reducer_id == reducer for o in state.slices.values()):
        return math.inf
    round_trip_seconds = state.links.round_trip_seconds.get(reducer, 0.0)
    grace_seconds = state.rules.waits.grace_seconds + GRACE_ROUND_TRIPS * round_trip_seconds
    return max(state.committed_at, state.push_ended_at.get(reducer, 0.0)) + grace_seconds


def wakes_at(state: RoundState, now: float) -> float | None:
    """When time alone would do something next; None: never."""
    times = [collects_until(state, known) for known in collecting(state)]
    times += [at for at in due_times(state).values() if at < math.inf]
    times += [at for at in silent_times(state).values() if at > now]
    return min(times, default=None)


def waiting_for(state: RoundState) -> str:
    """What the exchange waits for, in words; empty when for nothing."""
    if state.commit is not None:
        missing = [known.part.index for known in state.missing]
        if len(missing) > 1:
            return f"results of {len(missing)} slices of round {state.plan.round}"
        return "".join(f"the result of slice {i} of round {state.plan.round}" for i in missing)
    nodes = {node_id for known in collecting(state) for node_id in late_for(state, known)}
    if len(nodes) < 2:
        return "one contribution" if nodes else ""
    return f"contributions of {len(nodes)} nodes"
