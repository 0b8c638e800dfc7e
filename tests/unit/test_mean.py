import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from node.exchange.codecs.codec import ONE_THREAD, TILE_ELEMENTS, Codec, Tiles
from node.exchange.codecs.registry import codec_named
from node.exchange.mean import (
    Encoded,
    Passes,
    agreement,
    cosines_among,
    norm_of,
    shares,
    stretched_to,
    weighted_sum,
)
from node.exchange.screening import NOT_HERE, Cosine
from node.outer_state import Vector
from protocol.wire.rounds import BLOCK


def normal(num_elements: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)


def weighted_mean(
    contributions: Sequence[tuple[int, Vector | Encoded]],
    *,
    late_tokens: int = 0,
    tiles: Tiles = ONE_THREAD,
    unit: int = TILE_ELEMENTS,
) -> Vector:
    """As a reducer takes it of (tokens, values)."""
    coefficients = shares([tokens for tokens, _ in contributions], late=late_tokens)
    values = [values for _, values in contributions]
    return weighted_sum(values, coefficients, passes=Passes(tiles=tiles, unit=unit))


def norm_preserving_mean(
    contributions: Sequence[tuple[int, Vector | Encoded]],
    *,
    late_tokens: int = 0,
    tiles: Tiles = ONE_THREAD,
    unit: int = TILE_ELEMENTS,
) -> Vector:
    coefficients = shares([tokens for tokens, _ in contributions], late=late_tokens)
    decoded = [
        each.codec.decode(each.body, each.size) if isinstance(each, Encoded) else each
        for _, each in contributions
    ]
    norm = math.fsum(c * norm_of(each) for c, each in zip(coefficients, decoded, strict=True))
    mean = weighted_mean(contributions, late_tokens=late_tokens, tiles=tiles, unit=unit)
    return stretched_to(norm, mean, most=math.sqrt(len(contributions)))


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
        expected += np.float32(tokens / 21) * values
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
def test_a_mean_without_weight_is_refused(contributions: list[tuple[int, Vector]]) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        weighted_mean(contributions)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 3\] elements"):
        weighted_mean([(1, normal(3, 0)), (1, normal(1, 1))])


def lengths(*vectors: np.ndarray) -> list[float]:
    return [float(np.linalg.norm(vector.astype(np.float64))) for vector in vectors]


def test_a_norm_preserving_mean_points_like_the_mean_and_is_as_long_as_what_went_in() -> None:
    contributions = [(tokens, normal(1000, tokens)) for tokens in (3, 7, 11)]
    plain = weighted_mean(contributions)
    kept = norm_preserving_mean(contributions)
    stretches = kept[plain != 0] / plain[plain != 0]
    np.testing.assert_allclose(stretches, stretches[0], rtol=1e-6)
    norms = lengths(*(values for _, values in contributions))
    expected = sum(
        tokens / 21 * norm for (tokens, _), norm in zip(contributions, norms, strict=True)
    )
    assert lengths(kept)[0] == pytest.approx(expected, rel=1e-6)


def test_equal_contributions_are_their_own_norm_preserving_mean() -> None:
    values = normal(1000, 0)
    assert norm_preserving_mean([(7, values)]).tobytes() == values.tobytes()
    kept = norm_preserving_mean([(1, values), (3, values)])
    np.testing.assert_allclose(kept, values, rtol=1e-6)


def test_nodes_that_contradict_each_other_are_not_amplified_without_limit() -> None:
    opposed = normal(1000, 0)
    nearly = -opposed + np.float32(1e-4) * normal(1000, 1)
    contributions = [(1, opposed), (1, nearly)]
    longest = 2**0.5 * lengths(weighted_mean(contributions))[0]
    assert lengths(norm_preserving_mean(contributions))[0] == pytest.approx(longest, rel=1e-6)
    assert not norm_preserving_mean([(1, opposed), (1, -opposed)]).any()


def test_a_norm_has_the_same_bits_on_every_machine() -> None:
    """Judged by Python's own exact sum: numpy's takes an order that depends on the processor."""
    num_elements = TILE_ELEMENTS + 300
    contributions = [(1, normal(num_elements, 0)), (2, normal(num_elements, 1))]
    plain = weighted_mean(contributions)

    def norm(values: np.ndarray) -> float:
        return math.sqrt(math.fsum(float(value) ** 2 for value in values))

    norms = [norm(values) for _, values in contributions]
    stretch = (norms[0] / 3 + 2 * norms[1] / 3) / norm(plain)
    expected = plain * np.float32(stretch)
    assert norm_preserving_mean(contributions).tobytes() == expected.tobytes()


def test_over_two_rounds_late_work_moves_the_mean_as_far_as_if_it_had_been_in_time() -> None:
    first, second = normal(100, 0), normal(100, 1)
    in_time = weighted_mean([(4, first), (4, second)])
    late = weighted_mean([(4, first)], late_tokens=4) + weighted_mean([(4, second)], late_tokens=4)
    np.testing.assert_array_equal(late, in_time)


def test_a_norm_is_preserved_beside_late_work() -> None:
    contributions = [(4, normal(100, 0)), (4, normal(100, 1))]
    whole = norm_preserving_mean(contributions)
    half = norm_preserving_mean(contributions, late_tokens=8)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-6)


def encoded_by(codec: Codec, values: Vector) -> Encoded:
    return Encoded(codec=codec, body=codec.encode(values), size=values.size)


@pytest.mark.parametrize("uplink", ["fp32", "int4", "ec2", "topk64"])
@pytest.mark.parametrize("downlink", ["fp32", "int8", "int4"])
def test_how_far_a_mean_agrees_with_its_contributions_comes_to_one_in_all(
    uplink: str, downlink: str
) -> None:
    num_elements = 3 * TILE_ELEMENTS + 700
    up, down = codec_named(uplink), codec_named(downlink)
    sent = [encoded_by(up, place * normal(num_elements, place)) for place in (1, 2, 3)]
    weights = [0.5, 0.3, 0.2]
    mean = weighted_sum(sent, weights, passes=Passes(unit=up.unit))
    for result, comes_to in ((mean, 1.0), (-mean, -1.0), (4 * mean, 0.25)):
        opened = down.opened(down.encode(result), num_elements)
        found = [agreement(opened, each, drawn=0) for each in sent]
        whole = math.fsum(w * a for w, a in zip(weights, found, strict=True) if a is not None)
        assert whole == pytest.approx(comes_to, rel=0.03)


def test_nothing_agrees_with_a_result_of_zeros_and_zeros_say_nothing() -> None:
    fp32 = codec_named("fp32")
    nothing, something = np.zeros(300, np.float32), normal(300, 1)

    def found(result: Vector, contribution: Vector) -> float | None:
        opened = fp32.opened(fp32.encode(result), 300)
        return agreement(opened, encoded_by(fp32, contribution), drawn=7)

    assert found(nothing, something) == 0.0
    assert found(something, nothing) is None


def test_of_a_large_result_a_part_is_looked_at_from_anywhere_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.exchange.mean.LOOKED_AT", TILE_ELEMENTS)
    fp32 = codec_named("fp32")
    values = np.repeat(np.arange(1, 5, dtype=np.float32), TILE_ELEMENTS)
    result = fp32.opened(fp32.encode(np.ones_like(values)), values.size)
    sent = encoded_by(fp32, values)
    assert [agreement(result, sent, drawn=n) for n in range(5)] == [1.0, 2.0, 3.0, 4.0, 1.0]


def test_cosines_are_of_all_pairs_and_the_same_on_any_number_of_threads() -> None:
    fp32 = codec_named("fp32")
    values = [normal(2 * TILE_ELEMENTS + 300, place) + place for place in range(4)]
    sent = [encoded_by(fp32, each) for each in values]
    about = [range(4)] * 4
    found = cosines_among(sent, about, seed=b"drawn")
    threaded = cosines_among(sent, about, seed=b"drawn", passes=Passes(tiles=Tiles(3)))
    assert found == threaded
    expected = np.corrcoef([np.concatenate([each, -each]) for each in values])  # of mean zero
    assert list(found) == list(combinations(range(4), 2))
    for pair, cosine in found.items():
        assert cosine.value == pytest.approx(expected[pair], abs=1e-5)


def test_the_error_of_a_cosine_is_how_far_chance_moves_it_where_a_few_rows_make_up_most() -> None:
    """Of vectors whose rows are long or short, and each of one direction: as those of embeddings are."""
    fp32 = codec_named("fp32")
    draws = np.random.default_rng(0)
    of_rows = draws.lognormal(0, 1.5, size=1000)
    directions = draws.normal(size=(1000, BLOCK))
    in_errors, least = [], 1 / np.sqrt(1000 * BLOCK)
    for _ in range(40):
        pair = [(of_rows * draws.normal(size=1000))[:, None] * directions for _ in range(2)]
        sent = [encoded_by(fp32, each.astype(np.float32).ravel()) for each in pair]
        cosine = cosines_among(sent, [{1: 1}, {0: 1}], seed=b"")[0, 1]
        assert cosine.error > 10 * least
        in_errors.append(cosine.value / cosine.error)
    assert 0.7 < np.std(in_errors) < 1.3 and max(map(abs, in_errors)) < 3


def test_the_error_of_a_cosine_is_never_less_than_that_of_independent_elements() -> None:
    fp32 = codec_named("fp32")
    values = np.tile(normal(BLOCK, 1), 3)
    sent = [encoded_by(fp32, each) for each in (values, values, np.zeros_like(values))]
    found = cosines_among(sent, [{1: 1, 2: 1}, {}, {}], seed=b"")
    assert found[0, 1].value == pytest.approx(1.0)
    assert found[0, 1].error == pytest.approx(1 / np.sqrt(3 * BLOCK))
    assert found[0, 2] == Cosine(value=0.0, error=0.0)


def test_of_large_contributions_a_part_is_looked_at_which_the_seed_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.exchange.mean.COMPARED", 1)
    fp32 = codec_named("fp32")
    values = [normal(5 * TILE_ELEMENTS, place) for place in range(4)]
    sent = [encoded_by(fp32, each) for each in values]
    about = [{1: 5, NOT_HERE: 2}, {1: 5}, {0: 1}, {}]
    found = cosines_among(sent, about, seed=b"one")
    assert set(found) == {(0, 1), (0, 2)}
    assert all(1 / np.sqrt(TILE_ELEMENTS) < each.error < 0.01 for each in found.values())
    seeds = [b"one", b"another", b"a third", b"a fourth"]
    drawn = {cosines_among(sent, about, seed=seed)[0, 1].value for seed in seeds}
    assert cosines_among(sent, about, seed=b"one") == found and len(drawn) > 1
