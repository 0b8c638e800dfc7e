"""A node's first question to its coordinator, asked until it is answered.

A machine that boots before the coordinator's, or before its own network is up, waits: it has nothing
else to do, and nobody may be there to start it again. What no waiting can mend ends it at once:
another swarm's certificate, a node that is not let in any more, another version.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from node.link.calls import CoordinatorLink
from protocol.errors import AtollError, HeldBackError
from protocol.run.run_spec import RunSpec
from protocol.wire.channel import retried

log = structlog.get_logger()


class _Reasons:
    """Says why it waits: once for each change of the reason, not once for each try."""

    def __init__(self) -> None:
        self.num_tries = 0
        self._last = ""

    def note(self, error: AtollError, _seconds: float) -> None:
        self.num_tries += 1
        if error.what != self._last:
            self._last = error.what
            held_back = isinstance(error, HeldBackError)
            log.warning(
                f"waiting for the {'run owner' if held_back else 'coordinator'}; "
                "Ctrl-C ends it, --no-wait does not wait",
                why=error.what,
            )


async def run_of_coordinator(
    link: CoordinatorLink,
    *,
    waits: bool,
    rng: random.Random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RunSpec:
    """The run file, once the coordinator answers; without `waits` at once or never.

    Raises what no waiting can mend, and without `waits` UnavailableError or TemporaryError as well.
    """
    if not waits:
        return await link.get_run()
    reasons = _Reasons()
    spec = await retried(
        link.get_run, is_wanted=lambda: True, random=rng, sleep=sleep, on_wait=reasons.note
    )
    if reasons.num_tries:
        log.info("the coordinator is there", after_tries=reasons.num_tries)
    return spec
