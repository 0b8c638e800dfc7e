"""What a daemon tells systemd, in datagrams that a test reads in systemd's place."""

import asyncio
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from protocol.service.notify import ServiceManager


@contextmanager
def manager_at(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name)
        listening.settimeout(10)
        yield listening


def told(listening: socket.socket) -> list[str]:
    return listening.recv(4096).decode().split("\n")


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_daemon_says_that_it_is_ready_and_that_it_stops(
    tmp_path: Path, is_abstract: bool
) -> None:
    name = f"atoll-{uuid.uuid4().hex}" if is_abstract else str(tmp_path / "notify")
    with manager_at(f"\0{name}" if is_abstract else name) as listening:
        manager = ServiceManager(address=f"@{name}" if is_abstract else name)
        manager.ready("takes part")
        assert told(listening) == ["READY=1", "STATUS=takes part"]
        manager.doing("two\nlines")
        assert told(listening) == ["STATUS=two lines"]
        manager.stopping("leaving", within_seconds=1.5)
        assert told(listening) == ["STOPPING=1", "STATUS=leaving", "EXTEND_TIMEOUT_USEC=1500000"]


async def test_the_watchdog_is_fed_as_long_as_the_event_loop_lives(tmp_path: Path) -> None:
    with manager_at(str(tmp_path / "notify")) as listening:
        manager = ServiceManager(address=str(tmp_path / "notify"), watchdog_seconds=0.01)
        async with manager.watching():
            for _ in range(3):
                assert await asyncio.to_thread(told, listening) == ["WATCHDOG=1"]
        manager.doing("done")
        while (lines := told(listening)) == ["WATCHDOG=1"]:
            pass
        assert lines == ["STATUS=done"], "nothing feeds it afterwards"


async def test_a_manager_without_a_watchdog_hears_no_more_than_it_is_told(tmp_path: Path) -> None:
    with manager_at(str(tmp_path / "notify")) as listening:
        manager = ServiceManager(address=str(tmp_path / "notify"))
        async with manager.watching():
            await asyncio.sleep(0)
        manager.doing("all")
        assert told(listening) == ["STATUS=all"]


def test_what_a_daemon_starts_does_not_speak_for_it() -> None:
    environment = {"NOTIFY_SOCKET": "/nobody", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1", "A": "b"}
    ServiceManager.of_environment(environment)
    assert environment == {"A": "b"}


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_watchdog_is_of_one_process(tmp_path: Path, is_own: bool) -> None:
    with manager_at(str(tmp_path / "notify")) as listening:
        manager = ServiceManager.of_environment(
            {
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "WATCHDOG_USEC": "60000000",
                "WATCHDOG_PID": str(os.getpid() if is_own else 1),
            }
        )
        async with manager.watching():
            await asyncio.sleep(0)
        manager.doing("the end")
        assert (told(listening) == ["WATCHDOG=1"]) is is_own


def test_without_a_manager_nothing_is_said() -> None:
    with structlog.testing.capture_logs() as lines:
        ServiceManager.of_environment({}).ready("to nobody")
    assert lines == []


def test_a_manager_that_does_not_hear_is_told_of_once(tmp_path: Path) -> None:
    manager = ServiceManager(address=str(tmp_path / "gone"))
    with structlog.testing.capture_logs() as lines:
        manager.ready("a")
        manager.doing("b")
    assert [line["event"] for line in lines] == ["the service manager does not hear us"]
