"""The process that ranks are forked from may be killed: a service manager signals all there are."""

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from node.island.checkpoints.folder import CheckpointFolder
from node.island.data.places import DataPlaces
from node.island.parallel.mesh_shape import PLAIN, MeshShape
from node.island.ranks.commands import (
    Adopt,
    Command,
    Done,
    Evaluate,
    Failed,
    Keep,
    Order,
    Publish,
    RankSetup,
    Train,
)
from node.island.ranks.faults import RankDiedError
from node.island.ranks.forkserver import _live, end_forkserver, prepare_forkserver
from node.island.ranks.launcher import ProcessIsland, RanksHere
from protocol.errors import SystemRefusedError
from protocol.run.models import layout_of
from tests.islands.rank_scene import initial_vectors, small_spec, with_texts, work_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


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


def test_without_a_home_to_write_to_what_ranks_compile_goes_with_the_forkserver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end_forkserver()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    prepare_forkserver()
    server: Any = forkserver._forkserver
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    process = multiprocessing.get_context("forkserver").Process(target=os.listdir, args=(cache,))
    process.start()
    process.join()
    assert process.exitcode == 0 and cache.is_dir(), "it has loaded torch's compiler"
    assert cache.parent == Path(server._forkserver_address).parent
    end_forkserver()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and not cache.exists()


def test_what_ranks_print_goes_where_it_was_told_to_and_ours_stays_where_it_is(
    tmp_path: Path,
) -> None:
    end_forkserver()
    own = os.fstat(2).st_ino
    descriptor = os.open(tmp_path / "said", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    prepare_forkserver(standard_error=descriptor)
    assert os.fstat(2).st_ino == own
    for _ in range(2):  # and again when the forkserver was ended meanwhile
        process = multiprocessing.get_context("forkserver").Process(
            target=os.write, args=(2, b"said\n")
        )
        process.start()
        process.join()
        server: Any = forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
        server._forkserver_pid = None
        prepare_forkserver()
    end_forkserver()
    os.close(descriptor)
    assert (tmp_path / "said").read_text() == "said\nsaid\n"


def test_that_its_socket_was_cleared_away_is_said_and_does_not_hinder_its_end() -> None:
    end_forkserver()
    prepare_forkserver()
    server: Any = forkserver._forkserver
    Path(server._forkserver_address).unlink()
    with pytest.raises(
        SystemRefusedError, match=r"the socket by which ranks are started, \S+, is gone"
    ):
        prepare_forkserver()
    end_forkserver()
    prepare_forkserver()
    assert Path(server._forkserver_address).is_socket()


def _live_and_tell(
    orders: "Connection[Any, Any]", telling: "Connection[Any, Any]", setup: Any
) -> None:
    before = set(sys.modules)
    _live(orders, setup)
    loaded = {"torch", "torch._dynamo"} & before
    telling.send((gc.isenabled(), loaded, sorted(set(sys.modules) - before)))


def test_a_rank_alone_needs_no_compiler_of_torch_and_no_other_import_of_weight(
    tmp_path: Path,
) -> None:
    """Such imports took a second of each start. The collector, off while torch was loaded, is on again."""
    end_forkserver()
    prepare_forkserver(with_compiler=False)
    base = small_spec()
    spec = base.model_copy(
        update={"inner": base.inner.model_copy(update={"optimizer": "muon", "sparse": True})}
    )
    checkpoints = CheckpointFolder(
        path=tmp_path / "inner",
        run_digest=spec.digest(),
        layout_digest=layout_of(spec).summary().digest,
        every_rounds=1,
    )
    context = multiprocessing.get_context("forkserver")
    (ours, theirs), (told, telling) = context.Pipe(), context.Pipe()
    with initial_vectors(spec.model) as vectors:
        setup = RankSetup(
            spec=spec,
            names=vectors.names,
            rank=0,
            shape=MeshShape(),
            device="cpu",
            num_threads=1,
            local=PLAIN,
            data=DataPlaces(folder=with_texts(tmp_path)),
            meeting=tmp_path / "store",
        )
        process = context.Process(target=_live_and_tell, args=(theirs, telling, setup), daemon=True)
        process.start()
        theirs.close()
        commands: tuple[Command, ...] = (
            Adopt(None, True),
            Train(work_of(spec, inner_steps=2)),
            Publish(0),
            Evaluate(),
            Keep(checkpoints, 1, is_waited=True),
        )
        for number, command in enumerate(commands, 1):
            ours.send(Order(number, command))
        answered = -1
        while answered < len(commands):
            reply = ours.recv()
            assert not isinstance(reply, Failed), reply
            answered = reply.number if isinstance(reply, Done) else answered
        ours.close()
        is_collecting, loaded, imported = told.recv()
        process.join()
    end_forkserver()
    assert is_collecting and loaded == {"torch"}
    assert len(imported) < 40 and "torch._dynamo" not in imported, imported


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


@pytest.fixture
def killed_forkserver_id(forkserver_id: int) -> int:
    """As where the kernel kills both it and a rank for want of memory; nobody has reaped it."""
    os.kill(forkserver_id, signal.SIGKILL)
    os.waitid(os.P_PID, forkserver_id, os.WEXITED | os.WNOWAIT)
    return forkserver_id


async def test_one_that_was_killed_and_has_not_quite_ended_when_ranks_are_wanted_is_started_again(
    killed_forkserver_id: int, island: ProcessIsland, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_asked = 0

    def waitpid(process_id: int, flags: int) -> tuple[int, int]:
        nonlocal times_asked
        times_asked += process_id == killed_forkserver_id
        if process_id == killed_forkserver_id and times_asked <= 2:
            return 0, 0  # its sockets are closed, and its number is not free yet
        return waitpid_of_the_system(process_id, flags)

    waitpid_of_the_system = os.waitpid
    monkeypatch.setattr(os, "waitpid", waitpid)
    await island.start()
    assert island.process_ids and times_asked == 3
    await island.stop()


async def test_its_end_below_a_rank_is_told_and_ranks_start_again(island: ProcessIsland) -> None:
    await island.start()
    server: Any = forkserver._forkserver
    os.kill(server._forkserver_pid, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="255, as where the process that forked it is killed"):
        await asyncio.wait_for(_until_refused(island), 60)
    await island.stop()
    await island.start()
    await island.stop()


async def _until_refused(island: ProcessIsland) -> None:
    while True:
        await island.adopt()


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
