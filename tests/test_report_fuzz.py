"""Damaged exports, snapshots and text reports: each is read or refused in one line, in bounded time and memory.

``make test`` parses 300 copies of each kind (100 of text tables), ``make fuzz`` 10,000 (LEAKSCOPE_FUZZ_ROUNDS).
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import mutations
import pytest

from tests.event_files import EventFile
from tests.nsys_files import NsysFile, leaky_export
from tests.test_text_reports import SLAB_HEAD, cache, report_at, stack
from tests.test_torch_snapshot import snapshot

ERROR = "nsight_parsers:ReportError"
LONG = (
    "nsight_parsers.nsys:parse_nsys", "nsight_parsers.torch_snapshot:parse_torch_snapshot",
    "nsight_parsers.memleak:parse_memleak", "nsight_parsers.slabinfo:parse_slabinfo",
)  # fmt: skip
"""Parsers of many copies in the short form, too."""


def real_seeds(folder: str, *names: str) -> list[Path]:
    root = os.environ.get("LEAKSCOPE_TEST_DATA")
    return [Path(root) / folder / name for name in names] if root else []


def nsys_seeds(tmp_path: Path) -> list[Path]:
    pools = NsysFile()
    for step in range(50):
        number = pools.call(step * 10, step * 10 + 5, "cuMemAllocAsync")
        pools.memory(step * 10, step % 2, 0x1000 + step // 2, 64, correlation=number, pool=(0xF, 1, 4096, 64 * step))
        pools.add("NVTX_EVENTS", start=step, end=step + 5, eventType=59, globalTid=step << 24, text="x", domainId=step)
    made = [leaky_export(tmp_path / "leaky.sqlite"), pools.write(tmp_path / "pools.sqlite")]
    return [*made, *real_seeds("nsys", "nsys-2026.1.1_testcuda-async-a.sqlite")]


def torch_seeds(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"made-{protocol}.pickle" for protocol in (2, 4)]
    for protocol, path in zip((2, 4), made, strict=True):
        path.write_bytes(pickle.dumps(snapshot(), protocol))
    text = tmp_path / "made.json"
    text.write_text(json.dumps(snapshot()))
    return [*made, text, *real_seeds("torch_snapshot", "snapshot_windows_python-frames.pickle")]


def memleak_seeds(tmp_path: Path) -> list[Path]:
    made = tmp_path / "memleak.txt"
    made.write_text(
        "Attaching to pid 7, Ctrl+C to quit.\n"
        + "".join(
            report_at(
                f"12:00:{i:02}", stack(100 * i, i, "f+0x1 [app]", "main [app]"), stack(9, 1, "0x00ff\tg [lib.so]")
            )
            for i in range(1, 20)
        )
    )
    return [made, *real_seeds("ebpf_text", "bcc_memleak_example.txt", "libbpf_memleak_kernel_nosym.txt")]


def slabinfo_seeds(tmp_path: Path) -> list[Path]:
    made = tmp_path / "slabinfo.txt"
    made.write_text("".join(f"{1_700_000_000 + i}\n{SLAB_HEAD}{cache('filp', i, i + 1, 256)}" for i in range(20)))
    return [made, *real_seeds("ebpf_text", "slabinfo_rhel7.txt")]


def samples_seeds(tmp_path: Path) -> list[Path]:
    made = tmp_path / "samples.csv"
    rows = [f"{30 * i},{1_000_000 + 37 * i},{'' if i % 9 == 4 else i % 5},{1_700_000_000 + i // 20}" for i in range(60)]
    made.write_text("\n".join(["t_s,rss_bytes,open_files,proc_start_s", *rows, ""]))
    return [made]


def events_seeds(tmp_path: Path) -> list[Path]:
    made = EventFile()
    made.churn("main;serve;malloc", 40, 10.0)
    for step in range(20):
        made.keep(0.5 * step, 64 * step, 'main;keep "it";operator new(unsigned long)')
    return [made.write(tmp_path / "events.csv"), made.write(tmp_path / "events.jsonl")]


def events_meta_seeds(tmp_path: Path) -> list[Path]:
    made = tmp_path / "events.meta.json"
    lost = [{"from_ns": 10**9 * i, "to_ns": 10**9 * i + 5, "count": i} for i in range(9)]
    made.write_text(json.dumps({"tool": "tracer 1.0", "lost_events": 45, "lost": lost, "sampling": None}))
    return [made]


def cache_log_seeds(tmp_path: Path) -> list[Path]:
    ops = ("insert", "pin", "ref", "view", "unref", "unpin", "evict")
    rows = [
        {"ts_ns": 10**9 + 1000 * i, "op": ops[i % 7], "obj": f"blk-{i // 7}", "size": 4096, "owner": f"r{i % 3}",
         "base": "blk-0"}
        for i in range(70)
    ]  # fmt: skip
    made = tmp_path / "cache.jsonl"
    made.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [made]


@pytest.mark.parametrize(
    ("parser", "seeds"),
    [
        ("nsight_parsers.nsys:parse_nsys", nsys_seeds),
        ("nsight_parsers.torch_snapshot:parse_torch_snapshot", torch_seeds),
        ("nsight_parsers.memleak:parse_memleak", memleak_seeds),
        ("nsight_parsers.slabinfo:parse_slabinfo", slabinfo_seeds),
        ("nsight_parsers.samples_csv:parse_samples_csv", samples_seeds),
        ("nsight_parsers.memory_events:parse_memory_events", events_seeds),
        ("nsight_parsers.memory_events:parse_events_meta", events_meta_seeds),
        ("nsight_parsers.cache_log:parse_cache_log", cache_log_seeds),
    ],
    ids=["nsys", "torch_snapshot", "memleak", "slabinfo", "samples", "events", "events_meta", "cache_log"],
)
def test_fuzz_damaged_copies(tmp_path: Path, parser: str, seeds: object) -> None:
    rounds = mutations.ROUNDS if parser in LONG or mutations.ROUNDS > 300 else 100

    counts = mutations.fuzz(parser, ERROR, seeds(tmp_path), rounds)  # type: ignore[operator]

    assert counts["read"] + counts["refused"] == rounds
    assert counts["read"] > 0 and counts["refused"] > 0
