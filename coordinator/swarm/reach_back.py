"""To which rounds the run can go back by what lies on nodes' disks, as those that are here say. Pure.

A member may lie about that, and a disk may fail the next minute. So a round is in reach when two members of
different invites say that they keep it, or members of as much weight as decides a digest, or all that are
here. What fewer say only the run owner may go by.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from coordinator.swarm.state import Say, SwarmState, name_of, present_members
from coordinator.swarm.weighing import is_enough, say_of, unchecked
from protocol.wire.rounds import NodeId, RoundSpan


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
