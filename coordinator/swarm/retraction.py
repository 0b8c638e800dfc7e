"""Takes back what was committed and nobody can supply any more. Pure.

Every node that held a result may die right after the commit. The others can then never apply it,
and would wait for ever. So the round is committed once more without the slices that are lost, under
a new incarnation number; who had applied the first version goes back to the state before it.
"""

from dataclasses import replace

from coordinator.swarm.actions import SendCommit
from coordinator.swarm.books import book, unbook
from coordinator.swarm.ledger import committed_tokens
from coordinator.swarm.state import ClosedRound, Member, MemberState, Round, SwarmState
from coordinator.swarm.turn import Turn, is_present, name_of, present_members
from protocol.rounds import SliceOutcome


def lost_slices(state: SwarmState, current: Round) -> list[SliceOutcome]:
    """The committed slices of an applied round whose result no present member holds.

    None are lost as long as a present member has applied the round: it supplies the state.
    """
    assert current.commit is not None
    if any(is_present(state, node_id) for node_id in current.applied):
        return []
    return [
        outcome
        for outcome in current.commit.slices
        if outcome.digest is not None
        and not any(
            results.get(outcome.index) == outcome.digest and is_present(state, node_id)
            for node_id, results in current.held.items()
        )
    ]


def retract_lost(turn: Turn) -> bool:
    """Commits the round in flight once more without what is lost; False when nothing is.

    Not while nobody is here: who comes back first may hold it all. And not before the time that the
    run file gives for applying, however short nodes usually are about it.
    """
    current = turn.state.open_round
    assert current is not None and current.commit is not None
    if turn.now < current.committed_at + turn.state.rules.apply_seconds:
        return False
    lost = {outcome.index for outcome in lost_slices(turn.state, current)}
    if not lost or not present_members(turn.state):
        return False
    before = current.commit
    incarnation = turn.state.incarnation + 1
    commit = replace(
        before,
        incarnation=incarnation,
        slices=tuple(
            _voided(turn.state, outcome) if outcome.index in lost else outcome
            for outcome in before.slices
        ),
    )
    *earlier, closed = turn.state.recent
    closed = replace(
        closed,
        commit=commit,
        tokens=sum(committed_tokens(commit).values()),
        reason=f"{_slices(len(lost))} of {len(commit.slices)} taken back: "
        "every node that held the result is gone",
    )
    if closed.is_void:
        commit = replace(commit, outer_digest=before.base_digest)
        closed = replace(closed, commit=commit)
    turn.state = replace(
        book(unbook(turn.state, before), commit),
        incarnation=incarnation,
        open_round=replace(
            current,
            commit=commit,
            apply_deadline=turn.now + turn.state.rules.apply_seconds,
            applied={},
        ),
        recent=(*earlier, closed),
    )
    turn.act(SendCommit(commit=commit))
    return True


def retract_unsupplied(turn: Turn) -> None:
    """Takes the newest round back when nobody here holds its state, and somebody the one before.

    Between two rounds: all that had applied it may be gone before the others could fetch it. They
    are given as long as nodes are given to apply a commit. Void rounds after it go with it, for
    they left its state as it was. Never more than that: nodes that are further behind may simply
    have just begun, and those who are gone may come back.
    """
    state = turn.state
    if not _is_unsupplied(state):
        if state.unsupplied_since is not None:
            turn.state = replace(state, unsupplied_since=None)
    elif state.unsupplied_since is None:
        turn.state = replace(state, unsupplied_since=turn.now)
    elif turn.now >= state.unsupplied_since + state.rules.apply_seconds:
        _retract_newest(turn)


def _is_unsupplied(state: SwarmState) -> bool:
    if state.open_round or state.outer_digest is None or state.is_finished or not state.recent:
        return False
    oldest = state.recent[0]
    present = present_members(state)
    if oldest.is_void or any(_may_supply(state, member) for member in present):
        return False
    base = oldest.commit.base_digest
    return any(m.outer_round == oldest.commit.round - 1 and m.outer_digest == base for m in present)


def _may_supply(state: SwarmState, member: Member) -> bool:
    """Whether it holds the committed state, or says to hold a later one."""
    return member.state is MemberState.READY or member.outer_round > state.committed_round


def _retract_newest(turn: Turn) -> None:
    state = turn.state
    incarnation = state.incarnation + 1
    base = state.recent[0].commit.base_digest
    rewritten: list[ClosedRound] = []
    for closed in state.recent:
        commit = replace(
            closed.commit,
            incarnation=incarnation,
            base_digest=base,
            outer_digest=base,
            slices=tuple(_voided(state, outcome) for outcome in closed.commit.slices),
        )
        state = book(unbook(state, closed.commit), commit)
        is_cause = not closed.is_void
        rewritten.append(
            replace(
                closed,
                commit=commit,
                tokens=0,
                reason="taken back: every node that held the state after it is gone"
                if is_cause
                else closed.reason,
            )
        )
        turn.act(SendCommit(commit=commit))
    turn.state = replace(
        state,
        incarnation=incarnation,
        outer_digest=base,
        recent=tuple(rewritten),
        unsupplied_since=None,
    )


def _voided(state: SwarmState, outcome: SliceOutcome) -> SliceOutcome:
    if outcome.digest is None:
        return outcome
    holders = ", ".join(name_of(state, node_id) for node_id in outcome.holder_ids)
    return replace(
        outcome,
        digest=None,
        contributors=(),
        holder_ids=(),
        void_reason=f"taken back: all that held it are gone ({holders})",
    )


def _slices(number: int) -> str:
    return "1 slice" if number == 1 else f"{number} slices"
