"""What `make counts` counts."""

import asyncio
from types import FrameType

from node.exchange.peers import Patience
from node.heavy import cancelled, in_place
from tools.counts import Entered, following


def _always(frame: FrameType) -> bool:
    del frame
    return True


async def test_a_coroutine_that_goes_on_after_a_wait_is_not_called_again() -> None:
    entered = Entered()

    async def waits() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    with following(entered, _always):
        await cancelled([asyncio.ensure_future(waits())])
    assert entered.counts == {"node/heavy.py": 1}


async def test_a_change_of_file_is_a_call_into_another_file() -> None:
    entered = Entered()
    with following(entered, _always):
        patience = Patience(rng=None)  # type: ignore[arg-type]  # which only a pause draws from
        patience.tell()
        await in_place(list)
        patience.tell()
    assert entered.counts == {"node/exchange/peers.py": 3, "node/heavy.py": 1}
    assert entered.changes == 3
