"""Icicles and flame graphs: a tree of stacks as a figure that is searched, zoomed and turned in the page.

The whole tree goes into the page as tables of numbers; ``assets/icicle.js`` draws at most a thousand nodes of it at
once with plotly's ``icicle`` trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leakscope.model.stack_tree import StackTree
from leakscope.report.html.parts import Figure, Table, cut
from leakscope.report.text import printable

SCRIPT = "icicle.js"
"""To be named in the ``scripts`` of a page that has such a figure."""
MAX_TEXT = 1_500_000
"""Characters of all frames of a tree together; where they have more, each is cut to the first of LONGEST that is short
enough."""
LONGEST = (2_000, 300, 100, 50)
HEIGHT_PX = 420

KINDS = {
    "python": ("Python", "#9ecbf2"),
    "native": ("native", "#f3dc8f"),
    "cuda": ("CUDA call", "#a5dba9"),
    "kernel": ("kernel", "#f4b08c"),
    "range": ("NVTX range", "#d8bdee"),
    "memory": ("what was allocated", "#d3d8df"),
    "smaller": ("smaller branches together", "#e7e9ed"),
    "unknown": ("frame", "#f3ead2"),
}
"""By kind of frame: its word, and its fill, on which dark text is read in both looks (contrast above 8:1)."""


@dataclass(frozen=True)
class Measure:
    """An amount of the tree. ``unit``: bytes, bytes/s or objects. ``widths``: it can be chosen as the width."""

    name: str
    unit: str
    widths: bool = True


@dataclass(frozen=True)
class Root:
    """What a root of the tree is. ``together``: its amounts may be added to those of other layers of the same
    ``source``, which counts from 0; those of different sources are never added."""

    layer: str
    source: int = 0
    together: bool = True


@dataclass(frozen=True)
class Difference:
    """Numbers of measures: what there was ``before`` and ``after``, the ``change`` whichever way it went, and of that
    what is beyond chance: ``gain`` and ``loss``."""

    before: int
    after: int
    change: int
    gain: int
    loss: int


def icicle_figure(
    id_: str,
    title: str,
    description: str,
    tree: StackTree,
    measures: Sequence[Measure],
    roots: Sequence[Root],
    sources: Sequence[str],
    *,
    difference: Difference | None = None,
    table: Table | None = None,
) -> Figure:
    """The figure. ``roots`` says what each root of ``tree`` is, ``measures`` what its amounts are. ``difference``:
    which measures are compared; colours then say which way it went."""
    texts = list(dict.fromkeys(text for text, _ in tree.frames))
    at = {text: number for number, text in enumerate(texts)}
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    shown = [printable(text) for text in texts]
    if longest := _longest(shown):
        shown = [cut(text, longest) for text in shown]
    extra: dict[str, Any] = {
        "texts": shown,
        "kinds": [{"word": word, "fill": fill} for word, fill in KINDS.values()],
        "frameText": [at[text] for text, _ in tree.frames],
        "frameKind": [kinds.get(kind, kinds["unknown"]) for _, kind in tree.frames],
        "parent": tree.parent,
        "frame": tree.frame,
        "measures": [
            {
                "name": measure.name,
                "unit": measure.unit,
                "widths": measure.widths,
                "node": list(own),
                "own": [_number(amount) for amount in own.values()],
            }
            for measure, own in zip(measures, tree.own, strict=True)
        ],
        "roots": [{"layer": root.layer, "source": root.source, "together": root.together} for root in roots],
        "sources": [printable(name) for name in sources],
        "sampled": sorted(tree.sampled),
        "merged": [[node, count] for node, count in (tree.merged or {}).items()],
        "difference": asdict(difference) if difference else None,
    }
    return Figure(id_, title, [], {}, description, HEIGHT_PX, table, "icicle", extra)


def cut_note(tree: StackTree) -> str:
    """What was cut of the tree and of its frames; '' where all is whole."""
    said = []
    if tree.share:
        stacks = sum((tree.merged or {}).values())
        said.append(
            f"Branches with less than {tree.share * 100:g} % of their layer stand together as “(N smaller)”: "
            f"{stacks:,} stacks; no byte is lost. `leakscope export --to speedscope` has each of them."
        )
    if longest := _longest([printable(text) for text in {text for text, _ in tree.frames}]):
        said.append(f"Frames are cut to {longest:,} characters.")
    return " ".join(said)


def _longest(texts: Sequence[str]) -> int:
    """To how many characters frames are cut; 0: not at all."""
    lengths = [len(text) for text in texts]
    if sum(lengths) <= MAX_TEXT:
        return 0
    return next((most for most in LONGEST if sum(min(n, most) for n in lengths) <= MAX_TEXT), LONGEST[-1])


def _number(amount: float) -> float | int:
    return int(amount) if amount == int(amount) else round(amount, 3)
