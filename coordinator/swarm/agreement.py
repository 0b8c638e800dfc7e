"""Which members hold the committed state, and on which state they agree. Pure.

Each says by a digest what it holds. Who holds another state is sent to fetch the swarm's; who may know
commits that are missing here is asked for them first.
"""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.swarm.events import HistoryTold, Tell, Turn
from coordinator.swarm.members import PRESENT, Member, MemberState
from coordinator.swarm.state import (
    Round,
    RoundPhase,
    SwarmState,
    T,
    last_sure_round,
    present_members,
)
from coordinator.swarm.weighing import heaviest, say_of, unchecked, weight_of
from protocol.trust.rulings import undoes
from protocol.wire.messages import CommitsWanted, RefetchAsked
from protocol.wire.rounds import Digest, NodeId


def note_outer_state(
    turn: Turn, node_id: NodeId, outer_round: int, digest: Digest, incarnation: int
) -> None:
    """Takes note of the outer state that a present member says it holds.

    Messages overtake each other: a READY member that seems to go back is an old message. Others
    may go back, because a node that fetches its state anew may pass through an older snapshot.
    """
    member = turn.state.members[node_id]
    if member.state is MemberState.READY and outer_round < member.outer_round:
        return
    is_news = (outer_round, digest) != (member.outer_round, member.outer_digest)
    turn.put_member(
        replace(
            member,
            outer_round=outer_round,
            outer_digest=digest,
            outer_incarnation=incarnation,
        )
    )
    judge(turn, node_id, is_news=is_news)


def agree_on(turn: Turn, digest: Digest) -> None:
    """Makes `digest` the committed state's, and sorts all present members by it."""
    turn.state = replace(turn.state, outer_digest=digest)
    for member in present_members(turn.state):
        if member.outer_round > turn.state.committed_round:  # what it told may be of use only now
            judge(turn, member.node_id, is_news=member.has_told_history)
        elif member.outer_round == turn.state.committed_round:
            judge(turn, member.node_id, is_news=True)
        elif member.state is MemberState.READY:
            turn.put_member(replace(member, state=MemberState.JOINING))


def judge_all(turn: Turn) -> None:
    """Compares all present members' states with the committed one, which has just changed."""
    for member in present_members(turn.state):
        judge(turn, member.node_id, is_news=False)


def agree_on_initial_state(turn: Turn) -> None:
    """Chooses the initial state among the nodes that are here, until the first round opens.

    Where the run begins with given weights there is nothing to choose. Else it is what has most weight,
    and chosen anew when another one has more, or nobody who holds it is left: nothing is lost yet, and
    waiting for a node that may never come back would hold up the run. Nobody is told to fetch it before
    as many nodes are here as a round opens with: who comes first has no more say than others.
    """
    state = turn.state
    if state.rules.first_digest is not None or state.committed_round or state.open_round:
        return
    here = _choosing(state)
    if not here:
        return
    say = say_of(here, 0, unchecked(state))
    digest = heaviest(say, {m.node_id: m.outer_digest for m in here})
    for_it, for_what_is_agreed = (
        weight_of(say, (m.node_id for m in here if m.outer_digest == each))
        for each in (digest, state.outer_digest)
    )
    if for_it > for_what_is_agreed:
        agree_on(turn, digest)
    elif not _may_be_outweighed(state):
        for member in present_members(state):  # until now nobody was told to fetch it
            if member.state is MemberState.JOINING and member.outer_round == 0:
                judge(turn, member.node_id, is_news=True)


def _may_be_outweighed(state: SwarmState) -> bool:
    """Whether the first state is chosen by fewer nodes than a round opens with, so that it may change."""
    if state.rules.first_digest is not None or state.committed_round or state.open_round:
        return False
    return len(_choosing(state)) < state.rules.min_nodes


def _choosing(state: SwarmState) -> list[Member]:
    """Who chooses the first state: helpers have no say in it."""
    here = present_members(state)
    return [member for member in here if member.outer_round == 0 and not member.is_helper]


def judge(turn: Turn, node_id: NodeId, *, is_news: bool) -> None:
    """Compares a present member's outer state with the committed one.

    Asks for a refetch when it differs and that is news, so that heartbeats do not repeat the request.
    """
    state = turn.state
    member = state.members[node_id]
    current = state.open_round
    is_found_out = is_news or member.state is not MemberState.DIVERGED
    if holds_undone(state, member):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, f"round {member.outer_round}, which it holds, is undone")
        return
    if member.outer_round < state.committed_round:
        if current is not None and node_id in current.applied:  # it has gone back
            turn.put_round(replace(current, applied=without(current.applied, node_id)))
        if is_news and may_bring_commits(state, member):
            _ask_commits(turn, node_id)
        return  # it catches up by itself
    if member.outer_round > state.committed_round:
        # Only a coordinator restored from an old copy of its database sees an honest node ahead.
        turn.put_member(replace(member, state=MemberState.JOINING))
        if is_news or member.state is MemberState.READY:  # or what was learned has taken us back
            _ask_commits(turn, node_id)
    elif (
        current is not None
        and current.phase is RoundPhase.APPLYING
        and (_is_outdated(member, current) or _has_applied_what_is_left(state, member))
    ):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, f"round {member.outer_round} was taken back")
    elif current is not None and current.phase is RoundPhase.APPLYING:
        reports = {**current.applied, node_id: member.outer_digest}
        turn.put_round(replace(current, applied=reports))
    elif state.outer_digest is None:
        return  # agree_on_initial_state decides
    elif member.outer_digest == state.outer_digest:
        turn.put_member(replace(member, state=MemberState.READY))
    elif _may_be_outweighed(state):
        turn.put_member(replace(member, state=MemberState.JOINING))
    elif may_bring_commits(state, member) and member.state is not MemberState.DIVERGED:
        turn.put_member(replace(member, state=MemberState.JOINING))
        if is_news:  # what becomes of it shows when it has told all that it knows
            _ask_commits(turn, node_id)
    else:
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        if is_found_out:
            _ask_refetch(turn, member, _differs(state, member))


def history_told(turn: Turn, event: HistoryTold) -> None:
    """Sends a node back whose state builds on commits that it could not bring back."""
    state = turn.state
    member = state.members.get(event.node_id)
    if member is None or member.state not in PRESENT:
        return
    member = replace(member, has_told_history=True)
    turn.put_member(member)
    if member.outer_round > state.committed_round:
        _ask_refetch(turn, member, f"ahead of the swarm: it holds round {member.outer_round}")
    elif (
        member.outer_round == state.committed_round
        and state.outer_digest is not None
        and state.outer_digest != member.outer_digest
    ):
        turn.put_member(replace(member, state=MemberState.DIVERGED))
        _ask_refetch(turn, member, _differs(state, member))


def may_bring_commits(state: SwarmState, member: Member) -> bool:
    """Whether the member's state shows that it knows commits which hold over those here.

    It is ahead; or it holds another state after one of the newest rounds, which are void here.
    """
    if member.outer_round > state.committed_round:
        return True
    if not state.recent or not state.recent[-1].is_void:
        return False
    newest = state.recent[0].commit
    is_known = newest.outer_digest is not None and member.outer_round >= newest.round
    return is_known and member.outer_digest != newest.outer_digest


def _ask_commits(turn: Turn, node_id: NodeId) -> None:
    turn.put_member(replace(turn.state.members[node_id], has_told_history=False))
    turn.act(Tell(message=commits_wanted(turn.state), to=(node_id,)))


def commits_wanted(state: SwarmState) -> CommitsWanted:
    """What asks nodes for all commits that this coordinator may lack."""
    return CommitsWanted(after_round=last_sure_round(state))


def awaits_first_weights(state: SwarmState, member: Member) -> bool:
    """Whether a member has yet to fetch the weights that the run begins with, as all but one have to."""
    begins = state.rules.first_digest is not None and not state.committed_round
    return begins and member.state is MemberState.DIVERGED and not member.outer_round


def _differs(state: SwarmState, member: Member) -> str:
    assert state.outer_digest is not None
    return (
        f"its digest {member.outer_digest.hex()[:8]} at round {member.outer_round} "
        f"is not the swarm's {state.outer_digest.hex()[:8]}"
    )


def _is_outdated(member: Member, current: Round) -> bool:
    """Whether the member applied a version of the round that was taken back since.

    Its digest must not count among those that the nodes agree on.
    """
    return current.commit is not None and member.outer_incarnation < current.commit.incarnation


def _has_applied_what_is_left(state: SwarmState, member: Member) -> bool:
    """Whether its state is one from before, under the number of a void round that has given way."""
    at = member.outer_round, member.outer_digest
    return any(at[0] >= left.first_round and at[1] == left.digest for left in state.left)


def _ask_refetch(turn: Turn, member: Member, what: str) -> None:
    reason = f"the outer state of {member.node_name} was refused: {what}"
    if (refetch := refetch_of(turn.state, reason)) is not None:
        turn.act(Tell(message=refetch, to=(member.node_id,)))


def refetch_of(state: SwarmState, reason: str) -> RefetchAsked | None:
    """What sends a node to the newest state whose digest is known, if there is one."""
    if state.outer_digest is not None:
        target, digest = state.committed_round, state.outer_digest
    elif state.open_round is not None:  # nodes have yet to agree on the newest; this one is certain
        target, digest = state.open_round.number - 1, state.open_round.base_digest
    else:
        return None
    return RefetchAsked(round=target, outer_digest=digest, reason=reason)


def holds_undone(state: SwarmState, member: Member) -> bool:
    """Whether the member holds the state after a round that is undone."""
    return undoes(state.rolled_back, member.outer_round, member.outer_incarnation)


def without(reports: Mapping[NodeId, T], node_id: NodeId) -> dict[NodeId, T]:
    """What all nodes but one have reported."""
    return {other: report for other, report in reports.items() if other != node_id}
