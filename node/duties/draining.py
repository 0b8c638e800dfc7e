"""How a node leaves: it ends the rounds that count on it, and begins nothing new."""

import asyncio
from collections.abc import Callable

from node.link.session import Session
from protocol.wire.messages import Draining

ANSWER_SECONDS = 5.0
"""For the coordinator to hear that a helper leaves."""

ON_ITS_WAY_SECONDS = 1.0
"""A plan comes by the stream of messages, and may be overtaken by an answer."""


class Drain:
    """Whether the node leaves, and which plans still count on it.

    `on_over` hears when none can come any more.
    """

    def __init__(self, session: Session, on_over: Callable[[], None]) -> None:
        self.is_begun = False
        self.asked_round = 0  # whose plan asks us to reduce alone, and waits for its turn
        self._session = session
        self._on_over = on_over
        self._awaited: asyncio.Task[None] | None = None  # such a plan, while a helper leaves

    @property
    def awaits_plan(self) -> bool:
        """Whether a plan that counts on this node may be on its way."""
        return self._awaited is not None and not self._awaited.done()

    @property
    def has_refused(self) -> bool:
        """Whether no new plan counts on this node any more."""
        return self.is_begun and not self.awaits_plan

    def counts_on_us(self, round: int) -> bool:
        """Whether a later round than this one does, or may."""
        return self.asked_round > round or self.awaits_plan

    def begin(self, round: int, *, has_to_finish: bool) -> None:
        """Tells the coordinator, as of the last `round` that this node knows.

        A node with no round to finish waits some seconds for a plan that was sent before that was heard.
        """
        self.is_begun = True
        self._session.report(max(round, self.asked_round), Draining())
        if not has_to_finish:
            self._awaited = asyncio.create_task(self._await_plan(), name="a plan on its way")

    async def _await_plan(self) -> None:
        """Once the coordinator has answered, no further plan counts on this node; one may be on its way."""
        await self._session.flush(timeout_seconds=ANSWER_SECONDS)
        await asyncio.sleep(ON_ITS_WAY_SECONDS)
        asyncio.get_running_loop().call_soon(self._on_over)  # when this task is done

    def cancel(self) -> None:
        """The run has ended."""
        if self._awaited is not None:
            self._awaited.cancel()
