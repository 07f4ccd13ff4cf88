"""An Nsight Systems export as a database that nobody vouches for.

Read-only and immutable, so nothing is ever written beside it. Only tables that the parser knows are read, only real
ones (views and virtual tables run code of whoever made the file), every statement is checked by an authorizer, and the
work of all statements together is bounded by the size of the file. Exported tables are created lazily: each may be
missing, and columns come and go with the version, so they are asked for by name.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nsight_parsers import ReportError

Ints = npt.NDArray[np.int64]

NO_END = np.iinfo(np.int64).max
"""Stands for the NULL of an ``end``."""
MAX_TEXT = 4096
"""Characters kept of a name."""
MAX_VALUE_BYTES = 4 << 20
STEPS_PER_BYTE, FREE_STEPS = 10, 5_000_000
"""Virtual-machine steps that SQLite may take for each byte of the file: reading a row takes about one a byte."""
PROGRESS_STEPS = 100_000
FETCH_ROWS = 65_536
LOOKUP_IDS = 500

TABLES = frozenset(
    {
        "META_DATA_EXPORT", "EXPORT_META_DATA", "META_DATA_CAPTURE", "TARGET_INFO_SESSION_START_TIME",
        "TARGET_INFO_GPU", "StringIds", "PROCESSES", "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_KERNEL", "CUDA_GPU_MEMORY_USAGE_EVENTS", "CUDA_GPU_MEMORY_POOL_EVENTS", "CUDA_CALLCHAINS",
        "SAMPLING_CALLCHAINS", "OSRT_CALLCHAINS", "NVTX_EVENTS", "ENUM_CUDA_MEM_KIND", "ENUM_CUDA_DEV_MEM_EVENT_OPER",
    }
)  # fmt: skip
"""What may be read. Not among them: TARGET_INFO_SYSTEM_ENV and ProcessStreams (environment, user, host, output)."""
_FUNCTIONS = frozenset({"substr", "count", "glob"})
_ALLOWED = {sqlite3.SQLITE_SELECT}


class Export:
    """An open export. ``tables`` has the columns of each known table that is there; ``ignored`` names known tables
    that are no real ones. Use as a context manager.

    Every method raises ReportError when the file is damaged or asks for more work than its size explains.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ignored: list[str] = []
        self.tables: dict[str, list[str]] = {}
        self.too_long = 0  # texts left out because of their size
        self._left = FREE_STEPS + STEPS_PER_BYTE * path.stat().st_size
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True, isolation_level=None
            )
        except sqlite3.Error as error:
            raise ReportError(f"cannot open {path}: {error}") from error
        try:
            self._protect()
            self._read_schema()
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Export:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _protect(self) -> None:
        connection = self._connection
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for limit, value in (
            (sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 50),
        ):
            connection.setlimit(limit, value)
        connection.set_progress_handler(self._step, PROGRESS_STEPS)
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON", "temp_store = MEMORY"):
            self._all(f"PRAGMA {pragma}")
        connection.set_authorizer(self._authorize)

    def _step(self) -> int:
        self._left -= PROGRESS_STEPS
        return int(self._left < 0)

    @staticmethod
    def _authorize(action: int, first: str | None, second: str | None, database: str | None, via: str | None) -> int:
        if action == sqlite3.SQLITE_READ:
            # `via` is the view or trigger that reads: there are none that we would let.
            known = first in TABLES or first in ("sqlite_master", "sqlite_schema")
            return sqlite3.SQLITE_OK if known and database in ("main", None) and via is None else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first == "table_xinfo" else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_OK if second in _FUNCTIONS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY

    def _read_schema(self) -> None:
        rows = self._all("SELECT type, substr(name, 1, 100), rootpage, substr(sql, 1, 100) FROM sqlite_master")
        for kind, name, root, sql in rows:
            if name not in TABLES:
                continue
            real = kind == "table" and isinstance(root, int) and root > 0
            if not real or not str(sql).upper().startswith("CREATE TABLE"):
                self.ignored.append(name)
                self.tables.pop(name, None)
            elif name not in self.ignored:
                self.tables[name] = []
        for name in list(self.tables):
            columns = self._all(f'PRAGMA table_xinfo("{name}")')
            self.tables[name] = [column[1] for column in columns]
            if any(column[6] for column in columns):  # generated: reading it computes what the file says
                self.ignored.append(name)
                del self.tables[name]

    def has(self, table: str, *columns: str) -> bool:
        """Whether ``table`` is there and has ``columns``."""
        return table in self.tables and set(columns) <= set(self.tables[table])

    def rows(self, table: str) -> int:
        """Number of rows, 0 where there is no such table."""
        return int(self._all(f'SELECT count(*) FROM "{table}"')[0][0]) if table in self.tables else 0

    def ints(self, table: str, *columns: str, nulls: dict[str, int] | None = None) -> dict[str, Ints]:
        """Columns of integers by name. A missing column and a NULL are 0, or what ``nulls`` says for the column.

        Anything that is no integer is what SQLite's CAST makes of it.
        """
        nulls = nulls or {}
        there = [column for column in columns if self.has(table, column)]
        pieces: dict[str, list[Ints]] = {column: [] for column in there}
        if there:
            wanted = ", ".join(f'CAST("{column}" AS INTEGER)' for column in there)
            for chunk in self._chunks(f'SELECT {wanted} FROM "{table}"'):
                for column, values in zip(there, zip(*chunk, strict=True), strict=True):
                    array = pa.array(values, pa.int64()).fill_null(nulls.get(column, 0))
                    pieces[column].append(array.to_numpy(zero_copy_only=False))
        read = {column: np.concatenate(p) if p else np.empty(0, np.int64) for column, p in pieces.items()}
        count = len(next(iter(read.values()), np.empty(0)))
        return {
            column: read[column] if column in read else np.full(count, nulls.get(column, 0), np.int64)
            for column in columns
        }

    def texts(self, table: str, *columns: str) -> list[tuple[str, ...]]:
        """Rows of text, '' for NULL; [] when the table or one of the columns is missing. For small tables."""
        if not self.has(table, *columns):
            return []
        wanted = ", ".join(f'substr(CAST("{column}" AS TEXT), 1, {MAX_TEXT})' for column in columns)
        rows = self._all(f'SELECT {wanted} FROM "{table}"')
        return [tuple("" if value is None else str(value) for value in row) for row in rows]

    def text_column(self, table: str, column: str) -> list[str | None]:
        """One text column in the order of :meth:`ints`; [] when it is missing."""
        if not self.has(table, column):
            return []
        statement = f'SELECT substr(CAST("{column}" AS TEXT), 1, {MAX_TEXT}) FROM "{table}"'
        return [value for chunk in self._chunks(statement) for (value,) in chunk]

    def settings(self, table: str, names: Sequence[str]) -> dict[str, str]:
        """The rows of a name/value table whose name is one of ``names``, or ends in one after ``PROCESS_n:``."""
        if not self.has(table, "name", "value"):
            return {}
        found: dict[str, str] = {}
        for name in names:
            statement = (
                f'SELECT substr(CAST(name AS TEXT), 1, 100), substr(CAST(value AS TEXT), 1, 100) FROM "{table}" '
                f"WHERE name = '{name}' OR name GLOB 'PROCESS_*:{name}'"
            )
            for key, value in self._all(statement):
                found[str(key)] = str(value)
        return found

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts of StringIds by id, of those asked for alone: the table also holds leftovers of the environment."""
        wanted = sorted({int(i) for i in ids})
        found: dict[int, str] = {}
        if not self.has("StringIds", "id", "value"):
            return found
        for start in range(0, len(wanted), LOOKUP_IDS):
            chunk = wanted[start : start + LOOKUP_IDS]
            try:
                found.update(self._lookup(chunk))
            except sqlite3.DataError:  # one of them is longer than any name
                for one in chunk:
                    try:
                        found.update(self._lookup([one]))
                    except sqlite3.DataError:
                        self.too_long += 1
        return found

    def _lookup(self, ids: Sequence[int]) -> list[tuple[int, str]]:
        places = ", ".join("?" * len(ids))
        statement = f"SELECT id, substr(CAST(value AS TEXT), 1, {MAX_TEXT}) FROM StringIds WHERE id IN ({places})"
        try:
            rows = self._connection.execute(statement, ids).fetchall()
        except sqlite3.DataError:
            raise
        except sqlite3.Error as error:
            raise self._error(error) from error
        return [(key, text) for key, text in rows if isinstance(key, int) and isinstance(text, str)]

    def _all(self, statement: str) -> list[tuple[Any, ...]]:
        return [row for chunk in self._chunks(statement) for row in chunk]

    def _chunks(self, statement: str) -> Iterator[list[tuple[Any, ...]]]:
        try:
            cursor = self._connection.execute(statement)
            while chunk := cursor.fetchmany(FETCH_ROWS):
                yield chunk
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error) -> ReportError:
        if "interrupted" in str(error):
            return ReportError(f"{self.path}: damaged: reading it takes more work than a file of its size can need")
        if "not a database" in str(error):
            return ReportError(f"{self.path}: not an SQLite database, or encrypted")
        return ReportError(f"{self.path}: damaged or hostile database: {' '.join(str(error)[:200].split())}")
