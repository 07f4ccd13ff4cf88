"""The tables of an attribution's page: layers, sites, reconciliation, losses, joins, clocks, inputs and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.model.results import Report, Row, Site, Verdict
from leakscope.quantities import counted
from leakscope.report.cells import bare_frame
from leakscope.report.html.parts import Cell, Code, Lines, Part, Table, Text, Value
from leakscope.report.html.units import bytes_cell, duration_text, interval_text, rate_cell, share_cell
from leakscope.report.imports import import_lines
from leakscope.report.stores import store_lines

MAX_SITES = 60
MAX_FINDINGS = 50
MAX_ROWS = 200


def findings_table(findings: Sequence[Verdict]) -> Table:
    """Every verdict, ranked."""
    rows: list[list[Cell]] = []
    for number, one in enumerate(findings[:MAX_FINDINGS], 1):
        culprit = one.culprit
        name = (culprit and (culprit.frame or culprit.counter or culprit.object)) or ""
        rows.append(
            [
                number,
                one.verdict.replace("_", " "),
                one.kind,
                one.layer or None,
                Code(bare_frame(name)) if name else None,
                rate_cell(one.growth),
                interval_text(one.growth) if one.growth else None,
                None
                if one.leak_start_s is None
                else Value(duration_text(one.leak_start_s), round(one.leak_start_s, 3)),
                bytes_cell(one.kept_bytes),
                one.kept_objects,
                Value(f"{one.confidence:.2f}", round(one.confidence, 3)),
            ]
        )
    left = len(findings) - MAX_FINDINGS
    return Table(
        "Findings, ranked",
        (
            "#",
            "verdict",
            "class",
            "layer",
            "culprit",
            "rate",
            "95 % interval",
            "since",
            "kept",
            "objects",
            "confidence",
        ),
        rows,
        f"{left:,} more are in the JSON report." if left > 0 else "",
    )


def layers_table(report: Report, names: Mapping[int, str]) -> Table:
    """Totals by layer, and by capture where there are several."""
    several = len(names) > 1
    columns = ["layer", *(["capture"] if several else []), "kept at the end", "objects", "growth", "95 % interval"]
    columns += ["allocated", "frees not visible", "not added"]
    rows: list[list[Cell]] = [
        [
            one.layer,
            *([names.get(one.source, "")] if several else []),
            bytes_cell(one.live_bytes, one.standard_error_bytes),
            one.live_objects,
            rate_cell(one.growth),
            interval_text(one.growth) if one.growth else None,
            bytes_cell(one.allocated_bytes),
            bytes_cell(one.frees_not_visible_bytes),
            bytes_cell(one.not_added_bytes),
        ]
        for one in report.layers
    ]
    note = "Not added: memory whose bytes another kind counts already, and reservations."
    return Table("Layers", columns, rows, note)


def sites_table(report: Report) -> Table:
    """Sites, those that keep most first, with their stacks."""
    shown = [site for site in report.sites if site.frees_visible and site.added] or report.sites
    listed = sorted(shown, key=lambda site: -site.live_bytes)[:MAX_SITES]
    left = report.sites_total - len(listed)
    more = "keep less, their frees cannot be seen, or others count their bytes: --json has them."
    note = f"{counted(left, 'more site')}: they {more}" if left else ""
    if any(site.stack_sampled or site.bytes_sampled for site in listed):
        note = f"~ is an estimate from sampled stacks or sampled bytes. {note}"
    columns = ("site", "layer", "kind", "kept", "objects", "growth", "95 % interval", "kept share", "allocated", "id")
    return Table("Sites, those that keep most first", columns, [_site_row(site) for site in listed], note)


def _site_row(site: Site) -> list[Cell]:
    name = bare_frame(site.culprit_frame) or site.slab_cache or site.kind
    mark = "~" if site.stack_sampled or site.bytes_sampled else ""
    kept = bytes_cell(site.live_bytes, site.standard_error_bytes if site.bytes_sampled else 0.0)
    assert kept is not None
    return [
        Lines(name, [*(f"range {r}" for r in site.ranges), *site.stack]) if site.stack else Code(name),
        site.layer,
        site.slab_cache or site.kind,
        Value(mark + kept.text, kept.raw),
        site.live_objects,
        rate_cell(site.growth),
        interval_text(site.growth) if site.growth else None,
        share_cell(site.kept_share),
        bytes_cell(site.allocated_bytes),
        site.id,
    ]


def reconciliation_parts(report: Report) -> list[Part]:
    """Counters against what events keep, and what could not be compared."""
    rows: list[list[Cell]] = []
    entries = report.reconciliation
    for index, row in enumerate(entries):
        if row.value is not None and index + 2 < len(entries) and entries[index + 2].what == "unexplained":
            kept, rest = entries[index + 1], entries[index + 2]
            rows.append(
                [row.source, row.what, bytes_cell(row.value), kept.what, bytes_cell(kept.value),
                 bytes_cell(rest.value), row.detail or None]
            )  # fmt: skip
    parts: list[Part] = []
    if rows:
        columns = ("source", "counter", "grew by", "events", "keep", "unexplained", "detail")
        parts.append(Table("Counters against events", columns, rows))
    missing = [f"{row.source}: {row.what}." for row in entries if row.value is None]
    return [*parts, *([Text(missing)] if missing else [])]


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """Rows of losses or clocks."""
    cells: list[list[Cell]] = [[r.source, r.what, r.value, r.detail or None] for r in rows[:MAX_ROWS]]
    note = f"{len(rows) - MAX_ROWS:,} more are in the JSON report." if len(rows) > MAX_ROWS else ""
    return Table(title, ("source", "what", rows[0].unit if rows else "count", "detail"), cells, note)


def joins_table(report: Report) -> Table:
    """What joined evidence of two sources, and what was refused."""
    rows: list[list[Cell]] = [
        [
            join.rule,
            f"{join.left} with {join.right}",
            join.matched,
            join.ambiguous,
            join.refused,
            None if join.confidence is None else Value(f"{join.confidence:.2f}", round(join.confidence, 3)),
            Lines(join.reasons[0], join.reasons) if join.reasons else None,
        ]
        for join in report.joins[:MAX_ROWS]
    ]
    columns = ("rule", "what", "matched", "ambiguous", "refused", "confidence", "reasons")
    return Table("Joins, by rule", columns, rows)


def hidden_table(sites: Sequence[Site]) -> Table:
    """Sites whose frees cannot be seen: never a finding."""
    rows: list[list[Cell]] = [
        [
            site.slab_cache or site.kind,
            Code(bare_frame(site.culprit_frame)),
            site.allocated_objects,
            bytes_cell(site.live_bytes),
        ]
        for site in sites[:MAX_ROWS]
    ]
    columns = ("cache", "allocated by", "allocations", "not seen freed")
    return Table("Frees not visible: freed without a trace, so never a finding", columns, rows)


def calibration_table(report: Report) -> Table:
    """The document's calibration of counters beside the robust one."""
    rows: list[list[Cell]] = [
        [
            one.dimension,
            one.reference or "its own level",
            one.readings,
            *(Value(f"{share:.2%}", round(share, 6)) for share in (one.before, one.after_z, one.after_robust)),
            bytes_cell(one.z_swallowed_bytes),
            bytes_cell(one.diverged_bytes),
        ]
        for one in report.calibration
    ]
    columns = ("dimension", "against", "readings", "deviation before", "after the z-rule", "after the robust form")
    note = "The z-rule moves its baseline with what it should find and swallows slow leaks; no verdict rests on it."
    return Table("Calibration", (*columns, "swallowed by the z-rule", "logged by the robust form"), rows, note)


def stores_parts(report: Report) -> list[Part]:
    """Audits of key-value stores."""
    parts: list[Part] = []
    for audit in report.stores:
        parts.append(Text(list(store_lines(audit))))
        rows: list[list[Cell]] = [
            [
                Code(group.pattern),
                Value(str(group.keys), round(group.keys.value)),
                bytes_cell(group.bytes.value, group.bytes.error),
                Value(str(group.without_ttl), round(group.without_ttl.value)),
                bytes_cell(group.without_ttl_bytes.value, group.without_ttl_bytes.error),
                Value(str(group.stale), round(group.stale.value)),
                Value(duration_text(group.idle_s), round(group.idle_s, 1)),
            ]
            for group in audit.groups[:MAX_ROWS]
        ]
        columns = ("keys", "number", "bytes", "without TTL", "their bytes", "idle 7 d", "longest idle")
        parts.append(Table(f"Keys of {audit.source} by pattern", columns, rows))
    return parts


def inputs_parts(report: Report) -> list[Part]:
    """What the page was made of, what is wrong with it, and what it cannot say."""
    rows: list[list[Cell]] = []
    captures = [one for one in report.inputs if "limits" not in one]
    for one in captures:
        problems = "; ".join(map(str, one.get("problems", ())))
        command = " ".join(map(str, one.get("command", ())))
        rows.append([Code(str(one.get("path", ""))), "yes" if one.get("complete", True) else "no",
                     _count(one, "mem_events"), Code(command) if command else None, problems or None])  # fmt: skip
    parts: list[Part] = []
    if rows:
        parts.append(Table("Captures", ("path", "complete", "memory events", "command", "problems"), rows))
    lines = [line.strip() for line in import_lines([one for one in report.inputs if "limits" in one])]
    return [*parts, *([Text(lines)] if lines else [])]


def _count(one: Mapping[str, Any], name: str) -> int | None:
    value = one.get(name)
    return int(value) if isinstance(value, int) else None
