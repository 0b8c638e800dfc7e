"""What benchmarks/exchange measures: sizes, codecs and links of one swarm, as arithmetic. Pure."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from coordinator.presets.cost import CODEC_COSTS
from coordinator.rules import SLICE_BYTES
from lab.network.links import DEFAULT_BUFFER_BYTES, Link
from node.exchange.peers import Limits
from protocol.errors import UsageError
from protocol.run.run_spec import CodecName

LEAST_PATIENCE_SECONDS = 120.0
TIMES_THE_LIMIT = 20.0
"""What a step of a round may take, of its limit, before the benchmark gives up: for a hang only."""

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmb]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs:
    """What contributions and results are encoded with."""

    uplink: str
    downlink: str

    def __str__(self) -> str:
        return self.uplink if self.uplink == self.downlink else f"{self.uplink}/{self.downlink}"

    @property
    def up_bits(self) -> float:
        """Of a value. Entropy and places depend on the values: the largest that was measured."""
        return CODEC_COSTS[self.uplink].bits

    @property
    def down_bits(self) -> float:
        return CODEC_COSTS[self.downlink].bits


def codecs_named(text: str) -> Codecs:
    """Of "int4", or "topk64/topk256" for contributions and results apart."""
    uplink, _, downlink = text.partition("/")
    codecs = Codecs(uplink=uplink, downlink=downlink or uplink)
    for name in (codecs.uplink, codecs.downlink):
        if name not in get_args(CodecName):
            raise UsageError(
                f"there is no codec {name!r}",
                next_step=f"choose of {', '.join(get_args(CodecName))}, or two as in topk64/topk256",
            )
    return codecs


def count_of(text: str) -> int:
    """Of "8m", "500k" or "164288"."""
    matched = _COUNT.fullmatch(text)
    count = 0 if matched is None else round(float(matched[1]) * _FACTORS[matched[2].lower()])
    if count < 1:
        raise UsageError(
            f"{text!r} is no number of parameters", next_step="write 8m, 500k or 164288"
        )
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one swarm exchanges, over which links."""

    num_nodes: int
    codecs: Codecs
    num_elements: int
    mbit: float
    round_trip_ms: float
    slow: float = 1.0  # the last node's share of the others' rate
    by_bandwidth: bool = True
    stripes: int = Limits().max_streams_per_body  # for one body, at most
    keeps_window: bool = False  # whether TCP remembers over a pause what the links carry
    slow_motion: float = 1.0  # how many times as long everything takes
    num_helpers: int = 0  # with any, nobody dials a node, and helpers reduce everything

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes', then the helpers'."""
        return (
            *(f"node-{i}" for i in range(self.num_nodes)),
            *(f"helper-{i}" for i in range(self.num_helpers)),
        )

    @property
    def megabytes(self) -> float:
        """Of one node's whole contribution."""
        return round(self.num_elements * self.codecs.up_bits / 8e6, 3)

    @property
    def slice_elements(self) -> int:
        """As a coordinator would cut: see Rules there."""
        return int(8 * SLICE_BYTES / self.codecs.up_bits)

    @property
    def patience_seconds(self) -> float:
        """For every step of a round, as this machine's clock has it: far more than it takes."""
        bits = self.num_elements * (self.codecs.up_bits + self.codecs.down_bits)
        slowest = min(self.rate(number) for number in range(self.num_nodes))
        if self.num_helpers:
            bits *= self.num_nodes
        return LEAST_PATIENCE_SECONDS + TIMES_THE_LIMIT * self.slow_motion * bits / slowest

    @property
    def quiet_seconds(self) -> float:
        """When nothing was counted for so long, no answer is on its way: on the machine's clock."""
        slowest = min(self.rate(number) for number in range(self.num_nodes))
        full_buffers = 2 * 8 * DEFAULT_BUFFER_BYTES / slowest
        return self.slow_motion * (4 * self.round_trip_ms / 1e3 + full_buffers)

    def links(self) -> dict[str, Link]:
        """Of the lab: so much slower, and further apart, as the motion is slow."""
        return {host: self._link(number) for number, host in enumerate(self.hosts)}

    def rate(self, number: int) -> float:
        """Bits per second of a host's link, in each direction."""
        return 1e6 * self.mbit * (self.slow if number == self.num_nodes - 1 else 1.0)

    def _link(self, number: int) -> Link:
        rate = self.rate(number) / self.slow_motion
        # Two links make a path, and a round trip passes it twice.
        return Link(
            up_bits_per_second=rate,
            down_bits_per_second=rate,
            delay_seconds=self.slow_motion * self.round_trip_ms / 4e3,
        )

    def words(self) -> dict[str, Any]:
        """For a line of results."""
        codecs = {"codec": str(self.codecs), "megabytes": self.megabytes}
        return {k: v for k, v in asdict(self).items() if k != "codecs"} | codecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A swarm's: given by its model, or by what a contribution takes on the wire."""

    parameters: int | None = None
    megabytes: float = 0.0

    def elements(self, codecs: Codecs) -> int:
        if self.parameters is not None:
            return self.parameters
        return int(self.megabytes * 8e6 / codecs.up_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Of links, in Mbit/s."""

    mbit: float
    is_shared: bool
    """Whether it is that of links of two nodes, and more nodes get less each, so that the sum stays."""

    def of_each(self, num_nodes: int) -> float:
        return self.mbit * 2 / num_nodes if self.is_shared else self.mbit


def cases_of(
    *,
    nodes: Sequence[int],
    codecs: Sequence[Codecs],
    sizes: Sequence[Size],
    rate: Rate,
    round_trip_ms: float,
    stripes: Sequence[int],
    keep_window: Sequence[bool],
    by_bandwidth: Sequence[bool],
    slow: float,
    slow_motion: float,
    helpers: Sequence[int] = (0,),
) -> Iterator[Case]:
    """Every combination."""
    for (
        num_nodes,
        num_helpers,
        pair,
        size,
        num_stripes,
        keeps_window,
        is_by_bandwidth,
    ) in itertools.product(nodes, helpers, codecs, sizes, stripes, keep_window, by_bandwidth):
        yield Case(
            num_nodes=num_nodes,
            codecs=pair,
            num_elements=size.elements(pair),
            mbit=rate.of_each(num_nodes),
            round_trip_ms=round_trip_ms,
            slow=slow,
            by_bandwidth=is_by_bandwidth,
            stripes=num_stripes,
            keeps_window=keeps_window,
            slow_motion=slow_motion,
            num_helpers=num_helpers,
        )
