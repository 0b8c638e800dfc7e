"""What a rank frees it has again without asking the kernel. In a process of its own: it lasts."""

import subprocess
import sys

import pytest

from lab.processes.family import SOURCES

FAULTS_OF_TAKING_MEMORY_AGAIN = """
import resource, sys
import numpy as np
from node.machine.hardware import keep_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [np.ones(1 << 18, dtype=np.float32) for _ in range(16)]  # 1 MiB each
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keeping":
    assert keep_freed_memory()
print([faults_of_a_step() for _ in range(4)][-1])
"""


def faults(how: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_TAKING_MEMORY_AGAIN, how],
        cwd=SOURCES,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(ran.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc")
def test_freed_memory_is_taken_again_without_page_faults() -> None:
    assert faults("keeping") < 100  # 4,096 pages
    assert faults("returning") > 1000, "else there is nothing to gain any more"
