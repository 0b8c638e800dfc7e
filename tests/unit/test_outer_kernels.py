"""The outer arithmetic against plain numpy, and work tile by tile against whole vectors, bit for bit."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.codecs.codec import TILE_ELEMENTS, Codec, CodecError, Tiles, read_only
from node.exchange.codecs.registry import CODECS, codec_named
from node.exchange.error_feedback import Residual
from node.exchange.mean import Encoded, UndecodableError, sum_products
from node.exchange.outer_optimizer import Nesterov, Sgd
from node.exchange.reduction import Reduction, Sender
from node.outer_state import Vector
from protocol.errors import SystemRefusedError
from protocol.run.models import Layout
from protocol.wire.rounds import BLOCK, WHOLE, Contributor, NodeId
from tests.unit.exchange_scene import (
    RUN,
    A,
    B,
    C,
    commit_of,
    contribution_of,
    outer_of,
    plan_for,
    result_of,
)
from tests.unit.test_chunk_codecs import bell
from tests.unit.test_mean import norm_preserving_mean, weighted_mean

SPECIAL = np.array(
    [0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-127), 3.4028235e38, -3.4028235e38, 1 / 3],
    dtype=np.float32,
)

seeds = st.integers(min_value=0, max_value=2**32 - 1)
lengths = st.integers(min_value=1, max_value=1000)
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def any_values(num: int, seed: int) -> Vector:
    """Finite values of every sign and magnitude: random patterns, special ones, and usual ones."""
    rng = np.random.Generator(np.random.Philox(seed))
    values = rng.integers(0, 2**32, num, dtype=np.uint32).view(np.float32)
    kinds = rng.integers(0, 4, num)
    values[~np.isfinite(values) | (kinds == 0)] = 0.1
    values = np.where(kinds == 1, SPECIAL[rng.integers(0, SPECIAL.size, num)], values)
    return np.where(kinds == 2, rng.standard_normal(num, dtype=np.float32), values)


def assert_same_bits(found: Vector, expected: Vector) -> None:
    """NaN of two infinities included: only which NaN it is depends on the machine."""
    assert found.dtype == expected.dtype == np.float32
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


@given(num=lengths, seed=seeds)
def test_what_is_owed_is_numpys_to_the_bit(num: int, seed: int) -> None:
    parameters, published, owed = (any_values(num, seed + i) for i in range(3))
    residual = Residual(num)
    residual.values[:] = owed
    with np.errstate(all="ignore"):
        expected = (parameters - published) + owed
    assert_same_bits(residual.owed(slice(0, num), parameters, published), expected)


@pytest.mark.parametrize("decay", [1.0, 0.95])
@pytest.mark.parametrize("error_feedback", [True, False])
@given(num=lengths, seed=seeds, cut=st.integers(0, 999))
def test_what_is_settled_as_it_is_decoded_is_numpys_to_the_bit(
    decay: float, error_feedback: bool, num: int, seed: int, cut: int
) -> None:
    parameters, published, owed, sent = (any_values(num, seed + i) for i in range(4))
    residual = Residual(num, decay=decay, error_feedback=error_feedback)
    residual.values[:] = owed
    settle = residual.settling_taken(slice(0, num), parameters, published)
    for first, past in ((0, cut % num), (cut % num, num)):
        settle(first, sent[first:past])
    with np.errstate(all="ignore"):
        left = (((parameters - published) + owed) - sent) * np.float32(decay)
    assert_same_bits(residual.values, left if error_feedback else np.zeros_like(left))


@given(num=lengths, seed=seeds, scale=st.floats(0.125, 2, width=32))
def test_nesterov_is_numpys_to_the_bit(num: int, seed: int, scale: float) -> None:
    parameters, momentum, mean = (any_values(num, seed + i) for i in range(3))
    with np.errstate(all="ignore"):
        m = np.float32(0.9) * momentum
        m = m + mean
        update = np.float32(0.9) * m
        update = mean + update
        update = (np.float32(0.6) * np.float32(scale)) * update
        p = parameters - update
    Nesterov(learning_rate=0.6, momentum=0.9).apply(parameters, momentum, mean, np.float32(scale))
    assert_same_bits(momentum, m)
    assert_same_bits(parameters, p)


@given(num=lengths, seed=seeds)
def test_sgd_is_numpys_to_the_bit(num: int, seed: int) -> None:
    parameters, mean = any_values(num, seed), any_values(num, seed + 1)
    with np.errstate(all="ignore"):
        update = np.float32(0.7) * mean
        expected = parameters - update
    Sgd(learning_rate=0.7).apply(parameters, np.zeros_like(mean), mean)
    assert_same_bits(parameters, expected)


@given(num=lengths, seed=seeds, tokens=st.lists(st.integers(1, 10**9), min_size=1, max_size=5))
def test_a_mean_is_numpys_to_the_bit(num: int, seed: int, tokens: list[int]) -> None:
    contributions = [(t, any_values(num, seed + i)) for i, t in enumerate(tokens)]
    weights = [np.float32(t / (sum(tokens) + 7)) for t in tokens]
    with np.errstate(all="ignore"):
        expected = weights[0] * contributions[0][1]
        for weight, (_, values) in zip(weights[1:], contributions[1:], strict=True):
            product = weight * values
            expected = expected + product
        found = weighted_mean(contributions, late_tokens=7)
    assert_same_bits(found, expected)


def numpy_squares(values: Vector) -> np.ndarray:
    """Of each block, in float64: its halves added until one is left."""
    squares = np.zeros(-(-values.size // BLOCK) * BLOCK, dtype=np.float64)
    np.square(values, out=squares[: values.size], dtype=np.float64)
    columns = squares.reshape(-1, BLOCK).T
    while len(columns) > 1:
        half = len(columns) // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


def numpy_norm(values: Vector) -> float:
    return math.sqrt(math.fsum(numpy_squares(values)))


@given(num=lengths, seed=seeds)
def test_sums_of_squares_are_numpys_to_the_bit(num: int, seed: int) -> None:
    values = any_values(num, seed)
    sums = np.empty(-(-num // BLOCK), dtype=np.float64)
    sum_products(read_only(values), read_only(values), sums)
    assert sums.tobytes() == numpy_squares(values).tobytes()


@pytest.mark.parametrize("num", [1, 255, 256, 257, TILE_ELEMENTS + 300])
def test_a_norm_is_numpys_to_the_bit(num: int) -> None:
    contributions = [(1, any_values(num, 1) / np.float32(4)), (2, bell(num))]
    plain = weighted_mean(contributions)
    norm = numpy_norm(contributions[0][1]) / 3 + 2 * numpy_norm(contributions[1][1]) / 3
    stretch = np.float32(min(norm / numpy_norm(plain), math.sqrt(2)))
    with np.errstate(all="ignore"):
        assert_same_bits(norm_preserving_mean(contributions), stretch * plain)


@by_codec
@pytest.mark.parametrize("threads", [1, 3])
def test_tile_by_tile_a_body_says_what_it_says_as_a_whole(codec: Codec, threads: int) -> None:
    num = codec.unit + TILE_ELEMENTS + 777
    reading = codec_named(codec.name, Tiles(threads))
    body = codec.encode(bell(num))
    for opened in (reading.opened(body, num), reading.encoded(bell(num))):
        together = np.full(num, np.nan, dtype=np.float32)

        def put(start: int, values: Vector, together: Vector = together) -> None:
            together[start : start + values.size] = values

        opened.each_tile(put)
        assert opened.body == body
        assert_same_bits(together, codec.decode(body, num))


@by_codec
@pytest.mark.parametrize("merge", [weighted_mean, norm_preserving_mean])
def test_encoded_contributions_give_the_mean_of_what_they_decode_to(
    codec: Codec, merge: Callable[..., Vector]
) -> None:
    num = codec.unit + 777
    bodies = [codec.encode(bell((1 + i) * num)[i * num :]) for i in range(3)]
    decoded = [(5 + i, codec.decode(body, num)) for i, body in enumerate(bodies)]
    encoded = [(5 + i, Encoded(codec=codec, body=body, size=num)) for i, body in enumerate(bodies)]
    found = merge(encoded, late_tokens=3, tiles=Tiles(2), unit=codec.unit)
    assert_same_bits(found, merge(decoded, late_tokens=3))


INT4 = codec_named("int4")
LARGE = 2 * TILE_ELEMENTS + 300


def damaged_at_the_end(body: bytes) -> bytes:
    """The code of the last value but one becomes one that there is not."""
    return body[:-1] + bytes([body[-1] & 0xF0])


def test_a_body_that_is_damaged_in_its_last_tile_is_refused_and_named() -> None:
    right = INT4.encode(bell(LARGE))
    wrong = damaged_at_the_end(right)
    with pytest.raises(CodecError, match="-8 is no code"):
        INT4.decode(wrong, LARGE)
    contributions = [
        (1, Encoded(codec=INT4, body=body, size=LARGE)) for body in (right, wrong, right)
    ]
    with pytest.raises(UndecodableError, match="-8 is no code") as refused:
        weighted_mean(contributions)
    assert refused.value.index == 1


def test_a_mean_is_as_if_what_does_not_decode_had_not_come() -> None:
    """Though its first tiles decode, and were added."""
    plan = plan_for(A, B, C)
    part = replace(plan.slices[0], num_elements=LARGE)
    bodies = {A: INT4.encode(bell(LARGE)), B: damaged_at_the_end(INT4.encode(bell(LARGE)))}
    bodies[C] = INT4.encode(bell(2 * LARGE)[LARGE:])

    def result(*senders: NodeId) -> tuple[bytes, tuple[Contributor, ...], int]:
        asked = tuple(a for a in plan.assignments if a.node_id in senders)
        contributions = {}
        for sender in senders:
            body, weight = bodies[sender], 5 if sender == B else 2 + (sender == C)
            contributions[sender] = contribution_of(
                body, sender_id=sender, num_elements=LARGE, codec=INT4.name, tokens=weight
            )
        reduction = Reduction(
            plan=replace(plan, assignments=asked),
            slice=part,
            contributions=contributions,
            uplink=INT4,
            context=1,
        )
        reduced = reduction.result(
            downlink=codec_named("fp32"), sender=Sender(run_digest=RUN, node_id=A)
        )
        assert reduced is not None
        factors = reduced.made_of.factors or (WHOLE,) * len(reduced.made_of.contributors)
        named = zip(reduced.made_of.contributors, factors, strict=True)
        taken = tuple(contributor for contributor, factor in named if factor)
        return reduced.payload.body, taken, reduced.weighed_tokens

    assert result(A, B, C) == result(A, C)


def test_nothing_has_changed_when_threads_flush_subnormals() -> None:
    """Each thread looks for itself, for a processor's mode is a thread's; they inherit it."""
    layout = Layout.of([("w", (LARGE,))])
    outer = outer_of(A, layout=layout)
    outer.downlink = codec_named("fp32", Tiles(3))
    result = result_of(bell(LARGE), sender_id=B)
    commit = commit_of(outer, result)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(SystemRefusedError, match="subnormal"):
            outer.apply(commit, {0: result})
    finally:
        torch.set_flush_denormal(False)
    assert not outer.snapshot().parameters.any()
    assert outer.round == 0
    outer.apply(commit, {0: result})
    np.testing.assert_array_equal(outer.snapshot().parameters, -bell(LARGE))
