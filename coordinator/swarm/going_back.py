"""The run goes back: its state becomes again what it was after a round, and later rounds are undone. Pure.

A ruling says so: signed and numbered, it holds for nodes that were away and for an older copy of the
database too. What was committed after the round is of a lower incarnation than what is committed from
then on, so everybody can tell the two apart. Samples of undone rounds are free again, what they earned
counts no more, and nodes that hold their states are sent back to the state that the run goes on from.

How far it can go back depends on what lies on nodes' disks, as those that are here say. A member may lie
about that, and a disk may fail the next minute. So a round is in reach when two members of different
invites say that they keep it, or members of as much weight as decides a digest, or all that are here. What
fewer say only the run owner may go by.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from coordinator.swarm.agreement import judge
from coordinator.swarm.books import without_open_round, without_rounds, without_rounds_after
from coordinator.swarm.events import Turn, Undone
from coordinator.swarm.ledger import Ledger
from coordinator.swarm.penalties import without_rounds_undone
from coordinator.swarm.state import KEPT_ROUNDS, Say, SwarmState, name_of, present_members
from coordinator.swarm.weighing import is_enough, say_of, unchecked
from protocol.errors import TemporaryError, UsageError
from protocol.trust.rulings import NOBODY, Ruling
from protocol.wire.rounds import Commit, NodeId, RoundSpan

MOST_SAYING = 8
"""Members named that are not enough to be believed."""


MOST_CONTRIBUTORS = 64
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
        newest = state.committed_round
        state = without_rounds(state, gone)
        state = replace(
            state,
            members={
                node_id: replace(
                    member,
                    work=without_rounds_after(member.work, round),
                    screenings=tuple(s for s in member.screenings if s.round <= round),
                    against=without_rounds_undone(member.against, after=round, newest=newest),
                )
                for node_id, member in state.members.items()
            },
            recent=undone.recent,
            norms=undone.norms,
            audits=tuple(audit for audit in state.audits if audit.round <= round),
            spot_checks=tuple(check for check in state.spot_checks if check.round <= round),
            left=tuple(left for left in state.left if left.first_round <= round),
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
    state = without_rounds(state, gone) if gone else without_open_round(state)
    return state.token_clock, replace(state.ledger, leased=())


def _is_newest(state: SwarmState, commit: Commit) -> bool:
    if not state.recent:
        return commit.round == state.committed_round
    newest = state.recent[-1].commit
    return (newest.round, newest.base_digest, newest.incarnation) == (
        commit.round,
        commit.base_digest,
        commit.incarnation,
    )


def _contributors(state: SwarmState, commits: Sequence[Commit]) -> tuple[str, ...]:
    node_ids = {
        contributor.node_id
        for commit in commits
        for outcome in commit.slices
        for contributor in outcome.taken
    }
    names = sorted(name_of(state, node_id) for node_id in node_ids)
    if len(names) <= MOST_CONTRIBUTORS:
        return tuple(names)
    return (*names[:MOST_CONTRIBUTORS], f"{len(names) - MOST_CONTRIBUTORS} others")


# How far it can


def are_believed(state: SwarmState, node_ids: Collection[NodeId]) -> bool:
    """Whether the run may go by what these members, which are here, say alike of what they hold."""
    return _Saying.of(state, node_ids).are_enough


def is_in_reach(state: SwarmState, round: int) -> bool:
    """Whether enough of those that are here say that they can go back to the state after a round.

    To the state that the run began with it always can where the run file states its digest.
    """
    is_stated = round == 0 and state.rules.first_digest is not None
    return is_stated or are_believed(state, saying_so(state, round))


def saying_so(state: SwarmState, round: int) -> list[NodeId]:
    """Who of those that are here says that it can go back to the state after a round."""
    return [
        member.node_id
        for member in present_members(state)
        if any(span.includes(round) for span in member.reach_back)
    ]


def rounds_in_reach(state: SwarmState) -> tuple[RoundSpan, ...]:
    """The rounds before the latest that are in reach, in order."""
    return _joined(span for span, saying in _stretches(state) if saying.are_enough)


def latest_in_reach(state: SwarmState, round: int) -> int | None:
    """The latest round up to this one that is in reach, for a run that goes back by itself.

    It begins anew only where that is what is wanted.
    """
    if round == 0:
        return 0 if is_in_reach(state, 0) else None
    spans = [span for span in rounds_in_reach(state) if span.first <= round and span.last >= 1]
    return max((min(span.last, round) for span in spans), default=None)


def spans_in_words(spans: Iterable[RoundSpan]) -> str:
    """Rounds as people read them: "12, 24 and 30 to 41"."""
    words = [
        str(span.first) if span.first == span.last else f"{span.first} to {span.last}"
        for span in spans
    ]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def possible_in_words(state: SwarmState) -> str:
    """Where the run can go back to, or why nowhere, and who alone says to keep more."""
    words = spans_in_words(rounds_in_reach(state))
    if not present_members(state):
        said = ["start nodes again, and repeat this when they are here: they alone keep states"]
    elif words:
        said = [f"nodes that are here can go back to these rounds: {words}"]
    else:
        said = [
            "nodes that are here can go back to no round yet: each keeps a state every so many rounds"
        ]
    alone: dict[NodeId, list[RoundSpan]] = {}
    for span, saying in _stretches(state):
        if len(saying.node_ids) == 1 and not saying.are_enough:
            alone.setdefault(next(iter(saying.node_ids)), []).append(span)
    said += [
        f"{name_of(state, node_id)} alone says that it can go back to {spans_in_words(_joined(spans))}"
        for node_id, spans in list(alone.items())[:MOST_NAMED]
    ]
    return "; ".join(said)


MOST_NAMED = 4
"""Members that a sentence names."""


def _stretches(state: SwarmState) -> Iterator[tuple[RoundSpan, "_Saying"]]:
    """Rounds before the latest that the same members reach, and those, in order."""
    last = state.committed_round - 1
    turns: dict[int, list[tuple[NodeId, int]]] = {}
    for member in present_members(state):
        for span in member.reach_back:
            if span.first <= last:
                turns.setdefault(span.first, []).append((member.node_id, 1))
                turns.setdefault(min(span.last, last) + 1, []).append((member.node_id, -1))
    saying = _Saying.of(state, ())
    for place, following in pairwise(sorted(turns)):  # at the last place all have ended
        for node_id, more in turns[place]:
            saying.add(node_id, more)
        if saying.node_ids:
            yield RoundSpan(first=place, last=following - 1), saying


def _joined(spans: Iterable[RoundSpan]) -> tuple[RoundSpan, ...]:
    """Spans in order, those that touch as one."""
    found: list[RoundSpan] = []
    for span in spans:
        if found and span.first <= found[-1].last + 1:
            found[-1] = replace(found[-1], last=max(found[-1].last, span.last))
        else:
            found.append(span)
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class _Saying:
    """Members that say something alike, which may become more or fewer."""

    state: SwarmState
    here: tuple[NodeId, ...]
    say: Say
    node_ids: Counter[NodeId] = field(default_factory=Counter)
    invites: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, state: SwarmState, node_ids: Collection[NodeId]) -> "_Saying":
        """These, of all that are here."""
        here = present_members(state)
        say = say_of(here, state.committed_round, unchecked(state))
        saying = cls(state=state, here=tuple(member.node_id for member in here), say=say)
        for node_id in node_ids:
            saying.add(node_id, 1)
        return saying

    def add(self, node_id: NodeId, more: int) -> None:
        """One says it once more, or once less: what a member says may overlap."""
        invite = self.state.members[node_id].invite_id
        self.node_ids[node_id] += more
        self.invites[invite] += more
        if not self.node_ids[node_id]:
            del self.node_ids[node_id]
        if not self.invites[invite]:
            del self.invites[invite]

    @property
    def are_enough(self) -> bool:
        """Whether two of them are of different invites, or they have the say, or are all that are here."""
        if len(self.invites) > 1:
            return True
        is_all = 0 < len(self.node_ids) == len(self.here)
        return is_all or is_enough(self.say, self.node_ids, self.here)
