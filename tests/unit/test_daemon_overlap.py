"""A node that trains on while bytes travel: nothing is lost, nothing counts twice, nobody waits."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from node.island.ranks.faults import TrainingDivergedError
from node.outer_state import outer_digest
from protocol.wire.messages import (
    Applied,
    Evaluated,
    EvaluationAsked,
    RefetchAsked,
    RoundCommitted,
    RoundOpened,
    RunFinished,
    Trained,
)
from protocol.wire.rounds import Commit, Plan, SliceOutcome
from tests.unit.exchange_scene import in_virtual_time
from tests.unit.overlap_scene import BATCH, STEP_TOKENS, STEPS, TWO, OverlapLife, lease

BYTES_TRAVEL_SECONDS = 3.5


async def train_and_travel(life: OverlapLife, plan: Plan) -> None:
    """Opens a round, and lets half a step less than four pass after its training."""
    life.link.say(RoundOpened(plan=plan))
    await asyncio.sleep(STEPS + BYTES_TRAVEL_SECONDS)


async def commit(life: OverlapLife, plan: Plan, *, is_void: bool = False) -> None:
    life.link.say(RoundCommitted(commit=life.commit(plan, is_void=is_void)))
    await asyncio.sleep(1)


def committed_without_us(plan: Plan) -> Commit:
    """A round whose only slice is void, of which the node hears too late."""
    (part,) = plan.slices
    outcome = SliceOutcome(index=0, start=0, num_elements=part.num_elements, digest=None)
    return Commit(
        round=plan.round, fragment=plan.fragment, base_digest=plan.base_digest, slices=(outcome,)
    )


@in_virtual_time
async def test_what_is_trained_ahead_is_kept_and_not_trained_again() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        assert len(life.island.steps) == STEPS + 3
        assert life.daemon._duties.activity == "training ahead"
        await commit(life, first)
        np.testing.assert_array_equal(life.outer._parameters, -STEPS)
        assert life.accounted == [len(life.island.steps)]
        second = life.plan(2)
        await train_and_travel(life, second)
        (_, reported) = life.link.reported(Trained)[-1]
        assert (reported.inner_steps, reported.tokens) == (STEPS, STEPS * STEP_TOKENS)
        assert reported.seconds == STEPS
        await commit(life, second)
        np.testing.assert_array_equal(life.outer._parameters, -2.0 * STEPS)
        ends, samples = zip(*life.island.steps, strict=True)
        assert list(samples) == [i * BATCH for i in range(len(samples))], "each once, in order"
        assert np.diff(ends).max() == 1.0, "it waited"


@in_virtual_time
async def test_the_coordinator_hears_of_a_commit_before_ranks_have_ended_their_step() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)  # half of a step is left
        num_merges = len(life.island.merges)
        life.link.say(RoundCommitted(commit=life.commit(first)))
        await asyncio.sleep(0.25)
        assert [round_ for round_, _ in life.link.reported(Applied)][-1] == 1
        assert len(life.island.merges) == num_merges
        life.link.say(RoundOpened(plan=life.plan(2)))  # which waits until they have adopted
        await asyncio.sleep(1.5)
        assert life.island.merges[num_merges:] == [(0, True)]
        assert life.daemon._duties.last_planned_round == 2
        assert life.accounted == [len(life.island.steps)]


@in_virtual_time
async def test_without_a_lease_ahead_the_node_waits() -> None:
    async with OverlapLife() as life:
        first = life.plan(1, ahead=())
        await train_and_travel(life, first)
        assert len(life.island.steps) == STEPS
        await commit(life, first)
        assert life.island.merges[-1] == (0, True)
        assert life.daemon._duties.activity == "waiting"


@in_virtual_time
async def test_when_all_that_is_leased_ahead_is_trained_the_node_waits_for_the_plan() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        await asyncio.sleep(20)
        assert len(life.island.steps) == 2 * STEPS
        assert life.daemon._duties.activity == "waiting"
        await commit(life, first)
        second = life.plan(2)
        await train_and_travel(life, second)
        assert len(life.link.reported(Trained)) == 2
        assert life.link.reported(Trained)[-1][1].inner_steps == STEPS
        assert life.island.works[-1].round == 3


@in_virtual_time
async def test_a_plan_that_asks_for_other_samples_counts_no_more_than_it_asks() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        await commit(life, first)
        second = life.plan(2, assignments=(lease(7, steps=2),), ahead=())
        await train_and_travel(life, second)
        reported = life.link.reported(Trained)[-1][1]
        assert (reported.inner_steps, reported.tokens) == (2, 2 * STEP_TOKENS)
        await commit(life, second)
        num_steps = len(life.island.steps)
        assert num_steps > STEPS + 2, "more was trained than counts"
        np.testing.assert_array_equal(life.outer._parameters, -float(num_steps))


@in_virtual_time
async def test_a_void_round_is_let_go_and_what_was_trained_since_is_kept() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        await commit(life, first, is_void=True)
        np.testing.assert_array_equal(life.outer.owed().residual, 0)
        assert life.outer.owing.let_go_rounds == 1
        assert life.island.merges[-1] == (0, False)
        assert life.accounted == [len(life.island.steps) - STEPS]
        second = life.plan(2)
        await train_and_travel(life, second)
        await commit(life, second)
        np.testing.assert_array_equal(life.outer._parameters, -1.0 * STEPS)
        assert life.accounted == [len(life.island.steps) - STEPS]


@in_virtual_time
async def test_fragments_are_taken_over_in_turn_and_the_others_keep_what_was_trained() -> None:
    async with OverlapLife(layout=TWO) as life:
        for number in (1, 2, 3):
            plan = life.plan(number)
            await train_and_travel(life, plan)
            await commit(life, plan)
            assert life.accounted == [len(life.island.steps)] * 2
        assert [fragment for fragment, _ in life.island.merges] == [None, 1, 0, 1]
        first, second = (life.outer._parameters[f.span] for f in TWO.fragments)
        np.testing.assert_array_equal(first, -2.0 * STEPS)
        np.testing.assert_array_equal(second, -3.0 * STEPS)


@in_virtual_time
async def test_fragments_without_overlap_lose_nothing_either() -> None:
    async with OverlapLife(layout=TWO, overlap="none") as life:
        for number in (1, 2):
            plan = life.plan(number, ahead=())
            await train_and_travel(life, plan)
            await commit(life, plan)
        assert life.accounted == [2 * STEPS] * 2


@in_virtual_time
async def test_what_no_round_published_is_handed_in_before_commits_that_were_missed() -> None:
    """Two rounds pass without the node, which trained ahead for the first of them."""
    async with OverlapLife(layout=TWO) as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        life.commit(first)  # the session was broken
        after = np.zeros_like(life.outer._parameters)
        after[TWO.fragments[1].span] = -STEPS
        base = outer_digest(after, np.zeros_like(after))
        missed = committed_without_us(replace(life.plan(2), base_digest=base))
        taken = life.link.commits[-1]
        life.link.commits = (taken, missed)
        life.link.say(RoundCommitted(commit=missed))
        await asyncio.sleep(1)
        assert life.outer.round == 2
        done = len(life.island.steps)
        assert done > STEPS
        assert life.accounted == [done] * 2
        np.testing.assert_array_equal(life.outer.owed().residual[TWO.fragments[0].span], done)
        assert life.island.merges[-1] == (None, True)


@in_virtual_time
async def test_a_rank_that_dies_ahead_costs_what_it_trained_ahead_and_no_more() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        life.island.dies_at_step = STEPS + 3
        await train_and_travel(life, first)
        assert life.island.num_starts == 2
        life.link.say(EvaluationAsked(round=0))  # after which the ranks are free once more
        await asyncio.sleep(5)
        assert len(life.island.steps) == STEPS + 2
        await commit(life, first)
        np.testing.assert_array_equal(life.outer._parameters, -float(STEPS))
        assert life.island.merges[-1] == (None, True)
        second = life.plan(2)
        await train_and_travel(life, second)
        await commit(life, second)
        np.testing.assert_array_equal(life.outer._parameters, -2.0 * STEPS)
        assert life.link.reported(Trained)[-1][1].inner_steps == STEPS
        again = [sample for _, sample in life.island.steps[STEPS + 2 :]]
        assert again[:STEPS] == [STEPS * BATCH + i * BATCH for i in range(STEPS)]


@in_virtual_time
async def test_an_evaluation_interrupts_training_ahead() -> None:
    async with OverlapLife() as life:
        life.link.say(EvaluationAsked(round=0))
        first = await life.opened(1, seconds=2 + STEPS + 1.5)
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(0.6)  # the second step ahead is over
        assert life.daemon._duties.activity == "evaluating"
        await asyncio.sleep(4)
        assert len(life.link.reported(Evaluated)) == 2
        assert len(life.island.steps) == STEPS + 2 + 2
        await commit(life, first)
        assert life.accounted == [len(life.island.steps)]


@in_virtual_time
async def test_a_node_that_drains_owes_what_it_trained_ahead() -> None:
    async with OverlapLife(layout=TWO) as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        assert life.daemon.drain(60)
        await asyncio.sleep(3)
        done = len(life.island.steps)
        assert done == STEPS + 4, "it ends after the step in progress"
        life.link.say(RoundCommitted(commit=life.commit(first)))
        assert life.running is not None
        await asyncio.wait_for(life.running, 10)
        owed = life.outer.owed().residual
        np.testing.assert_array_equal(owed[TWO.fragments[0].span], done)
        np.testing.assert_array_equal(owed[TWO.fragments[1].span], done - STEPS)
        np.testing.assert_array_equal(life.outer._parameters[TWO.fragments[1].span], -STEPS)


@in_virtual_time
async def test_a_state_that_was_fetched_anew_takes_what_was_trained_ahead_with_it() -> None:
    async with OverlapLife() as life:
        first = life.plan(1)
        await train_and_travel(life, first)
        refetched = life.outer.snapshot()

        async def take_another(round: int, digest: object) -> bool:
            refetched.parameters[:] = -7
            life.outer.restore(refetched, None)
            return True

        life.daemon._exchange.refetch = take_another  # type: ignore[method-assign]
        life.link.say(RefetchAsked(round=0, outer_digest=life.outer.digest, reason="differs"))
        await asyncio.sleep(1.6)
        assert life.island.merges[-1] == (None, True)
        _, sample = life.island.steps[-1]
        assert sample == STEPS * BATCH, "from the first sample again"


@in_virtual_time
async def test_training_ahead_that_diverges_ends_the_node_at_once() -> None:
    async with OverlapLife() as life:
        await life.opened(1, seconds=STEPS + 1.5)
        life.island.fault = TrainingDivergedError(
            "the loss is no longer finite", next_step="lower the learning rate"
        )
        await asyncio.sleep(3)
        assert life.running is not None and life.running.done()
        with pytest.raises(TrainingDivergedError):
            life.running.result()
        told = "stopped by an error: the loss is no longer finite"
        assert life.link.goodbyes == [told], "the run owner is told as well"
        assert life.island.ended == "the loss is no longer finite; lower the learning rate"


@in_virtual_time
async def test_a_run_that_ends_ends_training_ahead() -> None:
    async with OverlapLife() as life:
        first = life.plan(1, ahead=(lease(2, steps=100),))
        await train_and_travel(life, first)
        await commit(life, first)
        assert [number for number, _ in life.link.reported(Applied)] == [1]
        life.link.say(RunFinished(round=1, outer_digest=life.outer.digest, reason="done"))
        assert life.running is not None
        assert await asyncio.wait_for(life.running, 10) == "done"
        done = len(life.island.steps)
        await asyncio.sleep(5)
        assert len(life.island.steps) == done


@in_virtual_time
async def test_a_node_whose_bytes_travel_faster_than_it_trains_is_always_in_inner_steps() -> None:
    async with OverlapLife() as life:
        plan = await life.opened(1, seconds=STEPS + 1.5)
        for number in (2, 3, 4):
            life.link.say(RoundCommitted(commit=life.commit(plan)))
            await asyncio.sleep(1.5)
            plan = await life.opened(number, seconds=STEPS - 1.5)
        made = life.daemon._duties.utilisation
        assert made is not None
        assert (made.round, made.compute_share) == (3, pytest.approx(1.0))
        assert len(life.island.steps) == 4 * STEPS + 1


@in_virtual_time
async def test_an_exchange_that_inner_steps_hide_takes_no_share_of_the_time() -> None:
    async def slow(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.1)
        return work()

    async with OverlapLife(heavy=slow) as life:
        plan = await life.opened(1, seconds=STEPS + 1.5)
        for number in (2, 3):
            life.link.say(RoundCommitted(commit=life.commit(plan)))
            await asyncio.sleep(1.5)
            plan = await life.opened(number, seconds=STEPS)
        made = life.daemon._duties.utilisation
        assert made is not None
        assert made.round == 2
        assert made.compute_share > 0.5
        shares = made.compute_share + made.publish_share + made.adopt_share + made.exchange_share
        assert shares + made.waiting_share == pytest.approx(1.0)
