"""memleak's output and dumps of /proc/slabinfo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.memleak import parse_memleak
from nsight_parsers.recognise import recognise
from nsight_parsers.slabinfo import parse_slabinfo

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="NOT TESTED: real outputs; set LEAKSCOPE_TEST_DATA to their folder"
)
SECOND = 1_000_000_000
NOON = 12 * 3600 * SECOND


def real(name: str) -> Path:
    assert DATA is not None
    return Path(DATA) / "ebpf_text" / name


def rows(report: ParsedReport, table: str) -> list[dict[str, Any]]:
    found = report.tables.get(table)
    return found.to_pylist() if found is not None else []


def live_bytes(report: ParsedReport, until_ns: int) -> int:
    """What the events say is live after a report."""
    events = [e for e in rows(report, "mem_events") if e["ts_ns"] <= until_ns]
    return sum(e["size_bytes"] * (1 if e["op"] == "alloc" else -1) for e in events)


def report_at(time: str, *stacks: str, listed: int | None = None) -> str:
    number = len(stacks) if listed is None else listed
    return f"[{time}] Top {number} stacks with outstanding allocations:\n" + "\n".join(stacks) + "\n"


def stack(size: int, count: int, *frames: str, addresses: tuple[tuple[int, int], ...] = ()) -> str:
    lines = [f"\taddr = {address:x} size = {one}" for address, one in addresses]
    lines.append(f"\t{size} bytes in {count} allocations from stack")
    return "\n".join([*lines, *(f"\t\t{frame}" for frame in frames), ""])


@needs_data
def test_real_memleak_page() -> None:
    report = parse_memleak(real("bcc_memleak_example.txt"))

    assert recognise(real("bcc_memleak_example.txt")) == "memleak"
    assert report.facts == {
        "reports": 8, "sessions": 6, "pids": [2614, 2623, 5193], "kernel": True, "first_report": "11:16:33",
    }  # fmt: skip
    totals = [(s["scope_id"], s["value"]) for s in rows(report, "samples")]
    assert totals == [
        ("5193", 80.0), ("5193", 160.0), ("5193", 64.0), ("5193", 160.0), ("2614", 16.0), ("2614", 16.0),
        ("2614", 32.0), ("2623", 45.0),
    ]  # fmt: skip
    assert "6 stacks stand under no report line and are left out" in report.findings
    frames = {row["id"]: (row["function"], row["module"]) for row in rows(report, "frames")}
    stacks = [[frames[i] for i in row["frames"]] for row in rows(report, "stacks")]
    assert [("__libc_start_main", "libc-2.21.so"), ("main", "allocs")] in stacks
    assert stacks[-1][0] == ("__libc_start_call_main", "libc.so.6") and stacks[-1][-1] == ("zmalloc", "redis-server")
    addresses = {e["addr"] for e in rows(report, "mem_events") if e["pid"] == 5193 and e["addr"] > 0xFFFF}
    assert {0x948CD0, 0x948DF0} <= addresses and len(addresses) == 10


@needs_data
def test_real_libbpf_memleak_without_symbols() -> None:
    report = parse_memleak(real("libbpf_memleak_kernel_nosym.txt"))

    events = rows(report, "mem_events")
    assert sum(e["size_bytes"] for e in events) == 1236992
    assert {(e["layer"], e["kind"], e["pid"], e["op"]) for e in events} == {("kernel", "kmalloc", 0, "alloc")}
    assert "202 objects share a row with others of their stack: bytes are exact, counts are not" in report.findings
    offsets = {row["id"]: row["offset"] for row in rows(report, "frames")}
    (only,) = rows(report, "stacks")
    assert [offsets[i] for i in only["frames"]][-2:] == [0xFFFFFFFF812C8F43] * 2
    assert {(row["function"], row["kind"]) for row in rows(report, "frames")} == {("", "kernel")}


def test_differences_between_reports(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    leak, churn = ("leak+0x10 [app]", "main+0x6d [app]"), ("churn+0x2 [app]", "main+0x9f [app]")
    path.write_text(
        "Attaching to pid 77, Ctrl+C to quit.\n"
        + report_at("12:00:00", stack(100, 2, *leak), stack(64, 4, *churn))
        + report_at("12:00:05", stack(151, 3, *leak), stack(32, 2, *churn))
        + "Possibly lost 9 samples\n"
        + report_at("12:00:10", stack(202, 4, *leak))
    )
    report = parse_memleak(path)

    at = [(e["ts_ns"] - NOON) // SECOND for e in rows(report, "mem_events")]
    got = [(t, e["op"], e["size_bytes"]) for t, e in zip(at, rows(report, "mem_events"), strict=True)]
    assert got == [
        (0, "alloc", 50), (0, "alloc", 50), *[(0, "alloc", 16)] * 4,
        (5, "alloc", 51), (5, "free", 16), (5, "free", 16),
        (10, "alloc", 51), (10, "free", 16), (10, "free", 16),  # the list grew shorter: what is not in it is gone
    ]  # fmt: skip
    assert [live_bytes(report, NOON + t * SECOND) for t in (0, 5, 10)] == [164, 183, 202]
    assert {(e["pid"], e["layer"], e["kind"]) for e in rows(report, "mem_events")} == {(77, "host", "heap")}
    assert [(row["what"], row["count"]) for row in rows(report, "losses")] == [("ring_drop", 9)]
    assert report.clock == "relative"


def test_what_is_live_is_always_what_the_report_lists(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    figures = [(7, 2), (1000, 3), (1000, 5), (400, 5), (999, 1), (50_000, 5000), (60_001, 5001), (60_001, 4000), (1, 1)]
    path.write_text(
        "".join(
            report_at(f"12:00:{i:02}", stack(size, count, "f+0x1 [app]")) for i, (size, count) in enumerate(figures)
        )
    )
    report = parse_memleak(path)

    assert [live_bytes(report, NOON + i * SECOND) for i in range(len(figures))] == [size for size, _ in figures]


def test_a_stack_that_drops_out_of_a_full_list_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    one, two = stack(10, 1, "one+0x1 [app]"), stack(20, 1, "two+0x1 [app]")
    path.write_text(report_at("12:00:00", one, two) + report_at("12:00:01", one, stack(30, 1, "three+0x1 [app]")))

    assert live_bytes(parse_memleak(path), NOON + SECOND) == 60


def test_listed_addresses_are_the_objects(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    path.write_text(
        report_at("12:00:00", stack(48, 2, "f+0x1 [app]", addresses=((0xA0, 16), (0xB0, 32))))
        + report_at("12:00:01", stack(40, 2, "f+0x1 [app]", addresses=((0xA0, 24), (0xC0, 16))))
    )
    got = [(e["op"], e["addr"], e["size_bytes"]) for e in rows(parse_memleak(path), "mem_events")]

    assert got == [
        ("alloc", 0xA0, 16), ("alloc", 0xB0, 32),
        ("free", 0xA0, 16), ("free", 0xB0, 32), ("alloc", 0xA0, 24), ("alloc", 0xC0, 16),
    ]  # fmt: skip


def test_midnight_and_another_run(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    path.write_text(
        "Attaching to pid 7, Ctrl+C to quit.\n"
        + report_at("23:59:59", stack(16, 1, "f+0x1 [app]"))
        + report_at("00:00:01", stack(32, 2, "f+0x1 [app]"))
        + "Attaching to pid 7, Ctrl+C to quit.\n"
        + report_at("00:00:00", stack(16, 1, "f+0x1 [app]"))
    )
    report = parse_memleak(path)

    times = [s["ts_ns"] // SECOND for s in rows(report, "samples")]
    assert times == [86399, 86401, 2 * 86400]
    assert [(e["op"], e["cause"]) for e in rows(report, "mem_events")] == [
        ("alloc", "call"), ("alloc", "call"), ("free", "exit"), ("free", "exit"), ("alloc", "call"),
    ]  # fmt: skip


def test_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "memleak.txt"
    path.write_text("Attaching to kernel allocators, Ctrl+C to quit.\n" + stack(16, 1, "f [kernel]"))
    with pytest.raises(ReportError, match="stand under no"):
        parse_memleak(path)
    path.write_text(report_at("12:00:00"))
    with pytest.raises(ReportError, match="no stack with outstanding allocations"):
        parse_memleak(path)


# slabinfo

SLAB_HEAD = "slabinfo - version: 2.1\n# name            <active_objs> <num_objs> <objsize> …\n"


def cache(name: str, active: int, total: int, size: int) -> str:
    return f"{name:<17} {active} {total} {size} 32 1 : tunables 0 0 0 : slabdata 9 9 0\n"


@needs_data
def test_real_slabinfo() -> None:
    report = parse_slabinfo(real("slabinfo_rhel7.txt"))

    assert (report.version, report.facts) == ("2.1", {"dumps": 1, "caches": 103})
    values = {s["counter"]: s["value"] for s in rows(report, "samples")}
    assert len(values) == 206
    assert values["slab_kmalloc-8"] == 87552 * 8 and values["slab_nf_conntrack_ffffffffaf313a40"] == 12 * 320
    assert (values["slab_kmem_cache"], values["slab_kmem_cache_num"]) == (112 * 256, 111 * 256)
    assert report.clock == "none" and "a state, no growth" in report.findings[0]


def test_dumps_with_times(tmp_path: Path) -> None:
    path = tmp_path / "slabinfo.txt"
    dump = SLAB_HEAD + cache("filp", 10, 20, 256) + cache("filp", 1, 1, 256)
    path.write_text("1700000000\n" + dump + "1700000060.5\n" + dump.replace(" 10 ", " 11 "))
    report = parse_slabinfo(path)

    assert recognise(path) == "slabinfo" and report.clock == "utc"
    got = [(s["ts_ns"], s["counter"], s["value"]) for s in rows(report, "samples")]
    assert got == [
        (1_700_000_000 * SECOND, "slab_filp", 11 * 256), (1_700_000_000 * SECOND, "slab_filp_num", 21 * 256),
        (1_700_000_060 * SECOND + SECOND // 2, "slab_filp", 12 * 256),
        (1_700_000_060 * SECOND + SECOND // 2, "slab_filp_num", 21 * 256),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "tz", "expected"),
    [
        ("2026-11-30T10:00:00+00:00", None, 1796032800),
        ("2026-11-30T10:00:00Z", None, 1796032800),
        ("2026-11-30 11:00:00", "Europe/Berlin", 1796032800),
        ("2026-11-30 12:00:00", "+02:00", 1796032800),
    ],
)
def test_local_times_take_the_zone_that_is_given(tmp_path: Path, line: str, tz: str | None, expected: int) -> None:
    path = tmp_path / "slabinfo.txt"
    path.write_text(f"{line}\n{SLAB_HEAD}{cache('filp', 1, 1, 1)}")

    assert {s["ts_ns"] for s in rows(parse_slabinfo(path, tz=tz), "samples")} == {expected * SECOND}


def test_dumps_without_times_are_numbered_and_torn_lines_counted(tmp_path: Path) -> None:
    path = tmp_path / "slabinfo.txt"
    path.write_text((SLAB_HEAD + cache("filp", 1, 1, 1)) * 2 + "dentry 12 3")
    report = parse_slabinfo(path)

    assert [s["ts_ns"] for s in rows(report, "samples")] == [1, 1, 2, 2] and report.clock == "none"
    assert "1 lines are no cache lines of this version: left out" in report.findings


@pytest.mark.parametrize(
    ("text", "tz", "message"),
    [
        ("nothing", None, "no 'slabinfo - version' line"),
        (SLAB_HEAD, None, "no cache line in it"),
        ("slabinfo - version: 1.1\n", None, "leakscope knows 2.x"),
        (SLAB_HEAD + cache("a", 1, 1, 1), "Mars/Base", "no time zone 'Mars/Base'"),
        (SLAB_HEAD + cache("a", 1, 1, 1), "../../etc/passwd", "no time zone"),
    ],
)
def test_slabinfo_that_cannot_be_used(tmp_path: Path, text: str, tz: str | None, message: str) -> None:
    path = tmp_path / "slabinfo.txt"
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        parse_slabinfo(path, tz=tz)
