"""The JSON report: one object of schema ``leakscope-report/1``."""

from __future__ import annotations

from typing import Any

from leakscope.model.results import SCHEMA, Report


def report_json(report: Report) -> dict[str, Any]:
    """``report`` as plain JSON types.

    Keys: schema, verdict, findings (other verdicts, ranked), chains, sites (ranked by kept bytes, see
    ``sites_total``), layers, losses and reconciliation (rows of source, what, and count or bytes), joins (what each
    rule matched, left ambiguous and refused), clocks (residual of each source in ns), calibration
    (rss, vss and gpu_used against their references, where counters span two windows of 180 readings), stores (audits
    of key-value stores), inputs; and breakdown (by, groups) where one was asked for.
    """
    values = {
        "schema": SCHEMA,
        "verdict": report.verdict.to_json(),
        "findings": [finding.to_json() for finding in report.findings],
        "layers": [layer.to_json() for layer in report.layers],
        "chains": [chain.to_json() for chain in report.chains],
        "sites": [site.to_json() for site in report.sites],
        "sites_total": report.sites_total,
        "losses": [row.to_json() for row in report.losses],
        "reconciliation": [row.to_json() for row in report.reconciliation],
        "joins": [join.to_json() for join in report.joins],
        "clocks": [row.to_json() for row in report.clocks],
        "calibration": [one.to_json() for one in report.calibration],
        "stores": [store.to_json() for store in report.stores],
        "inputs": report.inputs,
    }
    return values | ({"breakdown": report.breakdown.to_json()} if report.breakdown else {})
