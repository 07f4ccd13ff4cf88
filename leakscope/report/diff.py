"""A difference on a terminal: what B does that A did not, then layers, sites and counters side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from leakscope.model.diff import CounterDiff, Diff, Holding, SiteDiff
from leakscope.quantities import counted, rate, size
from leakscope.report.text import printable

SIGNS = {"new": "+ new", "grown": "↑ grown", "improved": "↓ less", "vanished": "- gone"}
_STYLES = {"leak": "bold red", "inconclusive": "bold yellow", "not_leak": "bold green"}

Line = tuple[str, str]
"""(text without control characters, style)."""


def diff_lines(diff: Diff, names: tuple[str, str], top: int) -> Iterator[Line]:
    """What ``diff`` prints. ``names``: of A and B; ``top``: sites and counters that are shown."""
    yield diff_sentence(diff), _STYLES.get(diff.verdict.verdict, "")
    for reason in (*diff.verdict.reasons, *(f"not known: {what}" for what in diff.verdict.missing)):
        yield f"   {printable(reason)}", ""
    yield "", ""
    yield printable(f"A  {names[0]}   (the baseline)"), "dim"
    yield printable(f"B  {names[1]}   (head)"), "dim"
    yield work_sentence(diff), "dim"
    yield from _table("layers", ["layer", "live in A", "live in B", "more for the same work", "growth A", "growth B"], [
        [d.layer, size(d.a.live_bytes), size(d.b.live_bytes), _signed(d.more_bytes), _rate(d.a), _rate(d.b)]
        for d in diff.layers
    ])  # fmt: skip
    yield from _sites(diff, top)
    yield from _counters(diff.counters, top)


def diff_sentence(diff: Diff) -> str:
    """The verdict of the comparison in one sentence."""
    verdict = diff.verdict
    if verdict.verdict == "leak":
        culprit = verdict.culprit
        who = (culprit.frame or culprit.slab_cache or culprit.counter or culprit.object) if culprit else ""
        more = f"  and {counted(len(diff.others), 'further regression')}" if diff.others else ""
        what = f"B keeps {size(verdict.kept_bytes)} more than A" if verdict.kept_bytes else "B leaks what A does not"
        return printable(f"{what}: {who or 'unknown code'} ({verdict.layer or 'counter'}){more}")
    if verdict.verdict == "inconclusive":
        return "Whether B keeps more than A cannot be told"
    return "B keeps no more than A for the same work"


def work_sentence(diff: Diff) -> str:
    """How much the two runs did."""
    if not diff.work_known:
        return "nothing says how much work the two did; figures stand as they were recorded"
    return printable(f"B did {diff.ratio:.2f} times the work of A ({diff.unit})")


def _sites(diff: Diff, top: int) -> Iterator[Line]:
    changed = diff.changed
    same = len(diff.sites) - len(changed)
    yield from _table(
        f"sites that changed: {len(changed):,}, as before: {same:,}" if diff.sites else "",
        ["", "layer", "kept in A", "kept in B", "more", "growth B", "culprit"],
        [_site(site) for site in leading(changed, top)],
    )
    if len(changed) > top:
        yield f"   … and {len(changed) - top:,} more: --top shows them, --json has all", "dim"


def leading(changed: Sequence[SiteDiff], top: int) -> list[SiteDiff]:
    """At most ``top``: those that differ by most bytes, growth before what got less."""
    chosen = sorted(changed, key=lambda site: -abs(site.more_bytes))[:top]
    return sorted(chosen, key=lambda site: -site.more_bytes)


def _site(site: SiteDiff) -> list[str]:
    return [
        SIGNS[site.change],
        f"{site.layer} {site.slab_cache or site.kind}",
        _kept(site.a),
        _kept(site.b),
        _signed(site.more_bytes),
        _rate(site.b),
        site.culprit or (site.stack[-1] if site.stack else "unknown"),
    ]


def _counters(counters: Sequence[CounterDiff], top: int) -> Iterator[Line]:
    moved = [c for c in counters if c.a is None or c.b is None or c.apart or c.more]
    yield from _table(
        f"counters: {len(counters):,}" if counters else "",
        ["", "counter", "rise in A", "rise in B", "rate A", "rate B"],
        [
            [
                "≠" if c.apart else "",
                c.name,
                *(_amount(course.rise, c.in_bytes) if course else "not read" for course in (c.a, c.b)),
                *(
                    f"{_amount(course.rate[1], c.in_bytes)}/s" if course and course.rate else "-"
                    for course in (c.a, c.b)
                ),
            ]
            for c in moved[:top]
        ],
    )
    if any(c.apart for c in moved[:top]):
        yield "   ≠ the 95 % intervals of the two rates are apart", "dim"
    if len(moved) > top:
        yield f"   … and {len(moved) - top:,} more: --top shows them, --json has all", "dim"


def _table(title: str, head: list[str], rows: list[list[str]]) -> Iterator[Line]:
    """Columns as wide as their cells; the last one is not padded."""
    if not title:
        return
    yield "", ""
    yield title, "bold"
    if not rows:
        return
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [head, *cells]) for i in range(len(head))]
    for number, row in enumerate([head, *cells]):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"   {text}".rstrip(), "" if number else "dim"


def _kept(holding: Holding) -> str:
    return f"{size(holding.live_bytes)} ({holding.live_objects:,})"


def _rate(holding: Holding) -> str:
    return rate(holding.growth.bytes_per_s) if holding.growth else "-"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + size(value)


def _amount(value: float, in_bytes: bool) -> str:
    return size(value) if in_bytes else f"{value:,.6g}"
