"""What a coordinator learns from nodes that was restored from an older copy of its database. Pure.

Nodes keep the commits that led to their state, signed by the coordinator, and bring back those that are
missing. The edge has checked the signatures; here they must continue the history. Of two commits of a round
on the same state the one of the later incarnation holds. Of one incarnation, one with results holds over a
void one: both are real, a coordinator that knew less has made the void one, and nothing that nodes did for
it is lost by leaving it out, for it is in their residuals. For the same reason a round that was taken back
holds again when a node returns with the state after it, as long as nothing was committed since. The end of
the run changes none of this.
"""

from dataclasses import replace

from coordinator.swarm.agreement import judge_all
from coordinator.swarm.books import book_learned, without_open_round, without_rounds
from coordinator.swarm.bounds import norms_after, stride_of
from coordinator.swarm.events import BaseLearned, CommitLearned, Tell, Turn
from coordinator.swarm.members import PRESENT, MemberState
from coordinator.swarm.reports import forget_errors
from coordinator.swarm.rounds import end_round, plan_of
from coordinator.swarm.start import await_participants, bringing, time_of_round
from coordinator.swarm.state import (
    KEPT_LEFT,
    ClosedRound,
    Left,
    Round,
    RoundPhase,
    SliceProgress,
    SwarmState,
    name_of,
    present_members,
    trimmed,
)
from protocol.trust.rulings import undoes
from protocol.wire.messages import RoundCommitted
from protocol.wire.rounds import Commit, NodeId, Result, Slice, same_fields


def learn_base(turn: Turn, event: BaseLearned) -> None:
    """Takes over what nodes had agreed on after the newest commit here; heard once, it is settled.

    Not when they agreed on it after another commit of that round: a later version of it, or what
    this coordinator had committed in its place.
    """
    state = turn.state
    current = state.open_round
    if (
        state.outer_digest is None
        and current is not None
        and current.commit is not None
        and _bare(current.commit) == _bare(event.after)
    ):
        end_round(turn, event.digest)


def _bare(commit: Commit) -> Commit:
    """Without what is added to a commit after it was made."""
    return replace(commit, outer_digest=None, signature=b"")


def learn_commit(turn: Turn, event: CommitLearned) -> None:
    """Goes on from the commit as if it had just been made; nodes that hold its state will say so.

    A round that was in flight in the older copy gives way: it is this one. So do the version of a
    round that was taken back since, and void rounds that were closed while nobody who knew of this
    commit was here; a run whose last rounds they were goes on. A commit that does not continue the
    history here is ignored, and so is one that is undone.
    """
    commit = event.commit
    if undoes(turn.state.rolled_back, commit.round, commit.incarnation):
        return
    state = _before_what_gives_way(turn.state, event)
    is_next = commit.round == state.committed_round + 1
    if not is_next or commit.base_digest != state.outer_digest or state.is_finished:
        return
    state = without_open_round(state)
    source = name_of(state, event.node_id)
    outer_digest = commit.base_digest if commit.is_void else None
    commit = replace(commit, outer_digest=outer_digest, signature=b"")
    state = forget_errors(state)
    current = _round_of(commit, state, by=event.node_id, now=turn.now)
    num_tokens = sum(commit.tokens.values())
    # It is not known when the round was opened, nor what its plan counted on.
    plan = replace(plan_of(current, turn.now), round_tokens=num_tokens, opened_at=0.0)
    closed = ClosedRound(
        plan=plan,
        commit=commit,
        trained={},
        tokens=num_tokens,
        seconds=0.0,
        reason=f"learned from {source}: this coordinator's database was older",
    )
    state = await_participants(state, commit.assignments)
    turn.state = replace(
        book_learned(state, commit),
        committed_round=commit.round,
        outer_digest=None,
        open_round=current,
        evaluating=None,
        has_untold=True,
        incarnation=max(state.incarnation, commit.incarnation),
        recent=trimmed((*state.recent, closed)),
        norms=norms_after(state.norms, commit, stride_of(state.rules, plan, closed.trained)),
    )
    for member in present_members(turn.state):
        if member.state is MemberState.READY and member.outer_round < commit.round:
            turn.put_member(replace(member, state=MemberState.JOINING))
    if commit.is_void:
        end_round(turn, commit.base_digest)
    else:
        judge_all(turn)


def _round_of(commit: Commit, state: SwarmState, *, by: NodeId, now: float) -> Round:
    """The round as if this coordinator had just made the commit that `by` brings."""
    committed_at = time_of_round(state, now)
    return Round(
        number=commit.round,
        fragment=commit.fragment,
        base_digest=commit.base_digest,
        phase=RoundPhase.APPLYING,
        opened_at=now,
        train_deadline=now,
        contribute_deadline=now,
        commit_deadline=now,
        assignments=commit.assignments,
        slices=tuple(
            SliceProgress(
                slice=Slice(
                    index=outcome.index,
                    start=outcome.start,
                    num_elements=outcome.num_elements,
                    reducer_id=by,  # who it was is not known any more
                ),
                **same_fields(outcome, Result),
            )
            for outcome in commit.slices
        ),
        token_clock=state.token_clock,
        reason=f"brought back by {name_of(state, by)}",
        commit=commit,
        committed_at=committed_at,
        apply_deadline=committed_at + state.rules.apply_seconds,
    )


def _gives_way(
    state: SwarmState, here: Commit, event: CommitLearned, *, newest_incarnation: int
) -> bool:
    """Whether a commit of a round yields to another one, which is made on the same state.

    What has given way once does not come back, or two nodes could bring both for ever. A later commit of
    the same incarnation on the one that is here shows that it has, also to an older copy of this
    coordinator: what takes a round back is of a newer incarnation than all that there was.
    """
    brought = event.commit
    if here.is_void and not brought.is_void:
        return here.incarnation <= brought.incarnation or _holds_state_after(state, event)
    has_given_way = any(
        left.first_round == brought.round
        and left.digest == brought.base_digest
        and left.incarnation >= brought.incarnation
        for left in state.left
    )
    return newest_incarnation < brought.incarnation and not (brought.is_void and has_given_way)


def _holds_state_after(state: SwarmState, event: CommitLearned) -> bool:
    """Whether the node is here and says to hold the state that the commit led to, or a later one."""
    member = state.members.get(event.node_id)
    commit = event.commit
    return (
        member is not None
        and member.state in PRESENT
        and member.outer_round >= commit.round
        and member.outer_digest != commit.base_digest
    )


def tell_when_all_is_learned(turn: Turn) -> None:
    """See tell_learned; not while somebody is here who may have more commits to bring."""
    if turn.state.has_untold and not bringing(turn.state):
        tell_learned(turn)


def tell_learned(turn: Turn) -> None:
    """Tells who is behind of the newest commit that was learned."""
    state = turn.state
    if not state.has_untold or not state.recent:
        return
    turn.state = replace(state, has_untold=False)
    turn.act(Tell(message=RoundCommitted(commit=state.recent[-1].commit), is_learned=True))


def _before_what_gives_way(state: SwarmState, event: CommitLearned) -> SwarmState:
    """Goes back before a round whose commit here gives way to this one; else changes nothing."""
    commit = event.commit
    gone = [closed for closed in state.recent if closed.commit.round >= commit.round]
    if not gone:
        return state
    first = gone[0].commit
    is_same_place = (first.round, first.base_digest) == (commit.round, commit.base_digest)
    newest = max(closed.commit.incarnation for closed in gone)
    if not is_same_place or not _gives_way(state, first, event, newest_incarnation=newest):
        return state
    left = Left(first_round=first.round, digest=first.base_digest, incarnation=first.incarnation)
    return replace(
        without_rounds(state, [closed.commit for closed in gone]),
        left=(*state.left, left)[-KEPT_LEFT:] if first.is_void else state.left,
        recent=state.recent[: -len(gone)],
    )
