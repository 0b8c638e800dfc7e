"""Outliers of the entropy-coded codecs: they come back, and leave the others as they are without them."""

from typing import Any

import numpy as np
import pytest

from node.exchange.codecs.chunkwise import CHUNK
from node.exchange.codecs.codec import TILE_ELEMENTS, Codec, CodecError
from node.exchange.codecs.deflate import deflated
from node.exchange.codecs.entropy import MOST_OUTLIERS
from tests.unit.golden.golden_file import golden_bytes, matches_golden
from tests.unit.test_chunk_codecs import (
    COARSENESS,
    ENTROPY_CODED,
    TOP,
    bell,
    every_entropy_coded,
    there_and_back,
)
from tests.unit.test_codecs import FP32_MAX, with_bytes

NIBBLES = [codec for codec in ENTROPY_CODED if TOP[codec.name] == 7]


def with_outliers(values: np.ndarray, places: Any, size: float) -> np.ndarray:
    """A copy with values of this size, of either sign, in these places."""
    values = values.copy()
    number = values[places].size
    values[places] = np.where(np.arange(number) % 2, -size, size)
    return values


def error_of(codec: Codec, values: np.ndarray, others: np.ndarray) -> float:
    """|decoded - value| / |value| of those that are no outliers."""
    left = there_and_back(codec, values) - values.astype(np.float64)
    return float(np.linalg.norm(left[others]) / np.linalg.norm(values[others].astype(np.float64)))


def steps_of(codec: Codec, values: np.ndarray) -> np.ndarray:
    return np.frombuffer(codec.encode(values), dtype="<f4", count=-(-values.size // CHUNK))


def num_outliers_of(codec: Codec, values: np.ndarray) -> int:
    """Of values whose other codes do not come back as bf16."""
    decoded = there_and_back(codec, values)
    return int((np.abs(decoded) > (TOP[codec.name] + 0.1) * steps_of(codec, values)[0]).sum())


@every_entropy_coded
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4, 1e9, 1e38])
@pytest.mark.parametrize("apart", [CHUNK, CHUNK // 8])
def test_outliers_leave_the_others_error_and_size_what_they_are_without_them(
    codec: Codec, size: float, apart: int
) -> None:
    plain = bell(8 * CHUNK + 1000)
    others = np.arange(plain.size) % apart != 77
    values = with_outliers(plain, ~others, size)
    slack = 1.08 if size == 30 else 1.01  # ec3's codes reach 30, which moves the mean a little
    assert error_of(codec, values, others) < slack * error_of(codec, plain, others)
    more_bits = 8 * (len(codec.encode(values)) - len(codec.encode(plain))) / (~others).sum()
    assert more_bits < 40
    if TOP[codec.name] == 7:
        outliers = there_and_back(codec, values)[~others]
        np.testing.assert_allclose(outliers, values[~others], rtol=2.0**-8)


@every_entropy_coded
def test_an_outlier_behind_a_larger_one_is_found(codec: Codec) -> None:
    plain = bell(CHUNK)
    others = ~np.isin(np.arange(CHUNK), [5, 4000])
    values = plain.copy()
    values[5], values[4000] = 1e6, -1e3
    assert error_of(codec, values, others) < 1.01 * error_of(codec, plain, others)


@every_entropy_coded
def test_without_outliers_a_body_is_what_version_1_wrote(codec: Codec) -> None:
    """Which steps of at least peak / top set apart. The golden bodies without outliers are its own."""
    values = bell(3 * CHUNK)
    steps = steps_of(codec, values)
    for chunk, step in zip(values.reshape(3, CHUNK), steps, strict=True):
        peak = np.abs(chunk).max()
        assert peak / np.float32(TOP[codec.name]) < step
        mean = np.abs(chunk.astype(np.float64)).mean()
        assert step == pytest.approx(COARSENESS[codec.name] * mean, rel=1e-6)


@every_entropy_coded
def test_the_bytes_of_outliers_and_their_values_never_change(codec: Codec) -> None:
    values = with_outliers(bell(CHUNK + 813), np.s_[50::700], 300.0)
    values[4] = 1e6
    name = codec.name.replace("/", "-")
    body = codec.encode(values)
    matches_golden(f"{name}-outliers-body", body)  # another encoder may deflate to other bytes
    decoded = codec.decode(golden_bytes(f"{name}-outliers-body"), values.size).astype("<f4")
    assert matches_golden(f"{name}-outliers-values", decoded[values > 100].tobytes())
    assert codec.decode(body, values.size).tobytes() == decoded.tobytes()


@every_entropy_coded
def test_values_beside_an_outlier_are_not_rounded_away_if_they_are_alike(codec: Codec) -> None:
    values = np.where(np.arange(CHUNK) % 3, 0.5, -0.5).astype(np.float32)
    values[9] = 1000
    np.testing.assert_allclose(there_and_back(codec, values), values, rtol=0.3)


@pytest.mark.parametrize("codec", NIBBLES, ids=lambda codec: codec.name)
def test_no_more_than_one_in_64_travels_by_itself(codec: Codec) -> None:
    """Of a chunk with a few rows of an embedding and nothing else, most would be outliers."""
    for num_rows in (1, 2, 5, 20):
        values = np.zeros(CHUNK, dtype=np.float32)
        values[: 50 * num_rows] = bell(50 * num_rows)
        assert num_outliers_of(codec, values) <= MOST_OUTLIERS
        assert error_of(codec, values, values != 0) < 0.6
    alike = with_outliers(bell(CHUNK), np.s_[: MOST_OUTLIERS + 1], 1e3)
    assert num_outliers_of(codec, alike) == 0
    np.testing.assert_allclose(there_and_back(codec, alike)[:65], alike[:65], rtol=0.2)
    fewer = with_outliers(bell(CHUNK), np.s_[:MOST_OUTLIERS], 1e3)
    assert num_outliers_of(codec, fewer) == MOST_OUTLIERS


@pytest.mark.parametrize("codec", NIBBLES, ids=lambda codec: codec.name)
def test_a_second_look_that_finds_too_many_outliers_counts_for_nothing(codec: Codec) -> None:
    values = np.full(CHUNK, 1e-20, dtype=np.float32)
    values[:60], values[60:70] = 1000, 1
    assert steps_of(codec, values)[0] == pytest.approx(COARSENESS[codec.name] * values.mean())
    assert num_outliers_of(codec, values) == 60


@every_entropy_coded
def test_one_value_among_zeros_comes_back(codec: Codec) -> None:
    for size, most in (
        (FP32_MAX, 2.0**-8),
        (1.0, 2.0**-8),
        (2.0**-118, 0.05),
    ):  # no step is smaller
        values = np.zeros(CHUNK + 700, dtype=np.float32)
        values[[3, CHUNK + 3]] = size, -size
        np.testing.assert_allclose(there_and_back(codec, values), values, rtol=most)


@every_entropy_coded
def test_an_outlier_that_stays_holds_nothing_else_up(codec: Codec) -> None:
    """With error feedback: what the others are owed is no more in the tenth round than in the first."""
    plain = bell(10 * CHUNK).reshape(10, CHUNK)
    owed = np.zeros(CHUNK, dtype=np.float32)
    left = []
    for pseudo_gradient in plain:
        accumulated = owed + with_outliers(pseudo_gradient, np.s_[::1000], 100.0)
        owed = accumulated - there_and_back(codec, accumulated)
        left.append(float(np.linalg.norm(np.delete(owed, np.s_[::1000]))))
    assert max(left) < 1.4 * left[0] < 1.4 * np.sqrt(CHUNK)


@every_entropy_coded
def test_outliers_without_places_and_places_without_outliers_are_refused(codec: Codec) -> None:
    num_codes = 2000
    if TOP[codec.name] == 7:
        packed = b"\x80" + b"\x88" * (num_codes // 2 - 1)  # codes -8 and 0, then zeros
    else:
        packed = b"\x80" + b"\0" * (num_codes - 1)
    stream = deflated(np.frombuffer(packed, dtype=np.uint8))

    def body_of(rest: bytes) -> bytes:
        step, size = np.float32(0.5), np.uint32(len(stream + rest))
        return step.tobytes() + size.tobytes() + stream + rest

    right = codec.decode(body_of(b"\x80\xc2"), num_codes)
    assert right.tolist() == [-64.0] + [0.0] * (num_codes - 1)
    for wrong in (b"", b"\x80\xc2\x80\xc2", b"\x80", b"\x80\xc2\x80"):
        with pytest.raises(CodecError, match="outlier"):
            codec.decode(body_of(wrong), num_codes)
    for not_normal in (b"\0\0", b"\0\x80", b"\x01\0", b"\x80\x7f", b"\x80\xff", b"\xc0\x7f"):
        with pytest.raises(CodecError, match="normal number"):
            codec.decode(body_of(not_normal), num_codes)
    with pytest.raises(CodecError, match="step 0"):
        codec.decode(with_bytes(body_of(b"\x80\xc2"), 0, bytes(4)), num_codes)


def test_outliers_of_later_tiles_stay_with_them() -> None:
    values = with_outliers(bell(2 * TILE_ELEMENTS + 300), np.s_[60::5000], 200.0)
    for codec in ENTROPY_CODED:
        whole = there_and_back(codec, values)
        part = np.empty(300, dtype=np.float32)
        codec.reader(codec.encode(values), values.size)(2 * TILE_ELEMENTS, values.size, part)
        assert part.tobytes() == whole[2 * TILE_ELEMENTS :].tobytes()
        np.testing.assert_allclose(whole[60::5000], values[60::5000], rtol=2.0**-8 + 0.05)
