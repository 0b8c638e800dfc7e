"""Metrics: declared once with their meaning, filled with what holds now, written for Prometheus; a node's.

A metric without a value is left out, never 0. docs/reference.md lists all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from protocol.v1.session_pb2 import HeartbeatRequest
from protocol.wire.vitals import HELD_BY

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. The name of a counter ends with _total."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...] = ()


class Board(Collector):
    """The values of declared metrics as of one instant."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        self._declared = {metric.name: metric for metric in declared}
        assert len(self._declared) == len(declared), "a metric is declared twice"
        self._values: dict[str, dict[tuple[str, ...], float]] = {m.name: {} for m in declared}

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """Sets a value; None leaves it out. Raises KeyError for what is not declared."""
        metric = self._declared[name]
        if set(labels) != set(metric.labels):
            raise KeyError(f"{name} has the labels {metric.labels}, not {tuple(labels)}")
        if value is not None:
            self._values[name][tuple(labels[label] for label in metric.labels)] = value

    def collect(self) -> Iterable[Family]:
        """For prometheus-client: every metric that has a value."""
        for name, values in self._values.items():
            metric = self._declared[name]
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(name, metric.meaning, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            if values:
                yield family

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self)


# What is told of a node, by the coordinator of all nodes and by a node of itself: the same names.


_NODE = ("node", "node_id")

PARTS = ("compute", "local_communication", "publish", "adopt", "exchange", "waiting")
"""Of a round's time; together all of it."""

NODE_METRICS = (
    Metric(
        name="atoll_node_info",
        kind="gauge",
        meaning="1 for each node that is there, with what it is",
        labels=(*_NODE, "device", "mesh", "version"),
    ),
    Metric(
        name="atoll_node_outer_round",
        kind="gauge",
        meaning="Round of the outer state that the node holds",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_out_of_reach",
        kind="gauge",
        meaning="Members that it has no connection with; the coordinator tells of 16 at most",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_inner_step",
        kind="gauge",
        meaning="Inner steps done in the round that the node trains",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_training_loss_nats",
        kind="gauge",
        meaning="Mean training loss of its latest inner steps, nats per token or as a function of the run's "
        "own has it",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_tokens_per_second",
        kind="gauge",
        meaning="Training speed over its latest inner steps",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_time_share",
        kind="gauge",
        meaning="Share of the time of its latest round, by part; a part not measured is left out",
        labels=(*_NODE, "part"),
    ),
    Metric(
        name="atoll_node_flops_per_second",
        kind="gauge",
        meaning="Floating-point operations per second while it trained its latest round",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_peak_flops_per_second",
        kind="gauge",
        meaning="Most that its devices can do; left out when not known",
        labels=(*_NODE, "origin"),
    ),
    Metric(
        name="atoll_node_mfu_ratio",
        kind="gauge",
        meaning="Its FLOP/s over the peak of its devices; left out when the peak is not known",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_peak_memory_bytes",
        kind="gauge",
        meaning="Most memory of one of its ranks in its latest round",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_bytes_total",
        kind="counter",
        meaning="Bytes on the wire since the node started",
        labels=(*_NODE, "direction", "kind"),
    ),
    Metric(
        name="atoll_node_late_work_let_go_rounds_total",
        kind="counter",
        meaning="Late work that the node's process let go, in rounds' pseudo-gradients",
        labels=_NODE,
    ),
    Metric(
        name="atoll_node_link_bytes_per_second",
        kind="gauge",
        meaning="What its link to its peers carries; left out before it was measured",
        labels=(*_NODE, "direction"),
    ),
    Metric(
        name="atoll_node_upload_held",
        kind="gauge",
        meaning="1 for what keeps its uploads from going faster; left out while it uploads nothing",
        labels=(*_NODE, "by"),
    ),
    Metric(
        name="atoll_node_upload_pace_bytes_per_second",
        kind="gauge",
        meaning="The limit, or what the link is taken to carry, that its uploads are kept to",
        labels=(*_NODE, "by"),
    ),
    Metric(
        name="atoll_node_exchange_arithmetic_bytes_per_second",
        kind="gauge",
        meaning="fp32 that one of its cores encodes, decodes, digests and copies in an exchange",
        labels=_NODE,
    ),
)


def put_node(
    board: Board,
    *,
    node_name: str,
    node_id: str,
    device: str,
    version: str,
    heartbeat: HeartbeatRequest | None,
) -> None:
    """What is known of a node by its latest heartbeat; without one, only who it is."""
    beat = heartbeat or HeartbeatRequest()
    own = {"node": node_name, "node_id": node_id}
    board.put("atoll_node_info", 1, **own, device=device, mesh=beat.mesh, version=version)
    if heartbeat is None:
        return
    board.put("atoll_node_outer_round", beat.outer_round, **own)
    board.put("atoll_node_out_of_reach", len(beat.unreachable_ids), **own)
    board.put("atoll_node_inner_step", beat.inner_step, **own)
    board.put("atoll_node_training_loss_nats", beat.loss or None, **own)
    board.put("atoll_node_tokens_per_second", beat.tokens_per_second or None, **own)
    for counted in beat.wire:
        for direction, num_bytes in (
            ("sent", counted.sent_bytes),
            ("received", counted.received_bytes),
        ):
            board.put(
                "atoll_node_bytes_total", num_bytes, **own, direction=direction, kind=counted.kind
            )
    board.put("atoll_node_late_work_let_go_rounds_total", beat.let_go_rounds, **own)
    rates = beat.link_rates
    for direction, rate in (
        ("up", rates.up_bytes_per_second),
        ("down", rates.down_bytes_per_second),
    ):
        board.put("atoll_node_link_bytes_per_second", rate or None, **own, direction=direction)
    if beat.upload_pace.held_by in HELD_BY:
        held_by = {"by": beat.upload_pace.held_by}
        pace = beat.upload_pace.bytes_per_second or None
        board.put("atoll_node_upload_held", 1, **own, **held_by)
        board.put("atoll_node_upload_pace_bytes_per_second", pace, **own, **held_by)
    speed = beat.exchange_speed.bytes_per_second or None
    board.put("atoll_node_exchange_arithmetic_bytes_per_second", speed, **own)
    if beat.HasField("utilisation"):
        _put_utilisation(board, beat, own)


def _put_utilisation(board: Board, beat: HeartbeatRequest, own: dict[str, str]) -> None:
    made = beat.utilisation
    for part in PARTS:
        is_known = part != "local_communication" or made.HasField("local_communication_share")
        share = getattr(made, f"{part}_share") if is_known else None
        board.put("atoll_node_time_share", share, **own, part=part)
    board.put("atoll_node_flops_per_second", made.flops_per_second, **own)
    board.put("atoll_node_peak_memory_bytes", made.peak_memory_bytes, **own)
    board.put("atoll_node_mfu_ratio", made.mfu if made.HasField("mfu") else None, **own)
    if made.HasField("peak_flops_per_second"):
        origin = "measured" if made.is_peak_measured else "vendor"
        board.put(
            "atoll_node_peak_flops_per_second", made.peak_flops_per_second, **own, origin=origin
        )
