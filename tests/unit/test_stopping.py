"""Signals to a node: the first drains it, the second lets it leave at once, the rest do nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.machine.notices import Leaving
from node.stopping import StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A node's process ends deaf to signals; this one goes on. It may be deaf to one from nohup."""
    before = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


class Node:
    """Drains as long as it likes; notes for how long it was asked to."""

    def __init__(self, *, has_work: bool) -> None:
        self.has_work = has_work
        self.asked: list[float] = []
        self.is_cancelled = False
        self._ended = asyncio.Event()

    def drain(self, within_seconds: float) -> bool:
        self.asked.append(within_seconds)
        return self.has_work

    async def live(self, *numbers: signal.Signals) -> None:
        try:
            with StopSignals() as signals:
                with signals.draining(self.drain, seconds=30.0):
                    for number in numbers:
                        times_asked = len(self.asked)
                        os.kill(os.getpid(), number)
                        while len(self.asked) == times_asked:  # noqa: ASYNC110 (the loop hears of it)
                            await asyncio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
                assert signals.is_asked
        except asyncio.CancelledError:
            self.is_cancelled = True


async def test_the_first_signal_drains_and_the_second_leaves_no_time() -> None:
    node = Node(has_work=True)
    await node.live(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert node.asked == [30.0, 0.0, 0.0]
    assert not node.is_cancelled  # not in the midst of ending, either


async def test_a_node_with_nothing_to_finish_is_cancelled_once() -> None:
    node = Node(has_work=False)
    await node.live(signal.SIGINT, signal.SIGINT)
    assert node.asked == [30.0] and node.is_cancelled


async def test_a_node_that_is_not_running_yet_is_cancelled() -> None:
    node = Node(has_work=True)
    await node.live()  # a signal where no drain is possible
    assert node.asked == [] and node.is_cancelled


async def test_a_signal_in_the_midst_of_imports_breaks_them_off_at_once() -> None:
    came_to = []
    with StopSignals() as signals:
        with pytest.raises(asyncio.CancelledError), signals.blocking():
            came_to.append("the import")
            os.kill(os.getpid(), signal.SIGINT)
            came_to.append("its end")
        os.kill(os.getpid(), signal.SIGTERM)  # the loop hears of later ones, and leaves it at that
        await asyncio.sleep(0.01)
    assert came_to == ["the import"]
    assert signals.is_asked


NOTICE = Leaving(within_seconds=25.0, reason="it goes in 30 s")


async def test_a_machine_that_goes_drains_and_its_shutdown_does_not_cut_that_short() -> None:
    node = Node(has_work=True)
    with StopSignals() as signals, signals.draining(node.drain, seconds=30.0):
        signals.leave(NOTICE)
        signals.leave(NOTICE)
        assert node.asked == [25.0] and signals.is_asked
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert node.asked == [25.0]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert node.asked == [25.0, 0.0], "its owner wants it to leave at once"


async def test_a_machine_that_goes_cancels_a_node_with_nothing_to_finish() -> None:
    node = Node(has_work=False)
    with (
        pytest.raises(asyncio.CancelledError),
        StopSignals() as signals,
        signals.draining(node.drain, seconds=30.0),
    ):
        signals.leave(NOTICE)
        await asyncio.sleep(10)
    assert node.asked == [25.0]


async def test_a_notice_is_nothing_new_to_a_node_that_was_stopped() -> None:
    node = Node(has_work=True)
    with StopSignals() as signals, signals.draining(node.drain, seconds=30.0):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        signals.leave(NOTICE)
    assert node.asked == [30.0]


_ENDS_IN_ORDER = """
import sys
from pathlib import Path
from node import app, cli
from node.config import NodeSettings
from protocol.terminal import console

async def run_node(*_, **__):
    return "stopped by its owner"

app.run_node = run_node
start = cli.click.Command("start", callback=lambda: cli._run(
    Path(sys.argv[1]), NodeSettings(name="n"), waits=False, log_json=False, ends_with_stdin=False
))
sys.exit(console.run(start, []))
"""


def test_a_node_whose_terminal_was_closed_ends_with_0_though_it_can_tell_nobody(
    tmp_path: Path,
) -> None:
    ours, terminal = os.openpty()
    os.close(ours)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _ENDS_IN_ORDER, tmp_path], stdout=terminal, stderr=terminal
        )
    finally:
        os.close(terminal)
    assert ended.returncode == 0
