"""Heavy work gives way to ranks, and is waited for."""

import os
import sys
import threading

import pytest

from node.heavy import NICER, in_thread


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
async def test_heavy_work_has_a_lower_priority_than_its_process() -> None:
    assert await in_thread(niceness) == min(19, niceness() + NICER)
