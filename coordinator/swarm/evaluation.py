"""Held-out losses of committed states, and the end of the run, which waits for the last of them."""

from dataclasses import replace

from coordinator.swarm.actions import AskEvaluation, SendFinished
from coordinator.swarm.deadlines import next_deadlines
from coordinator.swarm.events import Evaluated
from coordinator.swarm.state import Evaluating, HeldOut, Member, MemberState, SwarmState
from coordinator.swarm.turn import Turn, available_members, is_present, present_members


def ask_if_due(turn: Turn) -> None:
    """Asks one ready member to evaluate a new committed state, when the rules want it evaluated.

    Another one each time, so that not always the same node pays. It holds that state until it
    applies the next commit, and its ranks are free, or ahead, while the bytes of that round travel:
    so nobody waits for it. Supersedes an evaluation that has not come back, whose state is gone.
    """
    if not turn.has_new_state:
        return
    turn.has_new_state = False
    committed, rules = turn.state.committed_round, turn.state.rules
    if committed % rules.evaluate_every_rounds == 0 or committed == rules.total_rounds:
        _ask(turn)


def evaluated(turn: Turn, event: Evaluated) -> None:
    """Keeps the loss, if it is the one that was asked for."""
    asked = turn.state.evaluating
    if asked is None or (asked.node_id, asked.round) != (event.node_id, event.round):
        return
    loss = HeldOut(round=event.round, loss=event.held_out_loss, tokens=event.tokens)
    turn.state = replace(turn.state, held_out=(*turn.state.held_out, loss), evaluating=None)
    if event.round == turn.state.rules.total_rounds:
        last = turn.state.recent[-1].commit
        until = turn.now + next_deadlines(turn.state, last.assignments).apply_seconds
        waiting = replace(asked, node_id=None, until=min(until, asked.until))
        turn.state = replace(turn.state, evaluating=waiting)


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


def finish_evaluation(turn: Turn) -> None:
    """Gives up an evaluation that is late or whose node is gone; asks another for the final one.

    After it members that are behind are given as long as commits take to be applied: once the run is
    finished, those who could supply them leave.
    """
    asked = turn.state.evaluating
    if asked is None:
        return
    is_final = asked.round == turn.state.rules.total_rounds
    if turn.now >= asked.until:
        turn.state = replace(turn.state, evaluating=None)
    elif is_final and is_evaluated(turn.state):
        if not members_behind(turn.state):
            turn.state = replace(turn.state, evaluating=None)
    elif asked.node_id is None or not is_present(turn.state, asked.node_id):
        if not is_final:  # the swarm has moved on, or is about to
            turn.state = replace(turn.state, evaluating=None)
        elif available_members(turn.state):
            _ask(turn)
        elif asked.node_id is not None:
            turn.state = replace(turn.state, evaluating=replace(asked, node_id=None))


def finish_run(turn: Turn) -> None:
    """Ends the run after the last round, once its state is evaluated and taken over, or was given the time.

    Not while nobody here holds that state, and it may be taken back.
    """
    state = turn.state
    if state.is_finished or not is_at_end(state) or state.evaluating is not None:
        return
    if state.unsupplied_since is not None:
        return
    assert state.outer_digest is not None
    turn.state = replace(state, is_finished=True)
    turn.act(
        SendFinished(
            round=state.committed_round,
            outer_digest=state.outer_digest,
            reason=finished_reason(turn.state),
        )
    )


def finished_reason(state: SwarmState) -> str:
    """How the run ended, in words."""
    total = state.rules.total_rounds
    reason = "the only round is committed" if total == 1 else f"all {total} rounds are committed"
    if is_evaluated(state):
        return f"{reason}; the held-out loss is {state.held_out[-1].loss:.3f} nats per token"
    return f"{reason}; nobody could evaluate the final state in time"


def _ask(turn: Turn) -> None:
    """Asks a ready member; with none, keeps a request of the final state open until its time is over."""
    ready = available_members(turn.state)
    committed = turn.state.committed_round
    rules = turn.state.rules
    place = committed // rules.evaluate_every_rounds  # rounds alone could hit one node every time
    chosen = ready[place % len(ready)].node_id if ready else None
    if chosen is None and committed != rules.total_rounds:
        turn.state = replace(turn.state, evaluating=None)
        return
    current = turn.state.open_round
    until = (turn.now if current is None else current.commit_deadline) + rules.apply_seconds
    turn.state = replace(
        turn.state, evaluating=Evaluating(node_id=chosen, round=committed, until=until)
    )
    if chosen is not None:
        turn.act(AskEvaluation(node_id=chosen, round=committed))
