"""How long a node waits in a round for what others bring: contributions first, then results. Pure.

A reducer waits more briefly for members that kept some lately. A contribution that does not come shows
nothing of who is at fault: its node may keep it, or the reducer may refuse it. So this costs neither of the
two its part. A member whose work a result lacked, of any reducer, is waited for briefly in the next
BRIEF_ROUNDS: a quarter as long again as the contributions of others took, or for as long as something of
its own comes, for its link may be slow. A reducer that waited so in vain does not wait for it until its
work was in time in 1, 2, 4, ... rounds. What comes in time counts, whoever was waited for. Of whom the plan
asks more steps than of those that are here, as they check somebody's work, it waits as many times as long.

The member with the slowest link would never be in time again, nor would one whose work another member
carries. So it waits a quarter as long again while something of theirs comes, and in any case for those whom
the plan says to be carried here; and no longer: who only lets it trickle costs others what an honest slow
link does.

Also who is waited for in full is not waited for to the deadline where less than half are late, and nothing
of its comes or has come. The first deadlines of a run are the run file's, a hundred times a quick round.
Once the coordinator says that all have trained, nobody's steps are what is slow. Of honest ones something
comes soon then, however slow their links. So the wait is less than half as long again as those with most of
the weight took: what comes later does not move the end, or liars that come one after the other would.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from node.exchange.round.state import Awaited, Phase, RoundState, SliceState
from protocol.wire.rounds import Commit, NodeId, Plan, training_in

BRIEF_ROUNDS = 16
"""After a round that lacked somebody's work. So who works and idles by turns is in full waited for in one of
17 rounds."""

MOST_IN_TIME = 16
"""So many rounds in time are asked at most of somebody whom a reducer waited for in vain."""

KEPT_ROUNDS = 64
"""After so many, what somebody missed is forgotten."""

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
