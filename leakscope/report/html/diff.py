"""The page of a difference: the verdict, layers, stacks as a differential icicle, counters, what was compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leakscope.correlate.stack_trees import stack_tree
from leakscope.model.diff import CounterDiff, Diff, SiteDiff
from leakscope.model.results import Growth, Row, Verdict
from leakscope.model.runs import CounterCourse
from leakscope.model.stack_tree import WeighedStack
from leakscope.model.words import KINDS_NOT_ADDED
from leakscope.quantities import counted, size
from leakscope.report.diff import SIGNS, diff_sentence, leading, work_sentence
from leakscope.report.html.icicle import SCRIPT, Difference, Measure, Root, cut_note, icicle_figure
from leakscope.report.html.page import page
from leakscope.report.html.parts import (
    Cell,
    Code,
    Figure,
    Finding,
    Headline,
    Part,
    Section,
    Table,
    Text,
    Value,
    plot_text,
)
from leakscope.report.html.stacks import CUDA_KINDS, may_back, view_of
from leakscope.report.html.units import byte_axis, bytes_cell, rate_cell
from leakscope.report.html.words import as_code, facts_of, verdict_sentence

MEASURES = (
    Measure("change", "bytes"),
    Measure("the larger of both", "bytes"),
    Measure("A, for the same work", "bytes", widths=False),
    Measure("B", "bytes", widths=False),
    Measure("more, beyond chance", "bytes", widths=False),
    Measure("less, beyond chance", "bytes", widths=False),
)
COMPARED = Difference(before=2, after=3, change=0, gain=4, loss=5)
WORDS = {"leak": "regression", "not_leak": "no regression"}
SITES, COUNTERS, BARS, FURTHER = 200, 100, 12, 5


def diff_page(
    diff: Diff,
    names: tuple[str, str],
    inputs: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]] = ((), ()),
    losses: tuple[Sequence[Row], Sequence[Row]] = ((), ()),
) -> str:
    """The whole file. ``names``, ``inputs`` and ``losses`` are of A and B."""
    sections = [
        Section("layers", "Layers", [*_layers_figure(diff), _layers_table(diff)]),
        Section("stacks", "Stacks that differ", _stacks(diff)),
        *([Section("counters", "Counters", _counters(diff))] if diff.counters else []),
        Section("inputs", "What was compared", _inputs(diff, names, inputs, losses), open=False),
    ]
    return page(
        f"leakscope diff: {Path(names[0]).name} and {Path(names[1]).name}", _headline(diff, names), sections, [SCRIPT]
    )


def _headline(diff: Diff, names: tuple[str, str]) -> Headline:
    verdict = diff.verdict
    more = "More in B for the same work"
    facts = [(more if name in ("Kept", "Gained") else name, value) for name, value in facts_of(verdict)]
    facts += [("Work", work_sentence(diff)), ("A, the baseline", names[0]), ("B", names[1])]
    further = [Finding(_word(one), verdict_sentence(one)) for one in diff.others[:FURTHER]]
    return Headline(_word(verdict), diff_sentence(diff).replace("`", "'"), facts, _next_steps(diff, names), further)


def _word(verdict: Verdict) -> str:
    return WORDS.get(verdict.verdict, verdict.verdict)


def _next_steps(diff: Diff, names: tuple[str, str]) -> list[str]:
    a, b = map(shlex.quote, names)
    gate = f"{as_code(f'leakscope check {b} --baseline {a}')} makes a gate of this comparison."
    if diff.verdict.verdict == "leak":
        return [
            f"{as_code(f'leakscope attribute {b} --report b.html')} shows the chain from the code to the bytes.",
            gate,
        ]
    if diff.verdict.verdict == "inconclusive":
        return [*(f"Missing: {what}." for what in diff.verdict.missing), "Record both with the same workload."]
    return [gate]


def _layers_figure(diff: Diff) -> list[Part]:
    layers = [layer.layer for layer in diff.layers]
    before, after = [d.expected_bytes for d in diff.layers], [float(d.b.live_bytes) for d in diff.layers]
    if not any((*before, *after)):
        return []
    unit = byte_axis(max(*before, *after))
    said = [f"{d.layer} {_signed(d.more_bytes)}" for d in diff.layers]
    figure = Figure(
        "layers-bars",
        "Live bytes by layer",
        [
            _bars("A, for the same work", layers, before, unit[1], "var(--muted)"),
            _bars("B", layers, after, unit[1], "var(--series-1)"),
        ],
        _bar_layout(unit[0]),
        f"Live bytes of B beyond those of A for the same work: {', '.join(said) or 'no layer has any'}.",
        height_px=110 + 60 * max(1, len(layers)),
    )
    return [figure]


def _bars(
    name: str, at: Sequence[str], values: Sequence[float], unit: float, colour: str, ends: Sequence[Growth] = ()
) -> dict[str, Any]:
    """Horizontal bars, drawn in units of so many bytes; ``ends``: their intervals."""
    bars: dict[str, Any] = {
        "type": "bar", "orientation": "h", "name": name, "y": list(at), "x": [value / unit for value in values],
        "text": [size(value) for value in values], "textposition": "none", "marker": {"color": colour},
        "hovertemplate": "%{y}: %{text}<extra>" + name + "</extra>",
    }  # fmt: skip
    if ends:
        bars["error_x"] = {
            "type": "data", "symmetric": False, "color": "var(--soft)",
            "array": [(end.ci_high - end.bytes_per_s) / unit for end in ends],
            "arrayminus": [(end.bytes_per_s - end.ci_low) / unit for end in ends],
        }  # fmt: skip
    return bars


def _bar_layout(title: str) -> dict[str, Any]:
    return {
        "barmode": "group", "xaxis": {"title": {"text": title}},
        "yaxis": {"autorange": "reversed", "type": "category"}, "legend": {"orientation": "h", "y": 1.15},
    }  # fmt: skip


def _layers_table(diff: Diff) -> Table:
    return Table(
        "Layers in A and B",
        ["layer", "live in A", "live in B", "more for the same work", "growth A", "growth B"],
        [
            [
                d.layer,
                bytes_cell(d.a.live_bytes),
                bytes_cell(d.b.live_bytes),
                _more(d.more_bytes),
                rate_cell(d.a.growth),
                rate_cell(d.b.growth),
            ]
            for d in diff.layers
        ],
        "Every byte counts once: blocks of malloc as the maps that back them. A rate is the mean after the warm-up.",
    )


def _stacks(diff: Diff) -> list[Part]:
    """The differential icicle and the sites that changed."""
    with_cuda = any(site.kind in CUDA_KINDS for site in diff.sites)
    tree = stack_tree([_weighed(site, with_cuda) for site in diff.sites], len(MEASURES))
    changed = diff.changed
    parts: list[Part] = []
    if tree.roots and any(tree.own[0].values()):
        roots = [Root(view, together=not apart) for view, apart in tree.roots]
        parts.append(
            icicle_figure(
                "stacks-icicle", "What B keeps beyond A, by stack", _description(diff), tree, MEASURES, roots, [""],
                difference=COMPARED,
            )
        )  # fmt: skip
        said = [
            "Width is the change of live bytes, whichever way it went, so that what stayed the same takes no room; "
            "“the larger of both” shows it too. Orange is more in B, blue less; grey is as before or within chance. "
            "Frames stand without lines and folders, so that code may move between the two runs.",
            "“All layers” leaves out kernel pages and device mappings: the GPU driver may back memory with them that "
            "the other layers count already."
            if with_cuda and any(apart and ":" not in view for view, apart in tree.roots)
            else "",
            cut_note(tree),
        ]
        parts.append(Text([line for line in said if line]))
    else:
        parts.append(Text(["No stack keeps more or less than in A."]))
    rows = [_site(site) for site in leading(changed, SITES)]
    rest = len(changed) - len(rows)
    parts.append(
        Table(
            f"Sites that changed beyond chance: {len(changed):,}, as before: {len(diff.sites) - len(changed):,}",
            [
                "",
                "layer",
                "of",
                "kept in A",
                "kept in B",
                "more",
                "objects in A",
                "objects in B",
                "growth B",
                "culprit",
            ],
            rows,
            f"{counted(rest, 'further site')}: `leakscope diff --json` has all." if rest > 0 else "",
        )
    )
    return parts


def _weighed(site: SiteDiff, with_cuda: bool) -> WeighedStack:
    a, b = site.expected_bytes, float(site.b.live_bytes)
    allocated = f"[{site.kind} {site.slab_cache}]" if site.slab_cache else f"[{site.kind}]"
    backs = with_cuda and may_back(site.kind, [kind for _, kind in site.frames])
    apart = site.kind in KINDS_NOT_ADDED or backs
    changed = 0.0 if site.change == "same" else b - a
    return WeighedStack(
        (view_of(site.layer, site.kind), "apart" if apart else ""),
        (*site.frames, (allocated, "memory")),
        (abs(b - a), max(a, b), a, b, max(0.0, changed), max(0.0, -changed)),
    )


def _description(diff: Diff) -> str:
    more = sum(site.more_bytes for site in diff.sites if site.more_bytes > 0)
    less = sum(site.more_bytes for site in diff.sites if site.more_bytes < 0)
    first, last = diff.sites[0], min(diff.sites, key=lambda site: site.more_bytes)
    said = [f"Stacks that keep more: {_signed(more)} in all; that keep less: {_signed(less)}."]
    if first.more_bytes > 0:
        said.append(f"Most gained {as_code(_who(first))} ({first.layer}): {_signed(first.more_bytes)}.")
    if last.more_bytes < 0:
        said.append(f"Most lost {as_code(_who(last))} ({last.layer}): {_signed(last.more_bytes)}.")
    return " ".join(said)


def _who(site: SiteDiff) -> str:
    return site.culprit or (site.stack[-1] if site.stack else "unknown code")


def _site(site: SiteDiff) -> list[Cell]:
    return [
        SIGNS[site.change],
        site.layer,
        site.slab_cache or site.kind,
        bytes_cell(site.a.live_bytes),
        bytes_cell(site.b.live_bytes),
        _more(site.more_bytes),
        site.a.live_objects,
        site.b.live_objects,
        rate_cell(site.b.growth),
        Code(_who(site)),
    ]


def _counters(diff: Diff) -> list[Part]:
    parts: list[Part] = []
    rated = [c for c in diff.counters if c.in_bytes and c.a and c.b and c.a.rate and c.b.rate][:BARS]
    if rated:
        names = [plot_text(c.name, 40) for c in rated]
        ends = [[_ends(course) for c in rated if (course := side(c))] for side in (lambda c: c.a, lambda c: c.b)]
        unit = byte_axis(max(abs(end) for side in ends for growth in side for end in (growth.ci_low, growth.ci_high)))
        apart = [c.name for c in rated if c.apart]
        rates = [[growth.bytes_per_s for growth in side] for side in ends]
        parts.append(
            Figure(
                "counters-bars",
                "How fast counters rise",
                [
                    _bars("A", names, rates[0], unit[1], "var(--muted)", ends[0]),
                    _bars("B", names, rates[1], unit[1], "var(--series-1)", ends[1]),
                ],
                _bar_layout(f"{unit[0]}/s, with 95 % intervals"),
                f"The intervals of the two rates are apart: {', '.join(apart)}."
                if apart
                else "The intervals of the two rates overlap for every counter.",
                height_px=110 + 44 * len(rated),
            )
        )
    moved = [c for c in diff.counters if c.a is None or c.b is None or c.apart or c.more]
    rest = len(moved) - COUNTERS
    parts.append(
        Table(
            f"Counters: {len(diff.counters):,}, of which {len(moved):,} moved or are in one run alone",
            ["counter", "rise in A", "rise in B", "rate A", "rate B", "rates"],
            [_counter(c) for c in moved[:COUNTERS]],
            "As they were read, not scaled by work." + (f" {rest:,} more: `--json` has all." if rest > 0 else ""),
        )
    )  # fmt: skip
    return parts


def _ends(course: CounterCourse) -> Growth:
    low, mean, high = course.rate or (0.0, 0.0, 0.0)
    return Growth(course.name, mean, low, high)


def _counter(counter: CounterDiff) -> list[Cell]:
    def amount(value: float | None, a_second: str = "") -> Value | None:
        if value is None:
            return None
        return Value((size(value) if counter.in_bytes else f"{value:,.6g}") + a_second, round(value, 3))

    rises = [amount(course.rise if course else None) for course in (counter.a, counter.b)]
    rates = [amount(c.rate[1] if c and c.rate else None, "/s") for c in (counter.a, counter.b)]
    return [counter.name, *rises, *rates, "apart" if counter.apart else ""]


def _inputs(
    diff: Diff,
    names: tuple[str, str],
    inputs: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]],
    losses: tuple[Sequence[Row], Sequence[Row]],
) -> list[Part]:
    said = [*diff.verdict.reasons, *(f"Not known: {what}" for what in diff.verdict.missing)]
    rows: list[list[Cell]] = [
        [
            side,
            Code(name),
            str(row.get("kind", "")),
            _complete(row),
            row.get("mem_events"),
            Code(shlex.join(row.get("command") or [])),
        ]
        for side, name, of in zip("AB", names, inputs, strict=True)
        for row in (of or [{}])
    ]
    lost: list[list[Cell]] = [
        [side, row.source, row.what, row.value, row.detail] for side, of in zip("AB", losses, strict=True) for row in of
    ]
    return [
        Text([line.replace("`", "'") for line in said]),
        Table("Evidence", ["", "name", "kind", "complete", "events", "command"], rows),
        Table("Losses: evidence that is known to be missing", ["", "source", "what", "count", "detail"], lost)
        if lost
        else Text(["No losses are known in A or B."]),
    ]


def _complete(row: dict[str, Any]) -> str:
    return "" if "complete" not in row else ("yes" if row["complete"] else "no")


def _more(value: float) -> Value:
    return Value(_signed(value), round(value, 3))


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + size(value)
