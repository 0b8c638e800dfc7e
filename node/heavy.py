"""Where heavy work runs: hashing, encoding and outer arithmetic must not delay heartbeats.

The daemon runs it in a thread; tests and simulations run it in place, so that their order is fixed.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Heavy(Protocol):
    """Runs a function that may take long, without blocking the control loop."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, or raises what it raises."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread of the loop's pool; numpy, torch and BLAKE3 let go of the GIL there."""
    return await asyncio.to_thread(work)


async def in_place(work: Callable[[], Result]) -> Result:
    """Runs `work` here and now."""
    return work()
