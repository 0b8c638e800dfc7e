"""Every codec: speed against memcpy, bits per value with all headers, error on real pseudo-gradients.

    python -m benchmarks.codec [--values 16777216] [--repeats 7] [--rounds 24] [--threads 1]
        [--codecs int4 ec2 …] [--results codec.jsonl]

Speeds are of fp32 values, on the demo's pseudo-gradients one after the other until there are enough;
memcpy and torch.topk take turns with the codecs in each repeat, and a ratio is of one turn. With one
thread the time is the thread's own on the processor, so that other work on the machine counts less;
with more it is the clock's. "In two threads" is how many times faster by the clock two threads are than
one. Errors are |decoded - value| / |value| over a whole pseudo-gradient.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.learning.data_parallel import demo_spec
from benchmarks.measurement import Rows, add_results, machine, parser_of
from lab.simulation.inline_island import lone_work, unseen
from node.exchange.codecs.codec import Codec, Tiles
from node.exchange.codecs.deflate import deflated
from node.exchange.codecs.registry import KINDS, codec_named, compile_kernels
from node.island.data.dataset import read_corpus
from node.island.models.first_weights import initial_parameters
from node.island.parallel.mesh import Mesh
from node.island.training.trainer import Trainer
from node.outer_state import Vector
from protocol.wire.payload import CONTRIBUTION, Payload
from protocol.wire.rounds import Digest, NodeId

CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, least and most of some measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: list[float]) -> "Spread":
        """Of one figure at least."""
        return cls(median=statistics.median(figures), least=min(figures), most=max(figures))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found out about one codec. Speeds are in GB/s of fp32 values."""

    codec: str
    threads: int
    bits: float  # per value, on all the values, with the payload's header
    bits_of_demo: float  # likewise, for the demo's model as a single slice: 164,288 values
    bits_deflated: float  # of the body after deflate's Huffman code
    error: Spread  # on the demo's pseudo-gradients
    error_normal: float  # on normally distributed values
    encode: Spread
    decode: Spread
    encode_of_memcpy: Spread
    decode_of_memcpy: Spread
    encode_in_two: Spread  # the clock's time on one thread, by that on two
    decode_in_two: Spread


def payload_bytes(codec: Codec, values: Vector) -> int:
    """What travels: the body and its header."""
    payload = Payload.seal(
        kind=CONTRIBUTION,
        run_digest=Digest(bytes(32)),
        round=1000,
        fragment=0,
        slice_index=1,
        start=0,
        num_elements=values.size,
        codec=codec.name,
        tokens=100_000,
        sender_id=NodeId("0" * 32),
        body=codec.encode(values),
    )
    return len(payload.header.encode()) + len(payload.body)


def relative_error(codec: Codec, values: Vector) -> float:
    """|decoded - values| / |values|."""
    wide = values.astype(np.float64)
    decoded = codec.decode(codec.encode(values), values.size)
    return float(np.linalg.norm(decoded - wide) / np.linalg.norm(wide))


class Stopwatch:
    """Speeds in GB/s of so many values."""

    def __init__(self, values: Vector, clock: Callable[[], float]) -> None:
        self._gigabytes = values.nbytes / 1e9
        self._clock = clock

    def speed(self, work: Callable[[], object]) -> float:
        """Of one call."""
        began = self._clock()
        work()
        return self._gigabytes / (self._clock() - began)


def measure(
    codec: Codec,
    *,
    values: Vector,
    pseudo_gradients: list[Vector],
    stopwatch: Stopwatch,
    repeats: int,
    threads: int,
) -> Measured:
    """Everything about one codec."""
    compile_kernels(codec)
    body = codec.encode(values)
    target = np.zeros_like(values)
    encode, decode, memcpy = [], [], []
    encode_in_two, decode_in_two = [], []
    clock = Stopwatch(values, time.perf_counter)
    alone, in_two = (codec_named(codec.name, Tiles(num)) for num in (1, 2))
    for _ in range(repeats):
        memcpy.append(stopwatch.speed(lambda: np.copyto(target, values)))
        encode.append(stopwatch.speed(lambda: codec.encode(values)))
        decode.append(stopwatch.speed(lambda: codec.decode(body, values.size)))
        encode_in_two.append(
            clock.speed(lambda: in_two.encode(values)) / clock.speed(lambda: alone.encode(values))
        )
        decode_in_two.append(
            clock.speed(lambda: in_two.decode(body, values.size))
            / clock.speed(lambda: alone.decode(body, values.size))
        )
    normal = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    demo = pseudo_gradients[-1]
    return Measured(
        codec=codec.name,
        threads=threads,
        bits=8 * payload_bytes(codec, values) / values.size,
        bits_of_demo=8 * payload_bytes(codec, demo) / demo.size,
        bits_deflated=8 * len(deflated(np.frombuffer(body, dtype=np.uint8))) / values.size,
        error=Spread.of([relative_error(codec, part) for part in pseudo_gradients]),
        error_normal=relative_error(codec, normal),
        encode=Spread.of(encode),
        decode=Spread.of(decode),
        encode_of_memcpy=Spread.of([a / b for a, b in zip(encode, memcpy, strict=True)]),
        decode_of_memcpy=Spread.of([a / b for a, b in zip(decode, memcpy, strict=True)]),
        encode_in_two=Spread.of(encode_in_two),
        decode_in_two=Spread.of(decode_in_two),
    )


def naive_top_k(values: Vector, k: int) -> object:
    """The usual way: torch.topk over the magnitudes of each chunk."""
    chunks = torch.from_numpy(values[: values.size // CHUNK * CHUNK]).view(-1, CHUNK)
    return torch.topk(chunks.abs(), k, dim=1)


def demo_pseudo_gradients(*, rounds: int) -> list[Vector]:
    """Those of the demo's first rounds [all elements], in canonical order.

    One node in this process, without an exchange: the next round starts from the weights that the last one
    ended with, and a pseudo-gradient is the difference of the two.
    """
    spec = demo_spec(seed=0, rounds=rounds, num_nodes=1, codec="fp32")
    corpus = read_corpus(
        spec.data, context=spec.model.context, batch=spec.inner.batch, folder=Path.cwd()
    )
    trainer = Trainer(
        spec=spec, corpus=corpus, device=torch.device("cpu"), mesh=Mesh(), clock=time.monotonic
    )
    parameters = initial_parameters(spec)
    pseudo_gradients = []
    for training_round in range(spec.run.rounds):
        trainer.adopt(parameters)
        trainer.train(lone_work(spec, spec.inner.steps, round=training_round + 1), unseen)
        published = np.empty_like(parameters)
        trainer.publish(published, 0)
        pseudo_gradients.append(parameters - published)
        parameters = published
    return pseudo_gradients


def main() -> None:
    """Measures every codec, prints a table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--values", type=int, default=1 << 24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--codecs", nargs="+")
    add_results(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    pseudo_gradients = demo_pseudo_gradients(rounds=chosen.rounds)
    joined = np.concatenate(pseudo_gradients)
    values = np.resize(joined, chosen.values)
    stopwatch = Stopwatch(values, time.thread_time if chosen.threads == 1 else time.perf_counter)
    target = np.zeros_like(values)
    memcpy = Spread.of(
        [stopwatch.speed(lambda: np.copyto(target, values)) for _ in range(chosen.repeats)]
    )
    naive = {
        k: Spread.of([stopwatch.speed(lambda k=k: naive_top_k(values, k)) for _ in range(3)])  # type: ignore[misc]
        for k in (64, 256)
    }
    print(f"{values.size:,} values, {chosen.threads} thread; memcpy {memcpy} GB/s")
    for k, speed in naive.items():
        print(f"torch.topk, {k} of {CHUNK}: {speed} GB/s")
    results = Rows(chosen.results, is_printed=False)
    results.add(
        machine()
        | {
            "numpy": np.__version__,
            "torch": torch.__version__,
            "values": values.size,
            "threads": chosen.threads,
            "memcpy": asdict(memcpy),
            "naive_top_k": {k: asdict(speed) for k, speed in naive.items()},
        }
    )
    print(
        "codec | bits | deflated | error | encode GB/s | of memcpy | in two threads | "
        "decode GB/s | of memcpy | in two threads"
    )
    for codec in (kind(Tiles(chosen.threads)) for kind in KINDS):
        if chosen.codecs and codec.name.partition("/")[0] not in chosen.codecs:
            continue
        found = measure(
            codec,
            values=values,
            pseudo_gradients=pseudo_gradients,
            stopwatch=stopwatch,
            repeats=chosen.repeats,
            threads=chosen.threads,
        )
        print(
            f"{found.codec} | {found.bits:.3f} | {found.bits_deflated:.3f} | {found.error} | "
            f"{found.encode} | {found.encode_of_memcpy.median:.0%} | "
            f"{found.encode_in_two.median:.1f} | "
            f"{found.decode} | {found.decode_of_memcpy.median:.0%} | "
            f"{found.decode_in_two.median:.1f}",
            flush=True,
        )
        results.add(asdict(found))
