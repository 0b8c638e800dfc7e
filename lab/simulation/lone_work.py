"""What an island trains that has no swarm: what a plan for one participant would ask, without an end."""

import math

from node.island.island import InnerWork, Progress
from protocol.run.run_spec import RunSpec


def lone_work(spec: RunSpec, inner_steps: int, *, round: int = 1) -> InnerWork:
    """A round of so many inner steps, after others that were as long."""
    samples, done = inner_steps * spec.inner.batch, round - 1
    return InnerWork(
        round=round,
        inner_steps=inner_steps,
        first_sample=done * samples,
        num_samples=samples,
        token_clock=done * inner_steps * spec.tokens_per_inner_step,
        round_tokens=inner_steps * spec.tokens_per_inner_step,
        max_seconds=math.inf,
        num_participants=1,
    )


def unseen(progress: Progress) -> None:
    """For those who wait for the report."""
