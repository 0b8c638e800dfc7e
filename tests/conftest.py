"""Settings for all tests: one OpenMP thread for each process, as everywhere on small machines.

And no deadline for hypothesis's examples: a busy machine takes any time over any of them.
Here too: what tests of many folders share.
"""

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from node.island.data.dataset import Corpus

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
os.environ.pop("COLUMNS", None)  # xdist's; commands that we start would fit their tables into it
# Else each of the hundreds of processes that tests start compiles all of our own code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until tests are collected


NO_SWARM = (
    "_in_process.py",
    *("test_refused_meshes.py", "test_transport_contract.py", "test_web_server.py"),
    *("test_copies_of_any_age.py", "test_restored_copies.py", "test_amended_runs.py"),
)
"""Virtual time; nodes that are refused; what is served in the test's own process."""

AS_A_WHOLE = ("test_race.py", "test_wheel.py", "test_peer_tokens.py", "test_token_supply.py")
"""Unit tests that share what is costly to make, or one of which is long: files of many tests come first."""


class TwoSwarmsAtATime(LoadScopeScheduling):
    """Swarms of real processes in two rows, and islands in one, beside each other and all else.

    `make test` has three workers for two cores, since swarms and islands wait for much of their time: two
    take the swarms, one the islands; then all what is left.
    A file that starts no swarm of processes is left to whoever comes to it first, as a whole, for
    its tests share what is costly to make.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if nodeid.startswith(("tests/integration/", "tests/chaos/")):
            if file.endswith(NO_SWARM):
                return file
            return "swarms" if file < "tests/integration/test_m" else "more swarms"
        if nodeid.startswith("tests/islands/"):
            return "islands"
        return file if file.endswith(AS_A_WHOLE) else nodeid


def pytest_collection_finish() -> None:
    """What is imported and collected stays, and Python's collector need not look through it again and again.

    Each worker collects all tests, and that took it nearly half of the time.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logging_is_left_as_it_was() -> "Iterator[None]":
    """Benchmarks make the log quiet for their whole process, and tests after theirs read it."""
    before = structlog.get_config()
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoSwarmsAtATime:
    return TwoSwarmsAtATime(config, log)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> "Corpus":
    """The text that tiny runs train on, read once for all tests of a process. Nobody writes to it."""
    from node.island.data.dataset import read_corpus  # most tests need nothing of the node
    from tests.tiny_runs import tiny

    spec = tiny()
    folder = tmp_path_factory.mktemp("text")
    return read_corpus(spec.data, context=spec.model.context, batch=spec.inner.batch, folder=folder)
