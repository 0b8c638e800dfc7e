"""Rulings: who may take part, whether rounds open, and by which rules. Pure.

The run owner decides; here it becomes the next ruling of a chain, and what follows from it. The edge
signs rulings, refuses those whom they bar, and works out the rules that an amendment makes.
"""

from dataclasses import replace

from coordinator.swarm.events import Ruled, RulingsLearned, Tell, Turn
from coordinator.swarm.going_back import comes_to, go_back, refuse_going_back
from coordinator.swarm.members import MemberState
from coordinator.swarm.membership import bar, own, unbar
from coordinator.swarm.retraction import refuse_withdrawal, withdrawn
from coordinator.swarm.state import Rules, SwarmState, next_round
from protocol.errors import UsageError
from protocol.trust.rulings import (
    ABOUT_NODES,
    ROUNDS,
    Ruling,
    RulingKind,
    decision_of,
    digest_of,
    follows,
    in_words,
    limit_of_invite,
    owned_invite,
    sets_rounds,
    withdraws,
)
from protocol.wire.messages import RulingsTold

_SEE_STATUS = "'atoll status' shows how the run stands"
_SEE_NODES = "'atoll nodes' shows how each node stands"


def rule(turn: Turn, event: Ruled) -> None:
    """Makes the next ruling. Raises UsageError when it would change nothing, or cannot be."""
    _refuse(turn.state, event)
    state = turn.state
    decision = decision_of(event) | {"from_round": _from_round(state, event)}
    if event.kind is RulingKind.ROLLED_BACK and not event.incarnation:
        assert event.undone is not None
        decision |= comes_to(state, event.undone.commits)
    number, before = len(state.rulings) + 1, digest_of(state.rulings).hex()
    ruling = Ruling(number=number, before=before, **decision)
    _take(turn, ruling, event.rules)
    turn.act(Tell(message=RulingsTold(rulings=(ruling,))))
    if ruling.kind is RulingKind.ROLLED_BACK:  # nodes know it before they are asked to follow
        go_back(turn, ruling, event.undone)
    if ruling.kind is RulingKind.WITHDRAWN:
        withdrawn(turn)


def learn_rulings(turn: Turn, event: RulingsLearned) -> None:
    """Takes over rulings that are missing here; what does not follow those that are known is left out."""
    news = []
    for ruling in event.rulings:
        known = turn.state.rulings
        if follows(ruling, known[-1] if known else None):
            _take(turn, ruling, None)
            news.append(ruling)
    if news:
        turn.state = _opened(replace(turn.state, rules=_rules_after(turn.state, event.rules)))
        turn.act(Tell(message=RulingsTold(rulings=tuple(news))))
    for ruling in news:
        if ruling.kind is RulingKind.ROLLED_BACK:
            go_back(turn, ruling, event.undone.get(ruling.from_round - 1))
    if any(ruling.kind is RulingKind.WITHDRAWN for ruling in news):
        withdrawn(turn)


def with_rulings(state: SwarmState, rulings: tuple[Ruling, ...]) -> SwarmState:
    """The state with what rulings of the database come to; members have been barred then already."""
    alarm, convicted = state.alarm, state.convicted  # of after the latest of them
    state = replace(state, rulings=(), rolled_back=(), own_invites=(), invite_limits={})
    for ruling in rulings:
        state = _noted(state, ruling)
    rules = _rules_after(state, state.rules)
    return replace(state, rules=rules, alarm=alarm, convicted=convicted)


_OF_ROUNDS = frozenset({RulingKind.AMENDED, RulingKind.STOPPED, RulingKind.RESUMED})


def _from_round(state: SwarmState, event: Ruled) -> int:
    if event.from_round:
        return event.from_round
    if event.kind is RulingKind.KEYED:  # what is committed already bears the key before
        return state.committed_round + 1
    return next_round(state) if event.kind in _OF_ROUNDS else 0


def _take(turn: Turn, ruling: Ruling, rules: Rules | None) -> None:
    turn.state = _noted(turn.state, ruling)
    if rules is not None or ruling.kind is RulingKind.STOPPED:
        rules = _rules_after(turn.state, rules or turn.state.rules)
        turn.state = _opened(replace(turn.state, rules=rules))
    reason = f"{ruling.by} decided: {in_words(ruling)}"
    match ruling.kind:
        case RulingKind.EXPELLED:
            bar(turn, ruling.node_id, MemberState.EXPELLED, reason=reason)
        case RulingKind.QUARANTINED:
            bar(turn, ruling.node_id, MemberState.QUARANTINED, reason=reason)
        case RulingKind.READMITTED | RulingKind.APPROVED:
            unbar(turn, ruling.node_id)
        case RulingKind.INVITED if invite_id := owned_invite(ruling):
            own(turn, invite_id)


def _noted(state: SwarmState, ruling: Ruling) -> SwarmState:
    """The ruling, and what can be read from it alone."""
    state = replace(state, rulings=(*state.rulings, ruling))
    match ruling.kind:
        case RulingKind.PAUSED:
            return replace(state, paused=ruling, alarm=None)
        case RulingKind.RESUMED:
            return replace(state, paused=None, alarm=None)
        case RulingKind.STOPPED:
            return replace(state, paused=None, stopped=ruling, alarm=None)
        case RulingKind.AMENDED if sets_rounds(ruling):
            return replace(state, stopped=None)
        case RulingKind.ROLLED_BACK:
            alarm, round = state.alarm, ruling.from_round - 1
            if alarm is not None and (alarm.round is None or alarm.round >= round):
                alarm = None  # else the run goes back further still
            return replace(state, alarm=alarm, rolled_back=(*state.rolled_back, ruling))
        case RulingKind.INVITED:
            if (invite_id := owned_invite(ruling)) and invite_id not in state.own_invites:
                state = replace(state, own_invites=(*state.own_invites, invite_id))
            if (most := limit_of_invite(ruling)) is not None:
                limits = {k: v for k, v in state.invite_limits.items() if k != ruling.invite_id}
                limits |= {ruling.invite_id: most} if most else {}
                state = replace(state, invite_limits=limits)
            return state
        case RulingKind.WITHDRAWN:
            still = tuple(one for one in state.rolled_back if not withdraws(ruling, one))
            return replace(state, paused=ruling, alarm=None, rolled_back=still)
        case kind if kind in ABOUT_NODES:
            return replace(
                state,
                latest_rulings={**state.latest_rulings, ruling.node_id: ruling},
                convicted=tuple(c for c in state.convicted if c.node_id != ruling.node_id),
            )
    return state


def _rules_after(state: SwarmState, rules: Rules) -> Rules:
    """A run that is stopped asks for no more rounds than it had then."""
    if state.stopped is None:
        return rules
    return replace(rules, total_rounds=state.stopped.from_round - 1)


def _opened(state: SwarmState) -> SwarmState:
    """Nothing of an end is left where more rounds are to come; nodes that have gone home may come back."""
    if state.committed_round >= state.rules.total_rounds:
        return state
    return replace(state, finished_at=None, end_waits_until=None)


def _refuse(state: SwarmState, event: Ruled) -> None:
    """Raises UsageError for a ruling that says what holds already, or comes too late."""
    kind = event.kind
    if kind in ABOUT_NODES:
        _refuse_of_node(state, event)
    elif kind in (
        *(RulingKind.PAUSED, RulingKind.RESUMED),
        *(RulingKind.STOPPED, RulingKind.AMENDED, RulingKind.ROLLED_BACK, RulingKind.WITHDRAWN),
    ):
        _refuse_of_run(state, event)


def _refuse_of_node(state: SwarmState, event: Ruled) -> None:
    standing = state.latest_rulings.get(event.node_id)
    was = None if standing is None else standing.kind
    name = event.node_name or event.node_id
    barred = (RulingKind.EXPELLED, RulingKind.QUARANTINED)
    if event.kind is was and event.kind in barred:
        raise UsageError(
            f"{name} is {was} already", next_step=f"'atoll nodes readmit {name}' lets it come back"
        )
    if event.kind is RulingKind.READMITTED and was not in barred:
        raise UsageError(f"{name} is neither expelled nor quarantined", next_step=_SEE_NODES)
    if event.kind is RulingKind.APPROVED and was in barred:
        raise UsageError(f"{name} is {was}", next_step=f"'atoll nodes readmit {name}'")
    if event.kind is RulingKind.APPROVED and was is not None:
        raise UsageError(f"{name} may take part already", next_step=_SEE_NODES)


def _refuse_of_run(state: SwarmState, event: Ruled) -> None:
    if not _adds_rounds(state, event):
        _refuse_at_end(state)
    if event.kind is RulingKind.PAUSED and state.paused is not None:
        raise UsageError(
            "the run is paused already", next_step="'atoll run resume' lets rounds open again"
        )
    if event.kind is RulingKind.RESUMED and state.paused is None:
        raise UsageError("the run is not paused", next_step=_SEE_STATUS)
    if event.kind is RulingKind.STOPPED and next_round(state) == 1:
        raise UsageError(
            "no round has begun, so there is nothing to stop",
            next_step="end the coordinator with Ctrl-C, and each node likewise",
        )
    if event.kind is RulingKind.ROLLED_BACK and event.incarnation:
        _refuse_undone_already(state, event)
    elif event.kind is RulingKind.ROLLED_BACK:
        refuse_going_back(state, max(event.from_round, 1) - 1, event.undone, event.node_id)
    if event.kind is RulingKind.WITHDRAWN:
        refuse_withdrawal(state, event.incarnation)
    rules = event.rules
    if rules is not None and rules.total_rounds < next_round(state) - 1:
        raise UsageError(
            f"run.rounds = {rules.total_rounds} is less than the rounds that have begun",
            next_step="'atoll run stop' ends the run after the round in flight",
        )


def _adds_rounds(state: SwarmState, event: Ruled) -> bool:
    """Whether it gives the run rounds after those that have begun: it opens one that is over."""
    is_about = event.kind is RulingKind.AMENDED and ROUNDS in dict(event.changes)
    return is_about and event.rules is not None and event.rules.total_rounds >= next_round(state)


def _refuse_at_end(state: SwarmState) -> None:
    if state.is_finished:
        raise UsageError(
            f"the run is finished since round {state.committed_round}",
            next_step="'atoll run extend N' opens it again for N more rounds; "
            "'atoll export' writes the model out",
        )
    if state.stopped is not None:
        raise UsageError(
            f"the run is being stopped: round {state.stopped.from_round - 1} is its last",
            next_step="'atoll run extend N' lets it go on for N more rounds",
        )


def _refuse_undone_already(state: SwarmState, event: Ruled) -> None:
    """Of a going back that is ruled anew: once is enough."""
    same = (event.from_round, event.incarnation, event.outer_digest)
    if any(same == (r.from_round, r.incarnation, r.outer_digest) for r in state.rolled_back):
        raise UsageError(
            f"the run went back to round {event.from_round - 1} already",
            next_step=_SEE_STATUS,
        )
