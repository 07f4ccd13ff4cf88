"""Builds the tables ``kernel_profiles`` and ``kernel_metrics``, row by row, whatever the profiler's output was."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

WRITABLE_BYTES = "profiler__replayer_bytes_mem_accessible"
"""Metric: volume of memory that the replayer could write at a launch, in bytes. ``.avg`` is a pass's own value,
``.sum`` that times the passes."""
MAX_WORDS = 32_000
"""Distinct sections, metrics or units: what an int16 dictionary holds; real reports have up to about 1,500."""
MAX_METRIC_ROWS = 20_000_000
EXACT_INTEGERS = 1 << 53


class ProfileTables:
    """Rows of both tables. Profiles get ids from 1 in the order in which they are added."""

    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.dropped_metrics = 0
        self._words: dict[str, dict[str, int]] = {"section": {}, "metric": {}, "unit": {}}
        self._codes = {name: array("h") for name in self._words}
        self._profile_ids = array("q")
        self._values = array("d")
        self._texts: list[str] = []

    def add_profile(self, **columns: Any) -> int:
        """Adds a row of ``kernel_profiles``, columns not given are zero or empty; returns its id."""
        self.profiles.append(columns)
        return len(self.profiles)

    def add_metric(self, profile_id: int, section: str, metric: str, unit: str, value: float, text: str = "") -> None:
        """Adds a row of ``kernel_metrics``; an integer beyond 2^53 keeps its digits in ``text``."""
        if len(self._values) >= MAX_METRIC_ROWS:
            self.dropped_metrics += 1
            return
        codes = [self._code(*word) for word in (("section", section), ("metric", metric), ("unit", unit))]
        if min(codes) < 0:
            self.dropped_metrics += 1
            return
        for column, code in zip(self._codes.values(), codes, strict=True):
            column.append(code)
        self._profile_ids.append(profile_id)
        if isinstance(value, int) and abs(value) > EXACT_INTEGERS:
            text = str(value)
        self._values.append(value)
        self._texts.append(text)

    def tables(self) -> dict[str, pa.Table]:
        """Both tables in the schemas of ``leakscope.model.tables``; ``kernel_metrics`` only where there is a metric."""
        import numpy as np
        import pyarrow as pa

        from leakscope.model.tables import KERNEL_METRICS, KERNEL_PROFILES

        blank = {name: _blank(KERNEL_PROFILES.field(name).type) for name in KERNEL_PROFILES.names}
        rows = [{**blank, "id": number, **row} for number, row in enumerate(self.profiles, 1)]
        tables = {"kernel_profiles": pa.Table.from_pylist(rows, KERNEL_PROFILES)}
        if self._values:
            words = {
                name: pa.DictionaryArray.from_arrays(pa.array(np.frombuffer(codes, np.int16)), list(self._words[name]))
                for name, codes in self._codes.items()
            }
            columns = {
                "source_id": pa.repeat(pa.scalar(0, pa.int16()), len(self._values)),
                "profile_id": pa.array(np.frombuffer(self._profile_ids, np.int64)),
                **words,
                "value": pa.array(np.frombuffer(self._values, np.float64)),
                "text": pa.array(self._texts, pa.string()),
            }
            tables["kernel_metrics"] = pa.table(columns, KERNEL_METRICS)
        return tables

    def _code(self, column: str, word: str) -> int:
        words = self._words[column]
        if word in words:
            return words[word]
        if len(words) >= MAX_WORDS:
            return -1
        return words.setdefault(word, len(words))


def process_table(programs: dict[int, str]) -> dict[str, pa.Table]:
    """The table ``processes`` of PIDs and the base names of their programs; none where there is no PID."""
    if not programs:
        return {}
    import pyarrow as pa

    from leakscope.model.tables import PROCESSES

    blank = {name: _blank(PROCESSES.field(name).type) for name in PROCESSES.names}
    rows = [
        {**blank, "pid": pid, "namespace_pid": pid, "name": name, "role": "other"}
        for pid, name in sorted(programs.items())
    ]
    return {"processes": pa.Table.from_pylist(rows, PROCESSES)}


def in_range(value: int, bits: int) -> int:
    """``value`` where a signed integer of ``bits`` holds it, else 0: a hostile number is no number."""
    return value if -(1 << (bits - 1)) <= value < 1 << (bits - 1) else 0


def _blank(kind: pa.DataType) -> Any:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return []
    if pa.types.is_floating(kind):
        return math.nan
    return "" if pa.types.is_string(kind) or pa.types.is_dictionary(kind) else 0
