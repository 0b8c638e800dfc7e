"""Codecs by name. A new version comes after the older ones, which stay."""

import numpy as np

from node.exchange.codecs.blockwise import Int4, Int8
from node.exchange.codecs.chunkwise import CHUNK, Int2, Sign
from node.exchange.codecs.codec import ONE_THREAD, Codec, Tiles
from node.exchange.codecs.entropy import Ec1, Ec2, Ec3
from node.exchange.codecs.floats import Bf16, Fp4, Fp8, Fp32
from node.exchange.codecs.top_k import TopK64, TopK256
from protocol.errors import ConfigError


def all_codecs(tiles: Tiles) -> tuple[Codec, ...]:
    """Every codec there is; of one name, the newest version last."""
    return (
        Fp32(tiles),
        Bf16(tiles),
        Int8(tiles),
        Fp8(tiles),
        Int4(tiles),
        Fp4(tiles),
        Int2(tiles),
        Sign(tiles),
        TopK64(tiles),
        TopK256(tiles),
        Ec3(tiles),
        Ec2(tiles),
        Ec1(tiles),
    )


CODECS = all_codecs(ONE_THREAD)


def codec_named(name: str, tiles: Tiles = ONE_THREAD) -> Codec:
    """The codec called "int4/1", or the newest version of "int4". Raises ConfigError for others."""
    codecs = all_codecs(tiles)
    for codec in reversed(codecs):
        if name in (codec.name, codec.name.partition("/")[0]):
            return codec
    known = ", ".join(codec.name for codec in codecs)
    raise ConfigError(f"there is no codec {name!r}", next_step=f"choose one of {known}")


def compile_kernels(codec: Codec) -> None:
    """Encodes and decodes once: afterwards the kernels are there, and no round waits for them.

    Takes seconds where they are not in the cache yet.
    """
    values = np.arange(CHUNK + 1, dtype=np.float32)  # with a short chunk and a short block
    codec.decode(codec.encode(values), values.size)
