"""Where heavy work runs: hashing, encoding and outer arithmetic must not delay heartbeats.

The daemon runs it in a thread; tests and simulations run it in place, so that their order is fixed.
"""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Protocol, TypeVar

Result = TypeVar("Result")

NICER = 5
"""So much lower is its priority: on a machine whose processor also trains, ranks come first. An
exchange that nobody trains beside has the cores for itself all the same."""


def _give_way() -> None:
    if sys.platform == "linux":  # where each thread has a priority of its own
        thread = threading.get_native_id()
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


_threads = ThreadPoolExecutor(thread_name_prefix="heavy", initializer=_give_way)


class Heavy(Protocol):
    """Runs a function that may take long, without blocking the control loop."""

    async def __call__(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, or raises what it raises."""


async def in_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread that gives way; kernels, numpy, torch and BLAKE3 let go of the GIL.

    A thread cannot be stopped. So when it is cancelled it waits for the thread first: what follows
    may free the shared memory that `work` writes to.
    """
    in_context = partial(copy_context().run, work)
    thread = asyncio.get_running_loop().run_in_executor(_threads, in_context)
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
