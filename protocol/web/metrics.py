"""Metrics: declared once with their meaning, filled with what holds now, written for Prometheus.

A metric without a value is left out, never 0. docs/reference.md lists all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

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
