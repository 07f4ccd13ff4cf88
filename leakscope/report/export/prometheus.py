"""Prometheus' text format, for node_exporter's textfile collector or a push gateway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from leakscope.report.export.metrics import PREFIX, Metric

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_UNITS = {"By": "_bytes", "By/s": "_bytes_per_second", "{object}": "_objects", "s": "_seconds", "1": ""}


def prometheus(metrics: Iterable[Metric]) -> bytes:
    """The text, version 0.0.4, written by prometheus_client. Names end in their unit."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Family]:
            return families(metrics)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry)


def families(metrics: Iterable[Metric]) -> Iterator[Family]:
    """Families of prometheus_client, one a metric."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in metrics:
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        family = kind(metric_name(metric), metric.help, labels=metric.labels)
        for labels, value in metric.samples:
            family.add_metric(labels, value)
        yield family


def metric_name(metric: Metric) -> str:
    """``leakscope_layer_live_bytes``."""
    return f"{PREFIX}_{metric.name.replace('.', '_')}{_UNITS[metric.unit]}"
