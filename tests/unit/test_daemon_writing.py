"""A daemon has the model write beside its rounds: from the state that was asked for, one model at a time."""

import asyncio
from collections.abc import Callable

from protocol.run.run_spec import RunSection, RunSpec
from protocol.wire.messages import Evaluated, EvaluationAsked, RoundCommitted, RoundOpened, Wrote
from tests.unit.daemon_scene import TRAIN_SECONDS, Life
from tests.unit.exchange_scene import in_virtual_time


class SlowWriter:
    """Notes the parameters of which it has a copy, and writes their first one."""

    def __init__(self, life: Callable[[], Life], *, copying: float, writing: float) -> None:
        self._life = life
        self._copying, self._writing = copying, writing
        self.num_ended = 0

    async def write(self, on_copied: Callable[[], None]) -> Wrote:
        try:
            await asyncio.sleep(self._copying)
            first = self._life().outer._parameters[0]
            on_copied()
            await asyncio.sleep(self._writing)
            return Wrote(texts=(f"{first:g}",))
        finally:
            self.num_ended += 1


def life_with(*, copying: float, writing: float, rounds: int = 100) -> tuple[Life, SlowWriter]:
    writer = SlowWriter(lambda: life, copying=copying, writing=writing)
    life = Life(writer=writer, spec=RunSpec(run=RunSection(rounds=rounds)))
    return life, writer


async def commit_round(life: Life, number: int) -> None:
    plan = await life.opened(number, seconds=TRAIN_SECONDS + 3)
    life.link.say(RoundCommitted(commit=life.commit(plan)))
    await asyncio.sleep(1)


@in_virtual_time
async def test_rounds_go_on_while_a_model_writes_and_its_text_is_of_its_own_state() -> None:
    life, _ = life_with(copying=1, writing=60)
    async with life:
        life.link.say(EvaluationAsked(round=0, writes=True))
        await asyncio.sleep(2)
        assert [number for number, _ in life.link.reported(Evaluated)] == [0]
        await commit_round(life, 1)
        assert life.outer.round == 1 and not life.link.reported(Wrote)
        await asyncio.sleep(60)
        assert life.link.reported(Wrote) == [(0, Wrote(texts=("0",)))]
        assert life.outer._parameters[0] == -1


@in_virtual_time
async def test_the_state_stays_until_the_writer_has_its_copy() -> None:
    life, _ = life_with(copying=30, writing=1)
    async with life:
        plan = life.plan(1)
        life.link.say(RoundOpened(plan=plan), EvaluationAsked(round=0, writes=True))
        await asyncio.sleep(TRAIN_SECONDS + 1)
        life.link.say(RoundCommitted(commit=life.commit(plan)))
        await asyncio.sleep(10)
        assert life.outer.round == 0
        await asyncio.sleep(30)
        assert life.outer.round == 1
        assert life.link.reported(Wrote) == [(0, Wrote(texts=("0",)))]


@in_virtual_time
async def test_a_model_that_still_writes_is_let_end_but_for_the_last_one_of_the_run() -> None:
    for rounds, written in ((100, (0, "0")), (1, (1, "-1"))):
        life, writer = life_with(copying=1, writing=60, rounds=rounds)
        async with life:
            life.link.say(EvaluationAsked(round=0, writes=True))
            await commit_round(life, 1)
            life.link.say(EvaluationAsked(round=1, writes=True))
            await asyncio.sleep(100)
            told = dict(life.link.reported(Wrote))
            number, text = written
            assert told[number] == Wrote(texts=(text,))
            assert told[1 - number].why_not and not told[1 - number].texts
            assert writer.num_ended == (1 if rounds == 100 else 2)


@in_virtual_time
async def test_who_is_asked_again_for_what_is_being_written_goes_on_with_it() -> None:
    for rounds in (100, 1):
        life, writer = life_with(copying=1, writing=60, rounds=rounds)
        async with life:
            await commit_round(life, 1)
            life.link.say(EvaluationAsked(round=1, writes=True))
            await asyncio.sleep(10)
            life.link.say(EvaluationAsked(round=1, writes=True))
            await asyncio.sleep(100)
            assert life.link.reported(Wrote) == [(1, Wrote(texts=("-1",)))]
            assert writer.num_ended == 1


@in_virtual_time
async def test_nobody_writes_unasked_and_a_writer_ends_with_its_node() -> None:
    life, writer = life_with(copying=1, writing=60)
    async with life:
        life.link.say(EvaluationAsked(round=0))
        await asyncio.sleep(5)
        assert life.link.reported(Evaluated) and not life.link.reported(Wrote)
        life.link.say(EvaluationAsked(round=0, writes=True))
        await asyncio.sleep(5)
        assert writer.num_ended == 0
    assert writer.num_ended == 1
    async with Life() as life:
        life.link.say(EvaluationAsked(round=0, writes=True))
        await asyncio.sleep(5)
        ((number, wrote),) = life.link.reported(Wrote)
        assert number == 0 and "nothing on this node" in wrote.why_not
