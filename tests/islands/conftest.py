"""Fixtures of islands with ranks in processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.island.ranks.forkserver import prepare_forkserver
from node.outer_state import SharedVectors
from tests.islands.rank_scene import initial_vectors, small_spec, with_texts


@pytest.fixture(scope="module")
def forkserver() -> None:
    prepare_forkserver()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_texts(tmp_path)


@pytest.fixture
def vectors(request: pytest.FixtureRequest) -> Iterator[SharedVectors]:
    """The first weights of the file's SPEC, or of the small run."""
    with initial_vectors(getattr(request.module, "SPEC", small_spec()).model) as vectors:
        yield vectors
