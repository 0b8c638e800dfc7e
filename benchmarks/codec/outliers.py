"""What becomes of outliers, and of the values beside them: codecs as they are, and what ec2 could do.

    python -m benchmarks.codec.outliers [--codecs ec3 ec2 ec1 int4 int2 sign] [--rounds 12] [--turns 20]

The first table has bits a value without headers, and |decoded - value| / |value| of the others, on normal,
Laplacian and Student's t values (3 degrees of freedom), on the demo's pseudo-gradients, and with outliers
of so many standard deviations in each chunk of 4096. "peak", "clip" and "bf16 k" are ec2's quantiser in
numpy, with the entropy of its codes: steps that reach the peak; codes that stop at the top; outliers in
bf16, and the mean taken anew without them k times. The second table has what is owed after so many rounds
of error feedback on normal values, with four outliers of 100 in each chunk that stay or came in the first
round, relative to what a round adds: of the others and of the outliers. Then the share of outliers that
arrives without error feedback.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.codec.choices import CHUNK, entropy_bits
from benchmarks.codec.pseudo_gradients import demo_pseudo_gradients
from benchmarks.measurement import parser_of
from node.exchange.codecs.codec import Codec
from node.exchange.codecs.entropy import Ec2
from node.exchange.codecs.registry import codec_named
from node.outer_state import Vector

Chosen = npt.NDArray[np.bool_]
Way = Callable[[Vector], tuple[float, Vector]]
"""Values [whole chunks] → bits a value, and what comes back."""


def as_is(codec: Codec) -> Way:
    """A codec's."""

    def way(values: Vector) -> tuple[float, Vector]:
        body = codec.encode(values)
        return 8 * len(body) / values.size, codec.decode(body, values.size)

    return way


def upper_halves(values: Vector) -> Vector:
    """Rounded to bf16."""
    codec = codec_named("bf16")
    return codec.decode(codec.encode(values), values.size)


def with_ec2(what: str, looks: int = 0) -> Way:
    """Its quantiser: "peak", "clip" or "bf16"."""
    top, coarseness, shift = (float(x) for x in (Ec2.top, Ec2.coarseness, Ec2.shift))

    def way(values: Vector) -> tuple[float, Vector]:
        chunks = values.reshape(-1, CHUNK)
        magnitudes = np.abs(chunks)
        peaks = magnitudes.max(axis=1, keepdims=True)
        steps = np.minimum(coarseness * magnitudes.mean(axis=1, keepdims=True), peaks)
        if what == "peak":
            steps = np.maximum(steps, peaks / top)
        for _ in range(looks):
            within = np.where(magnitudes > top * steps, np.nan, magnitudes)
            steps = coarseness * np.nanmean(within, axis=1, keepdims=True)
        is_outlier = magnitudes > top * steps * (1 + 2**-20)
        codes = np.clip(np.rint(chunks / steps), -top, top)
        decoded = np.sign(codes) * (np.abs(codes) - shift) * (codes != 0) * steps
        bits = 32 / CHUNK
        if what == "bf16":
            decoded = np.where(is_outlier, upper_halves(values).reshape(chunks.shape), decoded)
            codes[is_outlier] = -top - 1
            bits += 16 * float(is_outlier.mean())
        bits += entropy_bits(codes.astype(np.int64))
        return bits, decoded.astype(np.float32).reshape(-1)

    return way


def error_of(values: Vector, decoded: Vector, chosen: Chosen) -> float:
    """|decoded - values| / |values| of those chosen."""
    wide = values[chosen].astype(np.float64)
    return float(np.linalg.norm(decoded[chosen] - wide) / np.linalg.norm(wide))


def cases(pseudo_gradients: Vector) -> dict[str, tuple[Vector, Chosen]]:
    """Values by name, and which of them are no outliers."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1 << 20, dtype=np.float32)
    whole = pseudo_gradients[: pseudo_gradients.size // CHUNK * CHUNK]
    plain = {
        "normal": normal,
        "Laplacian": rng.laplace(size=normal.size).astype(np.float32),
        "Student's t": rng.standard_t(3, normal.size).astype(np.float32),
        "demo": whole,
    }
    found = {name: (values, np.ones(values.size, dtype=bool)) for name, values in plain.items()}
    for number, size in ((1, 30), (1, 100), (1, 1000), (8, 100)):
        others = np.arange(normal.size) % (CHUNK // number) != 77
        found[f"normal, {number} of {size}"] = np.where(others, normal, np.float32(size)), others
    deviations = whole.reshape(-1, CHUNK).std(axis=1).repeat(CHUNK)
    others = np.arange(whole.size) % CHUNK != 77
    found["demo, 1 of 100"] = np.where(others, whole, 100 * deviations), others
    return found


def owed_after(way: Way, turns: int, *, stays: bool) -> tuple[float, float]:
    """Of the others and of the outliers: the residual's norm by that of what a round adds."""
    rng = np.random.default_rng(1)
    others = np.arange(16 * CHUNK) % (CHUNK // 4) != 77
    owed = np.zeros(others.size, dtype=np.float32)
    for turn in range(turns):
        added = rng.standard_normal(others.size, dtype=np.float32)
        if stays or turn == 0:
            added[~others] += 100
        owed += added
        owed -= way(owed)[1]
    of_others = np.linalg.norm(owed[others]) / np.sqrt(others.sum())
    return float(of_others), float(np.linalg.norm(owed[~others]) / np.sqrt((~others).sum()) / 100)


def main() -> None:
    """Prints both tables."""
    parser = parser_of(__doc__)
    names = ["ec3", "ec2", "ec1", "int4", "int2", "sign"]
    parser.add_argument("--codecs", nargs="+", default=names)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=20)
    chosen = parser.parse_args()
    ways = {name: as_is(codec_named(name)) for name in chosen.codecs}
    ways |= {"peak": with_ec2("peak"), "clip": with_ec2("clip")}
    ways |= {f"bf16 {looks}": with_ec2("bf16", looks) for looks in range(4)}
    found = cases(np.concatenate(demo_pseudo_gradients(rounds=chosen.rounds)))
    print(" | ".join(["values", *ways]))
    for name, (values, others) in found.items():
        cells = []
        for way in ways.values():
            bits, decoded = way(values)
            cells.append(f"{bits:.3f}, {error_of(values, decoded, others):.3f}")
        print(" | ".join([name, *cells]), flush=True)
    print(
        "way | stays: others | outliers | came once: others | outliers | arrived without feedback"
    )
    values, others = found["normal, 8 of 100"]
    for name, way in ways.items():
        owed = [*owed_after(way, chosen.turns, stays=True)]
        owed += owed_after(way, chosen.turns, stays=False)
        arrived = float(way(values)[1][~others].mean() / 100)
        print(" | ".join([name, *(f"{x:.2f}" for x in owed), f"{arrived:.1%}"]), flush=True)


if __name__ == "__main__":
    main()
