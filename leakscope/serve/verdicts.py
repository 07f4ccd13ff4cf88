"""Verdicts on what is read live: looks at the readings so far, at most 5 % false alarms in each 72 hours of a watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from leakscope.model.results import Verdict
from leakscope.report.export.metrics import Metric
from leakscope.serve.memory import verdict_metrics
from leakscope.soak.watch import Plan, Watch

HORIZON_S = 72 * 3600.0
EVERY_S = 30.0
"""Readings are taken so far apart at least."""
SLACK = 0.9
NOT_YET = Verdict("inconclusive", "window_too_short", missing=("ten minutes of readings",))


class LiveVerdict:
    """Judges one source. A watch lasts for its horizon; the next begins halfway, so that it knows the service when it
    takes over: memory stays bounded however long a server runs."""

    def __init__(
        self,
        name: str,
        look_s: float,
        limit_bytes: float | None = None,
        cgroup: str = "",
        byte_counters: Sequence[str] = (),
    ) -> None:
        """:param look_s: the time between looks; ``byte_counters``: the counters in bytes, where their names do not
        say it."""
        self._name = name
        self._plan = Plan(name, "", HORIZON_S, look_s, limit_bytes, cgroup=cgroup)
        self._byte_counters = byte_counters
        self._watches: list[tuple[float, Watch]] = []  # (when it began, in seconds), oldest first
        self._taken_s = float("-inf")

    def take(self, now_s: float, feed: Callable[[Watch, float], None]) -> None:
        """Look when it is time, after ``feed`` gave its reading to each watch; it is told when the watch began."""
        if now_s - self._taken_s < SLACK * EVERY_S:
            return
        self._taken_s = now_s
        if not self._watches or now_s - self._watches[-1][0] >= HORIZON_S / 2:
            watch = Watch(self._plan)
            if self._byte_counters:
                watch.declare(self._byte_counters)
            self._watches.append((now_s, watch))
        if now_s - self._watches[0][0] >= HORIZON_S:
            del self._watches[0]
        for began_s, watch in self._watches:
            feed(watch, began_s)
            watch.advance(now_s - began_s)

    @property
    def verdict(self) -> Verdict:
        """Of the last look; growth that is not beyond chance over all looks is no leak yet."""
        looks = self._watches[0][1].looks if self._watches else []
        if not looks:
            return NOT_YET
        verdict = replace(looks[-1].verdict, forecast=looks[-1].forecast)
        return (
            replace(verdict, verdict="inconclusive") if verdict.verdict == "leak" and not looks[-1].alarm else verdict
        )

    def told(self, now_s: float, values: Mapping[str, float | None]) -> list[Metric]:
        """Take one reading of counters that a service itself tells, unknown ones left out; metrics of the verdict."""
        known = {name: value for name, value in values.items() if value is not None}
        self.take(now_s, lambda watch, began_s: watch.add_values(now_s - began_s, known))
        return self.metrics()

    def metrics(self) -> list[Metric]:
        """Of the verdict."""
        return verdict_metrics(self._name, self.verdict)
