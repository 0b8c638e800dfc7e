"""A coordinator that is killed between a step and its commit has lost nothing that it answered."""

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.store import Store
from tests.unit.test_driver import RULES, RUN

NUM_WAVES, CALLS_IN_A_WAVE = 4, 5

VICTIM = """
import asyncio, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator.driver import Driver
from coordinator.store import Store
from protocol.wire.rounds import NodeId
from tests.unit.test_driver import RULES, RUN, HandClock, attach

folder, *numbers = sys.argv[1:]
num_waves, calls_in_a_wave, dies_at, is_on_disk, has_thread = map(int, numbers)


class DyingStore(Store):
    num_commits = 0

    def commit(self) -> None:
        self.num_commits += 1
        if self.num_commits == dies_at and not is_on_disk:
            os.kill(os.getpid(), signal.SIGKILL)
        super().commit()
        if self.num_commits == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


async def call(driver: Driver, wave: int, number: int) -> None:
    node_id = NodeId(f"{wave}{number}".rjust(32, "n"))
    await attach(driver, node_id)
    os.write(1, f"{node_id}\\n".encode())  # answered


async def main() -> None:
    store = DyingStore.open(Path(folder))
    writer = ThreadPoolExecutor(1) if has_thread else None
    state = store.load(RULES, RUN)
    driver = Driver(state=state, store=store, clock=HandClock(), writer=writer)
    for wave in range(num_waves):
        await asyncio.gather(*(call(driver, wave, number) for number in range(calls_in_a_wave)))


asyncio.run(main())
"""


@pytest.mark.parametrize("has_thread", [False, True], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize("is_on_disk", [False, True], ids=["before", "after"])
def test_what_was_answered_is_there_after_a_kill_at_a_commit(
    tmp_path: Path, is_on_disk: bool, has_thread: bool
) -> None:
    dies_at = 3
    numbers = NUM_WAVES, CALLS_IN_A_WAVE, dies_at, int(is_on_disk), int(has_thread)
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, tmp_path, *map(str, numbers)],
        stdout=subprocess.PIPE,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert victim.returncode == -9
    answered = set(victim.stdout.decode().split())
    store = Store.open(tmp_path)
    kept = set(store.load(RULES, RUN).members)
    assert answered <= kept
    assert len(answered) == CALLS_IN_A_WAVE * (dies_at - 1), "one commit, one batch of answers"
    assert len(kept) == len(answered) + (CALLS_IN_A_WAVE if is_on_disk else 0), "all of it or none"
