"""For tests of what is made of a report: the same evidence and options are attributed once a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leakscope.cli import attribute


@contextmanager
def reports_once() -> Iterator[None]:
    """Verbs that ask for the report of the same evidence with the same options get the same report."""
    known: dict[Any, Any] = {}

    def report_of(evidence: list[Path], options: Any, *args: Any, **how: Any) -> Any:
        key = (tuple(evidence), options)
        if key not in known:
            known[key] = original(evidence, options, *args, **how)
        return known[key]

    original, attribute.report_of = attribute.report_of, report_of
    try:
        yield
    finally:
        attribute.report_of = original
