"""What the codecs' choices rest on: entropy coders, dead zones, and tiles of matrices.

    python -m benchmarks.codec.choices [--rounds 8] [--hidden-size 256] [--tile-rounds 3]

On real pseudo-gradients. The first table has a uniform quantiser with steps relative to the mean
magnitude of each chunk of 4096, with and without a larger dead zone: the entropy of the codes, the
bits that deflate and zstd (if `zstandard` is installed; Atoll does not need it) make of them, and the
relative error. The second has the error of keeping 64 of each 4096 values: of the flat vector in
canonical order, and of tiles of 64 by 64 of each matrix.
"""

import importlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.codec.pseudo_gradients import demo_pseudo_gradients, pseudo_gradients_of
from benchmarks.learning.data_parallel import demo_spec
from benchmarks.measurement import parser_of
from node.exchange.codecs.deflate import deflated
from node.exchange.codecs.dense import nibble_bytes, pack_nibbles
from node.outer_state import Vector
from protocol.run.models import Layout, layout_of
from protocol.run.run_files import validated
from protocol.run.run_spec import RunSpec

CHUNK = 4096
TILE = 64
MIDDLE, LARGER = 0.5, 0.62
"""From where on a magnitude is not zero, in steps."""


def entropy_bits(codes: npt.NDArray[np.int64]) -> float:
    """Of a value, if nothing is known but the frequencies of the codes."""
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def quantised(chunks: Vector, coarseness: float, dead_zone: float) -> tuple[Vector, float]:
    """Codes [chunks, 4096], and the relative error if each code's mean were known."""
    quotients = chunks / (coarseness * np.abs(chunks).mean(axis=1, keepdims=True))
    codes = np.sign(quotients) * np.floor(np.abs(quotients) + 1 - dead_zone)
    codes = np.clip(codes, -7, 7)
    magnitudes = np.abs(codes).astype(np.int64).reshape(-1)
    sums = np.bincount(magnitudes, weights=np.abs(quotients).reshape(-1))
    means = sums / np.maximum(np.bincount(magnitudes), 1)
    means[0] = 0
    decoded = np.sign(codes) * means[magnitudes].reshape(codes.shape) / quotients * chunks
    return codes, float(np.linalg.norm(decoded - chunks) / np.linalg.norm(chunks))


def coders() -> dict[str, Callable[[npt.NDArray[np.uint8]], bytes]]:
    """By name."""
    found: dict[str, Callable[[npt.NDArray[np.uint8]], bytes]] = {"deflate": deflated}
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        return found
    for level in (1, 3):
        found[f"zstd {level}"] = zstandard.ZstdCompressor(level=level).compress
    return found


def compare_coders(values: Vector) -> None:
    """Prints the first table."""
    chunks = values[: values.size // CHUNK * CHUNK].reshape(-1, CHUNK)
    for coarseness in (1.25, 1.9, 2.5, 3.75):
        for dead_zone in (MIDDLE, LARGER):
            codes, error = quantised(chunks, coarseness, dead_zone)
            packed = np.empty(nibble_bytes(codes.size), dtype=np.uint8)
            pack_nibbles(codes.astype(np.int8).reshape(-1), packed)
            cells = [f"{coarseness}", f"{dead_zone}", f"error {error:.4f}"]
            cells.append(f"entropy {entropy_bits(codes.astype(np.int64)):.3f}")
            for name, encode in coders().items():
                began = time.thread_time()
                size = len(encode(packed))
                speed = values.nbytes / 1e9 / (time.thread_time() - began)
                cells.append(f"{name} {8 * size / codes.size:.3f} at {speed:.2f} GB/s")
            print(" | ".join(cells), flush=True)


def error_of_keeping(groups: Iterator[Vector], share: float) -> float:
    """Relative error of keeping the largest of each group."""
    lost = total = 0.0
    for group in groups:
        sizes = np.sort(group.astype(np.float64).reshape(-1) ** 2)
        kept = round(group.size * share)
        lost += sizes[: sizes.size - max(1, kept)].sum()
        total += sizes.sum()
    return float(np.sqrt(lost / total))


def in_chunks(values: Vector) -> Iterator[Vector]:
    """The flat vector's."""
    yield from (values[start : start + CHUNK] for start in range(0, values.size, CHUNK))


def in_tiles(values: Vector, layout: Layout) -> Iterator[Vector]:
    """Tiles of each matrix; vectors are cut into chunks."""
    for tensor in layout.places:
        part = values[tensor.offset : tensor.offset + tensor.num_elements]
        if len(tensor.shape) != 2:
            yield from in_chunks(part)
            continue
        matrix = part.reshape(tensor.shape)
        for row in range(0, matrix.shape[0], TILE):
            for column in range(0, matrix.shape[1], TILE):
                yield matrix[row : row + TILE, column : column + TILE]


def wide_spec(hidden_size: int, rounds: int) -> RunSpec:
    """The demo's run with wider matrices."""
    tables = demo_spec(seed=0, rounds=rounds, num_nodes=1, codec="fp32").model_dump(mode="json")
    tables["model"] |= {"hidden_size": hidden_size, "ffn_size": 3 * hidden_size, "num_layers": 2}
    return validated(tables, origin="the demo's run file, wider")


def main() -> None:
    """Prints both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--tile-rounds", type=int, default=3)
    chosen = parser.parse_args()
    compare_coders(np.concatenate(demo_pseudo_gradients(rounds=chosen.rounds)))
    spec = wide_spec(chosen.hidden_size, chosen.tile_rounds)
    layout = layout_of(spec)
    for index, values in enumerate(pseudo_gradients_of(spec)):
        errors = ", ".join(
            f"{TILE * TILE // kept} in {TILE * TILE}: chunks "
            f"{error_of_keeping(in_chunks(values), 1 / kept):.4f}, tiles "
            f"{error_of_keeping(in_tiles(values, layout), 1 / kept):.4f}"
            for kept in (64, 16)
        )
        print(f"round {index + 1}, hidden size {chosen.hidden_size}: {errors}", flush=True)


if __name__ == "__main__":
    main()
