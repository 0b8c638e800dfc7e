import threading
from typing import Any, get_args

import numpy as np
import pytest
import torch

from coordinator.config import RUN_TEMPLATE
from node.exchange.codecs.chunkwise import CHUNK
from node.exchange.codecs.codec import TILE_ELEMENTS, Codec, CodecError, Tiles, threads_beside
from node.exchange.codecs.registry import CODECS, codec_named
from node.exchange.codecs.top_k import SECTION
from protocol.errors import ConfigError
from protocol.run.run_spec import CODEC_VERSIONS, CodecName
from protocol.wire.rounds import BLOCK
from tests.unit.golden.golden_file import golden_bytes, matches_golden

INT8 = codec_named("int8/1")
INT4 = codec_named("int4/1")
FP32 = codec_named("fp32/1")
INTEGERS = [INT8, INT4]
ELEMENTWISE = [FP32, codec_named("bf16/1"), *INTEGERS]
TOP = {"int8/1": 127, "int4/1": 7}
SMALLEST_PEAK = np.float32(2.0**-118)
FP32_MAX = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_elementwise = pytest.mark.parametrize("codec", ELEMENTWISE, ids=lambda codec: codec.name)
every_integer = pytest.mark.parametrize("codec", INTEGERS, ids=lambda codec: codec.name)


def spread(num_elements: int) -> np.ndarray:
    """Values of many magnitudes from integer arithmetic, the same on every machine."""
    index = np.arange(num_elements, dtype=np.uint64)
    mixed = ((index * 2654435761 + 12345) % 2**32).astype(np.float64) - 2.0**31
    return (mixed * 2.0 ** (-36.0 + (index // 37 % 9))).astype(np.float32)


def with_bytes(body: bytes, place: int, replacement: bytes) -> bytes:
    return body[:place] + replacement + body[place + len(replacement) :]


@every_elementwise
def test_the_bytes_and_their_values_never_change(codec: Codec) -> None:
    values = spread(3 * BLOCK + 45)
    values[BLOCK : 2 * BLOCK] = 0
    values[2 * BLOCK] = -0.0
    values[2 * BLOCK + 1] = 2.0**-149
    values[2 * BLOCK + 2] = FP32_MAX
    body = codec.encode(values)
    name = codec.name.replace("/", "-")
    assert matches_golden(f"{name}-body", body)
    assert matches_golden(f"{name}-values", codec.decode(body, values.size).astype("<f4").tobytes())


@every_codec
@pytest.mark.parametrize("num_elements", [1, 2, 255, 256, 257, TILE_ELEMENTS + 301])
def test_a_body_has_a_size_that_is_admitted(codec: Codec, num_elements: int) -> None:
    values = spread(num_elements)
    body = codec.encode(values)
    assert codec.admits(len(body), num_elements)
    assert len(body) <= codec.most_bytes(num_elements)
    decoded = codec.decode(memoryview(body), num_elements)
    assert decoded.shape == (num_elements,) and decoded.dtype == np.float32


def test_fp32_returns_every_bit() -> None:
    values = np.array([0.0, -0.0, 2.0**-149, -FP32_MAX, 1 / 3], dtype=np.float32)
    assert FP32.decode(FP32.encode(values), 5).tobytes() == values.tobytes()


@every_integer
def test_tiles_leave_no_seam(codec: Codec) -> None:
    values = spread(2 * TILE_ELEMENTS + 3 * BLOCK + 7)
    whole = codec.decode(codec.encode(values), values.size)
    cut = TILE_ELEMENTS + BLOCK
    parts = [codec.decode(codec.encode(part), part.size) for part in (values[:cut], values[cut:])]
    assert whole.tobytes() == np.concatenate(parts).tobytes()


@every_integer
def test_values_and_codes_follow_the_definition(codec: Codec) -> None:
    top = np.float32(TOP[codec.name])
    values = np.array([1.0, -1.0, 0.5 / top, 1.5 / top, 2.5 / top, 0.0], dtype=np.float32)
    scale = np.float32(1) / top
    codes = np.array([top, -top, 0, 2, 2, 0], dtype=np.float32)  # ties to even
    np.testing.assert_array_equal(codec.decode(codec.encode(values), 6), codes * scale)


@every_integer
def test_a_scale_is_the_peak_divided_once(codec: Codec) -> None:
    values = spread(200 * BLOCK)
    peaks = np.abs(values).reshape(-1, BLOCK).max(axis=1)
    scales = np.frombuffer(codec.encode(values), dtype="<f4", count=200)
    np.testing.assert_array_equal(scales, peaks / np.float32(TOP[codec.name]))


def test_int4_puts_the_first_code_into_the_low_nibble() -> None:
    body = INT4.encode(np.array([7.0, -7.0, 1.0], dtype=np.float32))
    assert body == bytes.fromhex("0000803f 1f 09")


@every_integer
def test_the_largest_numbers_stay_finite(codec: Codec) -> None:
    values = np.array([FP32_MAX, -FP32_MAX, FP32_MAX / 2], dtype=np.float32)
    decoded = codec.decode(codec.encode(values), 3)
    np.testing.assert_allclose(decoded[:2], values[:2], rtol=2.0**-22)


@every_integer
def test_a_block_below_the_smallest_peak_becomes_zero(codec: Codec) -> None:
    below = np.full(BLOCK, np.nextafter(SMALLEST_PEAK, np.float32(0)), dtype=np.float32)
    body = codec.encode(below)
    assert body[:4] == bytes(4)
    assert not codec.decode(body, BLOCK).any()
    smallest = np.full(BLOCK, SMALLEST_PEAK, dtype=np.float32)
    np.testing.assert_allclose(codec.decode(codec.encode(smallest), BLOCK), smallest, rtol=2.0**-22)


def test_codecs_leave_the_cores_to_ranks_that_compute_on_them() -> None:
    def threads(num_ranks: int, num_cores: int, on_cores: bool) -> int:
        return threads_beside(
            num_ranks=num_ranks, num_cores=num_cores, ranks_compute_on_cores=on_cores
        )

    assert threads(1, 64, True) == 1
    assert threads(8, 64, False) == 56
    assert threads(6, 8, False) == 2
    assert threads(8, 8, False) == threads(8, 4, False) == 1


def test_work_in_a_thread_of_the_pool_waits_for_no_other_thread_of_it() -> None:
    """Else all of them would wait for each other."""
    tiles = Tiles(2)

    def sums(first: int, past: int) -> int:
        return sum(tiles.each_run(8, lambda start, end: sum(range(start, end)), unit=1))

    assert tiles.each_run(4, sums, unit=1) == [28, 28]


def test_what_one_thread_refuses_is_raised_when_all_have_ended() -> None:
    """What follows may free the memory that the others write to."""
    ended: list[int] = []
    is_refused = threading.Event()

    def work(first: int, past: int) -> None:
        if first == 0:
            is_refused.set()
            raise CodecError("the first")
        assert is_refused.wait(60)
        ended.append(first)

    with pytest.raises(CodecError, match="the first"):
        Tiles(3).each_run(3, work, unit=1)
    assert sorted(ended) == [1, 2]


@every_codec
def test_threads_change_no_bit(codec: Codec) -> None:
    values = spread(2 * SECTION + 3 * TILE_ELEMENTS + 77)
    in_three = codec_named(codec.name, Tiles(3))
    body = codec.encode(values)
    assert in_three.encode(values) == body
    assert in_three.decode(body, values.size).tobytes() == codec.decode(body, values.size).tobytes()


@every_codec
def test_a_thread_that_flushes_subnormals_decodes_the_same_values(codec: Codec) -> None:
    powers = 2.0 ** -(100.0 + np.arange(2 * CHUNK + 300) % 49)
    values = (powers * (1 - np.arange(powers.size) % 3)).astype(np.float32)  # of every sign
    body = codec.encode(values)
    decoded = codec.decode(body, values.size)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert codec.decode(body, values.size).tobytes() == decoded.tobytes()
    finally:
        torch.set_flush_denormal(False)


@every_integer
def test_a_thread_that_flushes_subnormals_gets_the_same_bytes(codec: Codec) -> None:
    powers = 2.0 ** -(116.0 + np.arange(2 * BLOCK) % 34)  # down to the smallest subnormal
    values = np.concatenate([powers, 2.0**-3 * powers]).astype(np.float32)
    body = codec.encode(values)
    decoded = codec.decode(body, values.size)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert codec.encode(values) == body
        assert codec.decode(body, values.size).tobytes() == decoded.tobytes()
    finally:
        torch.set_flush_denormal(False)


@every_codec
@pytest.mark.parametrize("place", [0, 700, TILE_ELEMENTS + 5])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_its_index(
    codec: Codec, place: int, wrong: float
) -> None:
    values = spread(TILE_ELEMENTS + 300)
    values[place] = wrong
    with pytest.raises(CodecError, match=rf"value {place} of the slice is {wrong}"):
        codec.encode(values)


@every_codec
def test_what_is_no_row_of_fp32_is_refused(codec: Codec) -> None:
    wrong: list[np.ndarray[Any, Any]] = [
        np.zeros(4),
        np.zeros((2, 2), np.float32),
        np.zeros(0, np.float32),
    ]
    for values in wrong:
        with pytest.raises(CodecError):
            codec.encode(values)


@every_codec
def test_a_body_of_another_size_is_refused_before_anything_is_allocated(codec: Codec) -> None:
    body = codec.encode(spread(300))
    for wrong, num_elements in ((body[:-1], 300), (body + b"\0", 300), (body, 2**62), (b"", 0)):
        with pytest.raises(CodecError):
            codec.decode(wrong, num_elements)


def test_fp32_bodies_that_are_not_finite_are_refused() -> None:
    for wrong in (np.nan, np.inf):
        with pytest.raises(CodecError, match="value 1 "):
            FP32.decode(np.array([0, wrong], dtype="<f4").tobytes(), 2)


@every_integer
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, -0.0, 2.0**-130])
def test_a_scale_that_no_encoder_writes_is_refused(codec: Codec, scale: float) -> None:
    body = codec.encode(spread(2 * BLOCK))
    wrong = with_bytes(body, 4, np.array(scale, dtype="<f4").tobytes())
    with pytest.raises(CodecError, match="block 1"):
        codec.decode(wrong, 2 * BLOCK)


@every_integer
def test_a_scale_whose_largest_value_is_not_finite_is_refused(codec: Codec) -> None:
    body = codec.encode(spread(2 * BLOCK))
    wrong = with_bytes(body, 4, np.array(FP32_MAX / 2, dtype="<f4").tobytes())
    with pytest.raises(CodecError, match="block 1"):
        codec.decode(wrong, 2 * BLOCK)


def test_forbidden_codes_are_refused() -> None:
    ones = np.ones(5, dtype=np.float32)
    with pytest.raises(CodecError, match="-128"):
        INT8.decode(with_bytes(INT8.encode(ones), 8, b"\x80"), 5)
    for place, nibbles in ((4, b"\xf0"), (5, b"\x0f")):
        with pytest.raises(CodecError, match="-8"):
            INT4.decode(with_bytes(INT4.encode(ones), place, nibbles), 5)
    with pytest.raises(CodecError, match="padding"):
        INT4.decode(with_bytes(INT4.encode(ones), 6, b"\x1f"), 5)
    bf16 = codec_named("bf16/1")
    for forbidden in (b"\x80\x7f", b"\x81\xff"):
        with pytest.raises(CodecError, match="no codes of bf16/1"):
            bf16.decode(with_bytes(bf16.encode(ones), 4, forbidden), 5)


def test_bf16_rounds_as_torch_does() -> None:
    ties = (np.arange(0x3F00, 0x4100) << 16 | 0x8000).astype(np.uint32).view(np.float32)
    values = np.concatenate([spread(5000), np.float32(2.0**-140) * spread(300), ties, -ties])
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    decoded = codec_named("bf16/1").decode(codec_named("bf16/1").encode(values), values.size)
    assert decoded.tobytes() == expected.tobytes()


def test_bf16_keeps_the_largest_numbers_finite() -> None:
    codec = codec_named("bf16/1")
    decoded = codec.decode(codec.encode(np.array([FP32_MAX, -FP32_MAX], dtype=np.float32)), 2)
    np.testing.assert_array_equal(
        decoded, np.array([1, -1], np.float32) * np.float32(2.0**128 - 2.0**120)
    )


@every_integer
def test_a_short_zero_block_may_follow_a_full_tile(codec: Codec) -> None:
    values = spread(TILE_ELEMENTS + 3)
    values[TILE_ELEMENTS:] = 0
    assert not codec.decode(codec.encode(values), values.size)[TILE_ELEMENTS:].any()


@every_integer
def test_a_zero_block_with_codes_is_refused(codec: Codec) -> None:
    values = spread(BLOCK + 3)
    values[BLOCK:] = 0
    body = codec.encode(values)
    with pytest.raises(CodecError, match="scale 0"):
        codec.decode(with_bytes(body, len(body) - 2, b"\x99\x09"), values.size)


def test_a_codec_is_found_by_name_and_by_version() -> None:
    assert codec_named("int4").name == codec_named("int4/1").name == "int4/1"
    for unknown in ("int4/2", "int", "", "int4/"):
        with pytest.raises(ConfigError, match="fp32/1, bf16/1, int8/1"):
            codec_named(unknown)


def test_the_run_file_names_and_explains_every_codec() -> None:
    names = {codec.name.partition("/")[0] for codec in CODECS}
    assert set(get_args(CodecName)) == names
    newest = {name: int(codec_named(name).name.partition("/")[2]) for name in names}
    assert newest == CODEC_VERSIONS, "the coordinator lets nodes in by these"
    assert all(f'"{name}" ' in RUN_TEMPLATE for name in names)


NUM_DAMAGED = 512


def damaged(body: bytes, number: int) -> bytes:
    """The body with up to four of its bytes changed; or another one of its size, which begins likewise."""
    mixed = (number * 2654435761 + 97) % 2**32
    if number % 8 == 0:
        kept = number * len(body) // NUM_DAMAGED
        return body[:kept] + bytes([mixed % 256]) * (len(body) - kept)
    change = bytes((mixed >> shift) % 256 for shift in (0, 8, 16, 24))[: 1 + number % 4]
    return with_bytes(body, mixed % (len(body) - 4), change)


@every_codec
def test_which_bodies_are_refused_never_changes(codec: Codec) -> None:
    """Who signs a body that is refused is put out: all machines and all releases must refuse the same."""
    name = codec.name.replace("/", "-")
    body = golden_bytes(f"{name}-body")
    (size,) = (n for n in (3 * BLOCK + 45, CHUNK + 813) if is_taken(codec, body, n))
    taken = [is_taken(codec, damaged(body, number), size) for number in range(NUM_DAMAGED)]
    assert 0 < sum(taken) < NUM_DAMAGED
    assert matches_golden(f"{name}-taken", np.packbits(taken).tobytes())


def is_taken(codec: Codec, body: bytes, num_elements: int) -> bool:
    try:
        codec.decode(body, num_elements)
    except CodecError:
        return False
    return True
