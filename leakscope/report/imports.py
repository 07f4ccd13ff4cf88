"""What ``leakscope import`` prints: what each file gave, what is wrong with it, what it cannot say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from leakscope.quantities import counted
from leakscope.report.text import printable

_NOUNS = {
    "mem_events": "memory event",
    "calls": "call",
    "launches": "launch",
    "marks": "range",
    "samples": "sample",
    "kernel_profiles": "profiled kernel",
    "kernel_metrics": "metric",
    "segments": "block",
    "cache_events": "cache event",
    "losses": "loss",
    "stacks": "stack",
    "processes": "process",
}
_PLURALS = {"launch": "launches", "process": "processes", "loss": "losses"}
_CLOCKS = {
    "monotonic": "times: the target's system clock",
    "utc": "times: UTC",
    "relative": "times: relative to an unknown zero",
    "none": "no times",
}


def import_lines(files: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of plain text, safe for a terminal. ``files``: ``Imported.to_json`` of each."""
    for file in files:
        tool = " ".join(part for part in (file["tool"] or file["kind"], file["version"]) if part)
        yield printable(f"{file['path']}: {tool}, source {file['source_id']}")
        rows = [_counted(file["rows"][name], noun) for name, noun in _NOUNS.items() if file["rows"].get(name)]
        yield f"  {', '.join(rows) or 'nothing that leakscope keeps'}; {_CLOCKS.get(file['clock'], file['clock'])}"
        for finding in file["findings"]:
            yield printable(f"  found: {finding}")
        for limit in file["limits"]:
            yield printable(f"  cannot say: {limit}")


def _counted(number: int, noun: str) -> str:
    if number != 1 and noun in _PLURALS:
        return f"{number:,} {_PLURALS[noun]}"
    return counted(number, noun)
