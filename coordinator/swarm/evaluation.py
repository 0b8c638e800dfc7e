"""Held-out losses of committed states: who is asked for one, which count, and which are void. Pure."""

from dataclasses import replace

from coordinator.swarm.actions import Tell
from coordinator.swarm.state import Evaluating, HeldOut, SwarmState
from coordinator.swarm.turn import Turn, available_members, is_present, present_members
from protocol.messages import Evaluated, EvaluationAsked
from protocol.rounds import NodeId


def ask_if_due(turn: Turn) -> None:
    """Asks one ready member to evaluate a new committed state, when the rules want it evaluated.

    It holds that state until it applies the next commit, and its ranks are free, or ahead, while the
    bytes of that round travel: so nobody waits for it. The final state is for
    coordinator.swarm.ending to ask about, which does wait.
    """
    if not turn.has_new_state:
        return
    turn.has_new_state = False
    committed, rules = turn.state.committed_round, turn.state.rules
    if committed % rules.evaluate_every_rounds == 0 and committed < rules.total_rounds:
        ask_somebody(turn)


def may_be_evaluated(state: SwarmState) -> bool:
    """Whether somebody who is here can evaluate, or nobody is here and anybody may come."""
    present = present_members(state)
    return not present or not all(member.cannot_evaluate for member in present)


def ask_somebody(turn: Turn) -> None:
    """Asks a ready member that can to evaluate the committed state; with none, nobody evaluates.

    Another one each time, so that not always the same node pays. Supersedes an evaluation that has
    not come back, whose state is gone.
    """
    state = turn.state
    ready = [member for member in available_members(state) if not member.cannot_evaluate]
    if not ready:
        turn.state = replace(state, evaluating=None)
        return
    committed, rules = state.committed_round, state.rules
    place = committed // rules.evaluate_every_rounds  # rounds alone could hit one node every time
    chosen = ready[place % len(ready)].node_id
    current = state.open_round
    until = (turn.now if current is None else current.commit_deadline) + rules.apply_seconds
    asked = Evaluating(node_id=chosen, round=committed, until=until)
    turn.state = replace(state, evaluating=asked)
    turn.act(Tell(message=EvaluationAsked(round=committed), to=(chosen,)))


def evaluated(turn: Turn, node_id: NodeId, round: int, report: Evaluated) -> None:
    """Keeps the loss, if it is the one that was asked for."""
    asked = turn.state.evaluating
    if asked is None or (asked.node_id, asked.round) != (node_id, round):
        return
    loss = HeldOut(
        round=round, loss=report.held_out_loss, tokens=report.tokens, metric=report.metric
    )
    turn.state = replace(turn.state, held_out=(*turn.state.held_out, loss), evaluating=None)


def give_up_evaluation(turn: Turn) -> None:
    """Waits no longer for an evaluation that is late or whose node is gone."""
    asked = turn.state.evaluating
    if asked is not None and (turn.now >= asked.until or not is_present(turn.state, asked.node_id)):
        turn.state = replace(turn.state, evaluating=None)


def without_evaluations_since(state: SwarmState, number: int) -> SwarmState:
    """Without what is known and asked of the states after round `number` and later: they are no more."""
    asked = state.evaluating
    return replace(
        state,
        held_out=tuple(loss for loss in state.held_out if loss.round < number),
        evaluating=asked if asked is not None and asked.round < number else None,
        end_waits_until=None,
    )
