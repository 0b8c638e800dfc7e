"""How long a node waits before it asks once more for what nobody supplied."""

import asyncio
import contextlib
import random

LONGEST_SECONDS = 60.0
"""Between two times of asking everybody, if there are no news."""


class Patience:
    """Pauses that double, with jitter, so that nodes that wait together do not ask together.

    News from the coordinator ends a pause at once: somebody may have come who supplies what is missing.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._news = asyncio.Event()

    def tell(self) -> None:
        """The coordinator has told something. Heard by the next pause, if there is none now."""
        self._news.set()

    async def pause(self, asked: int, *, first_seconds: float) -> None:
        """Waits after everybody was asked for the `asked`-th time in vain."""
        longest = min(LONGEST_SECONDS, first_seconds * 2.0 ** min(asked - 1, 10))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(longest / 2, longest)):
                await self._news.wait()
        self._news.clear()
