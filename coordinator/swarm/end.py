"""How a run ends: once its final state is evaluated and taken over, or its time is up. Pure."""

from dataclasses import replace

from coordinator.swarm.audit import pending_audits
from coordinator.swarm.deadlines import next_apply_seconds
from coordinator.swarm.evaluation import ask_somebody, awaited_writers, may_be_evaluated
from coordinator.swarm.events import Tell, Turn
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.membership import HEARTBEATS_PER_LEASE
from coordinator.swarm.state import SwarmState, present_members
from protocol.wire.messages import RunFinished
from protocol.wire.vitals import loss_in_words

SILENT_HEARTBEATS = 2
"""A member that is behind at the end is waited for until so many in a row are missing."""


def end_run(turn: Turn) -> None:
    """Ends a run at its end once its final state is evaluated and taken over by all here, or time is up.

    Where nobody who is here can evaluate, it ends without that. A node that evaluates has as long as
    the run file gives for applying, and so has the final model to write. Members that are behind have
    what is left of it while they are heard: they are waited for because those who could supply them
    leave when the run is finished. While nobody here holds the final state, and it may be taken back,
    the run does not end; after that it waits anew.
    """
    state = turn.state
    if state.is_finished or state.alarm is not None:
        return
    if state.unsupplied_since is not None:
        turn.state = replace(state, evaluating=None, end_waits_until=None)
        return
    until = state.end_waits_until
    if until is None:
        until = turn.now + state.rules.apply_seconds
        state = turn.state = replace(state, evaluating=None, end_waits_until=until)
    if not is_evaluated(state) and may_be_evaluated(state):
        _wait_for_evaluation(turn)
    elif turn.now >= _end_waits_until(state) or not (
        members_behind(state) or awaited_writers(state)
    ):
        _finish(turn)


def ends_at(state: SwarmState) -> float | None:
    """When the run ends even if nobody else comes to its final state; None away from its end."""
    return None if state.end_waits_until is None else _end_waits_until(state)


def _end_waits_until(state: SwarmState) -> float:
    """A member that is behind is waited for as long as it is heard: a slow one may be within a step."""
    until = state.end_waits_until
    assert until is not None
    is_evaluating = not is_evaluated(state) and may_be_evaluated(state)
    behind = members_behind(state)
    if is_evaluating or not behind or pending_audits(state):
        return until
    return min(until, max(_heard_until(state, member) for member in behind))


def _heard_until(state: SwarmState, member: Member) -> float:
    """When a member's silence has lasted for longer than living nodes are silent or commits take to apply."""
    if not member.is_heard:  # its stream broke, and its lease is shortened for that
        return member.lease_until
    lease = state.rules.lease_seconds
    silence = max(SILENT_HEARTBEATS * lease / HEARTBEATS_PER_LEASE, next_apply_seconds(state))
    return member.lease_until - lease + silence


def is_evaluated(state: SwarmState) -> bool:
    """Whether the loss of the final state is known."""
    return bool(state.held_out) and state.held_out[-1].round == state.rules.total_rounds


def members_behind(state: SwarmState) -> list[Member]:
    """Who is here and has yet to take over the committed state, in the order of their ids."""
    return [
        member
        for member in present_members(state)
        if member.state is not MemberState.READY and not member.is_draining
    ]


def finished_reason(state: SwarmState) -> str:
    """How the run ended, in words."""
    total = state.rules.total_rounds
    if state.stopped is not None:
        why = f": {state.stopped.reason}" if state.stopped.reason else ""
        reason = f"{state.stopped.by} has stopped the run after round {total}{why}"
    else:
        reason = (
            "the only round is committed" if total == 1 else f"all {total} rounds are committed"
        )
    if is_evaluated(state):
        loss = f"the held-out loss is {loss_in_words(state.held_out[-1].loss)}"
    elif not may_be_evaluated(state) or all(m.cannot_evaluate for m in state.members.values()):
        # Of those that have left, too: they still ask how it ended.
        loss = "no node here evaluates, so nobody has measured a held-out loss of it"
    else:
        loss = "no node that can evaluate the final state did so in time"
    return f"{reason}; {loss}; 'atoll export' on a machine that trained writes the model out"


def _wait_for_evaluation(turn: Turn) -> None:
    state = turn.state
    assert state.end_waits_until is not None
    if turn.now >= state.end_waits_until:
        _finish(turn)
    elif state.evaluating is None:
        ask_somebody(turn)
        if turn.state.evaluating is not None:
            turn.state = replace(turn.state, end_waits_until=turn.state.evaluating.until)


def _finish(turn: Turn) -> None:
    """Ends the run, or waits for audits of the last rounds: what they undo is trained again."""
    if audits := pending_audits(turn.state):
        until = max(audit.until for audit in audits)
        turn.state = replace(turn.state, end_waits_until=until)
        return
    state = replace(
        turn.state,
        finished_at=turn.now,
        evaluating=None,
        end_waits_until=None,
    )
    turn.state = state
    turn.act(Tell(message=finished_of(state)))


def finished_of(state: SwarmState) -> RunFinished:
    """What tells nodes of the run's end."""
    assert state.outer_digest is not None
    reason, number = finished_reason(state), state.committed_round
    return RunFinished(round=number, outer_digest=state.outer_digest, reason=reason)
