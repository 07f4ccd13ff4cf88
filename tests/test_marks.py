"""Rows of `marks` from records, and ranges as links of chains."""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest

from leakscope.correlate.aggregate import ALLOC, CALL, EXIT, IDENTITY
from leakscope.correlate.lives import FOLDED_PID
from leakscope.correlate.marks import MIN_SHARE, RULE, RangePath, range_links, site_ranges
from leakscope.model.results import ChainLink, Site
from leakscope.record import records
from leakscope.record.decode.marks import Marks, mark_ids
from leakscope.report.chain_text import link_text, shortened

# Decoding


def mark_batch(*rows: tuple[Any, ...]) -> np.ndarray:
    """MARK_RECORDs of (type, ts_ns, number, outer, name)."""
    batch = np.zeros(len(rows), records.MARK_RECORD)
    for record_, (kind, ts_ns, number, outer, name) in zip(batch, rows, strict=True):
        record_["type"], record_["ts_ns"], record_["number"], record_["outer"] = kind, ts_ns, number, outer
        record_["pid"], record_["tid"], record_["domain"] = 7, 8, "д".encode()
        record_["name"], record_["bytes"] = name.encode(), len(name.encode())
    return batch


PUSH, POP, START, END, INSTANT = (
    records.MARK_PUSH, records.MARK_POP, records.MARK_START, records.MARK_END, records.MARK_INSTANT,
)  # fmt: skip


def test_a_range_is_given_out_once_whenever_it_ends() -> None:
    marks = Marks(3)
    first = marks.rows(
        mark_batch((PUSH, 10, 1, 0, "a"), (PUSH, 20, 2, 1, "b"), (INSTANT, 25, 3, 2, "i"), (POP, 30, 2, 0, ""))
    )
    assert [(r["id"], r["parent_id"], r["start_ns"], r["end_ns"], r["name"]) for r in first.to_pylist()] == [
        (7 << 32 | 2, 7 << 32 | 1, 20, 30, "b"),
        (7 << 32 | 3, 7 << 32 | 2, 25, 25, "i"),
    ]
    assert {(r["source_id"], r["pid"], r["tid"], r["domain"]) for r in first.to_pylist()} == {(3, 7, 8, "д")}
    # a start is ended by an end, later; an end of something unknown counts once, and only of a push
    second = marks.rows(
        mark_batch((START, 40, 4, 0, "s"), (POP, 50, 99, 0, ""), (END, 55, 98, 0, ""), (POP, 60, 1, 0, ""))
    )
    assert [(r["name"], r["end_ns"]) for r in second.to_pylist()] == [("a", 60)]
    assert marks.unknown == 1
    assert [(r["name"], r["end_ns"]) for r in marks.open_rows().to_pylist()] == [("s", 0)]
    assert marks.open_rows().num_rows == marks.rows(mark_batch()).num_rows == 0


def test_names_that_share_what_was_recorded_of_them_stay_apart() -> None:
    batch = mark_batch((INSTANT, 1, 1, 0, "x" * 96), (INSTANT, 2, 2, 0, "x" * 96), (INSTANT, 3, 3, 0, "y"))
    batch["bytes"] = (96, 97, records.MARK_NAME_UNREADABLE)
    assert Marks(0).rows(batch)["name"].to_pylist() == ["x" * 96, "x" * 96 + "…", "[unreadable name]"]
    hostile = mark_batch((INSTANT, 1, 1, 0, "y"))
    hostile["name"] = b"\xff\x1b[2J"
    assert Marks(0).rows(hostile)["name"].to_pylist() == ["\N{REPLACEMENT CHARACTER}\x1b[2J"]


def test_ids_have_the_pid_above_the_number() -> None:
    pids, numbers = np.array([1, 4_194_304, 5], np.uint32), np.array([2, 0xFFFFFFFF, 0], np.uint32)
    assert mark_ids(pids, numbers).tolist() == [1 << 32 | 2, 4_194_304 << 32 | 0xFFFFFFFF, 0]


@pytest.mark.parametrize("seed", range(4))
def test_decoding_in_batches_agrees_with_decoding_one_by_one(seed: int) -> None:
    # given random pushes and pops of one thread
    rng = np.random.default_rng(seed)
    stack: list[int] = []
    events: list[tuple[Any, ...]] = []
    expected: dict[int, list[int]] = {}
    for ts_ns in range(1, 800):
        if stack and rng.random() < 0.5:
            ended = stack.pop()
            events.append((POP, ts_ns, ended, 0, ""))
            expected[ended][2] = ts_ns
        else:
            events.append((PUSH, ts_ns, ts_ns, stack[-1] if stack else 0, f"name {ts_ns % 17}"))
            expected[ts_ns] = [stack[-1] if stack else 0, ts_ns, 0]
            stack.append(ts_ns)
    marks, tables = Marks(0), []
    while events:
        size = int(rng.integers(1, 90))
        tables.append(marks.rows(mark_batch(*events[:size])))
        del events[:size]
    found = [row for table in [*tables, marks.open_rows()] for row in table.to_pylist()]
    assert {r["id"] & 0xFFFFFFFF: [r["parent_id"] & 0xFFFFFFFF, r["start_ns"], r["end_ns"]] for r in found} == expected
    assert all(r["name"] == f"name {r['start_ns'] % 17}" for r in found) and len(found) == len(expected)


# Attribution

SITE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc", "slab_cache": "", "kernel_stack": 0, "user_stack": 5,
        "python_stack": 6}  # fmt: skip


def paths_of(marks: list[tuple[int, int, str, str]], events: list[tuple[int, int, int, int]]) -> list[RangePath]:
    """site_ranges of one site: marks are (id, parent, domain, name), events (event code, mark, bytes, life)."""
    con = duckdb.connect()
    columns = ["id", "parent_id", "domain", "name"]
    con.register("marks_", pd.DataFrame(marks, columns=columns).astype({"id": "int64", "parent_id": "int64"}))
    con.execute("CREATE VIEW marks AS SELECT 0::SMALLINT AS source_id, * FROM marks_")
    fixed = {column: SITE.get(column, 0) for column in IDENTITY} | {"slab_cache": ""}
    frame = pd.DataFrame(
        [
            {**fixed, "event": e, "mark_id": m, "bytes": b, "objects": 1, "life": life, "source_id": 0}
            for e, m, b, life in events
        ]
    )
    con.register("events", frame)
    lives = pd.DataFrame({"life": [0, 1], "pid": [100, FOLDED_PID]})
    return site_ranges(con, pd.DataFrame([{"site": 9, **SITE}]), lives).get(9, [])


def test_instances_of_a_range_fold_into_paths_with_what_is_kept() -> None:
    marks = [(1, 0, "", "serve"), (2, 1, "", "request"), (3, 2, "kv", "block"), (4, 1, "", "request"),
             (5, 4, "kv", "block"), (6, 5, "kv", "block"), (7, 999, "", "orphan")]  # fmt: skip
    events = [(ALLOC, 3, 100, 0), (ALLOC, 5, 10, 0), (ALLOC, 6, 1, 0), (CALL, 3, 100, 0), (ALLOC, 2, 50, 0),
              (EXIT, 2, 50, 0), (ALLOC, 7, 7, 1), (EXIT, 7, 7, 1), (ALLOC, 0, 99, 0), (ALLOC, 12345, 1, 0)]  # fmt: skip
    assert paths_of(marks, events) == [
        RangePath(("serve", "request"), 1, 1, 50),  # the end of a judged process gives nothing back
        RangePath(("serve", "request", "kv:block"), 3, 2, 11),  # a range in one of its own name is the same
        RangePath(("orphan",), 1, 0, 0),  # of a short-lived process, which took it along
    ]


def test_numbers_fold_where_names_would_be_endless() -> None:
    few = paths_of([(i, 0, "", f"step {i}") for i in range(1, 4)], [(ALLOC, i, i, 0) for i in range(1, 4)])
    assert few == [RangePath((f"step {i}",), 1, 1, i) for i in (3, 2, 1)]
    many = paths_of([(i, 0, "", f"step {i}") for i in range(1, 1100)], [(ALLOC, i, 1, 0) for i in range(1, 1100)])
    assert many == [RangePath(("step #",), 1099, 1099, 1099)]


def test_marks_of_a_damaged_capture_do_no_harm() -> None:
    cycle = [(1, 2, "", "a"), (2, 1, "", "b"), (3, 3, "", "itself")]
    assert paths_of(cycle, [(ALLOC, i, 1, 0) for i in (1, 2, 3)]) == []
    twice = [(1, 0, "", "a"), (1, 0, "", "a"), *[(2, 1, "", "b")] * 5]
    assert paths_of(twice, [(ALLOC, 2, 1, 0)]) == [RangePath(("a", "b"), 1, 1, 1)]
    deep = [(i, i - 1, "", f"level {i}") for i in range(1, 200)]
    assert paths_of(deep, [(ALLOC, 199, 1, 0)]) == [] and len(paths_of(deep, [(ALLOC, 64, 1, 0)])[0].names) == 64


def a_site(live_objects: int, sampled: bool = False) -> Any:
    values = dict.fromkeys(Site.__dataclass_fields__, 0) | {"live_objects": live_objects, "stack_sampled": sampled}
    return Site(**values)  # type: ignore[arg-type]


def test_links_are_the_ranges_that_most_of_what_is_kept_was_in() -> None:
    paths = [RangePath(("serve", "prefill"), 40, 39, 3900), RangePath(("serve", "decode"), 900, 36, 3600),
             RangePath(("idle",), 5, 5, 500)]  # fmt: skip
    # 75 of 80 were in serve, but in neither of its ranges half of them
    assert MIN_SHARE == 0.5
    assert range_links(a_site(80), 1000, paths) == [ChainLink("range", "serve", RULE, 75 / 80, 940, 7500)]
    # where stacks are sampled, shares are of the allocations that have their own
    assert [link.confidence for link in range_links(a_site(10_000, sampled=True), 1000, paths)] == [0.94]
    assert range_links(a_site(80), 1000, []) == [] == range_links(a_site(1000), 1000, paths)


def test_a_chain_in_print_keeps_its_ranges_before_the_innermost_frames() -> None:
    frames = [ChainLink("frame", f"f{i}", "stack", 1, 1, 1) for i in range(9)]
    around = [ChainLink("range", "request", RULE, 1, 1, 1)]
    links = [*around, *frames, ChainLink("call", "cudaMalloc", "event", 1, 1, 1)]
    shown = [link_text(link) for link in shortened(links)]
    assert shown == ["range request", "f6", "f7", "f8", "cudaMalloc()"]
