"""Codecs by name, and how fast this machine is with them. Of one name, older versions stay before new ones.

The speed is measured at each start in less than a second. Presets predict a round from tables of one machine
(coordinator.presets.cost); with this figure of each node they count with the machines that a run has.
"""

import time
from collections.abc import Callable

import blake3
import numpy as np

from node.exchange.codecs.chunkwise import CHUNK, Int2, Sign
from node.exchange.codecs.codec import ONE_THREAD, Codec, Tiles
from node.exchange.codecs.dense import Bf16, Fp32, Int4, Int8
from node.exchange.codecs.entropy import Ec1, Ec2, Ec3
from node.exchange.codecs.top_k import TopK64, TopK256
from protocol.errors import ConfigError
from protocol.run.run_spec import RunSpec
from protocol.wire.vitals import ExchangeSpeed

KINDS: tuple[type[Codec], ...] = (
    Fp32,
    Bf16,
    Int8,
    Int4,
    Int2,
    Sign,
    TopK64,
    TopK256,
    Ec3,
    Ec2,
    Ec1,
)
"""Of one name, the newest version last."""

CODECS = tuple(kind() for kind in KINDS)
"""Every codec there is."""


def codec_named(name: str, tiles: Tiles = ONE_THREAD) -> Codec:
    """The codec called "int4/1", or the newest version of "int4". Raises ConfigError for others."""
    for kind in reversed(KINDS):
        if name in (kind.name, kind.name.partition("/")[0]):
            return kind(tiles)
    known = ", ".join(codec.name for codec in CODECS)
    raise ConfigError(f"there is no codec {name!r}", next_step=f"choose one of {known}")


def compile_kernels(codec: Codec) -> None:
    """Encodes and decodes once: afterwards the kernels are there, and no round waits for them.

    Takes seconds where they are not in the cache yet.
    """
    values = np.arange(CHUNK + 1, dtype=np.float32)  # with a short chunk and a short block
    codec.decode(codec.encode(values), values.size)


NUM_VALUES = 1 << 22
"""16 MB of fp32: more than caches hold, and little beside a model."""

REPEATS = 3
"""The quickest counts: other work of the machine is no property of it."""


def measured_speed(spec: RunSpec, tiles: Tiles) -> ExchangeSpeed:
    """With the codecs of a run, whose kernels are compiled, on the threads that exchanges have. Heavy."""
    uplink, downlink = spec.exchange.uplink, spec.exchange.downlink
    bytes_per_second = exchange_bytes_per_second(
        codec_named(uplink, tiles), codec_named(downlink, tiles)
    )
    return ExchangeSpeed(bytes_per_second=bytes_per_second, uplink=uplink, downlink=downlink)


def exchange_bytes_per_second(
    uplink: Codec, downlink: Codec, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes of fp32 a second: encode and decode what is sent, decode what comes, digest, copy.

    All on the uplink's threads. The digest is of two vectors, as parameters and momentum are. Heavy.
    """
    values = np.random.default_rng(0).standard_normal(NUM_VALUES, np.float32) * np.float32(1e-3)
    target = np.empty_like(values)
    tiles = uplink.tiles

    def digest(first: int, past: int) -> bytes:
        return blake3.blake3(values[first:past].view(np.uint8).data).digest()

    def copy(first: int, past: int) -> None:
        np.copyto(target[first:past], values[first:past])

    come = downlink.encode(values)

    def once() -> float:
        began_at = clock()
        uplink.decode(uplink.encode(values), NUM_VALUES)
        downlink.decode(come, NUM_VALUES)
        for _ in range(2):
            tiles.each_run(NUM_VALUES, digest)
        tiles.each_run(NUM_VALUES, copy)
        return clock() - began_at

    return values.nbytes / min(once() for _ in range(REPEATS))
