"""Layers, sites and breakdowns on a terminal: tables with a row a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from leakscope.model.breakdown import Breakdown, Group
from leakscope.model.results import LayerTotal, Site
from leakscope.model.words import LAYERS
from leakscope.quantities import counted, interval, rate, size
from leakscope.report.cells import Column, bare_frame, cut, in_columns, packed, short_frame

MAX_HIDDEN = 5
GROUPS_SHOWN = 8
"""Groups of a layer that a breakdown shows unless told otherwise."""
APART_SHOWN = 3
_HEADS = {"site": "culprit", "pid": "process", "range": "NVTX range", "cache": "slab cache or kind"}
NO_RANGES = "no NVTX range was open at any of these allocations, or ranges were not recorded"


def layer_lines(layers: Sequence[LayerTotal], width: int, captures: Mapping[int, str]) -> Iterator[Text]:
    """What each layer keeps; layers are not added up. ``captures``: names, where several."""
    if not layers:
        return
    columns = [Column("layer"), *([Column("capture", least=8)] if captures else [])]
    columns += [Column("kept at end", True), Column("objects", True), Column("growth", True)]
    columns += [Column("95 % interval", optional=2), Column("allocated", True)]
    rows = []
    for layer in layers:
        growth = layer.growth
        error = f" ± {size(layer.standard_error_bytes)}" if layer.standard_error_bytes else ""
        rows.append(
            [
                layer.layer,
                *([captures.get(layer.source, "")] if captures else []),
                size(layer.live_bytes) + error,
                f"{layer.live_objects:,}",
                rate(growth.bytes_per_s) if growth else "",
                _interval(growth.ci_low, growth.ci_high) if growth else "",
                size(layer.allocated_bytes),
            ]
        )
    yield from in_columns(columns, rows, width)


def site_lines(sites: Sequence[Site], width: int, top: int) -> Iterator[Text]:
    """One row for the sites of a culprit in a slab cache or kind, those that keep most first."""
    groups: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        what = site.slab_cache or site.kind
        groups.setdefault((site.culprit_frame or what, site.layer, what), []).append(site)
    if not groups or top <= 0:
        return
    columns = [Column("other sites", least=20, frames=True), Column("layer"), Column("kind", least=9)]
    columns += [Column("kept", True), Column("share", True), Column("growth", True)]
    ranked = sorted(groups.items(), key=lambda item: (-sum(s.live_bytes for s in item[1]), item[0]))
    shown = [member for _, members in ranked[:top] for member in members]
    rows = []
    for (name, layer, what), members in ranked[:top]:
        kept = sum(site.live_bytes for site in members)
        share = kept / max(1, sum(site.allocated_bytes for site in members))
        mark = "~" if any(site.stack_sampled or site.bytes_sampled for site in members) else ""
        error = sum(site.standard_error_bytes**2 for site in members if site.bytes_sampled) ** 0.5
        rows.append(
            [
                short_frame(name),
                layer,
                what,
                mark + size(kept) + (f" ± {size(error)}" if error else ""),
                f"{share:.0%}",
                rate(sum(site.growth.bytes_per_s for site in members if site.growth)),
            ]
        )
    yield from in_columns(columns, rows, width)
    notes = _sampling_notes(any(s.stack_sampled for s in shown), any(s.bytes_sampled for s in shown))
    if len(ranked) > top:
        notes.append(f"{len(ranked) - top:,} more with --top, all with --json")
    yield from (Text(line, "dim") for line in packed(notes, width, "; "))


def hidden_lines(sites: Sequence[Site], width: int) -> Iterator[Text]:
    """Sites whose frees are not visible, those of a slab cache and a culprit together."""
    groups: dict[tuple[str, str], int] = {}
    for site in sites:
        key = (site.slab_cache or site.kind, site.culprit_frame or site.kind)
        groups[key] = groups.get(key, 0) + site.allocated_objects
    if not groups:
        return
    yield Text("frees not visible (freed without a trace, so never a finding):", "dim")
    ranked = sorted(groups.items(), key=lambda item: (-item[1], item[0]))
    for (what, where), count in ranked[:MAX_HIDDEN]:
        said = f"   {cut(what, 24)}: {counted(count, 'allocation')} by "
        yield Text(said + short_frame(where, max(20, width - len(said))), "dim")
    if len(ranked) > MAX_HIDDEN:
        yield Text(f"   … and {counted(len(ranked) - MAX_HIDDEN, 'more site')}", "dim")


def breakdown_lines(
    breakdown: Breakdown, width: int, captures: Mapping[int, str], top: int = GROUPS_SHOWN
) -> Iterator[Text]:
    """The groups that count in their layer, ``top`` a layer and the rest in a row; what does not count stands apart."""
    counts = [g for g in breakdown.groups if g.added and g.frees_visible and (g.live_bytes or g.allocated_bytes)]
    rows, shown = [], []
    for group in _by_layer(counts):
        best = [g for g in group if g.live_bytes][:top]
        rest = group[len(best) :]  # they come most kept bytes first
        rows += [_group_row(g, breakdown.by, captures) for g in best]
        shown += best
        if rest:
            rows.append(_rest_row(rest, breakdown.by, captures))
    if rows:
        yield from in_columns(_columns(breakdown.by, bool(captures)), rows, width)
    else:
        yield Text("no memory events: there is nothing to break down", "dim")
    sampled = any(g.stack_sampled for g in shown), any(g.bytes_sampled for g in shown)
    yield from (Text(line, "dim") for line in packed(_sampling_notes(*sampled), width, "; "))
    if breakdown.by == "range" and breakdown.groups and not any(g.ranges for g in breakdown.groups):
        yield Text(NO_RANGES, "dim")
    apart = [g for g in breakdown.groups if not g.frees_visible and g.added]
    yield from _apart("frees not visible (never a finding), allocated", apart, breakdown.by, width)
    apart = [g for g in breakdown.groups if not g.added and g.live_bytes]
    title = "not added to a layer (another kind counts it, or it is no memory), kept"
    yield from _apart(title, apart, breakdown.by, width)


def _by_layer(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups of each capture and layer that keep something or, where none does, allocated something."""
    found: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        found.setdefault((group.source, LAYERS.index(group.layer) if group.layer in LAYERS else 9), []).append(group)
    return [found[key] for key in sorted(found)]


def _columns(by: str, several: bool) -> list[Column]:
    columns = [Column("layer"), *([Column("capture", least=8)] if several else [])]
    columns += [Column("PID", True)] if by == "pid" else []
    columns += [Column(_HEADS[by], least=32, frames=by == "site")]
    columns += [Column("kind", least=13)] if by == "site" else []
    columns += [Column("kept", True), Column("objects", True, optional=1), Column("of layer", True, optional=2)]
    return [*columns, Column("growth", True), Column("95 % interval", optional=3)]


def _group_row(group: Group, by: str, captures: Mapping[int, str]) -> list[str]:
    growth = group.growth
    mark = "~" if group.stack_sampled or group.bytes_sampled else ""
    error = f" ± {size(group.standard_error_bytes)}" if mark and group.standard_error_bytes else ""
    return [
        group.layer,
        *([captures.get(group.source, "")] if captures else []),
        *(["" if group.pid is None else str(group.pid)] if by == "pid" else []),
        _named(group, by),
        *([group.kind] if by == "site" else []),
        f"{mark}{size(group.live_bytes)}{error}",
        f"{group.live_objects:,}",
        "" if group.layer_share is None else f"{group.layer_share:.1%}",
        rate(growth.bytes_per_s) if growth else "",
        _interval(growth.ci_low, growth.ci_high) if growth else "",
    ]


def _named(group: Group, by: str) -> str:
    if by == "pid":  # the program without its folder
        program, space, arguments = group.name.partition(" ")
        return program.rpartition("/")[2] + space + arguments
    return bare_frame(group.name) if by == "site" else group.name


def _rest_row(rest: Sequence[Group], by: str, captures: Mapping[int, str]) -> list[str]:
    return [
        rest[0].layer,
        *([captures.get(rest[0].source, "")] if captures else []),
        *([""] if by == "pid" else []),
        f"… {len(rest):,} more",
        *([""] if by == "site" else []),
        size(sum(g.live_bytes for g in rest)),
        f"{sum(g.live_objects for g in rest):,}",
        f"{sum(g.layer_share or 0 for g in rest):.1%}",
        rate(sum(g.growth.bytes_per_s for g in rest if g.growth)) if any(g.growth for g in rest) else "",
        "",
    ]


def _apart(title: str, groups: Sequence[Group], by: str, width: int) -> Iterator[Text]:
    if not groups:
        return
    yield Text("")
    pieces = []
    for group in groups[:APART_SHOWN]:
        figure = size(group.live_bytes) if group.frees_visible else counted(group.allocated_objects, "object")
        what = group.kind if by == "site" and group.kind != group.name else ""
        pieces.append(" ".join(filter(None, (figure, group.layer, what, cut(_named(group, by), 44)))))
    if len(groups) > APART_SHOWN:
        pieces.append(f"{len(groups) - APART_SHOWN:,} more with --json")
    yield Text(f"{title}:", "dim")
    yield from (Text(f"   {line}", "dim") for line in packed(pieces, width - 3, "; "))


def _sampling_notes(stacks: bool, by_bytes: bool) -> list[str]:
    return [
        *(["~ apportioned by sampled stacks"] if stacks else []),
        *(["± standard error of what was sampled by bytes"] if by_bytes else []),
    ]


def _interval(low: float, high: float) -> str:
    return f"{interval(low, high)}/s"
