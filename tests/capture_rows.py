"""Rows for captures made by tests: columns have defaults, so that a test states only what it is about."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from leakscope.capture import CaptureWriter
from leakscope.model.manifest import ClockAnchor, Manifest, Source
from leakscope.model.tables import TABLES


def rows(table: str, count: int, /, **columns: Iterable[Any]) -> pa.Table:
    """``count`` rows of ``table``: the given columns, zeros, '' and [] in the others."""
    schema = TABLES[table]
    assert columns.keys() <= set(schema.names)
    arrays = []
    for field in schema:
        values = list(columns[field.name]) if field.name in columns else [_zero(field.type)] * count
        arrays.append(pa.array(values, _plain(field.type)).cast(field.type))
    return pa.table(arrays, schema=schema)


def manifest() -> Manifest:
    """A manifest with one source and nothing left at its default where that would hide a loss."""
    source = Source(
        id=0,
        kind="recording",
        name="test",
        clock="monotonic",
        anchors=[ClockAnchor(1_700_000_000_000_000_001, 9_007_199_254_740_993, 9_007_199_254_740_995)],
        command=["./leaker", "--rounds", "3"],
        exit_status=-9,
        scope={"pids": [17]},
        limits=["no GPU"],
    )
    return Manifest(sources=[source])


def small_capture(path: Path, count: int = 7) -> Path:
    """A complete capture: ``count`` mem_events with ts_ns 1… and size_bytes 11, 22, …; and two losses."""
    writer = CaptureWriter.create(path, manifest())
    numbers = range(1, count + 1)
    writer.write("mem_events", rows("mem_events", count, ts_ns=numbers, size_bytes=[11 * n for n in numbers]))
    writer.write("losses", rows("losses", 2, what=["ring_drop", "stack_miss"], count=[3, 5]))
    writer.finish()
    return path


def numbered(first: int, count: int) -> pa.Table:
    """mem_events with ts_ns ``first``, ``first`` + 1, …"""
    return rows("mem_events", count, ts_ns=range(first, first + count))


def incompressible(first: int) -> pa.Table:
    """5,000 mem_events from ts_ns ``first`` on which no compression makes small."""
    noise = random.Random(first)
    count = 5_000
    return rows(
        "mem_events",
        count,
        ts_ns=range(first, first + count),
        addr=[noise.getrandbits(64) for _ in range(count)],
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _zero(kind: pa.DataType) -> Any:
    plain = _plain(kind)
    if pa.types.is_list(plain):
        return []
    return "" if pa.types.is_string(plain) else 0
