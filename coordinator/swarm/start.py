"""How a coordinator starts: whom it hears before anything is decided, and what it learns from them. Pure.

Its database may be older than what nodes know, and it cannot tell. So it first hears the nodes of the
newest round that it knows of, and takes over the commits that they bring back. Nothing is decided
meanwhile: no round is closed, opened, settled or taken back, and its deadlines wait.

Nodes keep the commits that led to their state, signed by the coordinator, and bring back those that are
missing. The edge has checked the signatures; here they must continue the history. Of two commits of a round
on the same state the one of the later incarnation holds. Of one incarnation, one with results holds over a
void one: both are real, a coordinator that knew less has made the void one, and nothing that nodes did for
it is lost by leaving it out, for it is in their residuals. For the same reason a round that was taken back
holds again when a node returns with the state after it, as long as nothing was committed since. The end of
the run changes none of this.
"""

from collections.abc import Iterable
from dataclasses import replace

from coordinator.swarm.agreement import holds_undone, judge_all
from coordinator.swarm.books import book_learned, without_open_round, without_rounds
from coordinator.swarm.bounds import norms_after, stride_of
from coordinator.swarm.events import BaseLearned, CommitLearned, Tell, Turn
from coordinator.swarm.members import BARRED, PRESENT, Member, MemberState
from coordinator.swarm.membership import give_up
from coordinator.swarm.reports import forget_errors
from coordinator.swarm.rounds import end_round, plan_of
from coordinator.swarm.state import (
    KEPT_LEFT,
    Awaited,
    ClosedRound,
    Left,
    Round,
    RoundPhase,
    SliceProgress,
    SwarmState,
    name_of,
    present_members,
    present_participants,
    training_among,
    trimmed,
)
from protocol.trust.rulings import undoes
from protocol.wire.messages import RoundCommitted
from protocol.wire.rounds import Assignment, Commit, NodeId, Result, Slice, same_fields, training_in

GONE_FOR_GOOD = frozenset({MemberState.LEFT}) | BARRED
"""Nobody waits for these: they have said goodbye, or the run owner bars them."""

MARGIN = 1.5
"""The next round is given so many times what the newest one took, within the longest round's time."""

RETURN_SECONDS = 30.0
"""Within so long a node that lives has attached again, whatever the lease: it tries every 16 s at least, and
looks elsewhere after 20 (node.link.session)."""


def start(turn: Turn) -> None:
    """Begins to wait for the newest round's nodes. What the database says of who is here is old."""
    state = turn.state
    if state.is_finished:  # nobody is waited for, and processes that began anew are no copies
        unheard = {n: replace(member, is_heard=False) for n, member in state.members.items()}
        turn.state = replace(state, members=unheard)
        return
    node_ids = _newest_participants(state)
    members = {node_id: _not_yet_heard(member) for node_id, member in state.members.items()}
    was = state.awaited
    state = replace(state, members=members, awaited=None, unsupplied_since=None, unfollowed=None)
    if node_ids:
        until = turn.now + longest_wait_seconds(state)
        awaited = Awaited(
            node_ids=node_ids,
            until=until,
            living_until=turn.now + max(state.rules.lease_seconds, RETURN_SECONDS),
            from_session_id=state.next_session_id,
        )
        state = replace(state, awaited=awaited)
        state = _with_deadlines_later(state, until - (turn.now if was is None else was.until))
    turn.state = state


def waits_until(state: SwarmState, awaited: Awaited) -> float:
    """When the run goes on without those who are not back.

    Once one of them is back and a round could open, the others are waited for as long as a node that falls
    silent: who lives has found the coordinator by then. Else the longest wait holds: nobody could go on, and
    those who come may be the only ones with commits that this coordinator lacks.
    """
    back = [member for member in present_members(state) if _is_back(member, awaited)]
    able = [member for member in back if not (member.is_helper or member.is_draining)]
    is_one_back = any(member.node_id in awaited.node_ids for member in back)
    if not is_one_back or len(able) < state.rules.min_nodes or bringing(state):
        return awaited.until
    return min(awaited.until, awaited.living_until)


def longest_wait_seconds(state: SwarmState) -> float:
    """How long nodes are waited for at most: the next commit comes within the longest round's time.

    The longest round is the run file's: `[deadlines] commit`. Half of it at least, and more where
    the newest round was short.
    """
    longest = state.rules.commit_seconds
    taken = max((c.seconds for c in state.recent if not c.is_void), default=0.0)
    return max(longest / 2, longest - MARGIN * taken) if taken else longest / 2


def await_participants(state: SwarmState, assignments: Iterable[Assignment]) -> SwarmState:
    """A newer round was learned: its nodes are waited for instead."""
    if state.awaited is None:
        return state
    return replace(state, awaited=replace(state.awaited, node_ids=_known(state, assignments)))


def missing(state: SwarmState) -> list[NodeId]:
    """Who of those that are waited for has not come back, in the order of their ids."""
    awaited = state.awaited
    if awaited is None:
        return []
    return [n for n in awaited.node_ids if not _is_back(state.members[n], awaited)]


def bringing(state: SwarmState) -> list[Member]:
    """Who is here and ahead: it has commits to bring back."""
    ahead = (m for m in present_members(state) if m.outer_round > state.committed_round)
    return [member for member in ahead if not holds_undone(state, member)]


def end_waiting(turn: Turn) -> None:
    """The run goes on once all are back and nobody has commits to bring, or at the time limit.

    A node that has not come back by then counts as lost, whatever its lease was in the database.
    """
    awaited = turn.state.awaited
    if awaited is None:
        return
    is_over = turn.now >= waits_until(turn.state, awaited)
    if not is_over and (missing(turn.state) or bringing(turn.state)):
        return
    turn.state = replace(
        _with_deadlines_later(turn.state, min(0.0, turn.now - awaited.until)), awaited=None
    )
    silent = [m for m in present_members(turn.state) if not _is_back(m, awaited)]
    give_up(turn, silent, reason="it has not come back since the coordinator started")
    _void_with_too_few(turn)


def _void_with_too_few(turn: Turn) -> None:
    """A round in flight commits nothing if fewer of its nodes are back than a round may open with.

    Those who are missing may have committed it, and more, after the copy was made.
    """
    current, needed = turn.state.uncommitted_round, turn.state.rules.min_nodes
    if current is None:
        return
    back = training_among(current, present_participants(turn.state, current))
    num_training = len(training_in(current.assignments))
    if len(back) < min(needed, num_training):
        why = f"only {len(back)} of its nodes came back after the coordinator started"
        turn.put_round(replace(current, cannot_commit=why, commit_deadline=turn.now))


def wait_longer(turn: Turn, seconds: float) -> None:
    """Nodes could not be heard for a while: whoever is waited for has this much time at least."""
    awaited = turn.state.awaited
    if awaited is None:
        return
    until = turn.now + seconds
    living_until = max(awaited.living_until, until + turn.state.rules.lease_seconds)
    awaited = replace(awaited, living_until=living_until)
    later = max(0.0, until - awaited.until)
    state = _with_deadlines_later(turn.state, later)
    turn.state = replace(state, awaited=replace(awaited, until=awaited.until + later))


def time_of_round(state: SwarmState, now: float) -> float:
    """The time that the deadlines of the round in flight are measured from."""
    return now if state.awaited is None else state.awaited.until


def _newest_participants(state: SwarmState) -> tuple[NodeId, ...]:
    """Those of the newest round; before there was one, all members. Not who said goodbye or is barred."""
    if state.open_round is not None:
        return _known(state, state.open_round.assignments)
    if state.last_closed is not None:
        return _known(state, state.last_closed.commit.assignments)
    return tuple(n for n, m in sorted(state.members.items()) if m.state not in GONE_FOR_GOOD)


def _known(state: SwarmState, assignments: Iterable[Assignment]) -> tuple[NodeId, ...]:
    """Who joined after the copy of a database was made is no member in it, and cannot come back."""
    members = state.members
    return tuple(
        sorted(
            a.node_id
            for a in assignments
            if a.node_id in members and members[a.node_id].state not in GONE_FOR_GOOD
        )
    )


def _not_yet_heard(member: Member) -> Member:
    """Whether it is still ready, and still the same process, shows when it says so again."""
    if member.state is not MemberState.READY:
        return replace(member, is_heard=False)
    return replace(member, state=MemberState.JOINING, is_heard=False)


def _is_back(member: Member, awaited: Awaited) -> bool:
    """Whether it was heard since the start, or has said goodbye."""
    if member.state not in PRESENT:
        return member.state in GONE_FOR_GOOD
    return member.session_id >= awaited.from_session_id or member.state is MemberState.READY


def _with_deadlines_later(state: SwarmState, seconds: float) -> SwarmState:
    """Moves what the run file gives for a round, or for its end, by so much."""
    ends = state.end_waits_until
    return replace(
        state,
        end_waits_until=None if ends is None else ends + seconds,
        open_round=None if state.open_round is None else _later(state.open_round, seconds),
    )


def _later(current: Round, seconds: float) -> Round:
    return replace(
        current,
        train_deadline=current.train_deadline + seconds,
        contribute_deadline=current.contribute_deadline + seconds,
        commit_deadline=current.commit_deadline + seconds,
        committed_at=current.committed_at + seconds,
        apply_deadline=current.apply_deadline + seconds,
        slices=tuple(
            progress
            if progress.contribute_deadline is None
            else replace(progress, contribute_deadline=progress.contribute_deadline + seconds)
            for progress in current.slices
        ),
    )


# What nodes bring back


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
