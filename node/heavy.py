"""Where heavy work runs: hashing, encoding and outer arithmetic must not delay heartbeats.

The daemon runs it in a thread; tests and simulations run it in place, so that their order is fixed.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Heavy(Protocol):
    """Runs a function that may take long, without blocking the control loop."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, or raises what it raises."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread of the loop's pool; kernels, numpy, torch and BLAKE3 let go of the GIL.

    A thread cannot be stopped. So when it is cancelled it waits for the thread first: what follows
    may free the shared memory that `work` writes to.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        raise


async def in_place(work: Callable[[], Result]) -> Result:
    """Runs `work` here and now."""
    return work()
