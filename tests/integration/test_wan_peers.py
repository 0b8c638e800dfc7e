"""A peer of benchmarks/wan over loopback: real processes that exchange for real."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.wan.peers.order import Order
from lab.processes.family import SOURCES
from lab.run_files import TINY_MODEL
from node.island.models.first_weights import initial_parameters
from protocol.run.run_spec import RunSpec

PATIENCE_SECONDS = 200.0  # for a hang only
NUM_NODES = 2
EXCHANGES = 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Something to train on that is read in a moment."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a short text\n" for number in range(4000)))
    return path


@pytest.fixture
def spec(text: Path) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"min_nodes": NUM_NODES, "rounds": 1000},
            "model": {**TINY_MODEL},
            "data": {"source": "text", "paths": [str(text)], "held_out": 0.3},
            "inner": {"steps": 2, "batch": 2, "schedule": "constant", "warmup_tokens": 0},
        }
    )


@pytest.fixture
def orders(spec: RunSpec, tmp_path: Path) -> list[Order]:
    return [
        Order(
            rank=rank,
            addresses=("127.0.0.1",) * NUM_NODES,
            middle="127.0.0.1",
            interface="lo",
            tables=spec.model_dump(mode="json"),
            step_seconds=0.0,
            save_seconds=1e-6,
            folder=tmp_path,
        )
        for rank in range(NUM_NODES)
    ]


@pytest.fixture
def started(
    request: pytest.FixtureRequest, orders: list[Order], tmp_path: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """The peer that the test names, one process for each node; ended with the test."""
    environment = os.environ | {
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    with (tmp_path / "peers.log").open("wb") as log:
        for order in orders:
            command = [sys.executable, "-P", "-m", request.param, str(order.write())]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
            )
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def exchanges_of(order: Order) -> dict[int, str]:
    """The files of weights that a node has kept, by the number of exchanges before."""
    *lines, _ = order.log.read_text().split("\n")
    said = [json.loads(line) for line in lines]
    return {each["exchanges"]: each["path"] for each in said if each["said"] == "saved"}


@pytest.mark.parametrize(
    "started",
    [
        pytest.param("benchmarks.wan.peers.ddp", marks=pytest.mark.nightly),
        "benchmarks.wan.peers.gloo_diloco",
    ],
    indirect=True,
)
def test_peers_that_exchange_train_and_stay_equal(
    started: list["subprocess.Popen[bytes]"], orders: list[Order], spec: RunSpec, tmp_path: Path
) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not all(EXCHANGES in exchanges_of(order) for order in orders):
        assert time.monotonic() < give_up_at, (tmp_path / "peers.log").read_text()
        assert all(process.poll() is None for process in started), (
            tmp_path / "peers.log"
        ).read_text()
        time.sleep(0.05)
    one, other = (np.load(tmp_path / exchanges_of(order)[EXCHANGES]) for order in orders)
    assert np.array_equal(one, other)
    first = initial_parameters(spec)
    assert one.shape == first.shape
    assert not np.array_equal(one, first)
