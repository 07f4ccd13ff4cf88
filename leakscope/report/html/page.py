"""One self-contained HTML file of a headline and sections: pure functions from parts.py to text.

No request leaves the page: plotly's script, ours and the style are inlined, and a Content-Security-Policy forbids the
rest. Figures wait as JSON until they are scrolled to. Every text is escaped here, its control characters shown as
escapes, its direction isolated (``<bdi>``), and cut where it is long with the whole text one click away.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from leakscope.report.html.parts import (
    Cell,
    Code,
    Figure,
    Finding,
    Headline,
    Lines,
    Part,
    Section,
    Table,
    Text,
    Value,
    cut,
    plot_text,
)
from leakscope.report.text import printable

__all__ = [
    "Cell",
    "Code",
    "Figure",
    "Finding",
    "Headline",
    "Lines",
    "Part",
    "Section",
    "Table",
    "Text",
    "Value",
    "cut",
    "page",
    "plot_text",
]

LONGEST_TEXT = 300
"""Longer texts are folded to this many characters."""
WIDE_TEXT = 60
"""A cell of a longer text gets room for it: a phone scrolls the table sideways rather than down a screen a row."""
LONGEST_DESCRIPTION = 3000
SHORT_CELL = 28
"""Cells of a table up to so long stay in one line."""
LONGEST_PARAGRAPH = 1000
LONGEST_WHOLE = 20_000
"""Of texts that are longer still the page says how much is left out: one page must not carry megabytes of a frame."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_TONES = {
    **dict.fromkeys(("leak", "failed", "regression", "critical"), "bad"),
    **dict.fromkeys(("not_leak", "passed", "no regression", "normal"), "good"),
}
_WORDS = {"not_leak": "no leak"}  # as on a terminal
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_IN_JSON = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page(title: str, headline: Headline, sections: Sequence[Section], scripts: Sequence[str] = ()) -> str:
    """The whole file. ``scripts``: names of further scripts of ``assets/`` that hold the behaviours of figures.

    Raises ValueError for an id that is no plain name or occurs twice, and for values that JSON does not know (NaN).
    """
    parts = [(section, part) for section in sections for part in section.parts]
    figures = [part for _, part in parts if isinstance(part, Figure)]
    ids = [*(section.id for section in sections), *(figure.id for figure in figures)]
    wrong = [name for name in ids if not _NAME.fullmatch(name) or ids.count(name) > 1]
    if wrong:
        raise ValueError(f"ids of sections and figures: {', '.join(wrong)}: each once, lower case, digits and hyphens")
    drawing = [_script(_plotly()), *(_script(_asset(name)) for name in ("page.js", *scripts))] if figures else []
    contents = "".join(f'<li><a href="#{section.id}">{text(section.title)}</a></li>' for section in sections)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">',
            f"<title>{html.escape(printable(title))}</title>\n<style>\n{_asset('style.css')}</style>\n</head>\n<body>",
            '<a class="skip" href="#main">Skip to the report</a>',
            f'<header class="bar"><p class="title">{text(title)}</p><button type="button" id="theme" hidden></button>'
            "</header>",
            '<main id="main">',
            _headline(headline),
            f'<nav aria-label="Sections"><ul>{contents}</ul></nav>' if len(sections) > 1 else "",
            *(_section(section) for section in sections),
            "</main>\n<footer><p>Made by leakscope. This file loads nothing and sends nothing.</p></footer>",
            *(_data(figure) for figure in figures),
            _script(_asset("theme.js")),
            *drawing,
            "</body>\n</html>\n",
        ]
    )


def text(value: str, longest: int = LONGEST_TEXT) -> str:
    """Markup of an untrusted text; what is longer than ``longest`` characters is folded, and whole when unfolded."""
    shown = printable(value)
    if len(shown) <= longest:
        return f"<bdi>{html.escape(shown)}</bdi>"
    whole = html.escape(cut(shown, LONGEST_WHOLE))
    left = f" ({len(shown):,} characters; --json has them all)" if len(shown) > LONGEST_WHOLE else ""
    return (
        f'<details class="long"><summary><bdi>{html.escape(cut(shown, longest))}</bdi></summary>'
        f"<bdi>{whole}</bdi>{left}</details>"
    )


def prose(value: str, longest: int = LONGEST_TEXT) -> str:
    """As :func:`text`, with what stands in `backquotes` set as code."""
    pieces = value.split("`")
    if len(pieces) % 2 == 0:  # a quote that does not close is no quote
        return text(value, longest)
    return "".join(f"<code>{text(p, longest)}</code>" if i % 2 else text(p, longest) for i, p in enumerate(pieces) if p)


def _headline(headline: Headline) -> str:
    facts = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in headline.facts)
    further = "".join(f"<li>{_badge(one.verdict)} <span>{prose(one.sentence)}</span></li>" for one in headline.further)
    steps = "".join(f"<li>{prose(step)}</li>" for step in headline.next_steps)
    return "".join(
        [
            f'<section class="headline {_tone(headline.verdict)}" aria-labelledby="verdict">',
            f'{_badge(headline.verdict)}<h1 id="verdict">{prose(headline.sentence)}</h1>',
            f"<dl>{facts}</dl>" if facts else "",
            f'<h2>Also found</h2><ul class="further">{further}</ul>' if further else "",
            f'<h2>What to do next</h2><ol class="steps">{steps}</ol>' if steps else "",
            "</section>",
        ]
    )


def _tone(verdict: str) -> str:
    return _TONES.get(verdict, "unsure")


def _badge(verdict: str) -> str:
    word = _WORDS.get(verdict, verdict.replace("_", " "))
    return f'<strong class="badge {_tone(verdict)}">{html.escape(printable(word))}</strong>'


def _section(section: Section) -> str:
    body = "\n".join(_part(part) for part in section.parts)
    unfolded = " open" if section.open else ""
    return (
        f'<section id="{section.id}" class="section" aria-labelledby="h-{section.id}"><details{unfolded}>'
        f'<summary><h2 id="h-{section.id}">{text(section.title)}</h2></summary>\n{body}\n</details></section>'
    )


def _part(part: Part) -> str:
    if isinstance(part, Figure):
        return _figure(part)
    if isinstance(part, Table):
        return _table(part)
    return "".join(f"<p>{prose(paragraph, LONGEST_PARAGRAPH)}</p>" for paragraph in part.paragraphs)


def _figure(figure: Figure) -> str:
    numbers = ""
    if figure.table:
        numbers = f'<details class="numbers"><summary>Numbers</summary>{_table(figure.table)}</details>'
    return (
        f'<figure id="{figure.id}" class="figure" data-behaviour="{html.escape(figure.behaviour)}">'
        f'<figcaption><h3 id="t-{figure.id}">{text(figure.title)}</h3>'
        f'<p id="d-{figure.id}">{prose(figure.description, LONGEST_DESCRIPTION)}</p></figcaption>'
        '<div class="controls"></div>'
        f'<div class="plot" role="group" aria-labelledby="t-{figure.id}" aria-describedby="d-{figure.id}" '
        f'style="height:{int(figure.height_px)}px"></div>{numbers}</figure>'
    )


def _table(table: Table) -> str:
    right = [
        all(isinstance(row[i], int | float | Value | None) for row in table.rows) for i in range(len(table.columns))
    ]
    head = "".join(
        f'<th scope="col"{_right(r)}>{text(name)}</th>' for name, r in zip(table.columns, right, strict=True)
    )
    body = "\n".join(
        f"<tr>{''.join(_cell(cell, r) for cell, r in zip(row, right, strict=True))}</tr>" for row in table.rows
    )
    note = f'<p class="note">{prose(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(printable(table.title))}"><table>'
        f"<caption>{text(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        f"{note}"
    )


def _right(right: bool) -> str:
    return ' class="number"' if right else ""


def _cell(cell: Cell, right: bool) -> str:
    if cell is None:
        return f'<td{_right(right)}><span aria-label="no value">–</span></td>'
    if isinstance(cell, Value):
        return f'<td class="number" data-value="{_plain(cell.raw)}">{html.escape(printable(cell.text))}</td>'
    if isinstance(cell, Code):
        return f"<td{_right(right)}><code>{text(cell.text, 160)}</code></td>"
    if isinstance(cell, Lines):
        lines = "".join(f"<li><code>{text(line)}</code></li>" for line in cell.lines)
        shown = f"<code>{html.escape(cut(printable(cell.summary), 160))}</code>"
        return f'<td><details class="lines"><summary>{shown}</summary><ol>{lines}</ol></details></td>'
    if isinstance(cell, int | float):
        shown = f"{cell:,}" if isinstance(cell, int) else f"{cell:,.4g}"
        return f'<td class="number" data-value="{_plain(cell)}">{shown}</td>'
    kind = "number" if right else "short" if len(cell) <= SHORT_CELL else "wide" if len(cell) > WIDE_TEXT else ""
    return f'<td class="{kind}">{text(cell)}</td>' if kind else f"<td>{text(cell)}</td>"


def _plain(number: int | float) -> str:
    """The number as JavaScript reads it, numpy's too."""
    return repr(number) if isinstance(number, int) else repr(float(number))


def _data(figure: Figure) -> str:
    value = {"data": figure.data, "layout": figure.layout, "extra": figure.extra}
    return f'<script type="application/json" id="json-{figure.id}">{json_in_html(value)}</script>'


def json_in_html(value: Any) -> str:
    """JSON that no parser of HTML or of old JavaScript takes for anything else. Raises ValueError for NaN."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_JSON)  # ASCII: U+2028 is escaped


def _script(source: str) -> str:
    return f"<script>\n{source}\n</script>"


def _asset(name: str) -> str:
    return resources.files("leakscope.report.html").joinpath("assets", name).read_text("utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script
