"""What nodes count against what the network carried: the shortest form of benchmarks/wire."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wire.command import TOLERANCE

ROOT = Path(__file__).parent.parent.parent
NUM_NODES = 2


@pytest.fixture
def may_make_namespaces() -> None:
    for tool in (["unshare", "--map-root-user", "--net", "true"], ["ip", "-V"]):
        try:
            subprocess.run(tool, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"needs '{tool[0]}', which is not installed here")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace of our own here: {error.stderr.strip()}")


@pytest.mark.nightly
@pytest.mark.usefixtures("may_make_namespaces")
def test_the_bytes_that_nodes_count_are_those_that_the_network_carried() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.wire",
        "--rounds",
        "2",
        "--nodes",
        str(NUM_NODES),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as benchmark:
        try:
            printed, _ = benchmark.communicate(timeout=200)
        except BaseException:
            benchmark.terminate()  # unlike a kill, this lets it stop the swarm
            raise
    assert benchmark.returncode == 0, printed
    result = json.loads(printed.splitlines()[-1])
    assert result["counted_bytes"] == pytest.approx(result["interface_bytes"], rel=TOLERANCE)
    one, other = result["nodes"].values()
    for kind in ("contribution", "result"):
        (one_sent, one_received), (other_sent, other_received) = one[kind], other[kind]
        assert one_sent > 50_000
        assert one_sent == pytest.approx(other_received, rel=0.02)
        assert other_sent == pytest.approx(one_received, rel=0.02)
