"""The run goes back: its state becomes again what it was after a round, and later rounds are undone. Pure.

A ruling says so: signed and numbered, it holds for nodes that were away and for an older copy of the
database too. What was committed after the round is of a lower incarnation than what is committed from
then on, so everybody can tell the two apart. Samples of undone rounds are free again, what they earned
counts no more, and nodes that hold their states are sent back to the state that the run goes on from.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.swarm.committed import judge, unbook
from coordinator.swarm.evaluation import without_evaluations_since
from coordinator.swarm.events import Turn, Undone
from coordinator.swarm.ledger import Ledger, end_ahead, settle
from coordinator.swarm.reach_back import is_in_reach, possible_in_words, saying_so
from coordinator.swarm.standing import without_rounds_undone
from coordinator.swarm.state import KEPT_ROUNDS, SwarmState, name_of, present_members
from coordinator.swarm.weighing import without_rounds_after
from protocol.errors import TemporaryError, UsageError
from protocol.trust.rulings import NOBODY, Ruling
from protocol.wire.rounds import Commit, Digest, NodeId

MOST_SAYING = 8
"""Members named that are not enough to be believed."""

MOST_NAMED = 64
"""Contributors to undone rounds that a ruling names."""


class HistoryMovedError(TemporaryError):
    """A round was closed since the database was asked what going back undoes: ask it again."""


def refuse_going_back(
    state: SwarmState, round: int, undone: Undone | None, believed: NodeId = NOBODY
) -> None:
    """Raises UsageError where the run cannot go back to a round, HistoryMovedError where it may yet.

    It can where enough members say that they keep that state, or one whom the run owner believes.
    """
    if round >= state.committed_round:
        raise UsageError(
            f"round {round} is not behind the run: round {state.committed_round} is the latest",
            next_step=possible_in_words(state),
        )
    if state.awaited is not None:
        raise UsageError(
            "the coordinator has just started and waits to hear its nodes",
            next_step="type it again when 'atoll status' shows that they are back",
        )
    if undone is None or not undone.commits or undone.commits[0].round != round + 1:
        raise UsageError(
            f"what came after round {round} is not kept: commits of {KEPT_ROUNDS} rounds are",
            next_step=possible_in_words(state),
        )
    newest = undone.commits[-1]
    if not _is_newest(state, newest):
        raise HistoryMovedError(f"round {newest.round} is not the latest any more")
    saying = saying_so(state, round)
    if believed != NOBODY and believed not in saying:
        raise UsageError(
            f"{name_of(state, believed)} is not here, or does not say that it can go back to round {round}",
            next_step=possible_in_words(state),
        )
    if believed != NOBODY or is_in_reach(state, round):
        return
    if not saying:
        raise UsageError(
            f"no node that is here can go back to round {round}", next_step=possible_in_words(state)
        )
    names = [name_of(state, node_id) for node_id in saying]
    verb = "says" if len(names) == 1 else "say"
    raise UsageError(
        f"{', '.join(names[:MOST_SAYING])} alone {verb} that the run can go back to round {round}",
        next_step=f"'atoll run rollback {round} --believe {names[0]}' if you know that node; otherwise "
        f"{possible_in_words(state)}",
    )


def comes_to(state: SwarmState, undone: Sequence[Commit]) -> dict[str, Any]:
    """What a ruling says of a going back that undoes these commits, by the names of its fields."""
    return {
        "last_round": undone[-1].round,
        "incarnation": state.incarnation + 1,
        "outer_digest": undone[0].base_digest.hex(),
        "contributors": _contributors(state, undone),
    }


def go_back(turn: Turn, ruling: Ruling, undone: Undone | None) -> None:
    """Undoes all rounds of a lower incarnation from the ruling's on, and sends back who holds their states.

    Where this copy has none of them there is nothing to undo: what is brought back is refused from now on.
    """
    state = replace(turn.state, incarnation=max(turn.state.incarnation, ruling.incarnation))
    round = ruling.from_round - 1
    commits = [] if undone is None else undone.commits
    gone = [commit for commit in commits if round < commit.round <= state.committed_round]
    if undone is not None and gone and gone[0].incarnation < ruling.incarnation:
        state = _unbooked(_without_open_round(state), gone)
        state = replace(
            without_evaluations_since(state, round + 1),
            members={
                node_id: replace(
                    member,
                    work=without_rounds_after(member.work, round),
                    screenings=tuple(s for s in member.screenings if s.round <= round),
                    against=without_rounds_undone(
                        member.against, after=round, newest=state.committed_round
                    ),
                )
                for node_id, member in state.members.items()
            },
            committed_round=round,
            outer_digest=Digest(gone[0].base_digest),
            recent=undone.recent,
            norms=undone.norms,
            audits=tuple(audit for audit in state.audits if audit.round <= round),
            spot_checks=tuple(check for check in state.spot_checks if check.round <= round),
            left=tuple(left for left in state.left if left.first_round <= round),
            unsupplied_since=None,
            is_finished=False,
            finished_at=None,
        )
    turn.state = state
    for member in present_members(state):
        judge(turn, member.node_id, is_news=True)


def books_after(
    state: SwarmState, round: int, commits: Sequence[Commit]
) -> tuple[int, Ledger] | None:
    """The token clock and the ledger as they were after a round, with nothing leased.

    None unless `commits` are of all rounds since; later ones than the state knows do not matter.
    """
    gone = [commit for commit in commits if commit.round <= state.committed_round]
    if [commit.round for commit in gone] != [*range(round + 1, state.committed_round + 1)]:
        return None
    state = _unbooked(_without_open_round(state), gone)
    return state.token_clock, replace(state.ledger, leased=())


def _unbooked(state: SwarmState, commits: Sequence[Commit]) -> SwarmState:
    for commit in reversed(commits):
        state = unbook(state, commit)
        state = replace(state, ledger=settle(state.ledger, commit.assignments, {}))
    return state


def _is_newest(state: SwarmState, commit: Commit) -> bool:
    if not state.recent:
        return commit.round == state.committed_round
    newest = state.recent[-1].commit
    return (newest.round, newest.base_digest, newest.incarnation) == (
        commit.round,
        commit.base_digest,
        commit.incarnation,
    )


def _without_open_round(state: SwarmState) -> SwarmState:
    """Ends all leases of the round in flight, and those ahead of it."""
    ledger = end_ahead(state.ledger, {a.node_id for a in state.ledger.ahead})
    current = state.open_round
    if current is not None and current.commit is None:
        ledger = settle(ledger, current.assignments, {})
    return replace(state, ledger=ledger, open_round=None, earlier=(), round_wire={})


def _contributors(state: SwarmState, commits: Sequence[Commit]) -> tuple[str, ...]:
    node_ids = {
        contributor.node_id
        for commit in commits
        for outcome in commit.slices
        for contributor in outcome.taken
    }
    names = sorted(name_of(state, node_id) for node_id in node_ids)
    if len(names) <= MOST_NAMED:
        return tuple(names)
    return (*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} others")
