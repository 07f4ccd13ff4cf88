"""Captures that are damaged, hostile or none at all: said in a line, left out, never read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from capture_rows import incompressible, manifest, numbered, rows, small_capture
from hypothesis import given, settings
from hypothesis import strategies as st

from leakscope.capture import Capture, CaptureWriter
from leakscope.capture.layout import dump_manifest, parse_manifest
from leakscope.errors import BadInputError
from leakscope.model.tables import SCHEMA_VERSION

PART = "mem_events/part-000001.parquet"


def edit_manifest(capture: Path, **fields: object) -> None:
    content = json.loads((capture / "manifest.json").read_text())
    (capture / "manifest.json").write_text(json.dumps({**content, **fields}))


def cut_short(path: Path) -> None:
    (path / PART).write_bytes((path / PART).read_bytes()[:-9])


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / PART).read_bytes())
    content[len(content) // 3] ^= 1
    (path / PART).write_bytes(content)


def replace_by_link(path: Path) -> None:
    (path / PART).rename(path.parent / "outside.parquet")
    (path / PART).symlink_to(path.parent / "outside.parquet")


def other_columns(path: Path) -> None:
    pq.write_table(rows("losses", 7), path / PART)
    list_anew(path, rows=7)


def too_many_rows(path: Path) -> None:
    list_anew(path, rows=8)


def list_anew(path: Path, **fields: object) -> None:
    parts = json.loads((path / "manifest.json").read_text())["parts"]
    parts[0] |= {"sha256": hashlib.sha256((path / PART).read_bytes()).hexdigest(), **fields}
    edit_manifest(path, parts=parts)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / PART).unlink(), f"{PART}: missing"),
        (cut_short, f"{PART}: left out: damaged (its checksum is not the manifest's)"),
        (flip_a_bit, f"{PART}: left out: damaged (its checksum is not the manifest's)"),
        (replace_by_link, f"{PART}: missing"),
        (other_columns, f"{PART}: left out: its columns are not those of mem_events"),
        (too_many_rows, f"{PART}: left out: damaged (7 rows do not fit the manifest)"),
    ],
)
def test_a_damaged_part_is_said_and_left_out_and_the_rest_reads(tmp_path: Path, damage, says: str) -> None:
    path = small_capture(tmp_path / "a.lscope")
    damage(path)

    capture = Capture.open(path)

    assert capture.problems == [says]
    assert capture.rows("mem_events") == 0
    assert capture.table("losses")["count"].to_pylist() == [3, 5]
    assert capture.connect().execute("SELECT (SELECT count(*) FROM mem_events), sum(count) FROM losses").fetchall() == [
        (0, 8)
    ]


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
def test_damage_to_an_unlisted_part_is_found_without_a_checksum(tmp_path: Path, damage) -> None:
    # given a part which its writer could not list before it was killed
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("mem_events", incompressible(0))
    writer.write("mem_events", numbered(5_000, 3))
    # when the power loss has taken a piece of it
    damage(tmp_path / "a.lscope")
    # then only the whole part is read
    capture = Capture.open(tmp_path / "a.lscope")
    incomplete, damaged = capture.problems
    assert incomplete.startswith("the capture is incomplete")
    assert damaged.startswith(f"{PART}: left out: damaged (")
    assert capture.table("mem_events", ["ts_ns"])["ts_ns"].to_pylist() == [5_000, 5_001, 5_002]


def test_a_table_of_a_later_leakscope_is_named_not_read(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")
    (path / "tide_tables").mkdir()
    pq.write_table(rows("losses", 1), path / "tide_tables" / "part-000001.parquet")

    assert Capture.open(path).problems == [
        "tide_tables/part-000001.parquet: left out: this leakscope knows no table 'tide_tables'"
    ]


# --- what is no capture


def test_a_newer_schema_says_to_upgrade(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")
    edit_manifest(path, schema_version=SCHEMA_VERSION + 1)

    with pytest.raises(BadInputError, match=f"written with schema {SCHEMA_VERSION + 1}, .*upgrade leakscope"):
        Capture.open(path)


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    os.mkfifo(tmp_path / "fifo")
    for name, says in (
        ("nowhere", "no such capture"),
        ("empty", r"not a leakscope capture \(no manifest.json in it\)"),
        ("text", "not a packed leakscope capture"),
        ("fifo", r"not a leakscope capture \(neither a directory nor a packed file\)"),
    ):
        with pytest.raises(BadInputError, match=f"{name}: {says}"):
            Capture.open(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"format": "something-else", "schema_version": 1}',
        b'{"format": "leakscope-capture", "schema_version": "1"}',
        b'{"format": "leakscope-capture", "schema_version": 1}',
        b'{"format": "leakscope-capture", "schema_version": 1, "sources": 3}',
        b'{"format": "leakscope-capture", "schema_version": 1, "sources": [3]}',
        b'{"format": "leakscope-capture", "schema_version": 1, "sources": [{}]}',
        b'{"format": "leakscope-capture", "schema_version": 1, "sources": [], "parts": {"a": 1}}',
        b'{"format": "leakscope-capture", "schema_version": 1, "sources": [], "parts": [{"path": "x"}]}',
    ],
)
def test_a_manifest_that_is_none_is_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(BadInputError, match=r"^here: .*manifest") as refused:
        parse_manifest(content, "here")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "path",
    [
        "../mem_events/part-000001.parquet",
        "/etc/passwd",
        "mem_events/../part-000001.parquet",
        "mem_events//part-000001.parquet",
        "mem_events/part-000001.parquet\n",
        "mem_events/part-1.parquet",
        "losses/part-000001.parquet",
        "manifest.json",
        7,
        None,
    ],
)
def test_a_part_outside_the_layout_is_refused(path: object) -> None:
    entry = {"table": "mem_events", "path": path, "rows": 1, "sha256": ""}
    content = json.loads(dump_manifest(manifest())) | {"parts": [entry]}

    with pytest.raises(BadInputError, match="names a part"):
        parse_manifest(json.dumps(content).encode(), "here")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["schema_version", "sources", "parts", "path", "rows", "id", "anchors", "table", "sha256"]
                ),
                inner,
            )
        ),
    )
)
def test_no_manifest_makes_the_reader_fail_in_another_way(fields: object) -> None:
    content = {"format": "leakscope-capture", "schema_version": 1, "sources": [], "parts": []}
    if isinstance(fields, dict):
        content |= fields
    with contextlib.suppress(BadInputError):
        parse_manifest(json.dumps(content).encode(), "here")
