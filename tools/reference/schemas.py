"""Page of a capture's tables: every column with its type and what the code's comment says of it, and the words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pyarrow as pa

from leakscope.model import tables, words
from tools.reference import plain, table
from tools.reference.comments import Comments


def schemas_page() -> str:
    """Markdown of the tables and words."""
    source = Path(tables.__file__).read_text(encoding="utf-8")
    comments = column_comments(source)
    parts = [
        "# Tables of a capture",
        f"Schema version {tables.SCHEMA_VERSION}. What a capture is: [capture](../capture.md). "
        "`leakscope query CAPTURE SQL` has each table as a view of its name.",
        (tables.__doc__ or "").split("\n\n", 1)[1].replace("``", "`").strip(),
        table(("table", "a row is"), [(f"[`{name}`](#{name})", tables.ROWS[name]) for name in tables.TABLES]),
    ]
    for name, schema in tables.TABLES.items():
        rows = [
            (f"`{field.name}`", _type(field.type), _comment(comments.get((name.upper(), field.name), "")))
            for field in schema
        ]
        parts += [f"## {name}", f"A row: {tables.ROWS[name]}.", table(("column", "type", "meaning"), rows)]
    return "\n\n".join([*parts, *_words()])


def column_comments(source: str) -> dict[tuple[str, str], str]:
    """The comment of each column by (name of the schema's variable, column): see Comments."""
    comments, found = Comments(source), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for column in ast.walk(node.value):
                if isinstance(column, ast.Tuple) and isinstance(column.elts[0], ast.Constant) and len(column.elts) == 2:
                    found[node.targets[0].id, str(column.elts[0].value)] = comments.of(column)
    return found


def _comment(text: str) -> str:
    """``words.OPS`` becomes a link to these words."""
    return re.sub(r"\bwords\.([A-Z_]+)", lambda name: f"[{name[1].lower()}](#{name[1].lower()})", plain(text))


def _type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "text, dictionary"
    if pa.types.is_list(kind):
        return f"list of {kind.value_type}"
    return "text" if pa.types.is_string(kind) else str(kind)


def _words() -> list[str]:
    """The vocabularies with what the code says of each."""
    parts = ["## Words", "Values that columns may have."]
    body = ast.parse(Path(words.__file__).read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name = node.targets[0].id
        value = getattr(words, name)
        shown = value if isinstance(value, tuple) else sorted(value) if isinstance(value, frozenset) else [value]
        parts += [f"### {name.lower()}", ", ".join(f"`{word}`" for word in shown)]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            parts.append(" ".join(str(after.value.value).replace("``", "`").split()))
    return parts
