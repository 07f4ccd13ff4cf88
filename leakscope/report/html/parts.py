"""What a page of HTML is made of: plain values, without any markup.

Every text may come from a capture and is untrusted; page.py escapes it. Texts inside ``Figure.data`` and
``Figure.layout`` are drawn by plotly, which reads a little markup: pass them through :func:`plot_text`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.report.text import printable

LONGEST_LABEL = 120


@dataclass(frozen=True)
class Value:
    """A number as people read it, and the number itself (``data-value`` in the page): ``Value("1.5 MiB", 1572864)``."""

    text: str
    raw: int | float


@dataclass(frozen=True)
class Code:
    """A frame, path or command: set in a fixed-width face, with room to break."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Several lines that are one thing (a stack): ``summary`` is shown, the others when unfolded."""

    summary: str
    lines: Sequence[str]


Cell = str | int | float | None | Value | Code | Lines
"""A cell of a table. Numbers and :class:`Value` stand to the right; None is shown as a dash."""


@dataclass(frozen=True)
class Table:
    """Rows under named columns. ``note`` stands below it: what was left out, and where it is."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """One plotly figure as plain JSON; it is drawn when it is scrolled to.

    ``data`` and ``layout`` are plotly's, without colours of text, paper, grid and axes: the page gives those, for its
    light and its dark look. Where a colour is needed, name one of the page's: ``var(--gpu)`` (style.css lists them);
    the page puts the colour of the look in its place, anywhere in ``data`` and ``layout``.

    ``description`` says the finding in words, with its numbers: it stands above the figure and is what a screen reader
    says. ``table`` holds the same numbers, folded below. ``behaviour`` names a function that a script of ``assets/``
    registers as ``leakscope.behaviours[name](element, figure, extra)``; it runs once, after the first drawing, with
    the ``<figure>`` element (which has a ``.controls`` and a ``.plot``), the figure ``{data, layout}``, and ``extra``.
    To change what is drawn it changes ``figure.data`` and calls ``leakscope.redraw(element)``.
    """

    id: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    description: str
    height_px: int = 360
    table: Table | None = None
    behaviour: str = ""
    extra: Any = None


@dataclass(frozen=True)
class Text:
    """Paragraphs. What stands in `backquotes` is set as code."""

    paragraphs: Sequence[str]


Part = Figure | Table | Text


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; ``id`` is its anchor. ``open``: unfolded at first."""

    id: str
    title: str
    parts: Sequence[Part]
    open: bool = True


@dataclass(frozen=True)
class Finding:
    """A further finding of the first screen: its verdict word and one sentence."""

    verdict: str
    sentence: str


@dataclass(frozen=True)
class Headline:
    """The first screen. ``verdict`` gives colour and word: leak, not_leak, inconclusive, or a word of another verb
    (passed, failed, …). ``facts``: (name, value). ``next_steps``: what to do, `commands` in backquotes."""

    verdict: str
    sentence: str
    facts: Sequence[tuple[str, str]] = ()
    next_steps: Sequence[str] = ()
    further: Sequence[Finding] = ()


def plot_text(text: str, longest: int = LONGEST_LABEL) -> str:
    """``text`` for a label that plotly draws: control characters and direction overrides shown as escapes, cut in the
    middle to ``longest`` characters, and nothing left that plotly would read as markup."""
    return html.escape(cut(printable(text), longest), quote=False)


def cut(text: str, longest: int) -> str:
    """``text``, or its beginning and end around ``…`` where it is longer than ``longest`` characters."""
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"
