"""Fixtures that several integration tests share."""

from collections.abc import AsyncIterator

import pytest
from tls_coordinator import Coordinator

from lab.network.lab import LabUnavailableError, NetworkLab
from lab.network.links import Link


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
