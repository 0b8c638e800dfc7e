"""What becomes of slices whose reducers are gone, or hand out nothing of use, and which of these rest. Pure.

A result that was made is passed on by who holds it. Otherwise a backup reduces the slice, while the
others still hold their contributions. A reducer that has not reported a while after it should have
reduced counts as gone as well: it may be dead and its lease not over yet, or stalled, or cut off.

A result does not decode when members with as much weight as a commit needs have signed that. Each of them
has the bytes, which their reducer has signed. So that one is convicted, and its slice has a backup at once.
Fewer change nothing, but that no slice is waited for of which everybody has said what it found.

A few slices that are stuck while the others' results reach most are not waited for to a deadline of hours.
They are others' for this round, by what is known of them:

- Its result is made, and those who decide say that nothing of it comes to them. However slow its link is,
  something does: so its reducer keeps it, or has lost its way to the others, and rests.
- Its result is made and comes, or nobody says anything. It may be a slow link, and is waited for much longer;
  less long where results of the reducer were given up lately. Then it rests too.
- No result is made. Its reducer may wait for somebody's slow link, so it does not rest. When that happens
  again soon its slices are others' almost at once: else one that makes none lengthened each round.

Reducers give up contributions sooner than that (node.exchange.round.transition).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import PRESENT, Member, MemberState
from coordinator.swarm.penalties import convict, is_void_again, may_reduce, note_unmade, rest
from coordinator.swarm.reach import best_reducers, cut_off_from, newcomers
from coordinator.swarm.standing import late_helper
from coordinator.swarm.state import (
    Round,
    SliceProgress,
    SwarmState,
    as_set,
    is_present,
    name_of,
    others_in,
    present_participants,
    remembered,
)
from coordinator.swarm.weighing import (
    deciders,
    holders_of,
    is_enough,
    is_held_by_enough,
    refusers_of,
    say_in,
)
from protocol.trust.evidence import of_refusals
from protocol.wire.messages import ResultOffered, SliceTakenOver
from protocol.wire.rounds import NodeId

LEAST_SECONDS = 1.0
"""With less time before the commit deadline no backup could collect, reduce and hand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long a slice may keep a round from its end, by what it took until most results had reached most."""

    times: float  # as long as that
    least_seconds: float  # or so much longer than that

    def in_all(self, took: float) -> float:
        """Seconds since the round was opened."""
        return max(self.times * took, took + self.least_seconds)

    def beyond(self, took: float) -> float:
        """Seconds since most results had reached those who decide."""
        return max((self.times - 1) * took, self.least_seconds)


SLOW = Wait(times=5.0, least_seconds=30.0)
"""For results that are made, and may come over a slow link; and for all while most have not reached those
who decide. Then the slices that too few hold are given to others, where they are less than half."""

SILENT = Wait(times=1.25, least_seconds=2.0)
"""For results of which nothing comes, or whose reducers had some given up lately. From when it is made each
has the part beyond 1 at least."""

UNMADE = Wait(times=1.45, least_seconds=4.5)
"""For results that are not made. A reducer that itself waits for somebody of whom nothing comes has made its
own by then (node.exchange.round.transition)."""

UNMADE_AGAIN, UNMADE_ROUNDS = Wait(times=1.1, least_seconds=1.0), 16
"""Where others had to make a slice of the reducer in one of so many rounds before. And where most results
lack its work: it has been waited for already."""

STUCK_AGAIN = 1.5
"""So many times as long it takes until it is looked again."""


def take_over(turn: Turn) -> None:
    """Gives slices without a reducer to another participant, or offers their results."""
    if turn.state.uncommitted_round is None:
        return
    _convict_of_nonsense(turn)
    _give_up_a_few(turn)
    current = turn.current
    staying = _staying(turn.state, current, at_most=2)
    for progress in current.slices:
        overdue_at = _overdue_at(current, progress, staying)
        is_overdue = overdue_at is not None and turn.now >= overdue_at
        is_in_hands = _has_reducer(turn.state, current, progress)
        if is_in_hands and not is_overdue and not _is_for_a_helper(turn.state, current, progress):
            continue
        if is_overdue:
            late_helper(turn, progress.slice.reducer_id, current.number)
        if holders := holders_of(turn.state, current, progress):
            _offer(turn, progress, holders)
        elif is_overdue or not _is_its_own_backup(turn.state, current, progress):
            _hand_over(turn, progress)
        current = turn.current


def _convict_of_nonsense(turn: Turn) -> None:
    """Has reducers convicted whose results do not decode, and their slices made by others."""
    for progress in turn.current.slices:
        if progress.refused or not progress.refusals:
            continue
        current = turn.current
        among = deciders(turn.state, current, is_late=False)
        say = say_in(turn.state, current, among)
        by = [n for n in refusers_of(current, progress) if n in as_set(among)]
        if not by or not is_enough(say, by, among):
            continue
        by.sort(key=lambda n: (-say.weights.get(n, 0), n))
        signed = {refusal.node_id: refusal.refused for refusal in progress.refusals}
        reducer = progress.slice.reducer_id
        reason = (
            f"it signed a result of slice {progress.slice.index} of round {current.number} that does not "
            f"decode, as {', '.join(sorted(name_of(turn.state, n) for n in by))} have found"
        )
        evidence = of_refusals(signed[by[0]].header, [signed[n] for n in by])
        convict(turn, reducer, reason, evidence)
        refused = replace(
            progress, refused=f"{name_of(turn.state, reducer)} is convicted: {reason}"
        )
        turn.put_slice(turn.current, refused)
        _hand_over(turn, refused)


def _give_up_a_few(turn: Turn) -> None:
    """Has others make, or fetch, the slices that alone keep a round from its end."""
    current = turn.current
    at = _next_stuck_at(turn.state, current)
    if at is None or turn.now < at:
        return
    current = replace(current, stuck_seen_at=turn.now)
    turn.put_round(current)
    stuck = [
        progress
        for progress in current.slices
        if not progress.refused
        and not progress.is_empty
        and not is_held_by_enough(turn.state, current, progress, is_late=False)
    ]
    if 2 * len(stuck) >= len(current.slices):
        return  # it is the network
    due = [p for p in stuck if _stuck_at(turn.state, current, p) <= turn.now]
    giving_up = {progress.slice.reducer_id for progress in due}
    for progress in due:
        reducer = progress.slice.reducer_id
        if is_present(turn.state, reducer):
            if progress.digest is None:
                note_unmade(turn, reducer, current.number)
            else:
                rest(turn, reducer, current.number)
        others = [n for n in holders_of(turn.state, turn.current, progress) if n != reducer]
        if others and not progress.is_offered:
            _offer(turn, progress, tuple(others))
        else:
            _hand_over(turn, progress, without=giving_up)


def _next_stuck_at(state: SwarmState, current: Round) -> float | None:
    """When it is to be looked next whether a few slices are stuck; None where no backup could be in time."""
    if current.reduced_at is None:
        return None
    seen_at, since = current.stuck_seen_at, current.opened_at
    times = [_stuck_at(state, current, p) for p in current.slices if not p.is_empty]
    if seen_at:
        # Half of them were, or the same are again.
        times.append(since + STUCK_AGAIN * (seen_at - since))
    at = min((time for time in times if time > seen_at), default=None)
    return None if at is None or current.commit_deadline - at < LEAST_SECONDS else at


def _stuck_at(state: SwarmState, current: Round, progress: SliceProgress) -> float:
    """When a slice is given up that alone, or with a few others, keeps the round from its end."""
    most_at, since = current.most_held_at or current.reduced_at, current.opened_at
    assert most_at is not None
    took = most_at - since
    lately = _lately_given_up(state, current, progress)
    is_made = progress.digest is not None
    if is_made and (lately or _is_silent(state, current, progress)):
        assert progress.reduced_at is not None
        is_missed = _is_missed(current, progress.slice.reducer_id)
        more = UNMADE_AGAIN.least_seconds if is_missed else SILENT.beyond(took)
        at = more + max(most_at, progress.reduced_at)
        at = at if lately else max(at, current.silent_at)
    elif is_made or current.most_held_at is None:
        at = since + SLOW.in_all(took)
    elif lately or _is_missed(current, progress.slice.reducer_id):
        at = since + UNMADE_AGAIN.in_all(took)
    else:
        at = since + UNMADE.in_all(took)
    if progress.moved_at is not None:
        more = (STUCK_AGAIN - 1) * (progress.moved_at - since)
        at = max(at, progress.moved_at + max(more, UNMADE.least_seconds))
    return at


def _is_silent(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether those who decide say that nothing comes of the slice's result."""
    if not (by := _silent_to(current.silent).get(progress.slice.index)):
        return False
    among = deciders(state, current, is_late=False)
    return is_enough(say_in(state, current, among), as_set(among).intersection(by), among)


@remembered
def _silent_to(silent: Mapping[NodeId, tuple[int, ...]]) -> Mapping[int, list[NodeId]]:
    """To whom nothing comes, by slices. Asked with every report, of each slice."""
    found: dict[int, list[NodeId]] = {}
    for node_id, indexes in silent.items():
        for index in indexes:
            found.setdefault(index, []).append(node_id)
    return found


def _is_missed(current: Round, node_id: NodeId) -> bool:
    """Whether more than half of the others' results lack its work."""
    others = [p for p in current.slices if p.digest is not None and p.slice.reducer_id != node_id]
    num_lacking = sum(not _has_contributed(node_id, progress) for progress in others)
    return 2 * num_lacking > len(others)


def _has_contributed(node_id: NodeId, progress: SliceProgress) -> bool:
    named = progress.contributors  # in the order of their ids
    place = bisect_left(named, node_id, key=lambda contributor: contributor.node_id)
    return place < len(named) and named[place].node_id == node_id


def _lately_given_up(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether a result of the slice's reducer reached too few lately; or others had to make one, lately."""
    reducer = state.members.get(progress.slice.reducer_id)
    if reducer is None:
        return False
    if progress.digest is not None:
        return is_void_again(reducer, current.number)
    unmade = reducer.audits.unmade_round
    return 0 < current.number - unmade <= UNMADE_ROUNDS and unmade > 0


def _is_its_own_backup(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether a reducer that nobody waits for is the only one left: at each event it would begin anew."""
    if progress.digest is not None or progress.is_orphaned or progress.refused:
        return False
    return _backup(state, current, progress) == progress.slice.reducer_id


def _has_reducer(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether the slice is empty, or in the hands of a node that stays and remembers it."""
    if progress.is_empty:
        return True
    reducer = state.members.get(progress.slice.reducer_id)
    if progress.is_orphaned or reducer is None or reducer.state not in PRESENT:
        return False
    if progress.digest is not None:
        return True  # also of one that is leaving: it hands out what it has made
    if current.is_excused and reducer.node_id in current.on_trial:
        return False
    if not reducer.is_draining:
        return True
    return reducer.is_helper and not _is_reached_by_all(state, current)


def _is_for_a_helper(state: SwarmState, current: Round, progress: SliceProgress) -> bool:
    """Whether a slice that a node took over, whom not all are known to reach, can go to a helper.

    It may be the one that had it, and was started again.
    """
    reducer = state.members.get(progress.slice.reducer_id)
    if not progress.attempt or progress.digest is not None or reducer is None or reducer.is_helper:
        return False
    staying = _staying(state, current)
    if not any(member.is_helper and member.state is MemberState.READY for member in staying):
        return False
    is_known = reducer.node_id not in _newcomers(state, current, staying)
    if is_known and reducer.node_id not in cut_off_from(staying):
        return False
    backup = _backup(state, current, progress)
    helper = None if backup is None else state.members[backup]
    # One that let a slice be overdue in this round is not trusted with it again.
    return helper is not None and helper.is_helper and helper.standing.late_round != current.number


def _is_reached_by_all(state: SwarmState, current: Round) -> bool:
    """Whether one that stays is known to be reached by all. Else a helper that leaves reduces to its end.

    Nobody has said yet that newcomers are not reached.
    """
    staying = _staying(state, current)
    cut, new = cut_off_from(staying), _newcomers(state, current, staying)
    return any(member.node_id not in cut and member.node_id not in new for member in staying)


def _newcomers(state: SwarmState, current: Round, members: Sequence[Member]) -> frozenset[NodeId]:
    """As when the round was opened: who is known in its midst takes nothing from a reducer at work."""
    say = say_in(state, current, [member.node_id for member in members])
    return newcomers(members, say, current.opened_at)


def next_overdue(state: SwarmState) -> float | None:
    """When the next slice is overdue, if a backup could then take it over."""
    current = state.uncommitted_round
    if current is None:
        return None
    staying = _staying(state, current, at_most=2)
    times = [_overdue_at(current, progress, staying) for progress in current.slices]
    times.append(_next_stuck_at(state, current))
    return min((time for time in times if time is not None), default=None)


def _overdue_at(current: Round, progress: SliceProgress, staying: Sequence[Member]) -> float | None:
    """A quarter of what is left until the commit after its reducer should have taken the mean.

    None for slices that are reduced, and where no other node could take over in time.
    """
    if progress.is_empty or progress.digest is not None:
        return None
    due = progress.contribute_deadline or current.contribute_deadline
    overdue_at = due + (current.commit_deadline - due) / 4
    is_in_time = current.commit_deadline - overdue_at >= LEAST_SECONDS
    is_other = any(member.node_id != progress.slice.reducer_id for member in staying)
    return overdue_at if is_in_time and is_other else None


def _staying(state: SwarmState, current: Round, at_most: int | None = None) -> list[Member]:
    """The present participants that do not leave after this round, in the order of their ids.

    Two are enough to know whether there is another one than a given reducer.
    """
    members = (state.members[node_id] for node_id in present_participants(state, current))
    return list(islice((member for member in members if not member.is_draining), at_most))


def _offer(turn: Turn, progress: SliceProgress, holders: tuple[NodeId, ...]) -> None:
    """The result exists: who lacks it fetches it from who has it."""
    if progress.is_offered:
        return
    current = turn.current
    turn.put_slice(current, replace(progress, is_offered=True, moved_at=turn.now))
    offered = replace(offer_of(turn.state, current, progress), holder_ids=holders)
    turn.act(Tell(message=offered, to=others_in(current, ())))


def offer_to_deceived(turn: Turn, index: int, node_ids: Iterable[NodeId]) -> None:
    """Who was given another result than the reducer has reported fetches the reported one.

    It has both signatures then, and shows them.
    """
    current = turn.current
    digest = current.slices[index].digest
    refused = {r.node_id: r.refused.digest for r in current.slices[index].refusals}
    others = {n: current.held.get(n, {}).get(index) or refused.get(n) for n in node_ids}
    deceived = tuple(sorted(n for n, told in others.items() if told not in (None, digest)))
    if digest is None or not deceived:
        return
    turn.act(Tell(message=offer_of(turn.state, current, current.slices[index]), to=deceived))


def offer_of(state: SwarmState, current: Round, progress: SliceProgress) -> ResultOffered:
    """What says from whom the result that the slice's reducer has reported can be fetched."""
    assert progress.digest is not None
    return ResultOffered(
        round=current.number,
        slice_index=progress.slice.index,
        digest=progress.digest,
        holder_ids=holders_of(state, current, progress),
    )


def _hand_over(turn: Turn, progress: SliceProgress, *, without: Collection[NodeId] = ()) -> None:
    """Half of what is left until the commit is for collecting, if the round's own time is over."""
    current = turn.current
    left = current.commit_deadline - turn.now
    backup = _backup(turn.state, current, progress, without)
    if backup is None or left < LEAST_SECONDS:
        return
    deadline = max(current.contribute_deadline, turn.now + left / 2)
    taken_over = SliceProgress(
        slice=replace(progress.slice, reducer_id=backup),
        attempt=progress.attempt + 1,
        contribute_deadline=deadline,
        moved_at=turn.now,
    )
    index = progress.slice.index
    held = {
        node_id: {place: digest for place, digest in results.items() if place != index}
        for node_id, results in current.held.items()
    }  # what was held is of no use any more: the backup makes another result
    agreements = {
        node_id: {place: each for place, each in told.items() if place != index}
        for node_id, told in current.agreements.items()
    }
    silent = {n: tuple(i for i in told if i != index) for n, told in current.silent.items()}
    current = replace(current, held=held, agreements=agreements, silent=silent)
    turn.put_slice(current, taken_over)
    told = takeover_of(current.number, taken_over, turn.now)
    turn.act(Tell(message=told, to=others_in(current, ())))


def takeover_of(number: int, progress: SliceProgress, now: float) -> SliceTakenOver:
    """What participants are told of a slice that was taken over, with the time that is left."""
    assert progress.contribute_deadline is not None
    return SliceTakenOver(
        round=number,
        slice_index=progress.slice.index,
        reducer_id=progress.slice.reducer_id,
        attempt=progress.attempt,
        contribute_seconds=max(0.0, progress.contribute_deadline - now),
    )


def _backup(
    state: SwarmState,
    current: Round,
    progress: SliceProgress,
    without: Collection[NodeId] = (),
) -> NodeId | None:
    """Who stands in: a node that stays, holds the base, reaches the others, and reduces little.

    Rather one that has been here since the plan: who came back meanwhile trains for longer, and its slice
    would wait for its own contribution. Rather one of whom it is known who reaches it, and one whose own
    results have reached the others lately.
    """
    here = present_participants(state, current)
    if not here:
        return None
    members = [state.members[node_id] for node_id in here]
    new = _newcomers(state, current, members)
    reaching = {m.node_id for m in best_reducers(members, say_in(state, current, here))}
    others = (p for p in current.slices if p.slice.index != progress.slice.index)
    load = Counter(other.slice.reducer_id for other in others)
    on_trial = as_set(current.on_trial)
    convicted = {conviction.node_id for conviction in state.convicted}

    def is_back(member: Member) -> bool:
        """Whether it is a helper that was started again: else the slice went on to it a step later."""
        is_late = member.standing.late_round == current.number
        return progress.is_orphaned and member.is_helper and not is_late

    def preference(
        member: Member,
    ) -> tuple[bool, bool, bool, bool, bool, bool, bool, int, NodeId]:
        return (
            member.node_id in without or not may_reduce(member, current.number),
            member.node_id in on_trial,
            member.state is not MemberState.READY,
            member.session_id >= current.later_session_id and not member.is_helper,
            member.node_id not in reaching,
            member.node_id == progress.slice.reducer_id and not is_back(member),
            member.node_id in new,
            load[member.node_id],
            member.node_id,
        )

    staying = (m for m in _staying(state, current) if m.node_id not in convicted)
    best = min(staying, key=preference, default=None)
    return None if best is None else best.node_id
