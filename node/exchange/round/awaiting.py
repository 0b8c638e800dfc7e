"""How long a reducer waits for whose contributions: more briefly for members that kept some lately. Pure.

A contribution that does not come shows nothing of who is at fault: its node may keep it, or the reducer may
refuse it. So this costs neither of the two its part. A member whose work a result lacked, of any reducer, is
waited for briefly in the next BRIEF_ROUNDS: a quarter as long again as the contributions of others took, or
for as long as something of its own comes, for its link may be slow. A reducer that waited so in vain does not
wait for it until its work was in time in 1, 2, 4, ... rounds. What comes in time counts, whoever was waited
for.

Also who is waited for in full is not waited for to the deadline where less than half are late, and nothing
of its comes or has come. The first deadlines of a run are the run file's, a hundred times a quick round.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from protocol.wire.rounds import Commit, NodeId, Plan

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
"""Likewise for a few of whom nothing comes, in full. Who trains is told to end at 1.25 times what the others
took, so that is no matter of speed."""


class Awaited(Enum):
    """How long a reducer waits for somebody's contributions to a round."""

    FULLY = auto()  # until the deadline, or several times as long as others: see above
    BRIEFLY = auto()  # not much longer than for the others', unless they are coming
    NOT = auto()  # no longer than for the others'


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """In which rounds committed results lacked a participant's work."""

    newest_round: int  # in which a slice of anybody's lacked it
    after_brief: tuple[
        int, ...
    ] = ()  # in which slices of this node's did, though it waited briefly
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
    training = {a.node_id for a in commit.assignments if a.trains}
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
    training = [a.node_id for a in plan.assignments if a.trains]
    found = {n: missed[n].awaited_in(plan.round) for n in training if n in missed}
    less = [node_id for node_id, awaited in found.items() if awaited is not Awaited.FULLY]
    return {n: found[n] for n in less} if 2 * len(less) <= len(training) else {}
