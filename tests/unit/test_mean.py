import numpy as np
import pytest

from node.exchange.mean import TILE_ELEMENTS, MeanAccumulator, weighted_mean


def normal(num_elements: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)


def test_tokens_weigh() -> None:
    mean = weighted_mean([(100, np.full(3, 1, np.float32)), (300, np.full(3, 5, np.float32))])
    np.testing.assert_array_equal(mean, np.full(3, 4, np.float32))


def test_one_contribution_is_its_own_mean_to_the_bit() -> None:
    values = normal(1000, 0)
    assert weighted_mean([(7, values)]).tobytes() == values.tobytes()


def test_coefficients_products_and_sums_are_rounded_once_each() -> None:
    num_elements = TILE_ELEMENTS + 10
    contributions = [(tokens, normal(num_elements, tokens)) for tokens in (3, 7, 11)]
    expected = np.float32(3 / 21) * contributions[0][1]
    for tokens, values in contributions[1:]:
        expected = expected + np.float32(tokens / 21) * values
    assert weighted_mean(contributions).tobytes() == expected.tobytes()


def test_contributions_are_left_as_they_are() -> None:
    first, second = normal(10, 0), normal(10, 1)
    copies = first.copy(), second.copy()
    weighted_mean([(1, first), (1, second)])
    assert (first.tobytes(), second.tobytes()) == tuple(copy.tobytes() for copy in copies)


def test_a_weight_of_zero_adds_nothing() -> None:
    values = normal(10, 0)
    assert weighted_mean([(0, normal(10, 1)), (5, values)]).tobytes() == values.tobytes()


@pytest.mark.parametrize("contributions", [[], [(0, np.ones(2, np.float32))]])
def test_a_mean_without_weight_is_refused(contributions: list) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        weighted_mean(contributions)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="mean of 3 elements"):
        weighted_mean([(1, normal(3, 0)), (1, normal(1, 1))])


def test_an_accumulator_misses_what_was_announced() -> None:
    accumulator = MeanAccumulator(num_elements=2, total_tokens=10)
    accumulator.add(4, normal(2, 0))
    with pytest.raises(ValueError, match="only 4 of 10"):
        accumulator.finish()
    with pytest.raises(ValueError, match="7 tokens more, after 4 of 10"):
        accumulator.add(7, normal(2, 1))
