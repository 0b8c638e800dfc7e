"""Training for the next round while the bytes of this one travel.

The coordinator leases the next round's samples with the plan of this one. Ranks train one thing at
a time, so whoever needs them for something else pauses this first.
"""

import asyncio
from collections.abc import Callable

from node.duties.lasting_island import LastingIsland
from node.island.island import InnerWork, Progress


class Ahead:
    """One stint at a time, in the background. What it trained is in the ranks when it is paused."""

    def __init__(
        self,
        island: LastingIsland,
        on_progress: Callable[[Progress], None],
        on_fault: Callable[[], None],
    ) -> None:
        self._island = island
        self._on_progress = on_progress
        self._on_fault = on_fault  # then `pause` raises it
        self._work: InnerWork | None = None
        self._stint: asyncio.Task[None] | None = None

    @property
    def round(self) -> int | None:
        """The round whose samples are leased already."""
        return None if self._work is None else self._work.round

    @property
    def is_training(self) -> bool:
        """Whether inner steps are being taken now."""
        return self._stint is not None and not self._stint.done()

    def lease(self, work: InnerWork | None) -> None:
        """What may be trained from the next `resume` on; None for nothing."""
        self._work = work

    async def resume(self) -> None:
        """Goes on where it was paused, if there is anything leased."""
        if self._work is None or self._stint is not None:
            return
        self._stint = asyncio.ensure_future(self._island.train_ahead(self._work, self._on_progress))
        self._stint.add_done_callback(self._tell_fault)
        await asyncio.sleep(0)  # it has begun: one that has not cannot be cut short

    async def pause(self) -> None:
        """Waits for the inner step in progress; then the ranks are free. Raises what went wrong."""
        if self._stint is None:
            return
        if not self._stint.done():
            self._island.cut_short()
        try:
            await self._stint
        finally:
            self._stint = None

    def cancel(self) -> None:
        """Ends it without waiting: the node ends."""
        self._work = None
        if self._stint is not None:
            self._stint.cancel()

    def _tell_fault(self, stint: asyncio.Task[None]) -> None:
        if not stint.cancelled() and stint.exception() is not None:
            self._on_fault()
