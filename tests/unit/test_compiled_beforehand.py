"""A node's start, and the tool that CI runs, leave no kernel for a round to compile.

In processes of their own, for what is compiled stays with a process: another test may have done it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOUND = """
import sys
from benchmarks.outer_arithmetic import RoundsOfOneNode, measured
from node.exchange.codecs.codec import Tiles
from node.exchange.codecs.registry import CODECS
from protocol.run.run_spec import OuterSection
from numba.core.dispatcher import Dispatcher

def compiled():
    return {
        (kernel.__module__, kernel.__name__): tuple(kernel.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("node.exchange")
        for kernel in vars(module).values()
        if isinstance(kernel, Dispatcher)
    }

def go_through_rounds(codec, rules):
    rounds = RoundsOfOneNode(
        codec=codec, values=9000, nodes=3, fragments=2, tiles=Tiles(2), rules=rules
    )
    before = compiled()
    measured(rounds, values=9000, repeats=1, threads=1)
    return {kernel for kernel, signatures in compiled().items() if signatures != before[kernel]}
"""

OF_A_NODE = """
for rules in (OuterSection(), OuterSection(optimizer="sgd", merge="norm-preserving")):
    late = go_through_rounds(sys.argv[1], rules)
    assert not late, f"a round compiled {late}"
found = compiled()
assert found["node.exchange.error_feedback", "_sum_owed"], "nothing was looked at"
assert len(found["node.exchange.codecs.dense", "_decode_int4"]) == 1, "of one kind of arrays"
"""

OF_THE_TOOL = """
import runpy
runpy.run_path("tools/compile_kernels.py")["compile_all"]()
before = compiled()
outer = {kernel: found for kernel, found in before.items() if ".codecs." not in kernel[0]}
left = {kernel for kernel, signatures in outer.items() if not signatures}
assert len(outer) == 6 and not left, f"of {set(outer)} the tool leaves out {left}"
for codec in CODECS:
    go_through_rounds(codec.name.partition("/")[0], OuterSection())
assert compiled() == before, "a round compiled what the tool left out"
"""


def run(program: str, *arguments: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FOUND + program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_nodes_start_compiles_all_that_its_rounds_need() -> None:
    run(OF_A_NODE, "int4")


@pytest.mark.timeout(1200)  # where nobody has run the tool before, it compiles everything
def test_the_tool_compiles_all_that_any_run_needs() -> None:
    run(OF_THE_TOOL)
