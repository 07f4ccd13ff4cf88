"""The objectives of one source as metrics: values, states with their hysteresis, whether goals are met."""

from __future__ import annotations

from collections.abc import Mapping

from leakscope.detect.slo.states import OBJECTIVES, STATES, UNKNOWN, Objective
from leakscope.report.export.metrics import Metric
from leakscope.serve.source import gauge

BY_NAME = {objective.name: objective for objective in OBJECTIVES}


class Objectives:
    """Keeps the last known state of each objective of a source."""

    def __init__(self, name: str, *objectives: Objective) -> None:
        self._name, self._objectives = name, objectives
        self._last: dict[str, str] = {}

    def metrics(self, values: Mapping[str, float | None], *, given: bool = False) -> list[Metric]:
        """For these values, by name of the objective; those that are missing are unknown, or (``given``) do not apply
        to the source."""
        applying = [one for one in self._objectives if not given or one.name in values]
        states = {}
        for one in applying:
            states[one.name] = state = one.state(values.get(one.name), self._last.get(one.name, STATES[0]))
            if state != UNKNOWN:
                self._last[one.name] = state
        known = [one for one in applying if states[one.name] != UNKNOWN]
        return [
            gauge(
                "slo.value", "1", "Value of an objective; absent while it is unknown.",
                (((self._name, one.name), values[one.name]) for one in known), "slo",
            ),
            gauge(
                "slo.met", "1", "1 where the value meets the goal; absent while it is unknown.",
                (((self._name, one.name), float(bool(one.met(values[one.name])))) for one in known), "slo",
            ),
            gauge(
                "slo.state", "1", "1 for the state that the value is in, 0 for the others.",
                (((self._name, name, word), float(word == state)) for name, state in states.items() for word in STATES),
                "slo", "state",
            ),
        ]  # fmt: skip


def thresholds() -> list[Metric]:
    """The goals and bounds of all objectives; the same in each scrape."""
    help = "What an objective asks for (goal) and where its states begin (suspected, critical)."
    values = tuple(
        ((one.name, which), getattr(one, which)) for one in OBJECTIVES for which in ("goal", "suspected", "critical")
    )
    return [Metric("slo.threshold", "1", help, ("slo", "threshold"), values)]
