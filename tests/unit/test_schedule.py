"""The learning rate depends on the swarm's tokens alone."""

import pytest

from node.island.schedule import default_total_tokens, learning_rate
from protocol.run_spec import InnerSection, ModelSection, RunSection, RunSpec

COSINE = InnerSection(
    learning_rate=1.0, warmup_tokens=100, total_tokens=1100, final_fraction=0.2, schedule="cosine"
)


@pytest.mark.parametrize(
    ("token_clock", "rate"),
    [
        (0, 0.0),
        (25, 0.25),
        (100, 1.0),
        (350, 0.2 + 0.8 * 0.8535534),
        (600, 0.6),
        (1100, 0.2),
        (9999, 0.2),
    ],
)
def test_cosine_rises_in_the_warm_up_then_falls_to_its_final_fraction(
    token_clock: int, rate: float
) -> None:
    assert learning_rate(COSINE, token_clock, default_total_tokens=1) == pytest.approx(rate)


def test_a_constant_schedule_stays_after_its_warm_up() -> None:
    constant = COSINE.model_copy(update={"schedule": "constant"})
    rates = [learning_rate(constant, clock, default_total_tokens=1) for clock in (50, 100, 10**9)]
    assert rates == [0.5, 1.0, 1.0]


def test_without_total_tokens_the_whole_run_of_the_fewest_nodes_counts() -> None:
    spec = RunSpec(
        run=RunSection(rounds=7, min_nodes=3),
        model=ModelSection(context=32),
        inner=InnerSection(steps=5, batch=2, final_fraction=0.0, warmup_tokens=0),
    )
    total = default_total_tokens(spec)
    assert total == 7 * 5 * 2 * 32 * 3
    assert learning_rate(spec.inner, 0, default_total_tokens=total) == spec.inner.learning_rate
    assert learning_rate(spec.inner, total, default_total_tokens=total) == pytest.approx(0.0)


def test_without_warmup_tokens_a_tenth_of_the_run_warms_up() -> None:
    inner = InnerSection(learning_rate=1.0)
    rates = [learning_rate(inner, clock, default_total_tokens=1000) for clock in (0, 50, 100)]
    assert rates == [0.0, 0.5, 1.0]


def test_a_run_shorter_than_its_warm_up_ends_at_the_final_fraction() -> None:
    short = COSINE.model_copy(update={"total_tokens": 50})
    assert learning_rate(short, 100, default_total_tokens=1) == pytest.approx(0.2)
