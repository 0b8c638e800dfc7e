"""A daemon's process loads kernels and compiles none; another process fills the cache.

In processes of their own, with caches of their own: what is compiled stays with a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

STARTED = """
import asyncio, json, os, sys
from numba.core import event
from structlog.testing import capture_logs
from node.exchange.codecs.tiles import Tiles
from node.exchange import preparing
from node.exchange.outer import Outer
from protocol.layout import Layout
from protocol.run_spec import ExchangeSection, RunSpec
import numpy as np

class Compiled(event.Listener):
    count = 0
    def on_start(self, event):
        pass
    def on_end(self, event):
        self.count += event.data["dispatcher"].overloads.keys() >= {event.data["args"]}

compiled = Compiled()
event.register("numba:compile", compiled)
spec = RunSpec(exchange=ExchangeSection(uplink="int8", downlink="int8"))

with capture_logs() as logs:
    asyncio.run(preparing.prepare_kernels(spec))
after_preparing = compiled.count
vector = np.zeros(4096, dtype=np.float32)
Outer.of_run(
    spec,
    layout=Layout.of([("w", (4096,))]),
    parameters=vector,
    published=vector.copy(),
    tiles=Tiles(2),
    node_id="a",
).compile_kernels()
print(json.dumps({
    "pid": os.getpid(), "logs": logs, "here": [after_preparing, compiled.count],
}))
"""


def start(cache: Path, *, before: str = "", **environment: str) -> Any:
    ran = subprocess.run(
        [sys.executable, "-c", before + STARTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def events(told: Any) -> list[str]:
    return [line["event"] for line in told["logs"]]


@pytest.mark.timeout(600)
def test_the_daemon_compiles_nothing_and_the_next_start_finds_all_in_the_cache(
    tmp_path: Path,
) -> None:
    first = start(tmp_path)
    assert first["here"] == [0, 0], "the daemon's process has compiled"
    done = [line for line in first["logs"] if line["event"] == "compiled"]
    assert [line["what"] for line in done] == [
        "codec int8/1",
        "merge mean, outer optimizer nesterov",
    ]
    assert {line["process"] for line in done}.isdisjoint({first["pid"]})
    assert events(first)[-1] == "kernels compiled"
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.nbc")}
    assert compiled and not any("entropy" in name or "top_k" in name for name in compiled)
    again = start(tmp_path)
    assert again["here"] == [0, 0]
    assert not again["logs"]


@pytest.mark.timeout(600)
def test_where_no_cache_can_be_it_says_so_and_compiles_for_itself(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = start(
        tmp_path / "file" / "cache", NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator"
    )
    (line,) = told["logs"]
    assert line["log_level"] == "warning"
    assert "cannot be kept here" in line["event"]
    assert "NUMBA_CACHE_DIR" in line["next_step"]
    assert told["here"][0] == 0 < told["here"][1]


@pytest.mark.timeout(600)
def test_a_compiling_process_that_fails_is_told_of_with_its_reason(tmp_path: Path) -> None:
    broken = "import sys; sys.executable = '/bin/false'\n"
    told = start(tmp_path, before=broken)
    line = told["logs"][-1]
    assert line["log_level"] == "warning"
    assert "has failed" in line["event"]
    assert line["why"] == "it ended with 1: no reason given"
    assert told["here"][0] == 0 < told["here"][1]
