"""Kernels against plain numpy, operation by operation: compiled code may not round otherwise."""

import ast
import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numba
import numpy as np
import pytest

from node.exchange.codecs import codec as codec_room
from node.exchange.codecs.chunkwise import CHUNK, mean_magnitude, sum_of
from node.exchange.codecs.codec import (
    ALL_RIGHT,
    Codec,
    CodecError,
    Tiles,
    bits_of,
    first_not_finite,
    float_of,
    read_only,
    refuse_not_finite,
)
from node.exchange.codecs.deflate import code_lengths, huffman_coded
from node.exchange.codecs.dense import (
    largest_scale,
    pack_nibbles,
    pack_two_bits,
    peak_of,
    unpack_nibbles,
    unpack_two_bits,
    whole_codes,
)
from node.exchange.codecs.registry import CODECS, codec_named
from protocol.wire.rounds import BLOCK
from tests.unit.test_chunk_codecs import bell
from tests.unit.test_codecs import FP32_MAX, spread

FOLDER = Path(codec_room.__file__).parent


def kernels() -> list[numba.core.dispatcher.Dispatcher]:
    """All that the modules of the codecs and of the outer arithmetic define."""
    roots = FOLDER.parents[2]
    modules = [
        importlib.import_module(".".join(path.relative_to(roots).with_suffix("").parts))
        for path in FILES
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, numba.core.dispatcher.Dispatcher)
        and value.py_func.__module__ == module.__name__
    ]


ARITHMETIC = ("mean.py", "outer_optimizer.py", "error_feedback.py")
FILES = [
    *(path for path in sorted(FOLDER.glob("*.py")) if path.stem != "__init__"),
    *(FOLDER.parent / name for name in ARITHMETIC),
]


def hard_values() -> np.ndarray:
    """Of every magnitude and sign, with subnormal numbers and both zeros, and a short block."""
    values = spread(3 * CHUNK + 2 * BLOCK + 77)
    values[BLOCK : 2 * BLOCK] *= np.float32(2.0**-118)
    values[2 * BLOCK : 3 * BLOCK] = 0
    values[3 * BLOCK : 4 * BLOCK : 2] = -0.0
    values[5 * BLOCK] = FP32_MAX
    return values


def test_every_kernel_rounds_each_operation_by_itself() -> None:
    found = kernels()
    assert len(found) > 20
    for kernel in found:
        assert not kernel.targetoptions["fastmath"], kernel.py_func
        assert kernel.targetoptions["nogil"]
    decorated = sum(
        isinstance(node, ast.FunctionDef)
        and any(isinstance(name, ast.Name) and name.id == "kernel" for name in node.decorator_list)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
    )
    assert decorated == len(found)  # so none is compiled in any other way
    compiles = re.compile(r"numba import|\b(n?jit|vectorize|guvectorize|cfunc)\b *[(\n]")
    files = FOLDER.parents[1].rglob("*.py")
    others = {path for path in files if compiles.search(path.read_text())}
    assert others <= set(FILES)  # nor anywhere else


def test_a_product_and_a_sum_are_not_fused() -> None:
    @codec_room.kernel
    def multiplied_and_added(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> None:
        for i in range(a.size):
            sums[i] = a[i] * b[i] + sums[i]

    a, b, sums = bell(999), bell(1998)[999:], bell(2997)[1998:]
    expected = (a * b) + sums
    fused = (a.astype(np.float64) * b + sums).astype(np.float32)
    multiplied_and_added(a, b, sums)
    assert (expected != fused).any()
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
def test_blocks_are_those_of_numpy(name: str, top: int) -> None:
    values = hard_values()
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), dtype=np.float32)
    blocks.reshape(-1)[: values.size] = values
    peaks = np.abs(blocks).max(axis=1)
    scales = np.minimum(peaks / np.float32(top), largest_scale(np.float32(top)))
    scales[peaks < np.float32(2.0**-118)] = 0
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    codes = np.rint(blocks / divisors[:, None]).astype(np.int8)
    flat = codes.reshape(-1)[: values.size]
    if name == "int4":
        nibbles = np.append(flat.astype(np.uint8) + np.uint8(8), np.zeros(1, np.uint8))
        packed = nibbles[: flat.size // 2 * 2 : 2] | nibbles[1 : flat.size : 2] << 4
        flat = np.append(packed, nibbles[flat.size - 1]) if flat.size % 2 else packed
    body = codec_named(name).encode(values)
    assert body == scales.astype("<f4").tobytes() + flat.tobytes()
    decoded = codec_named(name).decode(body, values.size)
    expected = (codes.astype(np.float32) * scales[:, None]).reshape(-1)[: values.size]
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("num", [1, 7, 8, 9, 64, 127, 128, 129, 813, 4095, 4096])
def test_a_sum_is_numpys_to_the_bit(kind: type, num: int) -> None:
    rows = bell(20 * num).astype(kind).reshape(20, num) / kind(3)  # so that every addition rounds
    assert [sum_of(row) for row in rows] == list(rows.sum(axis=1))


def test_a_mean_magnitude_does_not_overflow() -> None:
    scratch = np.empty(CHUNK, dtype=np.float32)
    values = read_only(np.full(CHUNK, -FP32_MAX, dtype=np.float32))
    assert mean_magnitude(values, scratch) == FP32_MAX
    usual = bell(CHUNK)
    assert mean_magnitude(read_only(usual), scratch) == np.abs(usual).sum() / np.float32(CHUNK)


def test_rounding_by_addition_is_rint() -> None:
    ties = np.arange(-254, 255, dtype=np.float32) / 2
    values = np.concatenate([ties, np.nextafter(ties, np.float32(1e9)), bell(999) * 20])
    codes = np.empty(values.size, dtype=np.int8)
    whole_codes(read_only(values.astype(np.float32)), np.float32(1), codes)
    np.testing.assert_array_equal(codes, np.rint(values).astype(np.int8))


def test_a_peak_is_found_wherever_it_is() -> None:
    for place in range(BLOCK):
        row = bell(BLOCK)
        row[place] = -9
        assert peak_of(read_only(row)) == 9


def test_patterns_and_numbers_belong_together() -> None:
    values = hard_values()
    patterns = values.view(np.uint32)
    for value, pattern in zip(values[::97], patterns[::97], strict=True):
        assert bits_of(value) == pattern
        assert np.float32(float_of(pattern)).tobytes() == value.tobytes()


def test_the_first_value_that_is_not_finite_is_found() -> None:
    values = spread(3000)
    assert first_not_finite(read_only(values)) == ALL_RIGHT
    for place in (2999, 1024, 1023, 0):
        values[place] = np.nan
        assert first_not_finite(read_only(values)) == place
    with pytest.raises(CodecError, match="value 70 of the slice is nan"):
        refuse_not_finite(values, start=70)


def test_packed_codes_come_back() -> None:
    rng = np.random.Generator(np.random.Philox(7))
    codes = rng.integers(-7, 8, 600, dtype=np.int8)
    packed = np.empty(300, dtype=np.uint8)
    pack_nibbles(codes, packed)
    found = np.empty_like(codes)
    assert unpack_nibbles(read_only(packed), found)
    np.testing.assert_array_equal(found, codes)
    for place, wrong in ((0, 0x08), (299, 0x80), (77, 0)):
        damaged = packed.copy()
        damaged[place] = wrong
        assert not unpack_nibbles(read_only(damaged), found)
    pairs = rng.integers(0, 4, 600, dtype=np.uint8)
    packed = np.empty(150, dtype=np.uint8)
    pack_two_bits(pairs, packed)
    fours = pairs.reshape(-1, 4) << np.array([0, 2, 4, 6], dtype=np.uint8)
    np.testing.assert_array_equal(packed, fours.sum(axis=1))
    unpacked = np.empty_like(pairs)
    unpack_two_bits(read_only(packed), unpacked)
    np.testing.assert_array_equal(unpacked, pairs)


def test_zlib_reads_what_the_kernel_deflates_and_writes_hardly_less() -> None:
    rng = np.random.Generator(np.random.Philox(7))
    spread_out = rng.geometric(0.1, 30_000).astype(np.uint8)
    kinds: list[np.ndarray] = [np.repeat(np.arange(num), 50) for num in (1, 2, 3, 200, 256)]
    kinds += [spread_out, spread_out[:1], spread_out[:33]]
    for plain in (kind.astype(np.uint8) for kind in kinds):
        reader = zlib.decompressobj(-15)
        stream = huffman_coded(read_only(plain)).tobytes()
        assert reader.decompress(stream) == plain.tobytes()
        assert reader.eof and not reader.unused_data
        writer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        assert len(stream) <= len(writer.compress(plain.tobytes()) + writer.flush()) * 1.002 + 32


def test_codes_that_would_be_too_long_are_made_shorter() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 24:  # whose tree is as deep as can be
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    counts = np.array(fibonacci)
    for most_bits, depth in ((30, 23), (15, 15), (7, 7)):
        lengths = np.zeros(24, dtype=np.int64)
        code_lengths(counts, most_bits, lengths)
        assert lengths.max() <= depth
        assert sum(2.0**-lengths) == 1
    assert (lengths > 0).all()
    plain = rng_shuffled(np.repeat(np.arange(24, dtype=np.uint8), counts))
    assert zlib.decompress(huffman_coded(read_only(plain)).tobytes(), -15) == plain.tobytes()


def rng_shuffled(plain: np.ndarray) -> np.ndarray:
    return np.random.Generator(np.random.Philox(7)).permutation(plain)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_body_need_not_be_aligned_nor_values_be_ours_alone(codec: Codec) -> None:
    values = hard_values()
    body = codec.encode(values)
    decoded = codec.decode(body, values.size)
    for shift in (1, 2, 3):
        moved = memoryview(bytearray(b"\0" * shift + body))[shift:]
        assert codec.decode(moved, values.size).tobytes() == decoded.tobytes()
    every_second = np.repeat(values, 2)[::2]
    assert codec.encode(every_second) == codec.encode(read_only(values)) == body


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_random_bodies_mean_the_same_to_any_number_of_threads_or_nothing(codec: Codec) -> None:
    rng = np.random.Generator(np.random.Philox(7))
    num = 2 * (1 << 16) + 4097
    body = bytearray(codec.encode(bell(num)))
    in_three = codec_named(codec.name, Tiles(3))
    for _ in range(12):
        damaged = bytes(body)
        place = int(rng.integers(len(body)))
        damaged = damaged[:place] + rng.bytes(4) + damaged[place + 4 :]
        damaged = damaged[: len(body)]
        outcomes: list[bytes | str] = []
        for reader in (codec, in_three):
            try:
                outcomes.append(reader.decode(damaged, num).tobytes())
            except CodecError as error:
                outcomes.append(type(error).__name__)
        assert outcomes[0] == outcomes[1]


def test_without_a_folder_to_write_to_kernels_are_compiled_all_the_same(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    program = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = c.CacheImpl._locator_classes[:1]\n"  # NUMBA_CACHE_DIR alone
        "import numpy as np\n"
        "from node.exchange.codecs.registry import codec_named\n"
        "print(codec_named('bf16').encode(np.ones(2, dtype=np.float32)).hex())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"NUMBA_CACHE_DIR": str(not_a_folder), "PYTHONPATH": str(FOLDER.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "803f803f\n", ran.stderr


TRIED_BY = (
    *("test_kernels.py", "test_codecs.py", "test_chunk_codecs.py", "test_outliers.py"),
    *("test_mean.py", "test_residual.py", "test_outer_optimizer.py", "test_outer_kernels.py"),
    "../property/test_codec_properties.py",
)
BESIDE_ITS_ARRAY = """
import numpy as np
from node.exchange.codecs.codec import kernel

@kernel
def write(values):
    values[values.size] = 0

write(np.zeros(3))
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_kernel_reads_or_writes_beside_its_arrays(tmp_path: Path) -> None:
    """All that tries kernels, also with hostile bodies, where compiled code looks at every index."""

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
            cwd=FOLDER.parents[2],
            capture_output=True,
            text=True,
            check=False,
        )

    assert "IndexError" in ran("-c", BESIDE_ITS_ARRAY).stderr  # so it does look
    files = [str(Path(__file__).parent / name) for name in TRIED_BY]
    tried = ran("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *files)
    assert tried.returncode == 0, tried.stdout
