"""To which rounds nodes that are here can go back by what lies on their disks, as they say. Pure."""

from collections.abc import Iterable

from coordinator.swarm.state import SwarmState
from coordinator.swarm.turn import present_members
from protocol.wire.rounds import RoundSpan


def is_in_reach(state: SwarmState, round: int) -> bool:
    """Whether some node that is here can go back to the state after a round."""
    return any(
        span.includes(round) for member in present_members(state) for span in member.reach_back
    )


def rounds_in_reach(state: SwarmState) -> tuple[RoundSpan, ...]:
    """The rounds before the latest to whose states some node that is here can go back, in order."""
    last = state.committed_round - 1
    spans = sorted(
        (max(span.first, 1), min(span.last, last))
        for member in present_members(state)
        for span in member.reach_back
        if span.first <= last and span.last >= 1
    )
    found: list[RoundSpan] = []
    for first, end in spans:
        if found and first <= found[-1].last + 1:
            found[-1] = RoundSpan(first=found[-1].first, last=max(found[-1].last, end))
        else:
            found.append(RoundSpan(first=first, last=end))
    return tuple(found)


def latest_in_reach(state: SwarmState, round: int) -> int | None:
    """The latest round up to this one to whose state some node that is here can go back."""
    spans = [span for span in rounds_in_reach(state) if span.first <= round]
    return max((min(span.last, round) for span in spans), default=None)


def spans_in_words(spans: Iterable[RoundSpan]) -> str:
    """Rounds as people read them: "12, 24 and 30 to 41"."""
    words = [
        str(span.first) if span.first == span.last else f"{span.first} to {span.last}"
        for span in spans
    ]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def possible_in_words(state: SwarmState) -> str:
    """Where the run can go back to, or why nowhere."""
    words = spans_in_words(rounds_in_reach(state))
    if not words:
        return "nodes that are here can go back to no round yet: each keeps a state every so many rounds"
    return f"nodes that are here can go back to these rounds: {words}"
