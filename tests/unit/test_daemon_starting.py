"""A node that was here before takes part while its ranks are still coming up."""

import asyncio
from dataclasses import replace

import pytest

from protocol.errors import SystemRefusedError
from protocol.wire.messages import Evaluated, EvaluationAsked, RoundCommitted, RoundOpened, Trained
from protocol.wire.rounds import CorpusSummary, Digest
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import in_virtual_time

CORPUS = CorpusSummary(digest=Digest(bytes(32)), num_samples=1, num_bytes=1)
OTHER = replace(CORPUS, digest=Digest(bytes([1]) * 32))
SECONDS = 61.0  # that the ranks take


def life_with(corpus: CorpusSummary | None) -> Life:
    life = Life(corpus=corpus)
    life.island.start_seconds = SECONDS
    return life


@in_virtual_time
async def test_a_node_that_was_never_here_waits_for_its_ranks_to_say_what_they_train_on() -> None:
    async with life_with(None) as life:
        assert life.link.announced == []
        await asyncio.sleep(SECONDS)
        assert life.link.announced[0].corpus == CORPUS
        assert not life.link.announced[0].cannot_train
        assert life.kept_corpora == [CORPUS]


@in_virtual_time
async def test_a_node_attaches_before_its_ranks_are_up_and_is_counted_on_once_they_are() -> None:
    async with life_with(CORPUS) as life:
        (announced,) = life.link.announced
        assert announced.corpus == CORPUS
        assert announced.cannot_train and announced.cannot_evaluate
        assert life.link.heartbeats[-1].activity == "waiting for its ranks, which are starting"
        assert life.link.heartbeats[-1].cannot_train
        life.link.say(EvaluationAsked(round=0))  # though it said that it cannot
        await asyncio.sleep(5)
        assert life.link.reported(Evaluated) == []
        before = len(life.link.heartbeats)
        await asyncio.sleep(SECONDS - 6.5)
        assert not life.link.heartbeats[before:][-1].cannot_train
        assert life.link.num_attached == 1
        await life.opened(1, seconds=20)
        assert life.island.calls[:3] == ["start", "adopt", "train"]
        assert [report.tokens > 0 for _, report in life.link.reported(Trained)] == [True]


@in_virtual_time
async def test_commits_that_come_before_the_ranks_are_theirs_when_they_are_up() -> None:
    async with life_with(CORPUS) as life:
        plan = life.plan(1)
        life.link.say(RoundOpened(plan=plan))  # of a coordinator that has not heard yet
        await asyncio.sleep(5)
        assert [report.tokens for _, report in life.link.reported(Trained)] == [0]
        before = life.outer.round
        life.link.say(RoundCommitted(commit=life.commit(plan, is_void=True)))
        await asyncio.sleep(5)
        assert (before, life.outer.round) == (0, 1)
        assert life.island.calls == []
        await asyncio.sleep(SECONDS)
        life.link.say(RoundOpened(plan=life.plan(2)))
        await asyncio.sleep(20)
        assert life.island.calls[:3] == ["start", "adopt", "train"]


@in_virtual_time
async def test_a_node_whose_data_are_others_than_it_said_attaches_anew_with_what_is_right() -> None:
    async with life_with(OTHER) as life:
        assert life.link.announced[0].corpus == OTHER
        await asyncio.sleep(SECONDS)
        assert [one.corpus for one in life.link.announced] == [OTHER, CORPUS]
        assert not life.link.announced[1].cannot_train
        assert life.kept_corpora == [CORPUS]


@in_virtual_time
async def test_ranks_that_do_not_come_up_end_a_node_that_is_attached() -> None:
    life = life_with(CORPUS)
    life.island.fault = SystemRefusedError("no such device")
    with pytest.raises(SystemRefusedError, match="no such device"):
        await life.daemon.run()
    assert life.link.num_attached == 1
    assert life.link.goodbyes == ["stopped by an error, which its log tells"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_node_stopped_before_its_ranks_are_up_leaves_nothing_running() -> None:
    async with life_with(CORPUS) as life:
        assert life.link.num_attached == 1
    assert not life.island.is_running
    assert asyncio.all_tasks() == {asyncio.current_task()}
