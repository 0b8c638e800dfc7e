"""Codecs by name. A new version comes after the older ones, which stay."""

from node.exchange.codecs.blockwise import Int4, Int8
from node.exchange.codecs.codec import Codec
from node.exchange.codecs.fp32 import Fp32
from protocol.errors import ConfigError

CODECS: tuple[Codec, ...] = (Fp32(), Int8(), Int4())
"""Every codec there is; of one name, the newest version last."""


def codec_named(name: str) -> Codec:
    """The codec called "int4/1", or the newest version of "int4". Raises ConfigError for others."""
    for codec in reversed(CODECS):
        if name in (codec.name, codec.name.partition("/")[0]):
            return codec
    known = ", ".join(codec.name for codec in CODECS)
    raise ConfigError(f"there is no codec {name!r}", next_step=f"choose one of {known}")
