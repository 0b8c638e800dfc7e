"""What simulated nodes hear of what the core asks for, as the real edge tells them. It only delivers."""

from collections.abc import Iterable, Mapping

from coordinator.swarm.agreement import may_bring_commits
from coordinator.swarm.events import Action, EndSession, OpenSession, Tell
from coordinator.swarm.members import MemberState
from coordinator.swarm.rounds import plan_of
from coordinator.swarm.start import time_of_round
from coordinator.swarm.state import SwarmState, last_sure_round
from coordinator.swarm.takeover import takeover_of
from coordinator.swarm.weighing import holders_of
from protocol.wire.messages import (
    CommitsWanted,
    Message,
    RefetchAsked,
    ResultOffered,
    RoundOpened,
    SliceTakenOver,
)
from protocol.wire.rounds import NodeId
from tests.property.swarm_nodes import SimulatedNode

Nodes = Mapping[NodeId, SimulatedNode]


def obey(
    action: Action, nodes: Nodes, leased: Mapping[NodeId, object], state: SwarmState, now: float
) -> None:
    """`leased`: who got samples of the round in flight. What nodes do not hear is nothing to do here."""
    match action:
        case OpenSession():
            node = nodes[action.node_id]
            node.session_id = action.session_id
            _tell_what_holds(node, leased, state, now)
        case EndSession():
            nodes[action.node_id].session_id = None
        case Tell(message=message, to=to):
            for node in _listening(nodes, nodes if to is None else to):
                _hear(node, message)
        case _:
            pass


def _hear(node: SimulatedNode, message: Message) -> None:
    match message:
        case RoundOpened(plan=plan):
            node.hear_plan(plan)
        case SliceTakenOver():
            node.hear_takeover(message)
        case ResultOffered():
            node.hear_offer(message)
        case RefetchAsked(round=number, outer_digest=digest):
            node.refetch = (number, digest)
        case CommitsWanted(after_round=after_round):
            node.asked_after = after_round
        case _:
            pass


def _listening(nodes: Nodes, node_ids: Iterable[NodeId]) -> list[SimulatedNode]:
    return [nodes[each] for each in node_ids if nodes[each].session_id is not None]


def _tell_what_holds(
    node: SimulatedNode, leased: Mapping[NodeId, object], state: SwarmState, now: float
) -> None:
    """As when a session's stream of events begins."""
    current = state.open_round
    member = state.members[node.node_id]
    if current and current.commit is None and node.node_id in leased:
        now = time_of_round(state, now)
        node.hear_plan(plan_of(current, now))
        for progress in current.slices:
            if progress.attempt:
                node.hear_takeover(takeover_of(current.number, progress, now))
            if progress.is_offered and progress.digest is not None:
                node.hear_offer(
                    ResultOffered(
                        round=current.number,
                        slice_index=progress.slice.index,
                        digest=progress.digest,
                        holder_ids=holders_of(state, current, progress),
                    )
                )
    if may_bring_commits(state, member) and member.state is not MemberState.DIVERGED:
        node.asked_after = last_sure_round(state)
    if member.state is MemberState.DIVERGED and state.outer_digest is not None:
        node.refetch = (state.committed_round, state.outer_digest)
    elif member.state is MemberState.DIVERGED and current is not None:
        node.refetch = (current.number - 1, current.base_digest)
