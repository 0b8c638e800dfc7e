"""What rounds took and lost since this coordinator started, heard from its transitions. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.swarm.actions import Tell
from coordinator.swarm.state import SwarmState
from coordinator.swarm.transition import Transition
from protocol.wire.messages import AuditAsked, RoundCommitted, SliceTakenOver


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCounts:
    """As of one instant."""

    commits: int  # void ones included
    void_slices: int
    takeovers: int
    audits: int  # that members were asked for
    phase_seconds: Mapping[str, float]  # of phases that there were, the present one included


class RoundTally:
    """Hears every transition; counts from when it was made, in coordinator time."""

    def __init__(self, state: SwarmState, *, now: float) -> None:
        self._commits = 0
        self._void_slices = 0
        self._takeovers = 0
        self._audits = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase = _phase_of(state)
        self._since = now

    def hear(self, transition: Transition) -> None:
        """A step was taken."""
        for action in transition.actions:
            match action:
                case Tell(message=RoundCommitted(commit=commit)):
                    self._commits += 1
                    self._void_slices += sum(s.digest is None for s in commit.slices)
                case Tell(message=SliceTakenOver()):
                    self._takeovers += 1
                case Tell(message=AuditAsked(), to=to):
                    self._audits += len(to or ())
        self._count_up_to(transition.at)
        self._phase = _phase_of(transition.state)

    def counts(self, now: float) -> RoundCounts:
        """So far."""
        self._count_up_to(now)
        return RoundCounts(
            commits=self._commits,
            void_slices=self._void_slices,
            takeovers=self._takeovers,
            audits=self._audits,
            phase_seconds=dict(self._seconds),
        )

    def _count_up_to(self, now: float) -> None:
        self._seconds[self._phase] += now - self._since
        self._since = now


def _phase_of(state: SwarmState) -> str:
    if state.is_finished:
        return "finished"
    return "waiting" if state.open_round is None else state.open_round.phase.value
