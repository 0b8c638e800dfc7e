"""Fixtures that several integration tests share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.network.lab import LabUnavailableError, NetworkLab
from lab.network.links import Link
from tests.integration.tls_coordinator import Coordinator
from tests.integration.typed_commands import Swarm

if TYPE_CHECKING:
    from lab.simulation.swarm import SimulatedRun
    from node.island.data.dataset import Corpus


@pytest.fixture
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Swarm]:
    """A swarm by the RUN of the test's file."""
    swarm = Swarm(tmp_path / "swarm", request.module.RUN)
    yield swarm
    swarm.end()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator() as running:
        yield running


@pytest.fixture(scope="session")
def may_make_network_labs() -> None:
    try:
        with NetworkLab({"alone": Link()}):
            pass
    except LabUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def clean(corpus: "Corpus") -> "SimulatedRun":
    """A run of which no member lies."""
    from tests.integration.liars_scene import run  # most tests need nothing of the node

    return run(corpus)
