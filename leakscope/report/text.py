"""Small pieces of text that every rendering needs."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with every character that a terminal may act on shown as an escape (``\\x1b``, ``\\n``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
