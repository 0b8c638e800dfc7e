"""What the daemon leaves to a process beside its ranks: asking torch, and keeping their meeting point."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # is public

from node.hosts.wire import open_store
from node.island.ranks.aside import Aside, Work
from node.island.ranks.devices import devices_of, usable_devices
from protocol.errors import ConfigError, SystemRefusedError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HANGS_SECONDS = 600.0


@asynccontextmanager
async def aside_of(work: Work, *arguments: object) -> AsyncIterator[Aside]:
    aside = Aside(work, *arguments)
    try:
        yield aside
    finally:
        aside.close()


def add(connection: "Connection[Any, Any]", first: int, second: int) -> None:
    connection.send((first + second, os.getpid()))


def refuse(connection: "Connection[Any, Any]") -> None:
    raise ConfigError("so not", next_step="something else")


def die(connection: "Connection[Any, Any]") -> None:
    os._exit(7)


def answer_and_hang(connection: "Connection[Any, Any]") -> None:
    connection.send(os.getpid())
    time.sleep(HANGS_SECONDS)


def say_and_hang(connection: "Connection[Any, Any]", address: tuple[str, int]) -> None:
    socket.create_connection(address).sendall(str(os.getpid()).encode())
    time.sleep(HANGS_SECONDS)


def has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def becomes(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANGS_SECONDS / 4):
        while not is_so():  # noqa: ASYNC110 (processes and ports send no event)
            await asyncio.sleep(0.01)


async def test_it_answers_from_a_process_of_its_own() -> None:
    async with aside_of(add, 3, 4) as aside:
        answer, pid = await aside.answer()
    assert answer == 7
    assert pid != os.getpid()


async def test_what_it_refuses_is_refused_here() -> None:
    async with aside_of(refuse) as aside:
        with pytest.raises(ConfigError, match="so not; something else"):
            await aside.answer()


async def test_its_death_is_a_sentence_for_people() -> None:
    async with aside_of(die) as aside:
        with pytest.raises(SystemRefusedError, match="atoll-die ended with 7 and no answer"):
            await aside.answer()


async def test_it_ends_when_it_is_closed_though_it_hangs() -> None:
    async with aside_of(answer_and_hang) as aside:
        pid = await aside.answer()
        assert has_process(pid)
    await becomes(lambda: not has_process(pid))


async def test_nobody_has_to_wait_for_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with aside_of(say_and_hang, listening.getsockname()) as aside:
            waiting = asyncio.create_task(aside.answer())
            said, _ = await asyncio.get_running_loop().sock_accept(listening)
            with said:
                pid = int(await asyncio.get_running_loop().sock_recv(said, 32))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await becomes(lambda: not has_process(pid))


async def test_devices_are_those_that_torch_sees() -> None:
    usable = await usable_devices("auto", 1)
    assert usable.names == devices_of("auto", 1)
    assert usable.bytes_per_rank > 0
    assert (await usable_devices("cpu", 2)).names == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="cuda:4096 asked for, but"):
        await usable_devices("cuda:4096")


async def test_ranks_meet_at_a_store_until_it_is_closed() -> None:
    aside, port = await open_store("127.0.0.1")
    try:
        one, other = (TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2))
        one.set("a", "1")
        assert other.get("a") == b"1"
    finally:
        aside.close()

    def is_gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return True
        return False

    await becomes(is_gone)
