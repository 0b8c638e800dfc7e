"""Ranks that die under a daemon: it starts them again, and loses a round's work at most."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from node.duties.lasting_island import DEATHS_SECONDS, MOST_DEATHS
from node.island.island import InnerReport, InnerWork, Progress
from node.island.ranks.faults import (
    RankDiedError,
    RankFailedError,
    RankHungError,
    TrainingDivergedError,
)
from protocol.errors import AtollError
from protocol.wire.messages import (
    Applied,
    Evaluated,
    EvaluationAsked,
    Reduced,
    RoundCommitted,
    RoundOpened,
    Trained,
)
from tests.unit.daemon_scene import DEATH_SECONDS, START_SECONDS, Life
from tests.unit.exchange_scene import TOKENS, A, in_virtual_time


async def live_a_round(
    life: Life, number: int, *, train_seconds: float = 10.0, seconds: float = 60.0
) -> list[int]:
    """Opens a round, commits what this node reduced, and returns the tokens that it contributed."""
    plan = await life.opened(number, train_seconds=train_seconds, seconds=seconds)
    ((_, reduced),) = [r for r in life.link.reported(Reduced) if r[0] == number]
    assert all(contributor.node_id == A for contributor in reduced.contributors)
    commit = life.commit(plan, is_void=reduced.digest is None)
    life.link.say(RoundCommitted(commit=commit))
    await asyncio.sleep(60)
    assert life.link.reported(Applied)[-1][0] == number
    return [contributor.tokens for contributor in reduced.contributors]


@pytest.mark.parametrize("phase", ["adopt", "train", "publish", "keep"])
def test_a_rank_that_dies_is_replaced_within_the_round(phase: str) -> None:
    @in_virtual_time
    async def die() -> None:
        async with Life() as life:
            life.island.dies_in = [phase]
            assert await live_a_round(life, 1, train_seconds=20.0) == [TOKENS]
            assert await live_a_round(life, 2) == [TOKENS]
            assert life.island.calls.count("start") == 2
            np.testing.assert_array_equal(life.outer._parameters, -2.0)

    die()


@in_virtual_time
async def test_after_a_death_only_the_time_that_is_left_is_trained() -> None:
    async with Life() as life:
        life.island.dies_in = ["train"]
        await live_a_round(life, 1)
        first, again = life.island.works
        assert first.max_seconds == pytest.approx(10.0)
        assert again.max_seconds == pytest.approx(10.0 - DEATH_SECONDS - START_SECONDS)
        assert again.first_sample == first.first_sample


@in_virtual_time
async def test_a_death_that_leaves_no_time_costs_the_round_and_no_more() -> None:
    async with Life() as life:
        life.island.dies_in = ["train"]
        assert await live_a_round(life, 1, train_seconds=DEATH_SECONDS + START_SECONDS) == []
        assert [report.tokens for _, report in life.link.reported(Trained)] == [0]
        assert life.island.calls[-2:] == ["adopt", "adopt"]  # restarted, applied; never published
        assert await live_a_round(life, 2) == [TOKENS]


@in_virtual_time
async def test_a_rank_that_dies_while_it_evaluates_evaluates_again() -> None:
    async with Life() as life:
        life.island.dies_in = ["evaluate"]
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(10)
        assert [number for number, _ in life.link.reported(Evaluated)] == [0]
        assert life.island.calls[-2:] == ["adopt", "evaluate"]


@in_virtual_time
async def test_people_see_that_ranks_are_restarting() -> None:
    async with Life() as life:
        life.island.dies_in = ["evaluate"]
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(START_SECONDS / 2)
        assert life.daemon.vitals().activity == "restarting ranks"
        await asyncio.sleep(START_SECONDS)
        assert life.daemon.vitals().activity == "waiting"


@in_virtual_time
async def test_a_rank_that_dies_again_at_once_ends_the_node_with_what_it_died_of() -> None:
    async with Life() as life:
        life.island.dies_in = ["train"] + ["start"] * (MOST_DEATHS - 1)
        life.link.say(RoundOpened(plan=life.plan(1)))
        assert life.running is not None
        # The last of them: fakes name the call in which they die.
        with pytest.raises(RankDiedError, match="SIGKILL in start"):
            await asyncio.wait_for(life.running, 60)
        assert not life.island.is_running
        assert len(life.link.goodbyes) == 1


@in_virtual_time
async def test_where_tokens_are_fetched_from_may_be_away_for_long_and_people_see_it() -> None:
    async with Life() as life:
        life.island.is_away = True
        life.island.dies_in = ["train"] * (2 * MOST_DEATHS)
        train = life.island.train
        is_training = asyncio.Event()

        async def told(work: InnerWork, tell: Callable[[Progress], None]) -> InnerReport:
            if not life.island.dies_in:
                tell(Progress(round=1, inner_step=1, loss=1.0, tokens_per_second=1.0))
                is_training.set()
            return await train(work, tell)

        life.island.train = told
        life.link.say(RoundOpened(plan=life.plan(1, train_seconds=1000.0)))
        seen = set()
        while life.island.dies_in:
            await asyncio.sleep(DEATH_SECONDS / 2)
            seen.add(life.daemon.vitals().activity)
        assert {"restarting ranks", "waiting for the run's tokens"} <= seen
        await is_training.wait()
        assert life.daemon.vitals().activity == "training"
        await asyncio.sleep(60)
        assert life.running is not None and not life.running.done()


@in_virtual_time
async def test_an_evaluation_whose_tokens_cannot_be_fetched_keeps_no_round_waiting() -> None:
    async with Life() as life:
        life.island.is_away = True
        life.island.dies_in = ["evaluate"] * 1000
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(10)
        assert await live_a_round(life, 1) == [TOKENS]
        assert not life.link.reported(Evaluated)


@in_virtual_time
async def test_deaths_that_are_far_apart_never_end_the_node() -> None:
    async with Life() as life:
        for _ in range(2 * MOST_DEATHS):
            life.island.dies_in = ["evaluate"]
            life.link.say(EvaluationAsked(round=0))
            await asyncio.sleep(DEATHS_SECONDS / (MOST_DEATHS - 1))
        assert len(life.link.reported(Evaluated)) == 2 * MOST_DEATHS


@pytest.mark.parametrize("error", [TrainingDivergedError("not finite"), RankFailedError("a bug")])
def test_what_a_restart_cannot_mend_ends_the_node(error: AtollError) -> None:
    @in_virtual_time
    async def fail() -> None:
        async with Life() as life:

            async def raise_it(fragment: int) -> None:
                raise error

            life.island.publish = raise_it
            life.link.say(RoundOpened(plan=life.plan(1)))
            assert life.running is not None
            with pytest.raises(type(error)):
                await asyncio.wait_for(life.running, 60)
            assert life.island.calls.count("start") == 1

    fail()


def hang_in_every_training(life: Life, seconds: float) -> None:
    """Each time the ranks are found hung after so long."""

    async def hang(*_: object) -> InnerReport:
        await asyncio.sleep(seconds)
        raise RankHungError("the ranks on cpu gave no sign of life")

    life.island.train = hang


@in_virtual_time
async def test_ranks_that_hang_again_and_again_end_the_node_however_long_it_takes() -> None:
    async with Life() as life:
        hang_in_every_training(life, 2 * DEATHS_SECONDS)
        life.link.say(RoundOpened(plan=life.plan(1, train_seconds=1e6)))
        assert life.running is not None
        with pytest.raises(RankHungError):
            await asyncio.wait_for(life.running, MOST_DEATHS * 3 * DEATHS_SECONDS)
        assert life.island.calls.count("start") == MOST_DEATHS


@in_virtual_time
async def test_hangs_with_a_round_between_them_never_end_the_node() -> None:
    async with Life() as life:
        train = life.island.train
        for number in range(1, 2 * MOST_DEATHS, 2):
            hang_in_every_training(life, 2 * DEATHS_SECONDS)
            assert await live_a_round(life, number, seconds=3 * DEATHS_SECONDS) == []
            life.island.train = train
            assert await live_a_round(life, number + 1) == [TOKENS]
