"""Measuring a report against budgets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leakscope.detect.profile import fingerprint, sum_of
from leakscope.detect.runs import joined
from leakscope.errors import BadInputError
from leakscope.gate.budgets import Budget
from leakscope.model.gate import Check, Measured
from leakscope.model.results import Growth, Report, Site
from leakscope.model.runs import CounterCourse, Run
from leakscope.quantities import size

Z95 = 1.96
BACKED = frozenset({"heap", "pool_block"})
"""Kinds whose bytes other kinds count as well, where those were recorded."""


@dataclass(frozen=True)
class Measure:
    """A figure with its 95 % interval; exact figures have none."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float, error: float = 0.0) -> Measure:
        """A figure with a standard error."""
        return cls(value, value - Z95 * error, value + Z95 * error)

    def per(self, units: float) -> Measure:
        """The figure for each of ``units``."""
        return Measure(self.value / units, self.low / units, self.high / units)

    def outcome(self, limit: float) -> str:
        """``pass`` within the limit, ``fail`` certainly beyond it, else ``inconclusive``."""
        if self.value <= limit:
            return "pass"
        return "fail" if self.low > limit else "inconclusive"


def budget_checks(report: Report, budgets: Sequence[Budget], hidden: Collection[str]) -> list[Check]:
    """A check for every budget: its worst limit decides. ``hidden``: ids of sites that are suppressed.

    Raises BadInputError for a unit of work that the evidence does not count.
    """
    run = joined(report.runs)
    checks = []
    for budget in budgets:
        if budget.what == "counter":
            measured = _of_counters(budget, run)
        else:
            measured = _of_sites(budget, _counted(budget, report.sites, hidden), run)
        checks.append(_check(budget, measured))
    return checks


def _counted(budget: Budget, sites: Sequence[Site], hidden: Collection[str]) -> list[Site]:
    """Those of ``sites`` that a rule sums, but for the hidden ones.

    Each byte counts once in a layer: blocks of malloc and of caching allocators do where what backs them was not
    recorded. A rule for sites may ask for such blocks any time.
    """
    covered = [site for site in sites if site.frees_visible and budget.covers(site)]
    backed = budget.what == "site" or not any(site.added for site in covered)
    return [s for s in covered if s.id not in hidden and (s.added or (backed and s.kind in BACKED))]


def _of_sites(budget: Budget, sites: Sequence[Site], run: Run) -> dict[str, Measure]:
    """Name of a limit → its figure over these sites together."""
    error = sum(site.standard_error_bytes**2 for site in sites) ** 0.5
    kept = Measure.exactly(float(sum(site.live_bytes for site in sites)), error)
    found: dict[str, Measure] = {}
    for limit, _ in budget.limits:
        if limit == "kept":
            found[limit] = kept
        elif limit == "objects":
            found[limit] = Measure.exactly(float(sum(site.live_objects for site in sites)))
        elif limit == "per_unit":
            found[limit] = kept.per(_units(budget, run))
        else:
            rate: Growth | None = None
            for site in sites:
                rate = sum_of(rate, site.growth)
            found[limit] = Measure(rate.bytes_per_s, rate.ci_low, rate.ci_high) if rate else Measure(0.0, 0.0, 0.0)
    return found


def _of_counters(budget: Budget, run: Run) -> dict[str, Measure]:
    """The worst of the counters that the rule names; {} where there are none."""
    found: dict[str, Measure] = {}
    for counter in run.counters:
        if budget.names(counter.name):
            for limit, _ in budget.limits:
                measured = _of_counter(limit, counter, budget, run)
                if measured is not None and (limit not in found or measured.value > found[limit].value):
                    found[limit] = measured
    return found


def _of_counter(limit: str, counter: CounterCourse, budget: Budget, run: Run) -> Measure | None:
    if limit == "peak":
        return Measure.exactly(counter.peak)
    if limit == "growth":
        return Measure.exactly(counter.rise)
    if limit == "per_unit":
        return Measure.exactly(counter.rise).per(_units(budget, run))
    if counter.rate is None:
        return None
    low, value, high = counter.rate
    return Measure(value, low, high)


def _units(budget: Budget, run: Run) -> float:
    units = run.totals.get(budget.unit) or run.marks.get(budget.unit) or 0.0
    if not units:
        known = ", ".join([*run.totals, *run.marks][:8]) or "none"
        raise BadInputError(f"{budget.where}: unit {budget.unit}: the evidence counts no such work; it has: {known}")
    return float(units)


def _check(budget: Budget, measured: dict[str, Measure]) -> Check:
    name = f"{budget.what} {budget.name}"
    key = fingerprint(("budget", budget.what, budget.name, budget.layer, budget.where.rpartition(":")[2]))
    limits = dict(budget.limits)
    missing = [limit for limit in limits if limit not in measured]
    worst, outcome = "", "pass"
    for limit, figure in measured.items():
        this = figure.outcome(limits[limit])
        if not worst or ("pass", "inconclusive", "fail").index(this) > ("pass", "inconclusive", "fail").index(outcome):
            worst, outcome = limit, this
    said = [_said(limit, figure, limits[limit], budget) for limit, figure in measured.items()]
    if missing:
        outcome = outcome if outcome == "fail" else "inconclusive"
        said.append(f"not measured: {', '.join(missing)} (the evidence has no such counter, or too few readings)")
    return Check(
        "budget",
        outcome,
        f"budget: {name}",
        f"{budget.where}: {'; '.join(said)}",
        key,
        layer=budget.layer,
        counter=budget.name if budget.what == "counter" else "",
        measured=measured[worst].value if worst else None,
        limit=limits[worst] if worst else None,
        unit=_unit(worst, budget) if worst else "",
        measures=tuple(
            Measured(
                limit, one.value, one.low, one.high, limits[limit], _unit(limit, budget), one.outcome(limits[limit])
            )
            for limit, one in measured.items()
        ),
    )


def _unit(limit: str, budget: Budget) -> str:
    return {"rate": "bytes/s", "objects": "objects", "per_unit": f"bytes per {budget.unit}"}.get(limit, "bytes")


def _said(limit: str, figure: Measure, allowed: float, budget: Budget) -> str:
    def shown(value: float) -> str:
        if limit == "objects":
            return f"{value:,.0f} objects"
        after = {"rate": "/s", "per_unit": f" per {budget.unit}"}.get(limit, "")
        return f"{size(value)}{after}"

    what = {"pass": "within", "fail": "over", "inconclusive": "perhaps over"}[figure.outcome(allowed)]
    interval = f" ({shown(figure.low)} … {shown(figure.high)})" if figure.high > figure.low else ""
    return f"{limit} {shown(figure.value)}{interval}, {what} {shown(allowed)}"
