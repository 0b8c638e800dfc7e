"""Codecs that take statistics over chunks of 4096 values: int2, sign, top-k and the entropy-coded."""

import tracemalloc
from itertools import pairwise

import blake3
import numpy as np
import pytest

from node.exchange.codecs.chunkwise import CHUNK
from node.exchange.codecs.codec import ALL_RIGHT, TILE_ELEMENTS, Codec, CodecError, read_only
from node.exchange.codecs.deflate import deflated, inflated, most_stream_bytes
from node.exchange.codecs.registry import codec_named
from node.exchange.codecs.top_k import (
    SECTION,
    decode_places,
    encode_places,
    num_chosen,
    places_of_largest,
)
from tests.unit.golden.golden_file import golden_bytes, matches_golden
from tests.unit.test_codecs import FP32_MAX, spread, with_bytes

INT2, SIGN = codec_named("int2"), codec_named("sign")
TOP_K = [codec_named("topk64"), codec_named("topk256")]
ENTROPY_CODED = [codec_named("ec3"), codec_named("ec2"), codec_named("ec1")]
TOP = {"ec3/2": 127, "ec2/2": 7, "ec1/2": 7}
COARSENESS = {"ec3/2": 0.625, "ec2/2": 1.25, "ec1/2": 3.0}
SHIFT = {"ec3/2": 1 / 32, "ec2/2": 5 / 64, "ec1/2": 19 / 64}

every_chunked = pytest.mark.parametrize(
    "codec", [INT2, SIGN, *TOP_K, *ENTROPY_CODED], ids=lambda codec: codec.name
)
every_top_k = pytest.mark.parametrize("codec", TOP_K, ids=lambda codec: codec.name)
every_entropy_coded = pytest.mark.parametrize("codec", ENTROPY_CODED, ids=lambda codec: codec.name)


def bell(num_elements: int) -> np.ndarray:
    """Values distributed nearly normally, of unit spread, the same on every machine."""
    words = np.random.Generator(np.random.Philox(7)).integers(
        0, 1 << 16, size=(12, num_elements), dtype=np.int64
    )
    return ((words.sum(axis=0) - 6 * 65535) / 65536).astype(np.float32)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    places = np.empty(num_chosen(values.size, k), dtype=np.int32)
    assert places_of_largest(read_only(values.reshape(-1)), k, places) == ALL_RIGHT
    return places


def there_and_back(codec: Codec, values: np.ndarray) -> np.ndarray:
    return codec.decode(codec.encode(values), values.size)


@every_chunked
def test_the_bytes_and_their_values_never_change(codec: Codec) -> None:
    values = bell(CHUNK + 813)
    values[100:200] = 0
    name = codec.name.replace("/", "-")
    body = codec.encode(values)
    # Other encoders may deflate to other bytes; what the golden ones mean is the same everywhere.
    assert matches_golden(f"{name}-body", body) or codec not in (INT2, SIGN)
    decoded = codec.decode(golden_bytes(f"{name}-body"), values.size).astype("<f4")
    assert matches_golden(f"{name}-values-digest", blake3.blake3(decoded.tobytes()).digest())
    assert codec.decode(body, values.size).tobytes() == decoded.tobytes()


@every_chunked
def test_chunks_do_not_depend_on_each_other(codec: Codec) -> None:
    values = spread(SECTION + 2 * TILE_ELEMENTS + 3 * CHUNK + 5)
    whole = there_and_back(codec, values)
    for cut in (CHUNK, TILE_ELEMENTS, SECTION + CHUNK):
        parts = np.concatenate(
            [there_and_back(codec, part) for part in (values[:cut], values[cut:])]
        )
        assert parts.tobytes() == whole.tobytes()


@every_chunked
def test_the_largest_and_smallest_numbers_come_back_finite(codec: Codec) -> None:
    values = np.tile(np.array([FP32_MAX, -FP32_MAX, 0, 2.0**-149], dtype=np.float32), CHUNK)
    assert np.isfinite(there_and_back(codec, values)).all()
    tiny = np.full(CHUNK + 9, 2.0**-120, dtype=np.float32)
    assert not there_and_back(codec, tiny).any()


@every_chunked
def test_zeros_come_back_as_zeros(codec: Codec) -> None:
    values = bell(3 * CHUNK)
    values[CHUNK : 2 * CHUNK] = 0
    decoded = there_and_back(codec, values)
    assert not decoded[CHUNK : 2 * CHUNK].any() and decoded[:CHUNK].any()


def test_a_sign_stands_for_the_mean_magnitude() -> None:
    values = bell(CHUNK + 100)
    decoded = there_and_back(SIGN, values)
    for chunk in (slice(0, CHUNK), slice(CHUNK, None)):
        mean = np.abs(values[chunk].astype(np.float64)).mean()
        np.testing.assert_allclose(
            decoded[chunk], np.where(values[chunk] < 0, -mean, mean), rtol=1e-6
        )


def test_int2_gives_each_bin_the_mean_of_what_is_in_it() -> None:
    values = bell(CHUNK) + np.float32(0.3)
    decoded = there_and_back(INT2, values)
    wide = values.astype(np.float64)
    distance = 1.25 * np.abs(wide - wide.mean()).mean()
    bounds = [-np.inf, wide.mean() - distance, wide.mean(), wide.mean() + distance, np.inf]
    for low, high in pairwise(bounds):
        is_inside = (wide >= low) & (wide < high)
        assert is_inside.sum() > 100
        np.testing.assert_allclose(decoded[is_inside], wide[is_inside].mean(), rtol=1e-4)


def test_int2_of_equal_values_is_exact() -> None:
    values = np.full(CHUNK, 0.75, dtype=np.float32)
    np.testing.assert_array_equal(there_and_back(INT2, values), values)


def test_int2_of_two_values_is_exact() -> None:
    values = np.where(np.arange(CHUNK) % 2, 0.5, -0.5).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(INT2, values), values)


@pytest.mark.parametrize("sign", [1, -1])
def test_int2_keeps_the_mean_of_what_lies_beside_an_outlier(sign: int) -> None:
    values = bell(CHUNK)
    values[5] = 1e4  # nothing is far from the mean on its other side
    decoded = sign * there_and_back(INT2, np.float32(sign) * values)
    others = np.arange(CHUNK) != 5
    assert decoded[5] == pytest.approx(1e4)
    assert decoded[others].mean() == pytest.approx(values[others].mean(), abs=1e-3)


@every_entropy_coded
def test_codes_follow_the_definition(codec: Codec) -> None:
    values = bell(CHUNK)
    step = np.float32(COARSENESS[codec.name]) * np.abs(values).mean()
    assert step > np.abs(values).max() / TOP[codec.name]
    codes = np.rint(values / step)
    expected = np.sign(codes) * (np.abs(codes) - SHIFT[codec.name]) * (codes != 0) * step
    np.testing.assert_allclose(there_and_back(codec, values), expected, rtol=1e-6)


@every_entropy_coded
def test_a_chunk_of_equal_magnitudes_is_not_rounded_away(codec: Codec) -> None:
    values = np.where(np.arange(CHUNK) % 3, 0.5, -0.5).astype(np.float32)
    np.testing.assert_allclose(there_and_back(codec, values), values, rtol=0.3)


@pytest.mark.parametrize(("name", "bits"), [("ec3", 3.25), ("ec2", 2.2), ("ec1", 1.1)])
def test_entropy_coding_keeps_what_its_name_says(name: str, bits: float) -> None:
    values = bell(16 * TILE_ELEMENTS)
    num_bits = 8 * len(codec_named(name).encode(values)) / values.size
    assert bits - 0.2 < num_bits < bits


def test_what_deflate_does_not_make_smaller_is_stored() -> None:
    noise = np.random.Generator(np.random.Philox(7)).bytes(1 << 17)
    plain = np.frombuffer(noise, dtype=np.uint8)
    assert len(deflated(plain)) <= most_stream_bytes(plain.size) == plain.size + 15
    assert (
        inflated(np.frombuffer(deflated(plain), np.uint8), most_bytes=1 << 17, codec="x").tobytes()
        == noise
    )


def test_a_stream_that_would_fill_the_memory_is_given_up_at_its_limit() -> None:
    bomb = np.frombuffer(deflated(np.zeros(1 << 24, dtype=np.uint8)), dtype=np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="does not end"):
            inflated(bomb, most_bytes=100, codec="x")
        assert tracemalloc.get_traced_memory()[1] < 1 << 23  # what zlib has not read is copied once
    finally:
        tracemalloc.stop()


@every_entropy_coded
def test_streams_that_hold_too_much_or_too_little_are_refused(codec: Codec) -> None:
    num_codes = 2000
    head = codec.encode(bell(num_codes))[:4]
    right = np.frombuffer(codec.encode(np.zeros(num_codes, dtype=np.float32)), dtype=np.uint8)
    zero_byte = b"\0" if codec.name == "ec3/2" else b"\x88"
    num_bytes = num_codes if codec.name == "ec3/2" else num_codes // 2

    def body_of(stream: bytes) -> bytes:
        return head + np.array([len(stream)], dtype="<u4").tobytes() + stream

    def stream_of(num: int) -> bytes:
        return deflated(np.frombuffer(zero_byte * num, dtype=np.uint8))

    assert right.size < 500
    assert not codec.decode(body_of(stream_of(num_bytes)), num_codes).any()
    bomb = deflated(np.zeros(1 << 24, dtype=np.uint8))[: num_bytes - 10]
    for wrong in (
        stream_of(num_bytes - 1),
        stream_of(num_bytes + 1),
        stream_of(num_bytes) + b"\0",
        stream_of(num_bytes)[:-1],
        bomb,
        b"\xff\xff\xff\xff",
    ):
        with pytest.raises(CodecError, match=r"stream|does not end"):
            codec.decode(body_of(wrong), num_codes)
    long = np.array([2**32 - 1], dtype="<u4").tobytes()
    with pytest.raises(CodecError, match="do not fill"):
        codec.decode(head + long + stream_of(num_bytes), num_codes)


def test_wrong_steps_codes_and_tables_are_refused() -> None:
    values = bell(CHUNK)
    nan, negative, subnormal = (
        np.array(x, dtype="<f4").tobytes() for x in (np.nan, -1.0, 2.0**-130)
    )
    for codec in (SIGN, *ENTROPY_CODED):
        body = codec.encode(values)
        for wrong in (nan, negative, subnormal):
            with pytest.raises(CodecError, match="chunk 0"):
                codec.decode(with_bytes(body, 0, wrong), CHUNK)
        with pytest.raises(CodecError, match="chunk with"):
            codec.decode(with_bytes(body, 0, bytes(4)), CHUNK)
    body = INT2.encode(values)
    for wrong in (nan, subnormal, np.array(9.0, dtype="<f4").tobytes(), b"\0\0\0\x80"):
        with pytest.raises(CodecError, match="table"):
            INT2.decode(with_bytes(body, 0, wrong), CHUNK)
    for codec in TOP_K:
        body = codec.encode(values)
        for wrong in (b"\x80\x7f", b"\x01\x00", b"\x80\xbf", body[2:3] + b"\x7f"):
            with pytest.raises(CodecError, match="table"):
                codec.decode(with_bytes(body, 0, wrong), CHUNK)


@pytest.mark.parametrize("codec", [INT2, SIGN, *TOP_K], ids=lambda codec: codec.name)
def test_padding_must_be_zero(codec: Codec) -> None:
    values = bell(65)
    body = codec.encode(values)
    place = {"int2/1": 16 + 16, "sign/1": 4 + 8}.get(codec.name)
    if place is None:
        place = 4 + (num_chosen(65, codec.k) - 1) // 4  # type: ignore[attr-defined]
    with pytest.raises(CodecError, match="padding"):
        codec.decode(with_bytes(body, place, bytes([body[place] | 0x80])), 65)


@every_top_k
@pytest.mark.parametrize("num_elements", [1, 17, CHUNK - 1, CHUNK, 3 * CHUNK + 1000])
def test_the_largest_of_each_chunk_come_back_with_their_sign(
    codec: Codec, num_elements: int
) -> None:
    values = bell(num_elements)
    decoded = there_and_back(codec, values)
    for start in range(0, num_elements, CHUNK):
        chunk, found = values[start : start + CHUNK], decoded[start : start + CHUNK]
        k = num_chosen(chunk.size, codec.k)  # type: ignore[attr-defined]
        chosen = np.argsort(-np.abs(chunk), kind="stable")[:k]
        assert set(np.flatnonzero(found)) == set(chosen)
        assert (np.sign(found[chosen]) == np.sign(chunk[chosen])).all()
        sizes = np.abs(chunk[chosen].astype(np.float64))
        is_big = sizes >= sizes.mean()
        for group in (is_big, ~is_big):
            if group.any():
                mean = sizes[group].mean()
                np.testing.assert_allclose(np.abs(found[chosen[group]]), mean, rtol=2.0**-8)


def test_of_equal_magnitudes_the_first_are_chosen() -> None:
    rows = np.zeros((4, CHUNK), dtype=np.float32)
    rows[1] = 3
    rows[2, 4000] = 1
    rows[3, ::2] = 2
    places = largest(rows, 64).reshape(4, 64) - CHUNK * np.arange(4)[:, None]
    np.testing.assert_array_equal(places[0], np.arange(64))
    np.testing.assert_array_equal(places[1], np.arange(64))
    np.testing.assert_array_equal(places[2], [*range(63), 4000])
    np.testing.assert_array_equal(places[3], np.arange(0, 128, 2))


@every_top_k
def test_of_equal_magnitudes_all_that_are_chosen_come_back_whole(codec: Codec) -> None:
    values = np.where(np.arange(CHUNK) % 3, 0.5, -0.5).astype(np.float32)
    num = num_chosen(CHUNK, 64 if codec is TOP_K[0] else 256)
    expected = np.where(np.arange(CHUNK) < num, values, np.float32(0))
    np.testing.assert_array_equal(there_and_back(codec, values), expected)


@pytest.mark.parametrize("k", [64, 256])
def test_the_choice_is_that_of_a_whole_sort(k: int) -> None:
    coarse = np.abs(np.rint(bell(8 * CHUNK) * 20)).astype(np.float32)  # with many equal ones
    for magnitudes in (np.abs(bell(8 * CHUNK)), coarse):
        rows = magnitudes.reshape(8, CHUNK)
        expected = np.sort(np.argsort(-rows, axis=1, kind="stable")[:, :k], axis=1)
        found = largest(rows, k).reshape(8, k) - CHUNK * np.arange(8)[:, None]
        np.testing.assert_array_equal(found, expected)


def test_places_take_under_eight_bits_in_large_slices_and_hardly_more_in_small_ones() -> None:
    places = largest(bell(SECTION), 64)
    stream = np.frombuffer(encode_places(places, SECTION), dtype=np.uint8)
    assert 8 * stream.size / places.size < 7.6  # log2 of the number of choices: 7.4
    few = np.frombuffer(encode_places(places[:64], CHUNK), dtype=np.uint8)
    assert few.size < 64 + 16 + 5
    for encoded, expected, num_elements in ((stream, places, SECTION), (few, places[:64], CHUNK)):
        found = decode_places(
            encoded, num_places=expected.size, k=64, num_elements=num_elements, codec="x"
        )
        np.testing.assert_array_equal(found, expected)


def test_places_far_apart_are_reached_in_skips() -> None:
    places = np.sort(np.concatenate([[chunk * CHUNK + 4095, chunk * CHUNK] for chunk in range(40)]))
    places = places.astype(np.int32)
    plain_gaps = np.frombuffer(encode_places(places, 40 * CHUNK), dtype=np.uint8)
    found = decode_places(plain_gaps, num_places=80, k=2, num_elements=40 * CHUNK, codec="x")
    np.testing.assert_array_equal(found, places)


def test_places_that_are_not_as_many_in_each_chunk_are_refused() -> None:
    def gaps(*plain: int) -> np.ndarray:
        return np.frombuffer(deflated(np.array(plain, dtype=np.uint8)), dtype=np.uint8)

    def decoded(stream: np.ndarray, num_elements: int = CHUNK) -> np.ndarray:
        return decode_places(stream, num_places=64, k=64, num_elements=num_elements, codec="x")

    np.testing.assert_array_equal(decoded(gaps(*[0] * 64)), np.arange(64))
    for wrong in (
        gaps(*[0] * 63),
        gaps(*[0] * 65),
        gaps(*[0] * 63, 255),
        gaps(*[100] * 64),
        gaps(*[0] * 64, 255),
        gaps(*[255] * 64),
    ):
        with pytest.raises(CodecError):
            decoded(wrong)
    with pytest.raises(CodecError, match="64 of each"):
        decoded(gaps(*[1] * 64), num_elements=100)
