"""DuckDB over a capture: a view for each table, and no way out of the capture."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from leakscope.capture.reader import Capture, scratch_directory
from leakscope.errors import BadInputError
from leakscope.model.tables import TABLES

FETCH_ROWS = 10_000


class Selection(NamedTuple):
    """The result of one SELECT: column names (made unique), DuckDB's type names, and the rows, read once."""

    names: list[str]
    types: list[str]
    rows: Iterator[tuple[Any, ...]]


def connect(capture: Capture, memory_limit: str | None, threads: int | None) -> duckdb.DuckDBPyConnection:
    """See :meth:`Capture.connect`."""
    connection = duckdb.connect(":memory:")
    if memory_limit is not None:
        connection.execute("SET memory_limit = ?", [memory_limit])
    if threads is not None:
        connection.execute("SET threads = ?", [threads])
    # Where it spills; DuckDB makes the directory only when it does.
    connection.execute("SET temp_directory = ?", [f"{scratch_directory()}/spill-{secrets.token_hex(4)}"])
    for name, schema in TABLES.items():
        parts = capture.parts(name)
        if parts:
            files = ", ".join(_quoted(_pattern(path)) for path in parts)
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{files}])")
        else:
            connection.register("_empty", _plain_text(schema).empty_table())
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM _empty")
            connection.unregister("_empty")
    # DuckDB checks a name twice: as the pattern that it was given as, and as the file that it found.
    readable = {name(path) for table in TABLES for path in capture.parts(table) for name in (_literal, _pattern)}
    paths = ", ".join(map(_quoted, sorted(readable)))
    if paths:
        connection.execute(f"SET allowed_paths = [{paths}]")
    for setting in (
        "python_enable_replacements = false",  # else SQL names reach the Python variables of the caller
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "enable_external_access = false",
        "lock_configuration = true",  # the last: nothing above can be undone
    ):
        connection.execute(f"SET {setting}")
    return connection


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _literal(path: Path) -> str:
    return str(path.absolute())


def _pattern(path: Path) -> str:
    """The absolute path as a glob pattern that matches only itself (read_parquet takes patterns)."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in _literal(path))


def _plain_text(schema: pa.Schema) -> pa.Schema:
    """Dictionaries become text, the type that DuckDB reads from Parquet."""
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])


def select(capture: Capture, sql: str, memory_limit: str | None = None) -> Selection:
    """Run one SELECT that somebody typed. Everything else (COPY, SET, several statements) is refused.

    Raises BadInputError with DuckDB's first line for SQL that is wrong, also while the rows are read.
    """
    connection = capture.connect(memory_limit=memory_limit)
    try:
        statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise BadInputError("a query is one SELECT; a capture is only read")
        result = connection.execute(statements[0])
    except duckdb.Error as error:
        raise _refused(error) from None
    described = result.description or []
    names = _unique([str(column[0]) for column in described])
    return Selection(names, [str(column[1]) for column in described], _rows(connection))


def _rows(connection: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    try:
        while rows := connection.fetchmany(FETCH_ROWS):
            yield from rows
    except duckdb.Error as error:
        raise _refused(error) from None
    finally:
        connection.close()


def _refused(error: duckdb.Error) -> BadInputError:
    return BadInputError(f"query: {(str(error).strip() or type(error).__name__).splitlines()[0]}")


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        candidate = name
        while candidate in seen:
            seen[name] += 1
            candidate = f"{name}_{seen[name]}"
        seen[candidate] = 0
        unique.append(candidate)
    return unique
