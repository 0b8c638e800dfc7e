"""What a killed process leaves is removed by the next start, and what a living one holds is not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from node.outer_state import SHARED_MEMORY, SharedNames, SharedVectors
from protocol.files.leftovers import PREFIX, Held, TemporaryFolder, remove_leftovers

ROOT = Path(__file__).resolve().parents[2]

# Its resource tracker is killed with it, else that would remove the shared memory.
_NODE = """
import asyncio, os, signal, sys, time
from multiprocessing import resource_tracker
from node.exchange.transport.p2pd import P2pd
from node.outer_state import SharedVectors
from protocol.trust.identity import Identity

async def live():
    async def refuse(peer, reader, writer): ...
    vectors = SharedVectors.create(1000)
    daemon = await P2pd.start(Identity.generate(), listen_multiaddrs=("/ip4/127.0.0.1/tcp/0",),
                              on_streams={"/test": refuse})
    print(vectors.names.parameters, vectors.names.published, daemon._folder,
          resource_tracker._resource_tracker._pid, daemon.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(live())
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """With a short name, unlike tmp_path, for sockets lie in it."""
    with TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def node(temporary: Path) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """A process with p2pd and shared memory, and the words that it says."""
    with subprocess.Popen(
        [sys.executable, "-c", _NODE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        try:
            assert process.stdout is not None
            yield process, next(line for line in process.stdout if line.startswith(PREFIX)).split()
        finally:
            process.kill()


def test_a_killed_nodes_shared_memory_and_folders_go_and_a_living_ones_stay(
    temporary: Path,
) -> None:
    with node(temporary) as (killed, left), node(temporary) as (_, kept):
        *blocks, folder, tracker, _ = left
        os.kill(int(tracker), signal.SIGKILL)
        killed.kill()
        killed.wait()
        removed = remove_leftovers(temporary, SHARED_MEMORY)
        assert {*blocks, Path(folder).name} <= {path.name for path in removed}
        assert not any((SHARED_MEMORY / block).exists() for block in blocks)
        assert not Path(folder).exists()
        assert all((SHARED_MEMORY / block).exists() for block in kept[:2])
        assert Path(kept[2]).exists()
        os.kill(int(kept[3]), signal.SIGKILL)
    for block in kept[:2]:  # of the one that was killed just now
        (SHARED_MEMORY / block).unlink(missing_ok=True)


_FORKSERVER = """
import time
from multiprocessing import forkserver
from node.island.ranks.forkserver import end_forkserver, prepare_forkserver

prepare_forkserver(with_compiler=False)
end_forkserver()
prepare_forkserver(with_compiler=False)
print(forkserver._forkserver._forkserver_pid, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_node_leaves_of_its_forkserver_goes(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKSERVER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        forkserver_id = int(process.stdout.readline())
        assert remove_leftovers(temporary) == [] != list(temporary.iterdir())
        process.kill()
        os.kill(forkserver_id, signal.SIGKILL)
    remove_leftovers(temporary)
    assert list(temporary.iterdir()) == []


def test_p2pd_gets_its_key_without_a_file(temporary: Path) -> None:
    with node(temporary) as (_, words):
        files = [path.name for path in Path(words[2]).iterdir()]
        assert sorted(files) == ["control", "streams"]


def test_a_folder_of_another_kind_or_version_is_left_alone(tmp_path: Path) -> None:
    for name in ("atoll-p2pd-1", "someone", f"x{PREFIX}1"):
        (tmp_path / name).mkdir()
    assert remove_leftovers(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_what_is_held_stays_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}folder"
    path.mkdir()
    held = Held(path)
    assert remove_leftovers(tmp_path) == []
    held.release()
    held.release()
    assert remove_leftovers(tmp_path) == [path]
    with pytest.raises(FileNotFoundError):
        Held(path)


def test_a_link_that_bears_such_a_name_leads_nowhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    assert remove_leftovers(tmp_path) == []
    assert precious.is_dir()


def test_an_orderly_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = TemporaryFolder("test")
    (folder.path / "file").write_text("…")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    vectors = SharedVectors.create(10)
    names = (vectors.names.parameters, vectors.names.published)
    assert all((SHARED_MEMORY / name).exists() for name in names)
    vectors.close()
    assert not any((SHARED_MEMORY / name).exists() for name in names)


def _double(names: SharedNames) -> None:
    vectors = SharedVectors.attach(names)
    vectors.published[:] = 2 * vectors.parameters
    vectors.close()


def test_ranks_find_shared_memory_whose_name_a_logout_removed_and_a_node_ends_without_a_word() -> (
    None
):
    vectors = SharedVectors.create(3)
    vectors.parameters[:] = (1, 2, 3)
    for name in (vectors.names.parameters, vectors.names.published):
        (SHARED_MEMORY / name).unlink()
    rank = get_context("spawn").Process(target=_double, args=(vectors.names,))
    rank.start()
    rank.join()
    assert vectors.published.tolist() == [2, 4, 6]
    vectors.close()
    program = (
        "from node.outer_state import SHARED_MEMORY, SharedVectors\n"
        "vectors = SharedVectors.create(3)\n"
        "(SHARED_MEMORY / vectors.names.parameters).unlink()\n"
        "vectors.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_start_that_sweeps_beside_ours_takes_a_block_before_it_is_marked_and_we_make_another() -> (
    None
):
    program = (
        "from node import outer_state\n"
        "from protocol.files.leftovers import Held, remove_leftovers\n"
        "swept = []\n"
        "def swept_first(path):\n"
        "    if not swept:\n"
        "        path.unlink()\n"
        "        swept.append(path)\n"
        "    return Held(path)\n"
        "outer_state.Held = swept_first\n"
        "vectors = outer_state.SharedVectors.create(10)\n"
        "assert swept and vectors.parameters.size == 10\n"
        "vectors.close()\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr  # nor does Python tell of a leak
