"""A going back that nobody can follow is withdrawn, and the run has what it had. Pure.

Who says that it keeps a state may lie, and a disk may fail. So nodes keep what they hold until they have
the state that the run went back to, and no round opens before enough of them do. Where they do not for as
long as the longest round takes, a ruling withdraws the going back. Nodes then bring the commits of the
rounds that hold again, as they do to an older copy of the database, and the run owner says what happens
next. It ends: each time there is one going back less, and the run makes none by itself while it is paused.
"""

from dataclasses import replace

from coordinator.swarm.agreement import commits_wanted, judge
from coordinator.swarm.events import Tell, Turn, WithdrawalAsked
from coordinator.swarm.going_back import are_believed, possible_in_words
from coordinator.swarm.members import MemberState
from coordinator.swarm.state import SwarmState, Unfollowed, name_of, present_members, ready_members
from protocol.errors import UsageError
from protocol.trust.rulings import Ruling, undoes
from protocol.wire.rounds import NodeId


def unfollowed(state: SwarmState) -> Ruling | None:
    """The latest going back, while not enough members hold the state that it led to."""
    if not state.rolled_back or state.is_finished or state.open_round is not None:
        return None
    ruling = state.rolled_back[-1]
    newest = state.recent[-1].commit.incarnation if state.recent else 0
    is_where_it_led = state.committed_round == ruling.from_round - 1
    if (
        not is_where_it_led
        or newest >= ruling.incarnation
        or are_believed(state, _ready_ids(state))
    ):
        return None
    return ruling


def watch_going_back(turn: Turn) -> None:
    """Asks for a withdrawal once the time is over, and anew where that could not be ruled.

    The time begins anew with each member that first comes to hold the state, and does not run while one holds
    it that the run owner believes. What can be had instead somebody must hold: while nobody does, whoever
    returns may hold either.
    """
    state = turn.state
    ruling = None if state.stopped is not None else unfollowed(state)
    first = None if ruling is None else _first_to_go(state)
    if ruling is None or first is None or _gives_it(state, ruling):
        if state.unfollowed is not None:
            turn.state = replace(state, unfollowed=None)
        return
    ready = _ready_ids(state)
    known = state.unfollowed
    if known is None or known.incarnation != ruling.incarnation:
        known = None
    ever_ready = frozenset(ready if known is None else (*ready, *known.ready_ids))
    now = Unfollowed(
        since=turn.now, incarnation=ruling.incarnation, ready_ids=tuple(sorted(ever_ready))
    )
    if known is None or now.ready_ids != known.ready_ids:
        turn.state = replace(state, unfollowed=now)
    elif turn.now >= known.since + _seconds(state):
        turn.state = replace(state, unfollowed=now)
        turn.act(_asked(state, ruling, first))


def withdraws_at(state: SwarmState) -> float | None:
    """When the latest going back is withdrawn, unless more members come to hold its state."""
    return None if state.unfollowed is None else state.unfollowed.since + _seconds(state)


def refuse_withdrawal(state: SwarmState, incarnation: int) -> None:
    """Raises UsageError where the run has gone on from what it went back to, or never went."""
    current = state.open_round
    newest = state.recent[-1].commit.incarnation if state.recent else 0
    has_gone_on = (current is not None and current.commit is None) or newest >= incarnation
    if has_gone_on or all(one.incarnation < incarnation for one in state.rolled_back):
        raise UsageError(
            "there is no going back to withdraw",
            next_step="'atoll status' shows how the run stands",
        )


def withdrawn(turn: Turn) -> None:
    """The ruling is made: nodes that hold what is undone no more are asked for its commits."""
    turn.state = replace(turn.state, unfollowed=None)
    for member in present_members(turn.state):
        judge(turn, member.node_id, is_news=True)
    turn.act(Tell(message=commits_wanted(turn.state)))  # also those that say to hold less


def unfollowed_in_words(state: SwarmState, now: float) -> str:
    """What a going back waits for, and what can be typed; empty where it waits for nothing."""
    ruling = unfollowed(state)
    if ruling is None:
        return ""
    ready, round = ready_members(state), ruling.from_round - 1
    if _gives_it(state, ruling):
        name = name_of(state, ruling.node_id)
        return (
            f"the others fetch the state after round {round} from {name}; if it does not give it, "
            f"'atoll nodes quarantine {name}' withdraws the going back"
        )
    who = f"{ready[0].node_name} alone holds" if len(ready) == 1 else "too few nodes hold"
    waits = f"{who if ready else 'nobody holds'} the state after round {round} that the run went back to"
    at = withdraws_at(state)
    if at is None:
        return f"{waits}; start a node that keeps it"
    return f"{waits}: unless more do, that is withdrawn, {max(0.0, at - now):.0f} s left"


def _gives_it(state: SwarmState, ruling: Ruling) -> bool:
    """Whether the member holds the state that the run owner believed; others may need long to fetch it."""
    believed = state.members.get(ruling.node_id)
    return believed is not None and believed.state is MemberState.READY


def _ready_ids(state: SwarmState) -> tuple[NodeId, ...]:
    return tuple(member.node_id for member in ready_members(state))


def _seconds(state: SwarmState) -> float:
    return state.rules.commit_seconds + state.rules.apply_seconds


def _first_to_go(state: SwarmState) -> Ruling | None:
    """The first going back of those by which the newest state is undone that somebody here holds."""
    newest, first = (-1, -1), None
    for member in present_members(state):
        held = member.outer_incarnation, member.outer_round
        undoing = [r for r in state.rolled_back if undoes([r], held[1], held[0])]
        if undoing and held > newest:
            newest, first = held, min(undoing, key=lambda r: r.incarnation)
    return first


def _asked(state: SwarmState, ruling: Ruling, first: Ruling) -> WithdrawalAsked:
    round, last = ruling.from_round - 1, max(r.last_round for r in state.rolled_back)
    rounds = possible_in_words(replace(state, committed_round=last))
    reason = f"too few nodes came to hold the state after round {round} in {_seconds(state):.0f} s; {rounds}"
    return WithdrawalAsked(withdrawn=first, reason=reason)
