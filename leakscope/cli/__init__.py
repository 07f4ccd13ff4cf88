"""The command line: one module a verb; each parses, calls and renders, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from leakscope.report.text import printable


def warn(lines: Iterable[str]) -> None:
    """Print each line on stderr as a warning of leakscope's."""
    for line in lines:
        print(f"leakscope: warning: {printable(line)}", file=sys.stderr)
