"""What a daemon does one after the other: events of the coordinator, and what follows from them."""

from dataclasses import dataclass, replace

from protocol.messages import EvaluationAsked, RefetchAsked, RoundCommitted, RunFinished
from protocol.rounds import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpNeeded:
    """The session learned of a committed round that we do not hold."""

    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReceived:
    """A plan's durations count from here, however long it waits for its turn."""

    plan: Plan
    at: float

    def plan_at(self, now: float) -> Plan:
        """The plan after it has waited until `now`."""
        seconds = now - self.at
        return replace(
            self.plan,
            train_seconds=max(0.0, self.plan.train_seconds - seconds),
            contribute_seconds=max(0.0, self.plan.contribute_seconds - seconds),
            commit_seconds=max(0.0, self.plan.commit_seconds - seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadFailed:
    """Training ahead has ended with an error, which pausing it raises."""


Work = (
    PlanReceived
    | RoundCommitted
    | EvaluationAsked
    | RefetchAsked
    | RunFinished
    | CatchUpNeeded
    | AheadFailed
)
