"""Tables as CSV and Parquet: sites of a report, samples and events of captures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from leakscope.report.export.folded import folded_frame

if TYPE_CHECKING:
    import pyarrow as pa

    from leakscope.model.results import Report, Site


FORMULA = "=+-@\t\r\n＝＋－＠"
"""First characters that make a cell a formula in Excel, LibreOffice or Google Sheets, the full-width forms included."""
GUARD = "'"


class Batches(NamedTuple):
    """A table in pieces, all of one schema."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def sites_table(report: Report, names: Sequence[str]) -> Batches:
    """The listed sites, most kept bytes first: the keys of a site in the JSON report, and evidence (a name)."""
    import pyarrow as pa

    fields = [
        *((name, pa.string()) for name in ("evidence", "id", "layer", "kind", "api", "slab_cache", "culprit_frame")),
        *((name, pa.list_(pa.string())) for name in ("ranges", "stack")),
        *((name, pa.int64()) for name in ("live_bytes", "live_objects", "allocated_bytes", "allocated_objects")),
        *((name, pa.float64()) for name in ("growth_bytes_per_s", "growth_ci_low", "growth_ci_high")),
        *((name, pa.float64()) for name in ("kept_share", "free_seen_share", "standard_error_bytes")),
        *((name, pa.int64()) for name in ("first_ns", "last_ns", "outlives_process_bytes", "ended_with_process_bytes")),
        ("processes", pa.int64()),
        *((n, pa.bool_()) for n in ("frees_visible", "stack_sampled", "bytes_sampled", "added_to_layer")),
    ]
    schema = pa.schema(fields)
    rows = [_site_row(site, names[site.source]) for site in report.sites]
    table = pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema=schema)
    return Batches(schema, iter(table.to_batches()))


def _site_row(site: Site, evidence: str) -> dict[str, Any]:
    return site.to_json() | {"evidence": evidence}


def write_csv(tables: Iterable[Batches], path: Path | BinaryIO) -> None:
    """One header, then all rows, all of one schema. Lists are joined with ``;`` as in folded stacks, text is
    :func:`guarded`."""
    import pyarrow.csv as pc

    writer = None
    try:
        for table in tables:
            writer = writer or pc.CSVWriter(path, _flat_schema(table.schema))
            for batch in table.batches:
                writer.write_batch(_flat(batch))
    finally:
        if writer is not None:
            writer.close()


def write_parquet(tables: Iterable[Batches], path: Path | BinaryIO) -> None:
    """All rows in one file, zstd. The schemas are the same."""
    import pyarrow.parquet as pq

    writer = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            for batch in table.batches:
                writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()


def _flat_schema(schema: pa.Schema) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(f.name, pa.string() if pa.types.is_list(f.type) else f.type) for f in schema])


def _flat(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Lists of text as one text; no text is a formula."""
    import pyarrow as pa

    def joined(cells: list[list[str] | None]) -> pa.Array:
        return pa.array([None if cell is None else ";".join(map(folded_frame, cell)) for cell in cells], pa.string())

    columns = [joined(c.to_pylist()) if pa.types.is_list(c.type) else c for c in batch.columns]
    columns = [guarded(column) if pa.types.is_string(column.type) else column for column in columns]
    return pa.RecordBatch.from_arrays(columns, schema=_flat_schema(batch.schema))


def guarded(texts: pa.Array) -> pa.Array:
    """``texts`` with ``'`` before those that a spreadsheet would take for a formula.

    Those begin with one of :data:`FORMULA` (OWASP, "CSV Injection"); so that the guard can be taken off again, texts
    that begin with ``'`` get one more. The reverse: take one ``'`` from the beginning of each text that has one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    first = pc.utf8_slice_codeunits(texts, 0, 1)
    dangerous = pc.is_in(first, value_set=pa.array([*FORMULA, GUARD], pa.string()))
    return pc.if_else(dangerous, pc.binary_join_element_wise(GUARD, texts, ""), texts)
