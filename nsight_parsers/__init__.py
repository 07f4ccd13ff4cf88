"""Readers of NVIDIA and PyTorch reports, usable without the rest of leakscope.

Each parser takes a path and returns a :class:`ParsedReport`: Arrow tables in the schemas of ``leakscope.model.tables``
and findings about the file (what it cannot say, what was skipped). Imports nothing of ours but ``leakscope.model``.
:func:`nsight_parsers.recognise.parse` reads a file of any known kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


class ReportError(ValueError):
    """A file that no parser can use. One line: what is wrong, in which file, and what to do."""


@dataclass
class ParsedReport:
    """What a parser found in one file.

    ``tables`` by name, in the schemas of ``leakscope.model.tables``; ``source_id`` is 0 throughout, ids of rows,
    stacks and frames start at 1 and are the file's own. ``findings`` say what is wrong with this file or was left
    out of it, ``limits`` what files of its kind cannot say. ``facts`` are the small truths about the whole file
    (devices, creation time, launch filters): JSON values only, never environment, tokens or host names. ``clock`` is
    that of the times in the tables: ``monotonic`` (of the host that wrote the file), ``utc``, ``relative`` (to an
    unknown zero) or ``none`` (no times, or rows that are only in order).
    """

    tables: dict[str, pa.Table] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    tool: str = ""
    version: str = ""
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    clock: str = "none"
