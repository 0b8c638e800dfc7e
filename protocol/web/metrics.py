"""Metrics: each declared once, with its meaning and how it follows from what is told; and those of a node.

A metric without a value is left out, never 0. docs/reference.md lists all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.v1.session_pb2 import HeartbeatRequest, Utilisation
from protocol.wire.vitals import HELD_BY

CONTENT_TYPE = CONTENT_TYPE_LATEST


Told = TypeVar("Told")

Values = float | None | Mapping[tuple[str, ...], float | None]
"""What is known: a value, or one for each of what its own labels may say. None is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[Told]):
    """One metric. The name of a counter ends with _total; of `labels` those of its values are the last."""

    name: str
    meaning: str
    of: Callable[[Told], Values]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """As Prometheus calls it."""
        return "counter" if self.name.endswith("_total") else "gauge"


class Board(Collector):
    """The values of metrics as of one instant."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def tell(self, metrics: Iterable[Metric[Told]], told: Told, *whose: str) -> None:
        """Adds what is known; `whose` are the first labels of all. Raises ValueError for another number."""
        for metric in metrics:
            values = metric.of(told)
            each = values if isinstance(values, Mapping) else {(): values}
            for own, value in each.items():
                if value is not None:
                    self._put(metric, (*whose, *own), value)

    def _put(self, metric: Metric[Any], labels: tuple[str, ...], value: float) -> None:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
        if metric.name not in self._families:
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            self._families[metric.name] = kind(metric.name, metric.meaning, labels=metric.labels)
        self._families[metric.name].add_metric(labels, value)

    def collect(self) -> Iterable[Family]:
        """For prometheus-client: every metric that has a value."""
        return self._families.values()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self)


PARTS = ("compute", "local_communication", "publish", "adopt", "exchange", "waiting")
"""Of a round's time; together all of it."""


def by_direction_and_kind(counts: Iterable[Any]) -> Mapping[tuple[str, ...], float]:
    """Bytes of messages that have sent and received ones of each kind."""
    sent = {("sent", each.kind): each.sent_bytes for each in counts}
    return sent | {("received", each.kind): each.received_bytes for each in counts}


def _in_its_round(read: Callable[[Utilisation], Values]) -> Callable[[HeartbeatRequest], Values]:
    """Of what the node made of its latest round, where it trained in it."""
    return lambda beat: read(beat.utilisation) if beat.HasField("utilisation") else None


def _shares(made: Utilisation) -> Values:
    shares: dict[tuple[str, ...], float] = {
        (part,): getattr(made, f"{part}_share") for part in PARTS
    }
    if not made.HasField("local_communication_share"):
        del shares["local_communication",]
    return shares


def _peak(made: Utilisation) -> Values:
    if not made.HasField("peak_flops_per_second"):
        return None
    origin = "measured" if made.is_peak_measured else "vendor"
    return {(origin,): made.peak_flops_per_second}


def _held_by(beat: HeartbeatRequest, value: float | None) -> Values:
    held_by = beat.upload_pace.held_by
    return {(held_by,): value} if held_by in HELD_BY else None


def _link_rates(beat: HeartbeatRequest) -> Values:
    rates = beat.link_rates
    up, down = rates.up_bytes_per_second, rates.down_bytes_per_second
    return {("up",): up or None, ("down",): down or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTold:
    """What is known of a node: without a heartbeat, only who it is."""

    node_name: str
    node_id: str
    device: str
    version: str
    heartbeat: HeartbeatRequest | None


_NODE = ("node", "node_id")

_INFO: Metric[NodeTold] = Metric(
    name="atoll_node_info",
    meaning="1 for each node that is there, with what it is",
    labels=(*_NODE, "device", "mesh", "version"),
    of=lambda node: {(node.device, node.heartbeat.mesh if node.heartbeat else "", node.version): 1},
)

_OF_HEARTBEAT: tuple[Metric[HeartbeatRequest], ...] = (
    Metric(
        name="atoll_node_outer_round",
        meaning="Round of the outer state that the node holds",
        labels=_NODE,
        of=lambda beat: beat.outer_round,
    ),
    Metric(
        name="atoll_node_out_of_reach",
        meaning="Members that it has no connection with; the coordinator tells of 16 at most",
        labels=_NODE,
        of=lambda beat: len(beat.unreachable_ids),
    ),
    Metric(
        name="atoll_node_inner_step",
        meaning="Inner steps done in the round that the node trains",
        labels=_NODE,
        of=lambda beat: beat.inner_step,
    ),
    Metric(
        name="atoll_node_training_loss_nats",
        meaning="Mean training loss of its latest inner steps",
        labels=_NODE,
        of=lambda beat: beat.loss or None,
    ),
    Metric(
        name="atoll_node_tokens_per_second",
        meaning="Training speed over its latest inner steps",
        labels=_NODE,
        of=lambda beat: beat.tokens_per_second or None,
    ),
    Metric(
        name="atoll_node_time_share",
        meaning="Share of the time of its latest round, by part",
        labels=(*_NODE, "part"),
        of=_in_its_round(_shares),
    ),
    Metric(
        name="atoll_node_flops_per_second",
        meaning="Floating-point operations per second while it trained its latest round",
        labels=_NODE,
        of=_in_its_round(lambda made: made.flops_per_second),
    ),
    Metric(
        name="atoll_node_peak_flops_per_second",
        meaning="Most that its devices can do",
        labels=(*_NODE, "origin"),
        of=_in_its_round(_peak),
    ),
    Metric(
        name="atoll_node_mfu_ratio",
        meaning="Its FLOP/s over the peak of its devices",
        labels=_NODE,
        of=_in_its_round(lambda made: made.mfu if made.HasField("mfu") else None),
    ),
    Metric(
        name="atoll_node_peak_memory_bytes",
        meaning="Most memory of one of its ranks in its latest round",
        labels=_NODE,
        of=_in_its_round(lambda made: made.peak_memory_bytes),
    ),
    Metric(
        name="atoll_node_bytes_total",
        meaning="Bytes on the wire since the node started",
        labels=(*_NODE, "direction", "kind"),
        of=lambda beat: by_direction_and_kind(beat.wire),
    ),
    Metric(
        name="atoll_node_late_work_let_go_rounds_total",
        meaning="Late work that the node's process let go, in rounds' pseudo-gradients",
        labels=_NODE,
        of=lambda beat: beat.let_go_rounds,
    ),
    Metric(
        name="atoll_node_link_bytes_per_second",
        meaning="What its link to its peers carries",
        labels=(*_NODE, "direction"),
        of=_link_rates,
    ),
    Metric(
        name="atoll_node_upload_held",
        meaning="1 for what keeps its uploads from going faster",
        labels=(*_NODE, "by"),
        of=lambda beat: _held_by(beat, 1),
    ),
    Metric(
        name="atoll_node_upload_pace_bytes_per_second",
        meaning="The limit, or what the link is taken to carry, that its uploads are kept to",
        labels=(*_NODE, "by"),
        of=lambda beat: _held_by(beat, beat.upload_pace.bytes_per_second or None),
    ),
    Metric(
        name="atoll_node_exchange_arithmetic_bytes_per_second",
        meaning="fp32 that one of its cores encodes, decodes, digests and copies in an exchange",
        labels=_NODE,
        of=lambda beat: beat.exchange_speed.bytes_per_second or None,
    ),
)

NODE_METRICS: tuple[Metric[Any], ...] = (_INFO, *_OF_HEARTBEAT)
"""What is told of a node, by the coordinator of all nodes and by a node of itself: the same names."""


def put_node(board: Board, node: NodeTold) -> None:
    """What is known of a node by its latest heartbeat."""
    whose = (node.node_name, node.node_id)
    board.tell((_INFO,), node, *whose)
    if node.heartbeat is not None:
        board.tell(_OF_HEARTBEAT, node.heartbeat, *whose)
