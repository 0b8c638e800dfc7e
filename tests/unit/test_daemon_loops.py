"""A daemon whose training loop is its contributor's own: it comes and goes, and the node stays."""

import asyncio
from typing import Any

import pytest

from node.duties.lasting_island import MOST_DEATHS
from node.island.island import Ability, Evaluation, InnerReport, InnerWork
from protocol.wire.messages import (
    Applied,
    Evaluated,
    EvaluationAsked,
    Reduced,
    RoundCommitted,
    RoundOpened,
    Trained,
)
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import TOKENS, in_virtual_time
from tests.unit.test_daemon_dying_ranks import live_a_round


@pytest.mark.parametrize("phase", ["adopt", "train", "publish"])
def test_a_loop_that_goes_is_not_started_again_and_the_next_one_trains_the_round(
    phase: str,
) -> None:
    @in_virtual_time
    async def go() -> None:
        async with Life() as life:
            life.island.is_loop = True
            life.island.dies_in = [phase]
            assert await live_a_round(life, 1, train_seconds=20.0) == [TOKENS]
            assert len(life.island.works) == (1 if phase == "adopt" else 2), "trained anew"
            assert await live_a_round(life, 2) == [TOKENS]
            assert life.island.calls.count("start") == 1

    go()


@in_virtual_time
async def test_however_often_a_loop_goes_the_node_stays() -> None:
    async with Life() as life:
        life.island.is_loop = True
        for number in range(1, MOST_DEATHS + 3):
            life.island.dies_in = ["train"]
            assert await live_a_round(life, number, train_seconds=20.0) == [TOKENS]


@in_virtual_time
async def test_without_a_loop_the_node_reports_no_work_and_applies_the_commit() -> None:
    async with Life() as life:
        life.island.able = Ability(trains=False, evaluates=False)

        async def nobody(work: InnerWork, _: object) -> InnerReport:
            return InnerReport(
                round=work.round, inner_steps=0, samples=0, tokens=0, loss=0.0, seconds=0.0
            )

        life.island.train = nobody
        plan = await life.opened(1, seconds=5)
        assert [report.tokens for _, report in life.link.reported(Trained)] == [0]
        told = life.link.heartbeats[-1]
        assert told.cannot_train and told.cannot_evaluate
        assert life.link.heartbeats[-1].activity == "waiting for a training loop"
        assert [report.digest for _, report in life.link.reported(Reduced)] == [None], (
            "a slice of its own does not wait for what this node will not bring"
        )
        await asyncio.sleep(25)
        life.link.say(RoundCommitted(commit=life.commit(plan, is_void=True)))
        await asyncio.sleep(60)
        assert life.link.reported(Applied)[-1][0] == 1


@in_virtual_time
async def test_a_loop_that_gave_nothing_to_evaluate_with_reports_no_loss() -> None:
    async with Life() as life:

        async def none() -> Evaluation | None:
            return None

        life.island.evaluate = none
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(10)
        assert life.link.reported(Evaluated) == []
        assert await live_a_round(life, 1) == [TOKENS]


@in_virtual_time
async def test_a_node_that_trained_nothing_says_that_it_cannot_before_the_round_can_close() -> None:
    """Else rounds open and close without work until its next heartbeat."""
    async with Life() as life:

        async def has_lost_its_data(work: InnerWork, _: object) -> InnerReport:
            life.island.able = Ability(trains=False, waits_for="the run's tokens")
            return InnerReport(
                round=work.round, inner_steps=0, samples=0, tokens=0, loss=0.0, seconds=0.0
            )

        life.island.train = has_lost_its_data
        known: list[bool] = []
        report = life.link.report

        async def noted(session_id: int, reports: Any) -> None:
            known.append(not life.link.heartbeats[-1].cannot_train)
            await report(session_id, reports)

        life.link.report = noted  # type: ignore[method-assign]
        life.link.say(RoundOpened(plan=life.plan(1)))
        await asyncio.sleep(5)
        assert known[0] is False
        assert life.link.heartbeats[-1].activity == "waiting for the run's tokens"
