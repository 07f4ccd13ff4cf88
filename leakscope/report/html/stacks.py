"""The section of stacks: what each stack keeps and how fast that grows, as an icicle or flame graph."""

from __future__ import annotations

from collections.abc import Sequence

from leakscope.correlate.stack_trees import stack_tree
from leakscope.model.results import Report
from leakscope.model.stack_tree import WeighedStack
from leakscope.model.words import KINDS_NOT_ADDED
from leakscope.quantities import counted, rate, size
from leakscope.report.cells import bare_frame
from leakscope.report.export.stacks import StackValue, stack_values
from leakscope.report.html.icicle import Measure, Root, cut_note, icicle_figure
from leakscope.report.html.parts import Code, Part, Section, Table, Text, Value
from leakscope.report.html.words import as_code

MEASURES = (Measure("live bytes", "bytes"), Measure("growth", "bytes/s"), Measure("live objects", "objects"))
LIVE, GROWTH = 0, 1
ROWS = 20
OWN_VIEW = KINDS_NOT_ADDED - {"mmap_reserve", "ipc"}
"""Not address space without memory, nor memory of other processes."""
CUDA_KINDS = frozenset({"pinned", "registered", "managed", "device", "async", "vmm", "array", "pool_segment"})


def stack_sections(report: Report, names: Sequence[str]) -> list[Section]:
    """The section ``stacks`` of a report, or none where no site keeps anything. ``names``: of the evidence, by
    ``Site.source``. A page with it needs the script :data:`leakscope.report.html.icicle.SCRIPT`.

    Each source and layer is drawn by itself, or all layers of one source together where no byte is in two of them.
    Kinds whose bytes other kinds count have views of their own.
    """
    values, notes = stack_values(report, names)
    with_cuda = {value.source for value in values if value.kind in CUDA_KINDS and value.live}
    by_kind, _ = stack_values(report, names, OWN_VIEW)
    stacks = [_weighed(v, v.layer, "apart" if v.source in with_cuda and _backs(v) else "") for v in values]
    stacks += [_weighed(v, view_of(v.layer, v.kind), "apart") for v in by_kind]
    tree = stack_tree(stacks, len(MEASURES))
    if not tree.roots:
        return []
    sources = list(dict.fromkeys(source for source, _, _ in tree.roots))
    roots = [Root(view, sources.index(source), not apart) for source, view, apart in tree.roots]
    shown = [*values, *by_kind]
    figure = icicle_figure(
        "stacks-icicle", "Live bytes and growth by stack", _description(shown), tree, MEASURES, roots, sources,
        table=_table(shown, len(sources) > 1),
    )  # fmt: skip
    said = [
        "Width is the amount, depth the calls; click a frame to zoom in. Only what grows has a width under growth.",
        *_sampled(shown),
        *_apart(values, with_cuda),
        *_left_out(notes, {v.kind for v in by_kind if v.live}),
        cut_note(tree),
    ]
    parts: list[Part] = [figure, Text([line for line in said if line])]
    return [Section("stacks", "Memory by stack", parts)]


def view_of(layer: str, kind: str) -> str:
    """What the memory of a kind is drawn under: its layer, or, where other kinds count its bytes, a view of its own."""
    return f"{layer}: {kind}" if kind in KINDS_NOT_ADDED else layer


def _weighed(value: StackValue, view: str, apart: str) -> WeighedStack:
    """A stack of the report; NVTX ranges stand outside of all frames."""
    site = value.site
    ranges = [(name, "range") for name in site.ranges] if site else []
    kinds = site.frame_kinds if site and len(site.frame_kinds) == len(value.frames) - 1 else ()
    frames = zip(value.frames, (*(kinds or ["unknown"] * (len(value.frames) - 1)), "memory"), strict=True)
    amounts = (value.live, value.growth_bytes_per_s, value.live_objects)
    return WeighedStack((value.source, view, apart), (*ranges, *frames), amounts, _estimated(value))


def may_back(kind: str, frame_kinds: Sequence[str]) -> bool:
    """Whether a GPU driver may back with it what it gives out: kernel pages, and what it maps in a call of CUDA."""
    return kind == "page" or (kind == "mmap_file" and ("cuda" in frame_kinds or not frame_kinds))


def _backs(value: StackValue) -> bool:
    return may_back(value.kind, value.site.frame_kinds if value.site else ())


def _estimated(value: StackValue) -> bool:
    return value.site is not None and (value.site.stack_sampled or value.site.bytes_sampled)


def _description(values: Sequence[StackValue]) -> str:
    """The finding: what each layer keeps, and the stack that keeps most or grows fastest."""
    by_layer: dict[tuple[str, str], int] = {}
    for value in values:
        view = value.source, view_of(value.layer, value.kind)
        by_layer[view] = by_layer.get(view, 0) + value.live
    several = len({value.source for value in values}) > 1
    sums = ", ".join(
        f"{f'{s}: ' if several else ''}{layer} {size(live)}" for (s, layer), live in by_layer.items() if live
    )
    said = [f"Kept at the end of the evidence: {sums}."]
    sites = [value for value in values if value.site is not None]
    if (most := max(sites, key=lambda v: v.live, default=None)) is not None and most.live:
        of = by_layer[most.source, view_of(most.layer, most.kind)]
        said.append(
            f"Most has {as_code(bare_frame(_culprit(most)))}: {size(most.live)}, {100 * most.live / of:.0f} % of "
            f"{most.layer}."
        )
    grows = max(sites, key=lambda v: v.growth_bytes_per_s, default=None)
    if grows is not None and grows.growth_bytes_per_s > 0:
        said.append(
            f"Fastest grows {as_code(bare_frame(_culprit(grows)))} ({grows.layer}): {rate(grows.growth_bytes_per_s)}."
        )
    return " ".join(said)


def _culprit(value: StackValue) -> str:
    site = value.site
    return (site.culprit_frame if site else "") or (value.frames[-2] if len(value.frames) > 1 else value.frames[-1])


def _table(values: Sequence[StackValue], several: bool) -> Table:
    ranked = sorted(values, key=lambda v: (-v.live, -v.growth_bytes_per_s))[:ROWS]
    ranked += [v for v in sorted(values, key=lambda v: -v.growth_bytes_per_s)[:ROWS] if v.growth and v not in ranked]
    rest = len([v for v in values if v.live or v.growth]) - len(ranked)
    return Table(
        "Stacks that keep most or grow fastest",
        [*(["evidence"] if several else []), "layer", "allocated", "by", "live bytes", "growth", "live objects", ""],
        [
            [
                *([v.source] if several else []),
                v.layer,
                v.frames[-1],
                Code(_culprit(v)),
                Value(size(v.live), v.live),
                Value(rate(v.growth_bytes_per_s), round(v.growth_bytes_per_s, 3)),
                v.live_objects,
                "estimate" if _estimated(v) else "",
            ]
            for v in ranked
        ],
        f"{rest:,} further stacks are in the figure." if rest > 0 else "",
    )


def _left_out(notes: Sequence[str], drawn: set[str]) -> list[str]:
    """The notes of an export, without the options that are its alone. ``drawn``: kinds with a view of their own."""
    said = []
    if drawn:
        kinds = " and ".join(sorted(drawn))
        said.append(f"Other kinds count the bytes of {kinds}: they have views of their own, which are never added.")
    for note in notes:
        amount, found, _ = note.partition(" are left out")
        if found and amount.rsplit(" ", 1)[-1] in drawn:
            continue
        said.append(f"{amount} are not drawn: they take no memory." if found else f"{_sentence(note)}.")
    return said


def _sentence(note: str) -> str:
    said = note.split("; --")[0]
    return said[0].upper() + said[1:]


def _sampled(values: Sequence[StackValue]) -> list[str]:
    """What of the figure is estimated."""
    said = []
    drawn = [v for v in values if v.site is not None and (v.live or v.growth_bytes_per_s)]
    apportioned = [v for v in drawn if v.site and v.site.stack_sampled]
    by_bytes = [v for v in drawn if v.site and v.site.bytes_sampled]
    if apportioned:
        said.append(
            f"Marked ≈: the stacks of {counted(len(apportioned), 'site')} were sampled; parts of their "
            f"{size(sum(v.live for v in apportioned))} are apportioned from allocations of the same call site."
        )
    if by_bytes:
        said.append(f"Marked ≈: {counted(len(by_bytes), 'site')} estimated from a sample of allocations.")
    return said


def _apart(values: Sequence[StackValue], with_cuda: set[str]) -> list[str]:
    """What "all layers" leaves out, so that no byte is in it twice."""
    left = sum(v.live for v in values if v.source in with_cuda and _backs(v))
    if not left or len({v.layer for v in values}) < 2:
        return []
    return [
        f"“All layers” leaves out {size(left)} of kernel pages and device mappings: the GPU driver may back memory "
        "with them that the other layers count already. Each layer by itself has them."
    ]
