"""A benchmark that ends, is stopped or is killed leaves neither processes nor shared memory behind."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.processes.family import MARK, Family
from tests.integration.typed_commands import PATIENCE_SECONDS, ROOT, until

# Started by a thread that ends at once, in a session of its own, as real benchmarks start nodes; and
# with a child that its parent has forgotten, in another session, as p2pd is.
_BENCHMARK = """
import signal, subprocess, sys, tempfile, threading, time
from lab.processes.family import nothing_left

HOLDS_MEMORY = '''
import subprocess, time
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=1)
subprocess.run(["setsid", "--fork", "sleep", "1000"])
print(block.name, flush=True)
time.sleep(1000)
'''

def start():
    command = [sys.executable, "-c", HOLDS_MEMORY]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))

started = []
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may run them under nohup
with nothing_left(), tempfile.TemporaryDirectory() as folder:
    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    print(started[0].stdout.readline().decode().strip(), folder, flush=True)
    if sys.argv[1] == "goes on":
        time.sleep(1000)
"""

_POOL = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from lab.processes.family import nothing_left

with nothing_left(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
    assert pool.submit(int, "7").result() == 7
    pool.submit(time.sleep, 1000)
    print("works", flush=True)
    time.sleep(1000)
"""


@contextmanager
def benchmark(
    program: str, *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", list[str], Family]]:
    """A program as a process, the words it says first, and all that comes of it."""
    mark = uuid.uuid4().hex
    family = Family(mark)
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {MARK: mark},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split(), family
        finally:
            family.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_benchmark_that_gets_a_signal_takes_all_with_it(number: signal.Signals) -> None:
    with benchmark(_BENCHMARK, "goes on") as (process, (block, folder), family):
        memory = Path("/dev/shm") / block
        assert memory.exists()
        # The benchmark and its caretaker; the child, its resource tracker and the forgotten one.
        until(lambda: len(family.members()) == 5, f"five processes, not {family.members()}")
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        until(lambda: not family.members(), f"{family.members()} to end")
        assert not memory.exists()
        if number == signal.SIGKILL:
            assert process.returncode == -number
        else:
            assert process.returncode == 1
            assert f"stopped by {number.name}; everything that was started has ended" in said
            assert not Path(folder).exists()


def test_a_benchmark_that_ends_takes_what_it_forgot_with_it() -> None:
    with benchmark(_BENCHMARK, "ends") as (process, (block, _), family):
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, said
        until(lambda: not family.members(), f"{family.members()} to end")
        assert not (Path("/dev/shm") / block).exists()


def test_a_signal_does_not_wait_for_what_a_pool_is_doing() -> None:
    with benchmark(_POOL) as (process, words, family):
        assert words == ["works"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        until(lambda: not family.members(), f"{family.members()} to end")
