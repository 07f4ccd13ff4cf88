"""Comments of a source file by line: what the code says of a column or a field stands behind it or above it."""

from __future__ import annotations

import ast
import io
import tokenize


class Comments:
    """Comments of one source text."""

    def __init__(self, source: str) -> None:
        lines = source.splitlines()
        self._behind: dict[int, str] = {}
        self._alone: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                alone = lines[token.start[0] - 1].lstrip().startswith("#")
                (self._alone if alone else self._behind)[token.start[0]] = token.string.lstrip("# ")

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The comment behind the node, on any of its lines; else the comment lines right above it; else ''."""
        first, last = node.lineno, node.end_lineno or node.lineno
        behind = [self._behind[line] for line in range(first, last + 1) if line in self._behind]
        above: list[str] = []
        while not behind and first - 1 - len(above) in self._alone:
            above.insert(0, self._alone[first - 1 - len(above)])
        return " ".join(behind or above)
