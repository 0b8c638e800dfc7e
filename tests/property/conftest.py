"""How hard the property tests try: the same examples each time in CI, many others each night.

`pytest tests/property --hypothesis-profile=nightly`, or `make nightly`.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.property.effort import NIGHTLY_FACTOR

BOTH: dict[str, Any] = {
    "deadline": None,  # examples of very different sizes, on busy machines
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
CI_SECONDS = 900
"""Shrinking a failure takes minutes. Cut off in the middle, it would be reported as flaky."""

settings.register_profile("ci", max_examples=100, derandomize=True, **BOTH)
settings.register_profile(
    "nightly", max_examples=100 * NIGHTLY_FACTOR, derandomize=False, print_blob=True, **BOTH
)
settings.load_profile("ci")  # an option on the command line is taken after this


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_nightly = settings().max_examples > 100
    for item in items:
        if item.nodeid.startswith("tests/property/"):
            item.add_marker(pytest.mark.timeout(0 if is_nightly else CI_SECONDS))
