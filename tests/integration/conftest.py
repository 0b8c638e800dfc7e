"""Fixtures that several integration tests share."""

from collections.abc import AsyncIterator

import pytest
from tls_coordinator import Coordinator


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator() as running:
        yield running
