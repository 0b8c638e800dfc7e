import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from node.exchange.codecs.codec import Codec, CodecError
from node.exchange.codecs.registry import CODECS, codec_named
from node.exchange.error_feedback import Residual
from protocol.wire.rounds import BLOCK
from tests.property.effort import examples

TOP = {"int8/1": 127, "int4/1": 7}

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
scaled_float = st.builds(
    lambda value, power: np.ldexp(np.float32(value), power),
    st.floats(-1, 1, width=32),
    st.sampled_from([-149, -126, -119, -118, -117, -30, 0, 30, 127]),
)
slices = of_numpy.arrays(
    np.float32,
    st.integers(1, 3 * BLOCK + 1),
    elements=any_float | scaled_float,
    fill=any_float,
)


@pytest.mark.parametrize("name", ["fp32", "int8", "int4"])
@examples(150)
@given(values=slices)
def test_every_finite_slice_comes_back_within_half_a_scale(name: str, values: np.ndarray) -> None:
    codec = codec_named(name)
    decoded = codec.decode(codec.encode(values), values.size)
    assert np.isfinite(decoded).all()
    if name == "fp32":
        assert decoded.tobytes() == values.tobytes()
        return
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        error = np.abs(decoded[start : start + BLOCK] - block).max()
        peak = np.abs(block).max()
        # The scale, the quotient and the product are rounded, each by 2**-24 of `peak` at most.
        bound = peak if peak < 2.0**-118 else peak / TOP[codec.name] / 2 + peak * 2.0**-21
        assert error <= bound


@every_codec
@examples(60)
@given(values=slices, repeats=st.integers(1, 20))
def test_what_is_left_is_never_more_than_what_was_owed(
    codec: Codec, values: np.ndarray, repeats: int
) -> None:
    values = np.tile(values, repeats)  # so that some are longer than a chunk
    body = codec.encode(values)
    assert codec.admits(len(body), values.size)
    owed = values.astype(np.float64)
    left = owed - codec.decode(body, values.size)
    assert np.linalg.norm(left) <= np.linalg.norm(owed) * (1 + 2.0**-16)


@pytest.mark.parametrize(("name", "most_steps"), [("ec3", 0.54), ("ec2", 0.58), ("ec1", 0.8)])
@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_elements=st.sampled_from([1, 63, 64, 65, 300, 4096, 5000]),
    tail=st.floats(0, 30),
    filled=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
)
def test_entropy_coded_values_come_back_within_a_step_however_far_out_some_are(
    name: str, most_steps: float, seed: int, num_elements: int, tail: float, filled: float
) -> None:
    codec, rng = codec_named(name), np.random.default_rng(seed)
    magnitudes = np.exp(tail * np.clip(rng.standard_normal(num_elements), -2.8, 2.8))
    signs = rng.choice([-1, 0, 1], num_elements, p=[filled / 2, 1 - filled, filled / 2])
    values = (signs * magnitudes).astype(np.float32)
    body = codec.encode(values)
    assert codec.admits(len(body), num_elements)
    steps = np.frombuffer(body, dtype="<f4", count=-(-num_elements // 4096)).astype(np.float64)
    left = np.abs(codec.decode(body, num_elements) - values.astype(np.float64))
    owed = np.abs(values.astype(np.float64))
    assert (
        left <= np.maximum(np.repeat(steps, 4096)[:num_elements] * most_steps, owed / 256)
    ).all()
    assert (left <= owed * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@examples(60)
@given(values=slices, cut=st.integers(1, 3))
def test_a_slice_that_begins_at_a_block_decodes_as_it_does_in_the_whole(
    name: str, values: np.ndarray, cut: int
) -> None:
    codec = codec_named(name)
    whole = codec.decode(codec.encode(values), values.size)
    part = values[cut * BLOCK :]
    if part.size:
        assert (
            codec.decode(codec.encode(part), part.size).tobytes() == whole[cut * BLOCK :].tobytes()
        )


@every_codec
@examples(60)
@given(
    body=st.binary(min_size=1, max_size=500), num_elements=st.integers(0, 600), fit=st.booleans()
)
def test_any_bytes_decode_to_finite_values_or_are_refused(
    codec: Codec, body: bytes, num_elements: int, fit: bool
) -> None:
    if fit and num_elements:
        body = (body * 3000)[: codec.most_bytes(num_elements)]
    with contextlib.suppress(CodecError):
        decoded = codec.decode(body, num_elements)
        assert decoded.shape == (num_elements,)
        assert np.isfinite(decoded).all()


@every_codec
@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_elements=st.sampled_from([1, 300, 4096, 5000, 70_000]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    more=st.sampled_from([0, 0, 0, -4096, -1, 1, 7, 4097]),
    cut=st.sampled_from([0, 0, 0, 1, 300]),
)
def test_a_damaged_body_decodes_to_finite_values_or_is_refused(
    codec: Codec,
    seed: int,
    num_elements: int,
    changes: list[tuple[float, int]],
    more: int,
    cut: int,
) -> None:
    values = np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)
    body = bytearray(codec.encode(values))
    for place, byte in changes:
        body[min(len(body) - 1, int(place * len(body)))] = byte
    num_asked = max(1, num_elements + more)
    with contextlib.suppress(CodecError):
        decoded = codec.decode(bytes(body[: len(body) - cut]), num_asked)
        assert decoded.shape == (num_asked,)
        assert np.isfinite(decoded).all()


@every_codec
@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    fates=st.lists(st.booleans(), min_size=1, max_size=12),
)
def test_over_many_rounds_all_work_is_sent_or_still_owed(
    codec: Codec, seed: int, fates: list[bool]
) -> None:
    rng = np.random.default_rng(seed)
    span = slice(0, 300)
    residual = Residual(300)
    done, taken = np.zeros(300), np.zeros(300)
    for is_taken in fates:
        base = rng.standard_normal(300, dtype=np.float32)
        published = base - rng.standard_normal(300, dtype=np.float32)
        done += (base - published).astype(np.float64)
        accumulated = residual.owed(span, base, published)
        if is_taken:
            sent = codec.decode(codec.encode(accumulated), 300)
            residual.settle_taken(span, accumulated, sent)
            taken += sent
        else:
            residual.settle_missed(span, accumulated)
    np.testing.assert_allclose(taken + residual.values, done, rtol=0, atol=1e-4)
