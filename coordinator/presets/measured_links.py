"""What a swarm's links carry and how fast its nodes compute, by what they told: for the next run's file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.presets.cost import CODEC_COSTS, exchange_bytes_per_second
from protocol.errors import TemporaryError
from protocol.v1 import status_pb2 as pb

_PRESENT = {pb.NODE_STATE_JOINING, pb.NODE_STATE_READY}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """The slowest way down and up, bits per second, and of how many nodes."""

    down_bits_per_second: float
    up_bits_per_second: float
    num_nodes: int
    num_with_bbr: int  # who does not say counts as one with cubic
    arithmetic: float | None = None  # of the slowest node that told: see Situation

    @property
    def advice(self) -> str:
        """What would make them carry more; empty when all nodes have done it."""
        rest = self.num_nodes - self.num_with_bbr
        if not rest:
            return ""
        return (
            f"{rest} of {self.num_nodes} nodes use cubic, or do not say and count so: over bbr exchanges "
            "get more of a link; 'atoll node doctor' on them says how"
        )


def measured_links(nodes: Iterable[pb.NodeStatus], *, instead: str = "") -> MeasuredLinks:
    """Of the nodes that are there, or of all that were when none is: the run is finished.

    A direction that nobody has measured is taken for the other. Raises TemporaryError when there is
    no rate at all; `instead` says what else can be done then.
    """
    known = list(nodes)
    present = [node for node in known if node.state in _PRESENT] or known
    rates = [node.link_rates for node in present if node.HasField("link_rates")]
    downs = [r.down_bytes_per_second for r in rates if r.down_bytes_per_second > 0]
    ups = [r.up_bytes_per_second for r in rates if r.up_bytes_per_second > 0]
    if not downs and not ups:
        raise TemporaryError(
            f"none of {len(present)} nodes has measured its link yet"
            if present
            else "no node has come yet",
            next_step=f"wait until rounds have moved 4 MiB ('atoll nodes' shows links){instead}",
        )
    return MeasuredLinks(
        down_bits_per_second=8 * min(downs or ups),
        up_bits_per_second=8 * min(ups or downs),
        num_nodes=len(present),
        num_with_bbr=sum(node.heartbeat.congestion_control == "bbr" for node in present),
        arithmetic=min(_arithmetic_of(present), default=None),
    )


def _arithmetic_of(nodes: Iterable[pb.NodeStatus]) -> Iterator[float]:
    """Of each node that has told, in multiples of the tables that presets count with."""
    for node in nodes:
        told = node.heartbeat.exchange_speed
        if told.bytes_per_second > 0 and {told.uplink, told.downlink} <= CODEC_COSTS.keys():
            yield told.bytes_per_second / exchange_bytes_per_second(told.uplink, told.downlink)
