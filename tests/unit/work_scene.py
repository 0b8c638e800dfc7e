"""Inner work for tests that train: the first round's, with more samples and time than it takes."""

from typing import Any

from node.island.island import InnerWork


def inner_work(inner_steps: int, **fields: Any) -> InnerWork:
    """With these fields of InnerWork."""
    plain = {
        "round": 1,
        "first_sample": 0,
        "num_samples": 10**6,
        "token_clock": 0,
        "round_tokens": 0,
        "max_seconds": 1e9,
        "num_participants": 1,
    }
    return InnerWork(inner_steps=inner_steps, **{**plain, **fields})
