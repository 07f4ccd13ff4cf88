"""The page of a difference: the verdict, layers, stacks as a differential icicle, counters, what was compared."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from leakscope.correlate.stack_trees import stack_tree
from leakscope.model.diff import CounterDiff, Diff, Holding, SiteDiff
from leakscope.model.results import Growth, Row, Verdict
from leakscope.model.runs import CounterCourse
from leakscope.model.stack_tree import WeighedStack
from leakscope.model.words import KINDS_NOT_ADDED
from leakscope.quantities import counted, rate, size
from leakscope.report.diff import SIGNS, diff_sentence, leading, work_sentence
from leakscope.report.html.icicle import SCRIPT, Measure, Root, cut_note, icicle_figure
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
from leakscope.report.html.stacks import may_back

MEASURES = (
    Measure("change", "bytes"),
    Measure("the larger of both", "bytes"),
    Measure("A, for the same work", "bytes", widths=False),
    Measure("B", "bytes", widths=False),
)
A, B = 2, 3
WORDS = {"leak": "regression", "not_leak": "no regression"}
SITES, COUNTERS, BARS = 200, 100, 12


def diff_page(
    diff: Diff,
    names: tuple[str, str],
    inputs: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]] = ((), ()),
    losses: tuple[Sequence[Row], Sequence[Row]] = ((), ()),
) -> str:
    """The whole file. ``names``, ``inputs`` and ``losses`` are of A and B."""
    sections = [
        Section("layers", "Layers", [_layers_figure(diff), _layers_table(diff)]),
        Section("stacks", "Stacks that differ", _stacks(diff)),
        *([Section("counters", "Counters", _counters(diff))] if diff.counters else []),
        Section("inputs", "What was compared", _inputs(diff, names, inputs, losses), open=False),
    ]
    return page(f"leakscope diff: {names[0]} and {names[1]}", _headline(diff, names), sections, [SCRIPT])


def _headline(diff: Diff, names: tuple[str, str]) -> Headline:
    verdict = diff.verdict
    facts = [
        ("More in B for the same work", size(verdict.kept_bytes) if verdict.kept_bytes else ""),
        ("Growth", _growth(verdict.growth)),
        ("Start", f"{verdict.leak_start_s:,.1f} s after the start of B" if verdict.leak_start_s is not None else ""),
        ("Culprit", _named(verdict)),
        ("Layer", verdict.layer),
        ("Class", verdict.kind),
        ("Confidence", f"{verdict.confidence:.0%}"),
        ("Work", work_sentence(diff)),
        ("A, the baseline", names[0]),
        ("B", names[1]),
    ]
    further = [Finding(WORDS.get(v.verdict, v.verdict), _plain(_finding(v))) for v in diff.others]
    return Headline(
        WORDS.get(verdict.verdict, verdict.verdict),
        _plain(diff_sentence(diff)),
        [(name, value) for name, value in facts if value],
        _next_steps(diff, names),
        further,
    )


def _next_steps(diff: Diff, names: tuple[str, str]) -> list[str]:
    a, b = (_plain(shlex.quote(name)) for name in names)
    if diff.verdict.verdict == "inconclusive":
        return [*(f"Missing: {_plain(what)}" for what in diff.verdict.missing), "Record both with the same workload."]
    gate = f"`leakscope check {b} --baseline {a}` makes a gate of this comparison."
    if diff.verdict.verdict == "leak":
        return [f"`leakscope attribute {b} --report b.html` shows the chain from the code to the bytes.", gate]
    return [gate]


def _finding(verdict: Verdict) -> str:
    grows = f", {rate(verdict.growth.bytes_per_s)}" if verdict.growth else ""
    return f"{_named(verdict) or 'unknown code'} ({verdict.layer or 'counter'}): {size(verdict.kept_bytes)}{grows}"


def _named(verdict: Verdict) -> str:
    culprit = verdict.culprit
    return (culprit.frame or culprit.slab_cache or culprit.counter or culprit.object) if culprit else ""


def _plain(text: str) -> str:
    """Backquotes mean code in a page; a name has none."""
    return text.replace("`", "'")


def _growth(growth: Growth | None) -> str:
    if growth is None:
        return ""
    return f"{rate(growth.bytes_per_s)} ({rate(growth.ci_low)} to {rate(growth.ci_high)})"


def _layers_figure(diff: Diff) -> Figure:
    layers = [layer.layer for layer in diff.layers]
    said = [f"{d.layer} {_signed(d.more_bytes)}" for d in diff.layers]
    bars = [
        _bars("A, for the same work", layers, [d.expected_bytes for d in diff.layers], "var(--muted)"),
        _bars("B", layers, [float(d.b.live_bytes) for d in diff.layers], "var(--series-1)"),
    ]
    return Figure(
        "layers-bars", "Live bytes by layer", bars, _bar_layout("bytes"),
        f"Live bytes of B beyond those of A for the same work: {', '.join(said) or 'no layer has any'}.",
        height_px=110 + 60 * max(1, len(layers)),
    )  # fmt: skip


def _bars(
    name: str, at: Sequence[str], values: Sequence[float], colour: str, ends: Sequence[Growth] = ()
) -> dict[str, Any]:
    """Horizontal bars; ``ends``: their intervals."""
    bars: dict[str, Any] = {
        "type": "bar", "orientation": "h", "name": name, "y": list(at), "x": list(values),
        "text": [size(value) for value in values], "textposition": "none", "marker": {"color": colour},
        "hovertemplate": "%{y}: %{text}<extra>" + name + "</extra>",
    }  # fmt: skip
    if ends:
        bars["error_x"] = {
            "type": "data", "symmetric": False, "color": "var(--soft)",
            "array": [end.ci_high - end.bytes_per_s for end in ends],
            "arrayminus": [end.bytes_per_s - end.ci_low for end in ends],
        }  # fmt: skip
    return bars


def _bar_layout(title: str) -> dict[str, Any]:
    return {
        "barmode": "group", "xaxis": {"title": {"text": title}, "tickformat": ".3s"},
        "yaxis": {"autorange": "reversed", "type": "category"}, "legend": {"orientation": "h", "y": 1.15},
    }  # fmt: skip


def _layers_table(diff: Diff) -> Table:
    return Table(
        "Layers in A and B",
        ["layer", "live in A", "live in B", "more for the same work", "growth A", "growth B"],
        [
            [d.layer, _bytes(d.a.live_bytes), _bytes(d.b.live_bytes), _more(d.more_bytes), _rate(d.a), _rate(d.b)]
            for d in diff.layers
        ],
        "Every byte counts once; a rate is the mean growth after the warm-up.",
    )


def _stacks(diff: Diff) -> list[Part]:
    """The differential icicle and the sites that changed."""
    weighed = [(_weighed(site), site) for site in diff.sites]
    tree = stack_tree([stack for stack, _ in weighed], len(MEASURES))
    changed = diff.changed
    parts: list[Part] = []
    if tree.roots and any(tree.own[0].values()):
        roots = [Root(layer, 0, together == "together") for layer, together in tree.roots]
        parts.append(
            icicle_figure(
                "stacks-icicle", "What B keeps beyond A, by stack", _description(diff), tree, MEASURES, roots, [""],
                difference=(A, B),
            )
        )  # fmt: skip
        said = [
            "Width is the change of live bytes, whichever way it went, so that what stayed the same takes no room; "
            "“the larger of both” shows it too. Orange and + is more in B, blue and − is less, grey as before. "
            "Frames stand without lines and folders, so that code may move between the two runs.",
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


def _weighed(site: SiteDiff) -> WeighedStack:
    a, b = site.expected_bytes, float(site.b.live_bytes)
    allocated = f"[{site.kind} {site.slab_cache}]" if site.slab_cache else f"[{site.kind}]"
    kinds = [kind for _, kind in site.frames]
    apart = site.kind in KINDS_NOT_ADDED - {"heap"}
    layer = f"{site.layer}, {site.kind}" if apart else site.layer
    together = "" if apart or may_back(site.kind, kinds) else "together"
    return WeighedStack((layer, together), (*site.frames, (allocated, "memory")), (abs(b - a), max(a, b), a, b))


def _description(diff: Diff) -> str:
    more = sum(site.more_bytes for site in diff.sites if site.more_bytes > 0)
    less = sum(site.more_bytes for site in diff.sites if site.more_bytes < 0)
    first, last = diff.sites[0], min(diff.sites, key=lambda site: site.more_bytes)
    said = [f"All stacks that keep more keep {_signed(more)}, those that keep less {_signed(less)}."]
    if first.more_bytes > 0:
        said.append(f"Most gained `{_plain(_who(first))}` ({first.layer}): {_signed(first.more_bytes)}.")
    if last.more_bytes < 0:
        said.append(f"Most lost `{_plain(_who(last))}` ({last.layer}): {_signed(last.more_bytes)}.")
    return " ".join(said)


def _who(site: SiteDiff) -> str:
    return site.culprit or (site.stack[-1] if site.stack else "unknown code")


def _site(site: SiteDiff) -> list[Cell]:
    return [
        SIGNS[site.change],
        site.layer,
        site.slab_cache or site.kind,
        _bytes(site.a.live_bytes),
        _bytes(site.b.live_bytes),
        _more(site.more_bytes),
        site.a.live_objects,
        site.b.live_objects,
        _rate(site.b),
        Code(_who(site)),
    ]


def _counters(diff: Diff) -> list[Part]:
    parts: list[Part] = []
    rated = [c for c in diff.counters if c.in_bytes and c.a and c.b and c.a.rate and c.b.rate][:BARS]
    if rated:
        names = [plot_text(c.name, 40) for c in rated]
        ends = [[_ends(course) for c in rated if (course := side(c))] for side in (lambda c: c.a, lambda c: c.b)]
        apart = [c.name for c in rated if c.apart]
        parts.append(
            Figure(
                "counters-bars", "How fast counters rise",
                [
                    _bars("A", names, [g.bytes_per_s for g in ends[0]], "var(--muted)", ends[0]),
                    _bars("B", names, [g.bytes_per_s for g in ends[1]], "var(--series-1)", ends[1]),
                ],
                _bar_layout("bytes/s, with 95 % intervals"),
                f"The intervals of the two rates are apart: {', '.join(apart)}." if apart
                else "The intervals of the two rates overlap for every counter.",
                height_px=110 + 44 * len(rated),
            )
        )  # fmt: skip
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
        Text([_plain(line) for line in said]),
        Table("Evidence", ["", "name", "kind", "complete", "events", "command"], rows),
        Table("Losses: evidence that is known to be missing", ["", "source", "what", "count", "detail"], lost)
        if lost
        else Text(["No losses are known in A or B."]),
    ]


def _complete(row: dict[str, Any]) -> str:
    return "" if "complete" not in row else ("yes" if row["complete"] else "no")


def _bytes(value: float) -> Value:
    return Value(size(value), round(value, 3))


def _more(value: float) -> Value:
    return Value(_signed(value), round(value, 3))


def _rate(holding: Holding) -> Value | None:
    return Value(rate(holding.growth.bytes_per_s), round(holding.growth.bytes_per_s, 3)) if holding.growth else None


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + size(value)
