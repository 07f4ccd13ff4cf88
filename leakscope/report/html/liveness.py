"""The page of ``leakscope liveness``: who keeps memory alive, what nobody uses any more, and why it is still there."""

from __future__ import annotations

from collections.abc import Sequence

from leakscope.model.liveness import FAULTS, Keeper, Liveness, SourceLiveness, Stale, Why
from leakscope.model.liveness_overview import Overview
from leakscope.quantities import counted, size
from leakscope.report.html.cells import command, paths_of, time_cell, without_empty
from leakscope.report.html.liveness_figures import (
    classes_figure,
    course_figure,
    holders_figure,
    idle_figure,
    tree_figure,
    why_figure,
)
from leakscope.report.html.page import Cell, Finding, Headline, Lines, Part, Section, Table, Text, Value, page
from leakscope.report.html.units import bytes_cell, duration_text
from leakscope.report.html.words import as_code

_STALE = ("held-stale", "zombie", "immortal")
_MAX_FURTHER = 3


def liveness_page(found: Liveness, overview: Overview, top: int = 20) -> str:
    """The whole page. ``top``: keepers and stale objects to list."""
    names = paths_of(found.inputs)
    title = f"leakscope liveness: {', '.join(names) or 'no evidence'}"
    if not found.sources:
        sentence = "No objects: the evidence has neither cache events, nor a snapshot, nor allocations that are kept."
        return page(title, Headline("nothing kept", sentence), [_inputs(found)])
    whys = [*found.whys, *(why for why in found.suspects if why.node not in {one.node for one in found.whys})]
    sections = [
        Section("graph", "Who keeps what alive", [tree_figure(overview.tree), *_holders(found, overview, top)]),
        Section("classes", "Classes", _classes(found)),
        Section("stale", "What is not used any more", [*_stale(found.stale[:top]), *_idle(overview)]),
        Section("why", "Why it is alive", _whys(whys)),
        Section("rules", "The classic scheme, and its faults", _rules(found)),
        Section("losses", "What is missing", [_notes(found)]),
        _inputs(found),
    ]
    return page(title, _headline(found, names), [section for section in sections if section.parts])


def _headline(found: Liveness, names: Sequence[str]) -> Headline:
    totals = [row for source in found.sources for row in source.classes]
    objects, kept = sum(row.objects for row in totals), sum(row.bytes for row in totals)
    stale = [row for row in totals if row.name in _STALE and row.objects]
    facts = [("Kept", _amount(objects, kept))]
    if found.keepers:
        leading = found.keepers[0]
        facts.append(("Retains most", f"{leading.name}: {_amount(leading.objects, leading.retained_bytes)}"))
    for name in _STALE:
        rows = [row for row in stale if row.name == name]
        if rows:
            facts.append((name, _amount(sum(r.objects for r in rows), sum(r.bytes for r in rows))))
    forgetful = sorted(
        (keeper for keeper in found.keepers if keeper.stale_objects),
        key=lambda keeper: (-keeper.stale_bytes, -keeper.stale_objects, keeper.node),
    )
    if forgetful:
        first, rest = forgetful[0], forgetful[1:]
        if first.oldest_s is not None:
            facts.append(("Oldest hold", duration_text(first.oldest_s)))
        further = [Finding("held-stale", f"{_forgot(keeper)}.") for keeper in rest[:_MAX_FURTHER]]
        return Headline("stale memory", f"{_forgot(first)}.", facts, _steps(found, first, names), further)
    if found.stale:
        lead = found.stale[0]
        further = [Finding(row.cls, f"{_left(row)}.") for row in found.stale[1 : 1 + _MAX_FURTHER]]
        return Headline("stale memory", f"{_left(lead)}.", facts, _steps(found, None, names), further)
    keeper = f", most of it by {as_code(found.keepers[0].name)}" if found.keepers else ""
    sentence = f"{_amount(objects, kept)} are kept{keeper}; nothing of it is known to be stale."
    return Headline("nothing stale", sentence, facts, _steps(found, None, names))


def _forgot(keeper: Keeper) -> str:
    age = f", some for {duration_text(keeper.oldest_s)}" if keeper.oldest_s is not None else ""
    held = _amount(keeper.stale_objects, keeper.stale_bytes)
    return f"{as_code(keeper.name)} holds {held} that it does not use any more{age}"


def _left(row: Stale) -> str:
    held = f", held by {as_code(row.holder)}" if row.holder else ""
    how = row.evidence + (" (approximate)" if row.approximate else "")
    what = f"{_amount(row.objects, row.bytes)} of {as_code(row.name)}"
    return f"{what} for {duration_text(row.age_s)}{held}; known by: {how}"


def _steps(found: Liveness, keeper: Keeper | None, names: Sequence[str]) -> list[str]:
    steps = []
    if keeper is not None and keeper.stack:
        steps.append(f"Look at {as_code(keeper.stack[-1])}, which takes holds and does not give them up")
    elif keeper is None and found.stale and found.stale[0].stack:
        steps.append(f"Look at {as_code(found.stale[0].stack[-1])}, which allocated it: who should have freed it?")
    if found.stale and names:
        lead = found.stale[0].name
        steps.append(f"Ask why one of them is alive: {command('leakscope', 'liveness', *names, '--why', lead)}")
    if names:
        steps.append(f"Get the verdict, leak or not: {command('leakscope', 'attribute', *names)}")
    return steps


def _amount(objects: int, size_bytes: int) -> str:
    return f"{size(size_bytes)} in {counted(objects, 'object')}" if size_bytes else counted(objects, "object")


def _holders(found: Liveness, overview: Overview, top: int) -> list[Part]:
    parts: list[Part] = [holders_figure(overview.held)] if len(overview.held) > 1 else []
    rows = [
        [
            keeper.name, keeper.kind, bytes_cell(keeper.retained_bytes), bytes_cell(keeper.bytes), keeper.objects,
            keeper.stale_objects, bytes_cell(keeper.stale_bytes), time_cell(keeper.oldest_s), _stack(keeper.stack),
        ]
        for keeper in found.keepers[:top]
    ]  # fmt: skip
    if rows:
        columns = ["who", "kind", "retains", "holds", "objects", "stale", "stale bytes", "oldest hold", "stack"]
        note = "Retains: what would go if this one alone let go. What several hold, none of them retains."
        parts.append(without_empty(Table("Holders and caches, by what they retain", columns, rows, note)))
    return parts


def _classes(found: Liveness) -> list[Part]:
    parts: list[Part] = []
    for number, source in enumerate(found.sources, 1):
        parts.append(classes_figure(source, number))
        if (course := course_figure(source, number)) is not None:
            parts.append(course)
        if source.pools:
            parts.append(_pools(source))
    return parts


def _pools(source: SourceLiveness) -> Table:
    columns = ["device", "pool", "segments", "blocks", "reserved", "in use", "waits for a stream", "free",
               "free in segments partly in use", "largest free", "fragmentation"]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            p.device, p.pool or "?", p.segments, p.blocks, bytes_cell(p.reserved_bytes), bytes_cell(p.active_bytes),
            bytes_cell(p.pending_bytes), bytes_cell(p.free_bytes), bytes_cell(p.free_split_bytes),
            bytes_cell(p.largest_free_bytes), round(p.fragmentation, 6),
        ]
        for p in source.pools
    ]  # fmt: skip
    return Table(f"Pools of {source.source}", columns, rows, "Fragmentation: 1 − largest free block / free bytes.")


def _stale(rows: Sequence[Stale]) -> list[Part]:
    if not rows:
        return [Text(["Nothing is known to be held or allocated without being used."])]
    columns = ["what", "class", "layer", "bytes", "objects", "age", "bytes × seconds", "held by", "known by", "stack"]
    cells: list[list[Cell]] = [
        [
            row.name, row.cls, row.layer, bytes_cell(row.bytes), row.objects, time_cell(row.age_s),
            Value(f"{size(row.byte_seconds)}·s", row.byte_seconds),
            row.holder, row.evidence + (" (approximate)" if row.approximate else ""), _stack(row.stack),
        ]
        for row in rows
    ]  # fmt: skip
    note = "An age by the time of allocation is no proof of disuse: old memory in use looks the same."
    return [without_empty(Table("Stale, by bytes × age", columns, cells, note))]


def _idle(overview: Overview) -> list[Part]:
    """A figure where some use was seen; else there is nothing to draw."""
    if any(row.from_s is not None for row in overview.idle):
        return [idle_figure(overview.idle)]
    return [Text(["No use of anything was seen, which is no proof of disuse."])] if overview.idle else []


def _whys(whys: Sequence[Why]) -> list[Part]:
    if not whys:
        return []
    parts: list[Part] = [why_figure(whys)]
    rows: list[list[Cell]] = []
    for why in whys:
        for number, path in enumerate(why.paths, 1):
            for step in path:
                rows.append(
                    [
                        why.name, number, step.edge or "is held by the root", step.kind, step.name, step.count,
                        time_cell(step.held_s), _stack(step.stack),
                    ]
                )  # fmt: skip
    columns = ["why", "path", "edge", "kind", "name", "count", "held for", "stack"]
    heads: list[list[Cell]] = [
        [
            why.name, why.cls, bytes_cell(why.bytes), bytes_cell(why.retained_bytes), why.keepers,
            why.dominator or "no one alone: several ways lead to it",
        ]
        for why in whys
    ]  # fmt: skip
    parts.append(
        Table("Who could let it go", ["what", "class", "bytes", "retains", "keepers", "could be let go by"], heads)
    )
    parts.append(without_empty(Table("Paths, step by step", columns, rows)))
    return parts


def _rules(found: Liveness) -> list[Part]:
    rows: list[list[Cell]] = []
    for source in found.sources:
        if (rules := source.rules) is not None:
            rows.append(
                [
                    source.source, rules.objects, rules.looked_at, rules.strong, rules.weak, rules.without_class,
                    bytes_cell(rules.without_class_bytes), rules.expired, rules.unreferenced, rules.unknown,
                    bytes_cell(rules.hidden_bytes),
                ]
            )  # fmt: skip
    if not rows:
        return []
    columns = ["source", "objects", "looked at", "strong", "weak", "no class", "bytes of no class", "expired, not seen",
               "unreferenced, not seen", "unknown count", "bytes not seen"]  # fmt: skip
    about = (
        "Scan every 500 ms; look at objects with TTL left and a count above 0; strong: 2 references or more and used "
        "within 1 s; weak: 1 reference and less than 10 s of TTL left. Told for comparison; nothing above rests on it."
    )
    faults = ["Its known faults:", *(f"{number}. {fault}." for number, fault in enumerate(FAULTS, 1))]
    return [Text([about]), Table("The classic scheme on the same objects", columns, rows), Text(faults)]


def _notes(found: Liveness) -> Part:
    rows: list[list[Cell]] = [[source.source, note] for source in found.sources for note in source.notes]
    rows += [[str(one.get("path", "")), str(problem)] for one in found.inputs for problem in one.get("problems", ())]
    if not rows:
        return Text(["Nothing is known to be missing."])
    return Table("What was lost, or cannot be known", ["source", "what"], rows)


def _inputs(found: Liveness) -> Section:
    rows: list[list[Cell]] = [
        [str(one.get("path", "")), str(one.get("kind", "")), str(one.get("tool") or "")] for one in found.inputs
    ]
    parts: list[Part] = [without_empty(Table("Inputs", ["path", "kind", "tool"], rows))]
    if found.nodes:
        counts: list[list[Cell]] = [["node", kind, count] for kind, count in found.nodes.items()]
        counts += [["edge", kind, count] for kind, count in found.edges.items()]
        parts.append(Table("The graph", ["", "kind", "count"], counts))
    return Section("inputs", "Inputs", parts, open=False)


def _stack(stack: Sequence[str]) -> Lines | None:
    """Outermost first, the innermost frame at a glance."""
    return Lines(stack[-1], stack) if stack else None
