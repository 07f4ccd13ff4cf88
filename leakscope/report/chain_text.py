"""A chain in one line: from application code to the bytes, shortened to what names the cause."""

from __future__ import annotations

from collections.abc import Sequence

from leakscope.model.results import Chain, ChainLink
from leakscope.quantities import size
from leakscope.report.cells import bare_frame, short_frame
from leakscope.report.joins import evidence_of_link
from leakscope.report.text import printable

_OF_OTHERS = ("identity", "order", "window", "range")  # rules of links that another source adds


def chain_line(chain: Chain, culprit: str = "") -> str:
    """A chain in one line, its frames shortened to those around the culprit. Safe for a terminal."""
    return " → ".join(chain_pieces(chain, culprit))


def chain_pieces(chain: Chain, culprit: str = "", bare: bool = False, frames: int = 3) -> list[str]:
    """The links of :func:`chain_line`, outermost first; ``bare``: frames without the folders of their files."""
    return [link_text(link, bare) for link in shortened(chain.links, culprit, frames)]


def shortened(links: Sequence[ChainLink], culprit: str = "", frames: int = 3) -> list[ChainLink]:
    """The chain with few frames: the culprit and those around it, else the innermost; unnamed ones are left out."""
    first = next((i for i, link in enumerate(links) if link.what != "range"), len(links))
    lead = next((i for i, link in enumerate(links) if i >= first and link.what != "frame"), len(links))
    named = [link for link in links[first:lead] if "+0x" not in link.name]
    at = next((i for i in reversed(range(len(named))) if named[i].name == culprit), len(named) - 1)
    end = min(len(named), max(at + 2, frames))
    return [*links[:first], *named[max(0, end - frames) : end], *links[lead:]]


def link_text(link: ChainLink, bare: bool = False) -> str:
    """One link, with what it holds where it is memory."""
    text = f"{link.name}()" if link.what == "call" else (bare_frame if bare else short_frame)(link.name)
    if link.rule in _OF_OTHERS or link.what == "profile":
        text = f"{link.name} {evidence_of_link(link)}"
    elif link.what in ("slab_cache", "kind", "map", "device"):
        text = f"{link.name} {size(link.bytes)}"
    elif link.what == "range":
        text = f"range {link.name}"
    elif link.what == "launches":
        text = f"{'' if link.confidence == 1 else '~'}{link.name} ×{link.count:,}"
    return printable(text)
