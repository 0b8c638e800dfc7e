"""What a plan asks of a node's ranks, and how much of what they did counts."""

import math
from dataclasses import replace

import pytest

from node.duties.work import counted, counted_anew, trained_of, work_ahead_of, work_of
from node.island.island import InnerReport
from protocol.wire.messages import Trained
from protocol.wire.rounds import Assignment, NodeId
from tests.unit.exchange_scene import A, B, C, plan_for


def leased(node_id: NodeId, steps: int, first_sample: int) -> Assignment:
    return Assignment(
        node_id=node_id, inner_steps=steps, first_sample=first_sample, num_samples=4 * steps
    )


PLAN = plan_for(
    A,
    B,
    round=7,
    token_clock=1000,
    round_tokens=150,
    assignments=(leased(A, 5, 100), leased(B, 3, 120)),
    ahead=(leased(A, 2, 132),),
)
REPORT = InnerReport(round=7, inner_steps=5, samples=20, tokens=301, loss=1.5, seconds=2.0)


def test_the_round_is_trained_as_assigned_within_the_plans_time() -> None:
    assignment = PLAN.assignment_of(B)
    assert assignment is not None
    work = work_of(PLAN, assignment)
    assert (work.round, work.token_clock, work.max_seconds) == (7, 1000, PLAN.train_seconds)
    assert (work.inner_steps, work.first_sample, work.num_samples) == (3, 120, 12)
    assert (work.round_tokens, work.num_participants, work.steps_before) == (150, 2, 0)


def test_what_is_leased_ahead_begins_where_the_round_leaves_the_token_clock() -> None:
    work = work_ahead_of(PLAN, A)
    assert work is not None
    assert (work.round, work.token_clock, work.max_seconds) == (8, 1000 + 150, math.inf)
    assert (work.inner_steps, work.first_sample, work.num_samples) == (2, 132, 8)


@pytest.mark.parametrize("node_id", [B, C])
def test_a_node_without_a_lease_trains_nothing_ahead(node_id: NodeId) -> None:
    assert work_ahead_of(PLAN, node_id) is None


@pytest.mark.parametrize(("asked", "steps", "tokens"), [(7, 5, 301), (5, 5, 301), (2, 2, 121)])
def test_no_more_inner_steps_count_than_were_asked(asked: int, steps: int, tokens: int) -> None:
    less = replace(REPORT, inner_steps=steps, samples=4 * steps, tokens=tokens)
    assert counted(REPORT, leased(A, asked, 0)) == less


def test_a_part_of_work_on_few_tokens_is_work_still() -> None:
    few = replace(REPORT, tokens=1)
    assert counted(few, leased(A, 2, 0)).tokens == 1
    assert counted(replace(few, tokens=0), leased(A, 2, 0)).tokens == 0


def test_another_plan_of_the_round_counts_no_more_than_it_leases() -> None:
    trained = trained_of(REPORT)
    assert trained == Trained(inner_steps=5, samples=20, tokens=301, loss=1.5, seconds=2.0)
    less = counted_anew(trained, leased(A, 3, 0), context=16)
    assert less == replace(trained, inner_steps=3, samples=12, tokens=12 * 16)
    assert counted_anew(trained, leased(A, 4, 0), context=16) == replace(
        trained, inner_steps=4, samples=16, tokens=16 * 16
    )
    assert counted_anew(trained, leased(A, 9, 0), context=16) == trained
