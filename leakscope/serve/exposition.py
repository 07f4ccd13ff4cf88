"""What a scrape gets: the metrics of all sources, how reading them goes, and this process itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from leakscope import __version__
from leakscope.report.export.metrics import Metric
from leakscope.report.export.prometheus import families, metric_name
from leakscope.serve.objectives import thresholds
from leakscope.serve.source import EVIDENCE, Health, Polled, count, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

MAX_SERIES = 10_000
"""Of all sources together; a source whose metrics do not fit any more is left out and counted."""


def gathered(sources: Sequence[Polled]) -> list[Metric]:
    """One metric a name, with the samples of all sources."""
    states = [(polled.source.name, polled.source.kind, *polled.state()) for polled in sources]
    found, left_out, series = [], 0, 0
    for _, _, metrics, _ in states:
        size = sum(len(metric.samples) for metric in metrics)
        if series + size > MAX_SERIES:
            left_out += size
            continue
        series += size
        found += metrics
    health = [(name, kind, how) for name, kind, _, how in states]
    return merged([*_health(health), *_folding(left_out), *thresholds(), *found])


def merged(metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics of one name as one, in the order of their first; each series once, else Prometheus refuses all."""
    first: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in metrics:
        name = metric_name(metric)
        first.setdefault(name, metric)
        of = samples.setdefault(name, {})
        for key, value in metric.samples:
            of.setdefault(key, value)
    return [replace(metric, samples=tuple(samples[name].items())) for name, metric in first.items() if samples[name]]


def _health(sources: Sequence[tuple[str, str, Health]]) -> list[Metric]:
    tried = [(name, kind, how) for name, kind, how in sources if how.tried]
    help = "1 where the last reading of a source succeeded; absent before the first."
    return [
        Metric("build.info", "1", "The leakscope that serves.", ("version",), (((__version__,), 1.0),)),
        Metric("source.up", "1", help, (EVIDENCE, "kind"), tuple(((n, k), float(how.up)) for n, k, how in tried)),
        count("source.failures", "Readings that failed.", [((n,), float(how.failures)) for n, _, how in sources]),
        gauge(
            "source.last.read.timestamp", "s", "When a source was last read, Unix time; absent where it never was.",
            [((n,), how.last_read_s or None) for n, _, how in sources],
        ),
        gauge("source.read", "s", "How long the last reading took.", [((n,), how.took_s) for n, _, how in tried]),
    ]  # fmt: skip


def _folding(left_out: int) -> list[Metric]:
    return [Metric("series.left.out", "1", "Series beyond what one scrape may hold.", (), (((), float(left_out)),))]


def registry_of(gather: Callable[[], list[Metric]], *, itself: bool = True) -> CollectorRegistry:
    """A registry of prometheus_client that asks ``gather`` in each scrape. ``itself``: with memory and CPU of this
    process."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.registry import Collector

    class Served(Collector):
        def collect(self) -> Iterator[Family]:
            return families(gather())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Served())
    if itself:
        ProcessCollector(registry=registry)
    return registry
