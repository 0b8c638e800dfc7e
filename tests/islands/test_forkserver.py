"""The process that ranks are forked from may be killed: a service manager signals all there are."""

import asyncio
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from rank_scene import initial_vectors, small_spec, with_texts

from node.island.data.places import DataPlaces
from node.island.ranks.faults import RankDiedError
from node.island.ranks.forkserver import prepare_forkserver
from node.island.ranks.launcher import ProcessIsland, RanksHere


@pytest.fixture
def forkserver_id() -> int:
    """Of one that stands still, as one does that imports torch: it will be killed."""
    prepare_forkserver()
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGSTOP)
    return int(server._forkserver_pid)


def test_what_ranks_compile_is_kept_where_nobody_else_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    prepare_forkserver()
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.is_relative_to(Path.home()) or cache.is_relative_to(
        os.environ.get("XDG_CACHE_HOME", Path.home())
    )


@pytest.fixture
def island(tmp_path: Path) -> Iterator[ProcessIsland]:
    with initial_vectors(small_spec().model) as vectors:
        yield ProcessIsland(
            ranks=RanksHere(devices=("cpu",)),
            spec=small_spec(),
            names=vectors.names,
            data=DataPlaces(folder=with_texts(tmp_path)),
        )


@pytest.fixture
async def has_asked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a fork was asked for, and its answer is waited for."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    read_signed = forkserver.read_signed

    def read(descriptor: int) -> int:
        loop.call_soon_threadsafe(event.set)
        return read_signed(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read)
    return event


async def test_its_end_is_that_of_the_ranks_that_it_was_to_fork_and_others_can_be_started(
    forkserver_id: int, has_asked: asyncio.Event, island: ProcessIsland
) -> None:
    starting = asyncio.create_task(island.start())
    await has_asked.wait()
    os.kill(forkserver_id, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="the process that ranks are forked from has ended"):
        await starting
    await island.stop()
    await island.start()
    assert island.process_ids
    await island.stop()


async def test_its_end_is_nobodys_fault_when_the_node_stops(
    forkserver_id: int, has_asked: asyncio.Event, island: ProcessIsland
) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, fault: faults.append(fault))
    starting = asyncio.create_task(island.start())
    await has_asked.wait()
    starting.cancel()
    os.kill(forkserver_id, signal.SIGKILL)
    await island.stop()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del starting
    assert not faults
