"""Calls that are tried again, and those that are not."""

import random

import pytest

from protocol.errors import (
    AtollError,
    NotPermittedError,
    SessionEndedError,
    TemporaryError,
    UnavailableError,
)
from protocol.wire.channel import RETRY_CAP_SECONDS, retried


async def test_a_call_is_retried_with_growing_jitter_while_it_is_wanted() -> None:
    errors_ahead: list[AtollError] = [UnavailableError("down")] * 7 + [TemporaryError("busy")]
    slept: list[float] = []

    async def call() -> str:
        if errors_ahead:
            raise errors_ahead.pop(0)
        return "answer"

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Longest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            assert a == 0.0
            return b

    answer = await retried(call, is_wanted=lambda: True, random=Longest(), sleep=sleep)
    assert answer == "answer"
    assert slept == [0.5, 1.0, 2.0, 4.0, *[RETRY_CAP_SECONDS] * 4]


@pytest.mark.parametrize(
    ("error", "is_wanted"),
    [
        (UnavailableError("down"), False),
        (SessionEndedError("attach again"), True),
        (NotPermittedError("revoked"), True),
    ],
)
async def test_what_waiting_cannot_mend_is_not_retried(error: AtollError, is_wanted: bool) -> None:
    async def call() -> str:
        raise error

    async def sleep(_: float) -> None:
        pytest.fail("waited")

    with pytest.raises(type(error)) as caught:
        await retried(call, is_wanted=lambda: is_wanted, random=random.Random(0), sleep=sleep)
    assert caught.value is error
