"""Meshes and devices that cannot work, typed for real: 78, the numbers, and nothing was loaded.

All that is said of meshes is in tests/unit/test_mesh_shape.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.typed_commands import Swarm, atoll, refused

RUN = """
[run]
name = "refusing"

[model]
hidden_size = {hidden_size}
num_layers = 3
num_heads = 4
num_kv_heads = 2
ffn_size = {ffn_size}
context = 32

[inner]
batch = 4
"""


def member_of(folder: Path, *, hidden_size: int, ffn_size: int) -> Iterator[Path]:
    """The folder of a node that has joined; its swarm runs meanwhile."""
    swarm = Swarm(folder / "swarm", RUN.format(hidden_size=hidden_size, ffn_size=ffn_size))
    try:
        yield swarm.join("member", swarm.invite())
    finally:
        swarm.end()


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from member_of(tmp_path_factory.mktemp("small"), hidden_size=32, ffn_size=64)


@pytest.fixture(scope="module")
def member_of_a_giant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from member_of(tmp_path_factory.mktemp("giant"), hidden_size=65536, ffn_size=1 << 24)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--pp 2 --schedule zbv", "4 stages (two stages on each rank), and it has 3 layers"),
        ("--ranks 3 --tp 2", "ranks = 3, but the mesh tensor 2 has 2"),
        ("--mesh auto --ranks 7", "no mesh of 7 ranks fits this run"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_loaded(
    member: Path, options: str, words: str
) -> None:
    typed = atoll("node", "start", "--dir", member, "--device", "cpu", *options.split())
    refused(typed, 78, words)  # and nothing else was said, such as that torch is being loaded


def test_a_gpu_that_is_not_there_is_refused_at_once(member: Path) -> None:
    refused(atoll("node", "start", "--dir", member, "--device", "cuda:77"), 78, "cuda:77 asked for")


def test_a_model_that_no_machine_holds_is_refused_with_what_it_needs(
    member_of_a_giant: Path,
) -> None:
    refused(
        atoll("node", "start", "--dir", member_of_a_giant, "--device", "cpu"),
        78,
        "the outer state of 9,9",
        "TiB of memory, and ",
    )
