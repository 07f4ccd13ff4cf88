"""Events, samples and cache events of others: read to the byte, and judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from leakscope.cli.main import main
from leakscope.detect.cache import judge_rows
from leakscope.detect.pair import judge_pair
from leakscope.liveness.rows import CacheRows, rows_of
from leakscope.model.words import NEVER
from nsight_parsers import ReportError
from nsight_parsers.cache_log import parse_cache_log
from nsight_parsers.memory_events import parse_events_meta, parse_memory_events
from nsight_parsers.recognise import parse, recognise
from nsight_parsers.samples_csv import parse_samples_csv
from tests.event_files import SECOND, EventFile


def judged(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    assert main(["attribute", *map(str, paths), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_events_are_matched_to_the_byte(tmp_path: Path, suffix: str) -> None:
    # given a kept object, a freed one, an address handed out twice without a free, and a failed allocation
    events = EventFile()
    kept = events.keep(0.1, 101, "main;keep (a.c:12);malloc")
    events.free(0.4, events.keep(0.2, 103, "main;churn;malloc"))
    events.keep(0.5, 107, "main;[unknown]", address=0x5000)
    events.keep(0.6, 109, "main;again", address=0x5000)
    events.keep(0.7, 1 << 40, "main;huge", address=0)
    events.keep(0.8, 1 << 40, "main;huge", address=(1 << 64) - 1)
    events.free(0.9, 0xABC000)
    path = events.write(tmp_path / f"events{suffix}")

    report = parse_memory_events(path)

    assert recognise(path) == "events"
    rows = report.tables["mem_events"].to_pylist()
    alive = {}
    for row in rows:
        if row["op"] == "alloc":
            alive[row["addr"]] = row["size_bytes"]
        else:
            alive.pop(row["addr"], None)
    assert alive == {kept: 101, 0x5000: 109}
    (implicit,) = [row for row in rows if row["cause"] == "reuse"]
    assert (implicit["size_bytes"], implicit["ts_ns"], implicit["alloc_ts_ns"]) == (
        107,
        SECOND + 600_000_000,
        SECOND + 500_000_000,
    )
    freed = next(row for row in rows if row["op"] == "free" and row["size_bytes"] == 103)
    assert freed["user_stack"] and freed["alloc_ts_ns"] == SECOND + 200_000_000
    (loss,) = report.tables["losses"].to_pylist()
    assert (loss["what"], loss["count"]) == ("failed_allocation", 2)
    assert report.facts == {"implicit_frees": 1, "unknown_frees": 1, "failed_allocations": 2}
    frames = [(f["function"], f["file"], f["line"]) for f in report.tables["frames"].to_pylist()]
    assert ("keep", "a.c", 12) in frames and ("", "", 0) in frames


def test_samples_with_empty_cells_and_junk(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text(
        "t_s,rss_bytes,gpu_used_bytes,slab_x-64_bytes,threads,note\n0,100,0,64,4,a\n10,,0,128,4,b\n20,300,0,,5,\n21,1\n"
    )

    report = parse_samples_csv(path)

    assert recognise(path) == "samples"
    values = [(s["ts_ns"] // SECOND, s["counter"], s["value"]) for s in report.tables["samples"].to_pylist()]
    assert sorted(values) == [
        (0, "rss", 100), (0, "slab_x-64", 64), (0, "threads", 4), (10, "slab_x-64", 128), (10, "threads", 4),
        (20, "rss", 300), (20, "threads", 5),
    ]  # fmt: skip
    assert report.facts["byte_counters"] == ["rss", "slab_x-64"]
    assert any("gpu_used_bytes" in finding for finding in report.findings)
    assert any("1 rows" in finding for finding in report.findings)


def test_losses_beside_events(tmp_path: Path) -> None:
    path = tmp_path / "events.meta.json"
    path.write_text(
        json.dumps({"attach": "mid-run", "stack_map_full": True, "lost": [{"from_ns": 5, "to_ns": 9, "count": 11}]})
    )

    report = parse_events_meta(path)

    assert recognise(path) == "events_meta"
    assert [(r["what"], r["count"]) for r in report.tables["losses"].to_pylist()] == [
        ("attached_mid_run", 1), ("stack_map_full", 1), ("events_lost", 11),
    ]  # fmt: skip
    assert report.facts["lost"] == [[5, 9, 11]]


@pytest.mark.parametrize(
    "content",
    [
        "ts_ns,op,addr\n",
        "ts_ns,op,addr\nx,y,z\n",
        '{"ts_ns": 1, "op": "alloc", "addr": "0x1", "a": ' + "[" * 60_000,
        "t_s,rss_bytes\n\0",
        "t_s,t_s\n1,2\n",
    ],
    ids=["empty", "nonsense", "nested", "zeros", "twice"],
)
def test_hostile_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "input"
    path.write_text(content)

    if recognise(path) is None:
        return
    with pytest.raises(ReportError) as raised:
        parse(path)
    assert "\n" not in str(raised.value)


def test_leak_in_events_is_called_and_start_up_and_churn_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given start-up that is kept, churn, and 120 objects of 96 bytes from 6 s on
    events = EventFile()
    for number in range(30):
        events.keep(0.1 + number / 100, 100_000, "main;load_model;malloc")
    events.churn("main;serve;parse;malloc", 400, 60.0)
    for number in range(120):
        events.keep(6 + number * 0.45, 96, "main;serve;Registry.add;malloc")

    verdict = judged(capsys, events.write(tmp_path / "e.csv"))["verdict"]

    assert (verdict["verdict"], verdict["class"], verdict["layer"]) == ("leak", "per_call", "host")
    assert verdict["culprit"]["frame"] == "Registry.add"
    assert (verdict["kept_bytes"], verdict["kept_objects"]) == (120 * 96, 120)
    assert verdict["leak_start_s"] == pytest.approx(6, abs=1)
    assert verdict["growth"]["bytes_per_s"] == pytest.approx(120 * 96 / 54, rel=0.1)


def test_culprit_of_many_small_stacks_is_their_ancestor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventFile()
    events.churn("main;serve;flush;malloc", 200, 60.0)
    for number in range(300):
        depth = ";visit" * (1 + number % 9)
        events.keep(0.5 + number * 0.19, 700 + number, f"main;render{depth};<lambda_{number:04}>;malloc")

    report = judged(capsys, events.write(tmp_path / "e.csv"))

    verdict = report["verdict"]
    assert (verdict["verdict"], verdict["culprit"]["frame"]) == ("leak", "visit")
    assert verdict["kept_objects"] == 300
    assert verdict["leak_start_s"] == pytest.approx(0.5, abs=1)


def test_no_usable_stack_names_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventFile()
    events.churn("main;serve;parse", 300, 60.0)
    for number in range(200):
        events.keep(0.2 + number * 0.29, 5000, "[unknown]" if number % 3 else "")

    verdict = judged(capsys, events.write(tmp_path / "e.csv"))["verdict"]

    assert (verdict["verdict"], verdict["class"], verdict["kept_objects"]) == ("leak", "unattributed", 200)
    assert "frame" not in verdict["culprit"] and "stacks" in verdict["missing"]


@pytest.mark.parametrize("what", ["missed frees", "failed allocations"])
def test_artefacts_of_tracers_are_no_leaks(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    events = EventFile(layer="kernel")
    events.churn("do_syscall_64;__x64_sys_openat;do_filp_open;kmem_cache_alloc", 300, 60.0)
    for number in range(250):
        if what == "missed frees":
            at, address = 0.1 + number * 0.23, 0xFFFF888000000000 + 64 * (number % 3)
            events.keep(at, 64, "kthread;urb_enqueue;__kmalloc", address=address)
            if number % 5:
                events.free(at + 0.05, address)
        else:
            events.keep(0.1 + number * 0.23, 1 << 30, "main;probe", address=0)

    verdict = judged(capsys, events.write(tmp_path / "e.csv"))["verdict"]

    assert (verdict["verdict"], verdict["class"], verdict["layer"]) == ("not_leak", "tracing_artifact", "kernel")


def test_lost_frees_withhold_and_late_growth_is_certain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verdict(until_s: float) -> str:
        events = EventFile()
        events.churn("main;serve", 300, 60.0)
        for number in range(200):
            events.keep(0.2 + number * 0.29, 500, "main;cache.put")
        meta = tmp_path / "e.meta.json"
        lost = [{"from_ns": SECOND, "to_ns": SECOND + int(until_s * SECOND), "count": 1000}]
        meta.write_text(json.dumps({"attach": "start", "stack_map_full": False, "lost": lost}))
        found = judged(capsys, events.write(tmp_path / "e.csv"), meta)["verdict"]
        return f"{found['verdict']} {found['class']}"

    assert verdict(10.0).startswith("leak")  # what is kept was allocated after the loss
    assert verdict(59.9) == "inconclusive partial_data"


def test_files_that_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventFile()
    for number in range(100):
        events.keep(0.1 + number * 0.5, 100, f"main;f{number % 4}")

    verdict = judged(capsys, events.write(tmp_path / "e.csv"))["verdict"]

    assert (verdict["verdict"], verdict["class"]) == ("inconclusive", "unusable_capture")


def cache_rows(rows: list[tuple[float, str, str, int, str, str]]) -> CacheRows:
    columns = ["ts_ns", "op", "object", "size_bytes", "owner", "base"]
    made = pd.DataFrame(rows, columns=columns)
    made["ts_ns"] = (SECOND + made["ts_ns"] * SECOND).astype(np.int64)
    return rows_of(pa.Table.from_pandas(made, preserve_index=False))


@pytest.mark.parametrize(
    ("hold", "release", "kind"), [("pin", "unpin", "pinned_never_unpinned"), ("ref", "unref", "refcount")]
)
def test_holds_that_nobody_gives_up(hold: str, release: str, kind: str) -> None:
    rows = []
    for number in range(200):
        at = number * 1.0
        rows += [(at, "insert", f"o{number}", 1000, "store", ""), (at + 0.1, hold, f"o{number}", 1000, "lookup", "")]
        if number % 4:
            rows += [
                (at + 1.1, release, f"o{number}", 1000, "worker", ""),
                (at + 5, "evict", f"o{number}", 1000, "lru", ""),
            ]

    (verdict,) = judge_rows(cache_rows(rows))
    clean = judge_rows(cache_rows([row for row in rows if int(row[2][1:]) % 4]))

    assert (verdict.verdict, verdict.kind) == ("leak", kind)
    assert (verdict.kept_objects, verdict.kept_bytes) == (50, 50_000)
    assert verdict.culprit is not None and verdict.culprit.owner == "lookup"
    assert verdict.growth is not None and verdict.growth.bytes_per_s == pytest.approx(250, rel=0.1)
    assert [v.verdict for v in clean] == ["not_leak"]


def test_views_keep_their_base() -> None:
    rows = []
    for number in range(100):
        at = number * 1.0
        rows += [
            (at, "insert", f"b{number}", 1 << 20, "store", ""),
            (at + 0.1, "view", f"v{number}", 100, "reader", f"b{number}"),
        ]
        if number % 2:
            rows += [
                (at + 0.6, "evict", f"v{number}", 100, "reader", ""),
                (at + 0.7, "evict", f"b{number}", 1 << 20, "lru", ""),
            ]

    (verdict,) = judge_rows(cache_rows(rows))

    assert (verdict.verdict, verdict.kind, verdict.kept_bytes) == ("leak", "view_retains_backing_store", 50 << 20)


def test_cache_log_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"ts_ns": 1000000000, "op": "insert", "obj": "a", "size": 7, "owner": "x"}\n'
        '{"ts_ns": 1000000001, "op": "view", "obj": "b", "size": 1, "owner": "y", "base": "a"}\nbroken\n'
    )

    report = parse_cache_log(path)

    assert recognise(path) == "cache_log"
    rows = report.tables["cache_events"].to_pylist()
    assert [(r["op"], r["object"], r["size_bytes"], r["owner"], r["base"]) for r in rows] == [
        ("insert", "a", 7, "x", ""), ("view", "b", 1, "y", "a"),
    ]  # fmt: skip
    assert any("1 lines" in finding for finding in report.findings)


def test_what_a_cache_log_says_beyond_lives(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(
        '{"ts_ns": 1764500000123456789, "op": "insert", "obj": "a", "ttl_ns": 5000000000, "refcount": 2, '
        '"stack": "main (a.py:3);take (b.py:9)", "generation": "m1", "last_access_ns": null}\n'
        '{"ts_ns": 1764500000123456790, "op": "state", "obj": "b", "ttl_ns": -1, "parent": "a", '
        '"last_access_ns": 1764500000000000001}\n'
        '{"ts_ns": 1764500000123456791, "op": "state", "obj": "c", "expires_ns": 1764500000000000003}\n'
        '{"ts_ns": 1764500000123456792, "op": "clear", "medium": "GPU"}\n'
        '{"ts_ns": 1764500000123456793, "op": "access"}\n'
    )

    report = parse_cache_log(path)

    rows = report.tables["cache_events"].to_pylist()
    names = ("op", "object", "expires_ns", "last_access_ns", "parent", "medium", "generation", "user_stack")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("insert", "a", 1764500005123456789, 0, "", "", "m1", 1),
        ("state", "b", NEVER, 1764500000000000001, "a", "", "", 0),
        ("state", "c", 1764500000000000003, 0, "", "", "", 0),
        ("clear", "", 0, 0, "", "GPU", "", 0),
    ]
    assert [row["refcount"] for row in rows[:1]] == [2]
    assert all(math.isnan(row["refcount"]) for row in rows[1:])
    assert [(f["function"], f["file"], f["line"], f["kind"]) for f in report.tables["frames"].to_pylist()] == [
        ("main", "a.py", 3, "python"), ("take", "b.py", 9, "python"),
    ]  # fmt: skip
    assert any("1 lines" in finding for finding in report.findings)  # an access to nothing


def test_head_against_baseline(tmp_path: Path) -> None:
    def run(extra: int, lines: str, churn: int = 300) -> Path:
        events = EventFile()
        for number in range(20):
            events.keep(0.01 * (number + 1), 16_384, "main;load_fixture;malloc")
        events.churn(f"main;query (q.c:{lines});malloc", churn, 20.0)
        for number in range(20):
            events.keep(0.5 + number * 0.9, 64, f"main;label (l.c:{lines});malloc")  # leaks in both
        for number in range(extra):
            events.keep(0.3 + number * 19.0 / max(extra, 1), 208, f"main;copy_row (q.c:{lines});malloc")
        return events.write(tmp_path / f"{extra}-{lines}-{churn}.csv")

    from leakscope.cli.attribute import report_of
    from leakscope.detect.attribution import Options

    def report(path: Path) -> Any:
        return report_of([path], Options(), "1GiB")

    base = report(run(0, "10"))
    worse, rest = judge_pair(base, report(run(55, "14")))
    same, _ = judge_pair(base, report(run(0, "33")))
    better, _ = judge_pair(report(run(55, "10")), base)

    assert (worse.verdict, worse.kind, worse.culprit and worse.culprit.frame) == (
        "leak",
        "regression",
        "copy_row (q.c:14)",
    )
    assert (worse.kept_objects, worse.kept_bytes, rest) == (55, 55 * 208, [])
    assert same.verdict == better.verdict == "not_leak"
