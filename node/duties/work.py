"""What a daemon does one after the other, and what of a plan its ranks train. Pure."""

import math
from dataclasses import dataclass, replace

from node.island.island import InnerReport, InnerWork
from protocol.messages import EvaluationAsked, RefetchAsked, RoundCommitted, RunFinished, Trained
from protocol.rounds import BOOK_PLACES, Assignment, NodeId, Plan


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


def work_of(plan: Plan, assignment: Assignment) -> InnerWork:
    """The round's own inner steps."""
    return InnerWork(
        round=plan.round,
        inner_steps=assignment.inner_steps,
        first_sample=assignment.first_sample % BOOK_PLACES,
        num_samples=assignment.num_samples,
        token_clock=plan.token_clock,
        round_tokens=plan.round_tokens,
        max_seconds=plan.train_seconds,
        num_participants=len(plan.assignments),
    )


def work_ahead_of(plan: Plan, node_id: NodeId) -> InnerWork | None:
    """What the plan leases the node for the round after it; until that is planned, it has no end.

    It counts on a next plan that gets as far as this one: the run's rounds are closed one by one
    whatever becomes of them, so a schedule on rounds is exact, and one on tokens a forecast.
    """
    assignment = plan.ahead_of(node_id)
    if assignment is None:
        return None
    return replace(
        work_of(plan, assignment),
        round=plan.round + 1,
        token_clock=plan.token_clock + plan.round_tokens,
        max_seconds=math.inf,
    )


def counted(report: InnerReport, assignment: Assignment) -> InnerReport:
    """No more than was asked: a plan may ask less than was trained ahead, and reports are checked.

    Of the tokens an even part, as nobody keeps those of each step.
    """
    if report.inner_steps <= assignment.inner_steps:
        return report
    steps = assignment.inner_steps
    return replace(
        report,
        inner_steps=steps,
        samples=report.samples // report.inner_steps * steps,
        tokens=-(-report.tokens * steps // report.inner_steps),  # rounded up: there is work
    )


def trained_of(report: InnerReport) -> Trained:
    """What the coordinator is told of it."""
    return Trained(
        inner_steps=report.inner_steps,
        samples=report.samples,
        tokens=report.tokens,
        loss=report.loss,
        seconds=report.seconds,
    )


def counted_anew(trained: Trained, assignment: Assignment, *, context: int) -> Trained:
    """No more than another plan of the same round asks, which may be for other samples."""
    samples = min(trained.samples, assignment.num_samples)
    return replace(
        trained,
        inner_steps=min(trained.inner_steps, assignment.inner_steps),
        samples=samples,
        tokens=min(trained.tokens, samples * context),
    )
