"""Captures: what is written reads back exactly, by the reader and by SQL that reaches nothing else."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capture_rows import manifest, numbered, rows, small_capture
from hypothesis import given, settings
from hypothesis import strategies as st

from leakscope.capture import Capture, CaptureWriter
from leakscope.errors import BadInputError
from leakscope.model.tables import MAX_PART_ROWS, TABLES

PART = "mem_events/part-000001.parquet"


# --- round trips


@pytest.mark.parametrize("table", TABLES)
def test_a_table_reads_back_as_written(tmp_path: Path, table: str) -> None:
    written = rows(table, 5)
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write(table, written)
    writer.finish()

    capture = Capture.open(tmp_path / "a.lscope")

    assert capture.problems == []
    assert capture.table(table).schema == TABLES[table]
    assert capture.table(table).to_pylist() == written.to_pylist()
    assert [name for name in TABLES if capture.rows(name)] == [table]


def integers(kind: pa.DataType) -> st.SearchStrategy[int]:
    bits = kind.bit_width
    if pa.types.is_unsigned_integer(kind):
        return st.integers(0, 2**bits - 1)
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def values(kind: pa.DataType) -> st.SearchStrategy[object]:
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    if pa.types.is_list(kind):
        return st.lists(values(kind.value_type), max_size=4)
    if pa.types.is_floating(kind):
        return st.floats(allow_nan=False)
    return integers(kind)


def tables() -> st.SearchStrategy[tuple[str, pa.Table]]:
    def of(name: str) -> st.SearchStrategy[tuple[str, pa.Table]]:
        row = st.fixed_dictionaries({field.name: values(field.type) for field in TABLES[name]})
        batch = st.lists(row, min_size=1, max_size=5)
        return batch.map(lambda items: (name, rows(name, len(items), **{k: [i[k] for i in items] for k in items[0]})))

    return st.sampled_from(sorted(TABLES)).flatmap(of)


@settings(max_examples=20, deadline=None)
@given(batches=st.lists(tables(), max_size=3))
def test_any_rows_survive_the_round_trip(tmp_path_factory: pytest.TempPathFactory, batches: list) -> None:
    path = tmp_path_factory.mktemp("round") / "a.lscope"
    writer = CaptureWriter.create(path, manifest())
    for table, data in batches:
        writer.write(table, data)
    writer.finish()

    capture = Capture.open(path)
    connection = capture.connect(threads=1)

    assert capture.problems == []
    for name in TABLES:
        expected = []
        for table, data in batches:
            if table == name:
                time_column = next((c for c in ("ts_ns", "enter_ns", "start_ns") if c in data.column_names), None)
                items = data.to_pylist()
                expected += sorted(items, key=lambda row: row[time_column]) if time_column else items
        assert capture.table(name).to_pylist() == expected
        names = ", ".join(f'"{column}"' for column in TABLES[name].names)
        in_sql = connection.execute(f"SELECT {names} FROM {name}").fetchall()
        assert in_sql == [tuple(row.values()) for row in expected]


def test_the_manifest_reads_back_and_states_each_parts_checksum(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")

    read = Capture.open(path).manifest

    assert read.sources == manifest().sources
    assert (read.complete, read.incomplete_reason, read.tool_version) == (True, "", "0.1.0")
    assert [(part.table, part.path, part.rows) for part in read.parts] == [
        ("mem_events", PART, 7),
        ("losses", "losses/part-000001.parquet", 2),
    ]
    for part in read.parts:
        assert part.sha256 == hashlib.sha256((path / part.path).read_bytes()).hexdigest()


def test_columns_can_be_picked_and_unknown_names_are_an_error(tmp_path: Path) -> None:
    capture = Capture.open(small_capture(tmp_path / "a.lscope", 3))

    assert capture.table("mem_events", ["size_bytes", "ts_ns"]).to_pydict() == {
        "size_bytes": [11, 22, 33],
        "ts_ns": [1, 2, 3],
    }
    assert capture.table("calls", ["id"]).schema.names == ["id"]
    for wrong in (
        lambda: capture.table("nonsense"),
        lambda: capture.rows("nonsense"),
        lambda: capture.parts("nonsense"),
        lambda: capture.table("calls", ["nonsense"]),
    ):
        with pytest.raises(KeyError):
            wrong()


# --- writing


def test_large_writes_are_split_into_parts_in_order(tmp_path: Path) -> None:
    count = 2 * MAX_PART_ROWS + 1
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("samples", rows("samples", count, ts_ns=range(count)))
    writer.finish()

    capture = Capture.open(tmp_path / "a.lscope")

    assert [pq.read_metadata(part).num_rows for part in capture.parts("samples")] == [200_000, 200_000, 1]
    assert [part.name for part in capture.parts("samples")] == [f"part-00000{n}.parquet" for n in (1, 2, 3)]
    assert capture.table("samples", ["ts_ns"])["ts_ns"].to_pylist() == list(range(count))


def test_rows_are_sorted_by_time_within_a_part(tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("calls", rows("calls", 4, enter_ns=[7, 3, 5, 3], id=[1, 2, 3, 4]))
    writer.finish()

    table = Capture.open(tmp_path / "a.lscope").table("calls")

    assert table["enter_ns"].to_pylist() == [3, 3, 5, 7]
    assert table["id"].to_pylist() == [2, 4, 3, 1]


def test_plain_text_any_column_order_and_batches_are_accepted(tmp_path: Path) -> None:
    names = list(reversed(TABLES["losses"].names))
    batch = pa.RecordBatch.from_pylist(
        [{"source_id": 0, "ts_ns": 2, "probe": "ring", "what": "ring_drop", "count": 3, "detail": "cpu 1"}],
        schema=pa.schema(
            [(name, pa.string() if name == "what" else TABLES["losses"].field(name).type) for name in names]
        ),
    )
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("losses", batch)
    writer.write("losses", batch.slice(0, 0))
    writer.finish()

    capture = Capture.open(tmp_path / "a.lscope")

    assert capture.table("losses").to_pylist() == [
        {"source_id": 0, "ts_ns": 2, "probe": "ring", "what": "ring_drop", "count": 3, "detail": "cpu 1"}
    ]
    assert len(capture.parts("losses")) == 1  # no rows, no part


def test_wrong_columns_are_refused(tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())

    with pytest.raises(ValueError, match="what"):
        writer.write("losses", rows("losses", 1).drop_columns(["what"]))
    with pytest.raises(ValueError, match="extra"):
        writer.write("losses", rows("losses", 1).append_column("extra", pa.array([1])))
    with pytest.raises(ValueError, match="no table 'nonsense'"):
        writer.write("nonsense", rows("losses", 1))

    assert not any(entry.is_dir() for entry in (tmp_path / "a.lscope").iterdir())


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    # given four threads, each with its own range of times
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())

    def work(thread: int) -> None:
        for piece in range(13):
            writer.write("mem_events", numbered(thread * 10_000 + piece * 17, 17))
            writer.save_manifest()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    # when they write at the same time
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    # then every row is there once
    capture = Capture.open(tmp_path / "a.lscope")
    assert capture.problems == []
    assert len(capture.parts("mem_events")) == len(capture.manifest.parts) == 4 * 13
    expected = [n * 10_000 + row for n in range(4) for row in range(13 * 17)]
    assert sorted(capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist()) == expected


# --- an output that exists


def test_an_existing_capture_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")

    with pytest.raises(BadInputError, match=r"a\.lscope: exists already.*--force"):
        CaptureWriter.create(path, manifest())
    assert Capture.open(path).rows("mem_events") == 7

    CaptureWriter.create(path, manifest(), force=True).finish()
    assert Capture.open(path).rows("mem_events") == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.lscope"]


def test_force_never_deletes_what_leakscope_did_not_write(tmp_path: Path) -> None:
    # given things that are not, or not only, a capture
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web app"}')
    (small_capture(tmp_path / "noted") / "notes.txt").write_text("mine")
    (small_capture(tmp_path / "deep") / "losses" / "sub").mkdir()
    small_capture(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    # when each is to be replaced with force, then it is refused and untouched
    for name in ("file", "folder", "other", "noted", "deep", "link"):
        with pytest.raises(BadInputError, match=name):
            CaptureWriter.create(tmp_path / name, manifest(), force=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_capture_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"nowhere/a\.lscope: cannot make the capture: No such file or directory"):
        CaptureWriter.create(tmp_path / "nowhere" / "a.lscope", manifest())
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"cannot make the capture: Not a directory"):
        CaptureWriter.create(tmp_path / "file" / "a.lscope", manifest())


# --- SQL


def test_sql_reads_the_tables_by_name_and_empty_ones_too(tmp_path: Path) -> None:
    connection = Capture.open(small_capture(tmp_path / "a.lscope")).connect(memory_limit="256MiB", threads=1)

    assert connection.execute("SELECT count(*), sum(size_bytes) FROM mem_events").fetchall() == [(7, 308)]
    names = [name for (name,) in connection.execute("SHOW TABLES").fetchall()]
    assert names == sorted(TABLES)
    for name in TABLES:
        described = [column for column, *_ in connection.execute(f"DESCRIBE {name}").fetchall()]
        assert described == TABLES[name].names
    text = connection.execute("SELECT data_type FROM duckdb_columns() WHERE column_name = 'what'").fetchall()
    assert text == [("VARCHAR",)]


def test_sql_works_when_the_path_has_quotes_and_glob_characters(tmp_path: Path) -> None:
    folder = tmp_path / "it's [a] *?"
    folder.mkdir()

    connection = Capture.open(small_capture(folder / "b{1,2}.lscope")).connect()

    assert connection.execute("SELECT sum(size_bytes) FROM mem_events").fetchall() == [(308,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM secret_of_the_caller",
        "COPY (SELECT 1) TO '{outside}/x.csv'",
        "COPY (SELECT 1) TO '{capture}/x.csv'",
        "COPY (SELECT 1) TO '{capture}/losses/part-000001.parquet'",
        "EXPORT DATABASE '{outside}/x'",
        "ATTACH '{outside}/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '{outside}/x.so'",
        "SET enable_external_access = true",
        "SET allowed_directories = ['/']",
        "SET lock_configuration = false",
        "SET temp_directory = '{outside}'",
    ],
)
def test_sql_reaches_nothing_outside_the_capture(tmp_path: Path, sql: str) -> None:
    import duckdb

    secret_of_the_caller = pa.table({"secret": [1]})  # noqa: F841
    path = small_capture(tmp_path / "a.lscope")
    before = sorted(str(entry) for entry in tmp_path.rglob("*"))
    connection = Capture.open(path).connect()

    with pytest.raises(duckdb.Error):
        connection.execute(sql.format(outside=tmp_path, capture=path)).fetchall()

    assert sorted(str(entry) for entry in tmp_path.rglob("*")) == before
    assert Capture.open(path).problems == []


def test_sql_spills_to_disk_instead_of_failing(tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    for start in range(0, 600_000, 200_000):
        writer.write("samples", rows("samples", 200_000, ts_ns=range(start, start + 200_000)))
    writer.finish()
    connection = Capture.open(tmp_path / "a.lscope").connect(memory_limit="50MB", threads=1)

    connection.execute(
        "CREATE TABLE copy AS SELECT hash(ts_ns) AS h, ts_ns, repeat('x', 80) AS t FROM samples ORDER BY h"
    )

    assert connection.execute("SELECT count(*) FROM duckdb_temporary_files()").fetchone() != (0,)
    assert connection.execute("SELECT count(*), sum(ts_ns) FROM copy").fetchone() == (
        600_000,
        179_999_700_000,
    )
