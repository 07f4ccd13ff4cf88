"""Memory of processes, control groups, devices and the host as metrics, and verdicts on it: the families that captures
and processes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from leakscope.model.results import Report, Verdict
from leakscope.report.export.metrics import Metric, metrics
from leakscope.serve.labels import Names
from leakscope.serve.source import gauge, of_evidence

Row = tuple[str, str, str, float]
"""(scope, scope_id, counter, value) of `samples`."""

PROCESS = ("rss", "vss", "pss", "rss_anon", "rss_file", "rss_shmem", "swap", "page_tables", "gpu_process_used")
THREADS, DESCRIPTORS = "threads", "fds"
CGROUP = (
    *("cgroup", "cgroup_anon", "cgroup_file", "cgroup_shmem", "cgroup_kernel", "cgroup_slab_unreclaimable"),
    *("cgroup_slab_reclaimable", "cgroup_sock", "cgroup_swap", "cgroup_limit"),
)
DEVICE = ("gpu_used", "gpu_total")
HOST = tuple(
    f"meminfo_{line}"
    for line in ("MemAvailable", "SUnreclaim", "SReclaimable", "KernelStack", "PageTables", "VmallocUsed", "Percpu")
)
MAX_LOSS_SERIES = 100
UNNAMED = "unknown"


class MemoryMetrics:
    """Metrics of one source's samples. Processes of one name are summed: no PID is a label."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._processes, self._groups, self._devices = Names(), Names(), Names()

    def of(self, rows: Iterable[Row], process_names: Mapping[str, str]) -> list[Metric]:
        """Of the last readings; ``process_names``: by scope_id."""
        memory: dict[tuple[str, ...], float] = {}
        counts: dict[str, dict[tuple[str, ...], float]] = {THREADS: {}, DESCRIPTORS: {}}
        groups: dict[tuple[str, ...], float] = {}
        devices: dict[tuple[str, ...], float] = {}
        host: dict[tuple[str, ...], float] = {}
        found: dict[str, set[str]] = {}
        for scope, scope_id, counter, value in rows:
            if scope == "process":
                label = self._processes.of(process_names.get(scope_id) or UNNAMED)
                found.setdefault(label, set()).add(scope_id)
                if counter in PROCESS:
                    _add(memory, (self._name, label, counter), value)
                elif counter in counts:
                    _add(counts[counter], (self._name, label), value)
            elif scope == "cgroup" and counter in CGROUP:
                _add(groups, (self._name, self._groups.of(scope_id), counter), value)
            elif scope == "device" and counter in DEVICE:
                _add(devices, (self._name, self._devices.of(scope_id), counter), value)
            elif scope == "host" and counter in HOST:
                _add(host, (self._name, counter), value)
        running = {(self._name, label): float(len(ids)) for label, ids in found.items()}
        made = [
            gauge("process.memory", "By", "Memory of processes, by name.", memory.items(), "process", "counter"),
            gauge("processes", "1", "Processes of a name.", running.items(), "process"),
            gauge("process.threads", "1", "Their threads.", counts[THREADS].items(), "process"),
            gauge("process.descriptors", "1", "Their open descriptors.", counts[DESCRIPTORS].items(), "process"),
            gauge("cgroup.memory", "By", "Memory of control groups.", groups.items(), "cgroup", "counter"),
            gauge("device.memory", "By", "Memory of GPUs.", devices.items(), "device", "counter"),
            gauge("host.memory", "By", "Kernel memory of the host.", host.items(), "counter"),
        ]
        kinds = (("process", self._processes), ("cgroup", self._groups), ("device", self._devices))
        folded = [((self._name, label), float(names.folded())) for label, names in kinds]
        made.append(gauge("names.folded", "1", "Names that share the label value `other`.", folded, "label"))
        return [metric for metric in made if metric.samples]


def _add(sums: dict[tuple[str, ...], float], key: tuple[str, ...], value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def report_metrics(name: str, report: Report) -> list[Metric]:
    """Of a report of one source: what `leakscope export --to prometheus` writes of it, without sites."""
    found = []
    for metric in of_evidence(
        metrics(report, [name] * (1 + max((t.source for t in report.layers), default=0)), 0), name
    ):
        if metric.name.startswith("site."):
            continue
        found.append(_folded(metric) if metric.name == "losses" else metric)
    return [*found, *_growth(name, report.verdict)]


def verdict_metrics(name: str, verdict: Verdict) -> list[Metric]:
    """Of a verdict without a report."""
    wanted = ("verdict", "verdict.confidence", "findings")
    return [one for one in report_metrics(name, Report(verdict)) if one.name in wanted or one.name.startswith("growth")]


def _growth(name: str, verdict: Verdict) -> list[Metric]:
    growth, forecast = verdict.growth, verdict.forecast
    metrics = []
    if growth is not None:
        key = (name, growth.counter)
        metrics = [
            gauge(
                "growth", "By/s", "Growth that the leading verdict is about.", [(key, growth.bytes_per_s)], "counter"
            ),
            gauge("growth.low", "By/s", "Lower end of its 95 % interval.", [(key, growth.ci_low)], "counter"),
            gauge("growth.high", "By/s", "Upper end of its 95 % interval.", [(key, growth.ci_high)], "counter"),
        ]
    if forecast is not None:
        help = "Until the limit is reached if the growth goes on."
        metrics.append(gauge("time.to.limit", "s", help, [((name, forecast.counter), forecast.expected_s)], "counter"))
    return metrics


def _folded(metric: Metric) -> Metric:
    """Losses by source and kind; with too many sources by kind alone."""
    if len(metric.samples) <= MAX_LOSS_SERIES:
        return metric
    sums: dict[tuple[str, ...], float] = {}
    for (evidence, _, what), value in metric.samples:
        _add(sums, (evidence, "other", what), value)
    return gauge(metric.name, metric.unit, metric.help, sums.items(), "source", "what")
