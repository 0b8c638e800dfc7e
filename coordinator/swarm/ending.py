"""The end of the run: what it waits for after the last round, and how long. Pure."""

from dataclasses import replace

from coordinator.swarm.audit import pending_audits
from coordinator.swarm.deadlines import next_apply_seconds
from coordinator.swarm.evaluation import ask_somebody, awaited_writers, may_be_evaluated
from coordinator.swarm.events import Tell
from coordinator.swarm.members import Member, MemberState
from coordinator.swarm.state import SwarmState
from coordinator.swarm.turn import Turn, present_members
from protocol.wire.messages import RunFinished


def end_run(turn: Turn) -> None:
    """Ends the run once its final state is evaluated and taken over by all who are here, or time is up.

    Where nobody who is here can evaluate, it ends without that. A node that evaluates has as long as
    the run file gives for applying, and so has the final model to write. Members that are behind have
    what is left of it, and no more than commits take to be applied: they are waited for because those
    who could supply them leave when the run is finished. While nobody here holds the final state, and
    it may be taken back, the run does not end; after that it waits anew.
    """
    state = turn.state
    if state.is_finished or not is_at_end(state) or state.alarm is not None:
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
    elif members_behind(state):
        _wait_for_members_behind(turn)
    elif not awaited_writers(state) or turn.now >= until:
        _finish(turn)


def is_at_end(state: SwarmState) -> bool:
    """Whether the last round is over: its state is agreed on."""
    return state.committed_round == state.rules.total_rounds and state.outer_digest is not None


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
        return f"{reason}; the held-out loss is {state.held_out[-1].loss:.3f} nats per token"
    return f"{reason}; nobody could evaluate the final state in time"


def _wait_for_evaluation(turn: Turn) -> None:
    state = turn.state
    assert state.end_waits_until is not None
    if turn.now >= state.end_waits_until:
        _finish(turn)
    elif state.evaluating is None:
        ask_somebody(turn)
        if turn.state.evaluating is not None:
            turn.state = replace(turn.state, end_waits_until=turn.state.evaluating.until)


def _wait_for_members_behind(turn: Turn) -> None:
    state = turn.state
    assert state.end_waits_until is not None
    until = min(state.end_waits_until, turn.now + next_apply_seconds(state))
    if turn.now >= until:
        _finish(turn)
    else:
        turn.state = replace(state, end_waits_until=until)


def _finish(turn: Turn) -> None:
    """Ends the run, or waits for audits of the last rounds: what they undo is trained again."""
    if audits := pending_audits(turn.state):
        until = max(audit.until for audit in audits)
        turn.state = replace(turn.state, end_waits_until=until)
        return
    state = replace(
        turn.state,
        is_finished=True,
        finished_at=turn.now,
        evaluating=None,
        end_waits_until=None,
    )
    assert state.outer_digest is not None
    turn.state = state
    finished = RunFinished(
        round=state.committed_round,
        outer_digest=state.outer_digest,
        reason=finished_reason(state),
    )
    turn.act(Tell(message=finished))
