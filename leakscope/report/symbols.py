"""What `leakscope symbolize` found and what is missing, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from leakscope.model.symbolized import Symbolized
from leakscope.report.text import printable

MAX_MISSING = 30


def symbolized_json(result: Symbolized, output: str) -> dict[str, Any]:
    """One object; `missing` are the modules whose frames still lack names or lines."""
    return {"schema": "leakscope-symbolize/1", "output": output, **asdict(result)}


def symbolized_text(result: Symbolized, output: str) -> str:
    """Lines for people: the frames before and after, and the build ids whose files are still missing."""
    lines = [
        f"{printable(output)}: {result.frames:,} native frames",
        f"  without a function  {result.unnamed_before:,} before, {result.unnamed_after:,} now",
        f"  without a line      {result.without_line_before:,} before, {result.without_line_after:,} now",
        f"  inlined functions   {result.inlined:,} added",
    ]
    if result.missing:
        lines.append("still missing (build id, frames without a line, without a function, module: why):")
        lines += [
            f"  {printable(m.build_id) or 'none':<40}  {m.frames:>6,}  {m.unnamed:>6,}  "
            f"{printable(m.module)}: {printable(m.reason)}"
            for m in result.missing[:MAX_MISSING]
        ]
    if len(result.missing) > MAX_MISSING:
        lines.append(f"  and {len(result.missing) - MAX_MISSING:,} more modules; --json has them all")
    return "\n".join(lines)
