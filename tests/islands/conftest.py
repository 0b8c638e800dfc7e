"""Fixtures of islands with ranks in processes."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from node.island.parallel.mesh_shape import MeshShape
from node.island.ranks.forkserver import prepare_forkserver
from node.outer_state import SharedVectors
from protocol.run.run_spec import RunSpec
from tests.islands.any_model_scene import (
    Outcome,
    prepare_with_transformers,
    text_run,
    texts,
    trained,
)
from tests.islands.rank_scene import initial_vectors, small_spec, with_texts


@pytest.fixture(scope="module")
def forkserver() -> None:
    prepare_forkserver()


@pytest.fixture(scope="module")
def transformers_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[RunSpec, Outcome]]:
    """What one process comes to, for each kind of model."""
    from tests.transformers_configs import CONFIGS  # takes seconds

    prepare_with_transformers()

    @cache
    def alone(kind: str) -> tuple[RunSpec, Outcome]:
        folder = tmp_path_factory.mktemp(kind)
        spec = text_run(CONFIGS[kind], folder)
        return spec, trained(spec, MeshShape(), folder, texts)

    return alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_texts(tmp_path)


@pytest.fixture
def vectors(request: pytest.FixtureRequest) -> Iterator[SharedVectors]:
    """The first weights of the file's SPEC, or of the small run."""
    with initial_vectors(getattr(request.module, "SPEC", small_spec()).model) as vectors:
        yield vectors
