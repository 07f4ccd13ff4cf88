"""Readers of NVIDIA and PyTorch reports, usable without the rest of leakscope.

Each parser takes a path and returns a :class:`ParsedReport`: Arrow tables in the schemas of ``leakscope.model.tables``
and findings about the file (what it cannot say, what was skipped). Imports nothing of ours but ``leakscope.model``.
No parser is here yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class ParsedReport:
    """What a parser found: tables by name, findings in words, and the tool and version that wrote the file."""

    tables: dict[str, pa.Table] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    tool: str = ""
    version: str = ""
