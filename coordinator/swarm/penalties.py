"""What keeps a member from slices and audits for a while, or has it put out. Pure.

A ruling puts a member that is convicted in quarantine, with the evidence. A reducer whose results are in
doubt, or reached too few, stays away from slices for 1, 2, 4, … rounds.
"""

from dataclasses import replace

from coordinator.swarm.events import LeftOutProven, QuarantineAsked, Turn
from coordinator.swarm.members import BARRED, Conviction, Member, Work
from coordinator.swarm.retraction import go_back_before
from coordinator.swarm.standing import MOST_ROUNDS_OUT, rounds_out
from coordinator.swarm.state import Round, is_present, name_of, next_round
from protocol.wire.rounds import Commit, NodeId

MOST_CONTRADICTED = 2
"""So often a member's findings are contradicted until its confirmed work counts no more."""


def convict(turn: Turn, node_id: NodeId, reason: str, evidence: tuple[str, ...]) -> None:
    """Has a member put in quarantine, once, unless it is barred already."""
    strike(turn, node_id)
    state, member = turn.state, turn.state.members.get(node_id)
    is_asked = any(conviction.node_id == node_id for conviction in state.convicted)
    if member is None or member.state in BARRED or is_asked:
        return
    conviction = Conviction(
        node_id=node_id, node_name=name_of(state, node_id), reason=reason, evidence=evidence
    )
    turn.state = replace(state, convicted=(*state.convicted, conviction))
    turn.act(QuarantineAsked(conviction=conviction))


def left_out(turn: Turn, event: LeftOutProven) -> None:
    """A reducer has left out a contribution that it gave a receipt for; heard until its round is settled."""
    omission, current = event.omission, turn.state.open_round
    if current is None or current.number != omission.round:
        return
    progress = current.slices[omission.slice_index]
    place = progress.slice.reducer_id, progress.digest
    is_known = any(c.node_id == omission.reducer_id for c in turn.state.convicted)
    if place != (omission.reducer_id, omission.result) or progress.refused or is_known:
        return
    name, left = (name_of(turn.state, n) for n in (omission.reducer_id, omission.contributor_id))
    reason = (
        f"it left {left} out of slice {omission.slice_index} of round {omission.round}, whose "
        f"contribution it had signed a receipt for"
    )
    convict(turn, omission.reducer_id, reason, event.evidence)
    commit, index = current.commit, omission.slice_index
    if commit is not None and commit.slices[index].digest is not None:
        go_back_before(turn, omission.round, f"{name} is convicted: {reason}", event.evidence)
    elif commit is None:
        turn.put_slice(current, replace(progress, refused=f"{name} is convicted: {reason}"))


def sound_convictions(turn: Turn) -> None:
    """Has the edge rule what follows from convictions that a coordinator before this one came to."""
    for conviction in turn.state.convicted if turn.state.awaited is None else ():
        turn.act(QuarantineAsked(conviction=conviction))


def strike(turn: Turn, node_id: NodeId) -> None:
    """Keeps a member from slices and audits for a while, twice as long each time."""
    if (member := turn.state.members.get(node_id)) is not None:
        num_disputed = member.audits.num_disputed + 1
        back_at = next_round(turn.state) + rounds_out(num_disputed)
        _note(turn, member, num_disputed=num_disputed, back_at_round=back_at)


def contradict(turn: Turn, node_id: NodeId) -> None:
    """A member's finding is not what more than half of the weight found: on repeat it loses its say."""
    if (member := turn.state.members.get(node_id)) is not None:
        num_contradicted = member.audits.num_contradicted + 1
        if num_contradicted >= MOST_CONTRADICTED:
            member = replace(member, work=Work())
        _note(turn, member, num_contradicted=num_contradicted)


def was_silent(turn: Turn, node_id: NodeId) -> None:
    """Who is asked and does not answer lets results pass unseen: it is asked more and more seldom."""
    member, planned = turn.state.members.get(node_id), next_round(turn.state)
    if member is None or member.audits.audits_from_round > planned:
        return  # it is gone, or was silent on another slice too
    silent = member.audits.num_unanswered + 1
    from_round = planned + rounds_out(silent)
    _note(turn, member, num_unanswered=silent, audits_from_round=from_round)


def rest_of_void(turn: Turn, closed: Round, commit: Commit) -> None:
    """Keeps those from slices for a while whose results reached too few, while results of others did.

    Its link may be slow, its bytes may not decode, or it keeps them to accomplices: members cannot tell these
    apart, and the slice is lost each time. Where as many slices are void as not, the network is at fault.
    """
    void = [closed.slices[o.index] for o in commit.slices if o.digest is None]
    if 2 * len(void) >= len(commit.slices):
        return
    made = {p.slice.reducer_id for p in void if p.digest is not None and not p.refused}
    for node_id in sorted(made):
        if is_present(turn.state, node_id):
            rest(turn, node_id, closed.number)


def rest(turn: Turn, node_id: NodeId, number: int) -> None:
    """Keeps a member from slices for 1, 2, 4, … rounds, whose result of a round did not reach the others."""
    member = turn.state.members.get(node_id)
    if member is None or (member.audits.num_void and member.audits.void_round == number):
        return
    num_void = member.audits.num_void + 1 if is_void_again(member, number) else 1
    back_at = max(member.audits.back_at_round, next_round(turn.state) + rounds_out(num_void))
    _note(turn, member, num_void=num_void, void_round=number, back_at_round=back_at)


def note_unmade(turn: Turn, node_id: NodeId, number: int) -> None:
    """Remembers that others had to make a slice which this reducer had not made when they had all."""
    if (member := turn.state.members.get(node_id)) is not None:
        _note(turn, member, unmade_round=number)


def _note(turn: Turn, member: Member, **changes: int) -> None:
    turn.put_member(replace(member, audits=replace(member.audits, **changes)))


def is_void_again(member: Member, number: int) -> bool:
    """Whether a result of the member reached too few in a round not long before this one."""
    record = member.audits
    return record.num_void > 0 and 0 < number - record.void_round <= 2 * MOST_ROUNDS_OUT


def may_reduce(member: Member, number: int) -> bool:
    """Whether a plan of this round may have the member reduce."""
    return member.audits.back_at_round <= number
