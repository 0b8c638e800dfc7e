"""A node that waits for what nobody supplies asks ever more rarely, says so once, and hears news."""

import asyncio
from random import Random

from structlog.testing import capture_logs

from node.exchange.peers import LONGEST_PAUSE_SECONDS, Patience
from protocol.wire.messages import RefetchAsked, RosterTold
from protocol.wire.rounds import Digest
from tests.unit.daemon_scene import Life
from tests.unit.exchange_scene import in_virtual_time


async def paused(patience: Patience, asked: int) -> float:
    clock = asyncio.get_running_loop().time
    began_at = clock()
    await patience.pause(asked, first_seconds=1.0)
    return clock() - began_at


@in_virtual_time
async def test_pauses_grow_to_a_minute_with_jitter() -> None:
    pauses = [[await paused(Patience(Random(seed)), n) for n in range(1, 2000)] for seed in (1, 2)]
    for first, *_ in pauses:
        assert 0.5 <= first <= 1.0
    for one in pauses:
        assert max(one) <= LONGEST_PAUSE_SECONDS
        assert all(pause >= LONGEST_PAUSE_SECONDS / 2 for pause in one[6:])
    assert pauses[0] != pauses[1]


@in_virtual_time
async def test_news_end_a_pause_at_once_even_if_they_came_before_it() -> None:
    patience = Patience(Random(0))
    waiting = asyncio.create_task(paused(patience, 100))
    await asyncio.sleep(3)
    patience.tell()
    assert await waiting == 3
    patience.tell()
    assert await paused(patience, 100) == 0
    assert await paused(patience, 100) > 1, "heard once"


@in_virtual_time
async def test_a_node_whose_gap_nobody_bridges_says_once_what_it_waits_for_and_asks_rarely() -> (
    None
):
    async with Life() as life:
        times: list[float] = []
        clock = asyncio.get_running_loop().time
        honest = life.daemon._exchange.refetch

        async def refetch(round: int, digest: Digest) -> bool:
            times.append(clock())
            return await honest(round, digest)

        life.daemon._exchange.refetch = refetch  # type: ignore[method-assign]
        with capture_logs() as logs:
            life.link.say(RefetchAsked(round=3, outer_digest=Digest(bytes(32)), reason="a test"))
            await asyncio.sleep(3600)
            asked_in_vain = len(times)
            life.link.say(RosterTold(members=()))
            await asyncio.sleep(0.1)
        assert (
            3600 / LONGEST_PAUSE_SECONDS <= asked_in_vain <= 2 * 3600 / LONGEST_PAUSE_SECONDS + 10
        )
        assert len(times) > asked_in_vain, "news made it ask at once"
        (said,) = [entry for entry in logs if "waits_for" in entry]
        assert said["log_level"] == "warning"
        assert said["event"] == "nobody here supplies the state that this node was asked to fetch"
        assert said["waits_for"].startswith("a node that holds the state after round 3")
