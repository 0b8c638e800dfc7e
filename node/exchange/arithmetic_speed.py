"""How fast this machine does what an exchange asks of it, measured at each start in less than a second.

Presets predict a round from tables of one machine (coordinator.presets.cost); with this figure of each node
they count with the machines that a run has.
"""

import time
from collections.abc import Callable

import blake3
import numpy as np

from node.exchange.codecs.codec import Codec
from node.exchange.codecs.registry import codec_named
from protocol.run_spec import RunSpec
from protocol.vitals import ExchangeSpeed

NUM_VALUES = 1 << 22
"""16 MB of fp32: more than caches hold, and little beside a model."""

REPEATS = 3
"""The quickest counts: other work of the machine is no property of it."""


def measured_speed(spec: RunSpec) -> ExchangeSpeed:
    """With the codecs of a run, whose kernels are compiled. Heavy."""
    uplink, downlink = spec.exchange.uplink, spec.exchange.downlink
    bytes_per_second = exchange_bytes_per_second(codec_named(uplink), codec_named(downlink))
    return ExchangeSpeed(bytes_per_second=bytes_per_second, uplink=uplink, downlink=downlink)


def exchange_bytes_per_second(
    uplink: Codec, downlink: Codec, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes of fp32 a second on one core: encode and decode what is sent, decode what comes, digest, copy.

    Both codecs with one thread. The digest is of two vectors, as parameters and momentum are. Heavy.
    """
    values = np.random.default_rng(0).standard_normal(NUM_VALUES, np.float32) * np.float32(1e-3)
    target = np.empty_like(values)
    come = downlink.encode(values)

    def once() -> float:
        began_at = clock()
        uplink.decode(uplink.encode(values), NUM_VALUES)
        downlink.decode(come, NUM_VALUES)
        for _ in range(2):
            blake3.blake3(values.view(np.uint8).data).digest()
        np.copyto(target, values)
        return clock() - began_at

    return values.nbytes / min(once() for _ in range(REPEATS))
