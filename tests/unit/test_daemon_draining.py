"""A node that leaves with its work: what it trained is contributed, and the commit waited for."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from node.exchange.auditing import PAUSE_SECONDS, Inputs
from protocol.wire.messages import (
    Applied,
    Draining,
    Evaluated,
    EvaluationAsked,
    Reduced,
    RoundCommitted,
    RoundOpened,
    RunFinished,
)
from protocol.wire.rounds import Plan
from tests.unit.daemon_scene import TRAIN_SECONDS, Life
from tests.unit.exchange_scene import TOKENS, A, B, in_virtual_time, plan_for


def as_helper(plan: Plan) -> Plan:
    """The plan of a round in which this node only reduces."""
    assignments = tuple(
        replace(one, inner_steps=0, num_samples=0) if one.node_id == A else one
        for one in plan.assignments
    )
    return replace(plan, assignments=assignments)


async def ended(life: Life, *, within: float) -> str:
    assert life.running is not None
    return await asyncio.wait_for(life.running, within)


@in_virtual_time
async def test_a_draining_node_contributes_what_it_trained_and_leaves_after_the_commit() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=TRAIN_SECONDS - 1)
        assert life.daemon.drain(30)
        await asyncio.sleep(0.5)
        ((_, reduced),) = life.link.reported(Reduced)
        assert [(c.node_id, c.tokens) for c in reduced.contributors] == [(A, TOKENS // 2)]
        await asyncio.sleep(20)
        commit = life.commit(plan)
        life.link.say(EvaluationAsked(round=0), RoundCommitted(commit=commit))
        reason = await ended(life, within=1.5)  # a goodbye takes one
        assert reason == "stopped by its owner, after the commit of round 1"
        assert life.link.goodbyes == [reason]
        assert life.island.ended == f"the node was {reason}"
        np.testing.assert_array_equal(life.outer._parameters, -1.0)
        # The coordinator is told first, and counts on it no more.
        assert [round_ for round_, _ in life.link.reported(Draining)] == [1]
        assert [round_ for round_, _ in life.link.reported(Applied)] == [1]
        assert not life.link.reported(Evaluated)


@in_virtual_time
async def test_a_node_that_has_contributed_already_waits_for_the_commit_too() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        assert life.daemon.drain(30)
        await asyncio.sleep(10)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        assert await ended(life, within=1.5) == "stopped by its owner, after the commit of round 1"


@in_virtual_time
async def test_a_node_that_leaves_keeps_what_its_inner_optimizer_knows() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        assert life.island.kept == [(1, False)]
        assert life.daemon.drain(30)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await ended(life, within=1.5)
        assert life.island.kept == [(1, False), (1, True)]


@in_virtual_time
async def test_a_commit_that_does_not_come_is_waited_for_no_longer_than_asked() -> None:
    async with Life() as life:
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(1)
        assert life.daemon.drain(30)
        assert life.running is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(life.running), 29)
        assert await ended(life, within=2.5) == "stopped by its owner, before the commit of round 1"
        assert not life.island.is_running


@in_virtual_time
async def test_a_draining_node_that_is_asked_again_leaves_at_once() -> None:
    async with Life() as life:
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(1)
        assert life.daemon.drain(30)
        await asyncio.sleep(1)
        assert life.daemon.drain(0)
        assert await ended(life, within=1.5) == "stopped by its owner, before the commit of round 1"


@in_virtual_time
async def test_a_node_stopped_between_rounds_gives_auditors_first_what_its_results_were_made_of() -> (
    None
):
    """What goes with it nobody can make again: the run would go back, for everybody."""
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(1)
        audits = life.daemon._exchange.audits
        audits._kept[1] = cast("Inputs", SimpleNamespace(contributions={0: {}}))
        audits._kept_at = began = asyncio.get_running_loop().time()
        assert life.daemon.drain(30)
        await asyncio.sleep(PAUSE_SECONDS - 1)
        audits.note_asked()
        assert await ended(life, within=30) == "stopped by its owner, after the commit of round 1"
        took = asyncio.get_running_loop().time() - began
        assert 2 * PAUSE_SECONDS - 1 <= took < 2 * PAUSE_SECONDS + 3


@in_virtual_time
async def test_a_node_whose_results_were_looked_at_long_ago_leaves_at_once() -> None:
    async with Life() as life:
        audits = life.daemon._exchange.audits
        audits._kept[1] = cast("Inputs", SimpleNamespace(contributions={0: {}}))
        audits._kept_at = asyncio.get_running_loop().time()
        await asyncio.sleep(PAUSE_SECONDS)
        assert not life.daemon.drain(30)


@in_virtual_time
async def test_there_is_nothing_to_drain_without_a_round_in_flight_or_without_time() -> None:
    async with Life() as life:
        assert not life.daemon.drain(30)
        plan = await life.opened(1, seconds=60)
        assert not life.daemon.drain(0)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(1)
        assert not life.daemon.drain(30)
        life.link.say(RoundOpened(plan=life.plan(2)))
        await asyncio.sleep(60)
        assert len(life.island.works) == 2  # as if nobody had asked


@in_virtual_time
async def test_a_node_that_says_goodbye_already_need_not_be_cancelled() -> None:
    async with Life() as life:
        life.link.say(RunFinished(round=0, outer_digest=life.outer.digest, reason="done"))
        await asyncio.sleep(0.5)  # a goodbye takes one second
        assert life.link.goodbyes == ["the run is finished"]
        assert life.daemon.drain(30)
        assert await ended(life, within=1) == "done"


@in_virtual_time
async def test_a_plan_that_comes_to_a_draining_node_is_not_taken() -> None:
    async with Life() as life:
        plan = await life.opened(1, seconds=60)
        assert life.daemon.drain(30)
        life.link.say(RoundOpened(plan=plan_for(A, B, round=2, base_digest=life.outer.digest)))
        await asyncio.sleep(5)
        assert len(life.island.works) == 1
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        assert await ended(life, within=1.5) == "stopped by its owner, after the commit of round 1"


@in_virtual_time
async def test_a_helper_whose_plan_waits_for_its_turn_reduces_that_round_before_it_leaves() -> None:
    async with Life() as life:
        life.island.evaluation_seconds = 5
        plan = as_helper(life.plan(1))
        life.link.say(EvaluationAsked(round=0), RoundOpened(plan=plan))
        await asyncio.sleep(1)
        assert not life.daemon._duties.is_round_in_flight
        assert life.daemon.drain(30)
        later = plan_for(A, B, round=2, base_digest=life.outer.digest)
        life.link.say(RoundOpened(plan=later))
        await asyncio.sleep(10)
        assert life.daemon._duties.last_planned_round == 1
        life.link.say(RoundCommitted(commit=life.commit(plan, is_void=True)))
        assert await ended(life, within=1.5) == "stopped by its owner, after the commit of round 1"
        assert [round_ for round_, _ in life.link.reported(Draining)] == [1]


@in_virtual_time
async def test_a_helper_that_leaves_takes_the_plan_that_was_on_its_way_and_no_later_one() -> None:
    async with Life(num_ranks=0) as life:
        plan = as_helper(life.plan(1))
        assert life.daemon.drain(30)
        await asyncio.sleep(0.5)
        life.link.say(RoundOpened(plan=plan))
        await asyncio.sleep(5)
        assert life.daemon._duties.last_planned_round == 1
        life.link.say(RoundCommitted(commit=life.commit(plan, is_void=True)))
        assert await ended(life, within=1.5) == "stopped by its owner, after the commit of round 1"


@in_virtual_time
async def test_a_helper_that_no_plan_counts_on_leaves_within_seconds() -> None:
    async with Life(num_ranks=0) as life:
        assert life.daemon.drain(30)
        assert await ended(life, within=3) == "stopped by its owner, with no round in flight"
        assert [round_ for round_, _ in life.link.reported(Draining)] == [0]
    async with Life(num_ranks=0) as life:
        assert not life.daemon.drain(0)  # asked a second time


@in_virtual_time
async def test_a_rank_that_dies_in_a_draining_node_is_not_replaced() -> None:
    """Whoever stops a service signals all its processes: ranks die of it."""
    async with Life() as life:
        plan = await life.opened(1, seconds=1)
        life.island.dies_in = ["publish"]
        assert life.daemon.drain(60)
        await asyncio.sleep(30)
        assert life.island.calls.count("start") == 1
        life.link.say(RoundCommitted(commit=life.commit(plan, is_void=True)))
        assert await ended(life, within=1.5) == "stopped by its owner, after the commit of round 1"


@in_virtual_time
async def test_training_that_begins_after_the_drain_is_left_out() -> None:
    """The drain is asked for while the round is being opened."""
    async with Life() as life:
        open_round = life.daemon._exchange.open_round

        async def open_slowly(plan: Plan) -> None:
            await asyncio.sleep(1)
            await open_round(plan)

        life.daemon._exchange.open_round = open_slowly  # type: ignore[method-assign]
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(0.5)
        assert life.daemon.drain(30)
        await asyncio.sleep(25)
        assert not life.island.works
