"""Damaged Nsight Compute files: each is read or refused in one line, in bounded time and memory.

``make test`` parses 300 copies of each kind, ``make fuzz`` 10,000 (LEAKSCOPE_FUZZ_ROUNDS).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import mutations
import ncu_files as made
import pyarrow as pa
import pytest

from nsight_parsers import ReportError
from nsight_parsers.ncu_rep import parse_ncu_rep

ERROR = "nsight_parsers:ReportError"


def hand_made_report() -> bytes:
    stack = made.frame("libcudart.so.12", 0x7F01, "", "cudaLaunchKernel") + made.frame("", 0, "/a/b.py", "main", 7)
    results = [
        made.result(
            f"kernel{i}", tid=12, api=5 + i, nvtx=made.nvtx(12, ["request"], "server"), stack=stack,
            metrics=[made.metric(0, 1048576.0 * i), made.metric(1, 7), made.metric(2, "CachePreferNone")],
        )
        for i in range(8)
    ]  # fmt: skip
    program = made.process(12, "/usr/bin/python3")
    return made.report(
        made.block(session=made.tool_session("2025.2.1.0"), program=program),
        made.block(session=made.command_session("/opt/ncu -k regex:kernel -s 2 --nvtx-include a/ ./app x")),
        made.block(results=results[:1], strings=[made.ACCESSIBLE, "launch__thread_count", "config"], program=program),
        *(made.block(results=[one], program=program) for one in results[1:]),
    )


def hand_made_csv() -> bytes:
    rows = [made.details_row(i, f"m{j}", "byte", f"{i},{j:03d},{j:03d}.{j}") for i in range(4) for j in range(6)]
    raw = [
        f'{made.RAW_IDENTITY},"{made.ACCESSIBLE}"',
        ",".join(['""'] * 12) + ',"byte"',
        *(f'"{i}","1","p","h",""," k","1","7","(1, 1, 1)","(1, 1, 1)","0","8.0","{i}"' for i in range(4)),
    ]
    return "\n".join(["==PROF== Connected to process 1", made.DETAILS, *rows, "done", *raw, ""]).encode()


def real_seeds(folder: str, *names: str) -> list[Path]:
    root = os.environ.get("LEAKSCOPE_TEST_DATA")
    return [Path(root) / folder / name for name in names] if root else []


def test_fuzz_reports(tmp_path: Path) -> None:
    seed = tmp_path / "seed.ncu-rep"
    seed.write_bytes(hand_made_report())
    seeds = [seed, *real_seeds("ncu_rep", "ncu-2022.4.0_mojo-divergence.ncu-rep")]

    counts = mutations.fuzz("nsight_parsers.ncu_rep:parse_ncu_rep", ERROR, seeds)

    assert counts["read"] + counts["refused"] == mutations.ROUNDS
    assert counts["read"] > mutations.ROUNDS / 2 and counts["refused"] > 0


def test_fuzz_csv(tmp_path: Path) -> None:
    seed = tmp_path / "seed.csv"
    seed.write_bytes(hand_made_csv())
    names = ("details-with-rules_thousands.csv", "details-2020_kerneltime_app-output-mixed.log")

    counts = mutations.fuzz("nsight_parsers.ncu_csv:parse_ncu_csv", ERROR, [seed, *real_seeds("ncu_csv", *names)])

    assert counts["read"] + counts["refused"] == mutations.ROUNDS
    assert counts["read"] > mutations.ROUNDS / 2 and counts["refused"] > 0


def test_fuzz_recognises_and_parses_whatever_a_copy_has_become(tmp_path: Path) -> None:
    seeds = [tmp_path / "seed.ncu-rep", tmp_path / "seed.csv"]
    seeds[0].write_bytes(hand_made_report())
    seeds[1].write_bytes(hand_made_csv())

    counts = mutations.fuzz("nsight_parsers.recognise:parse", ERROR, seeds)

    assert counts["read"] > 0 and counts["refused"] > 0


def test_fuzz_harness_reports_a_traceback_a_hang_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = tmp_path / "seed"
    seed.write_bytes(b"seed " * 9)
    module = tmp_path / "bad_parsers.py"
    module.write_text(
        "first = set()\n"
        "def bad(kind):\n"
        "    def parse(path):\n"
        "        if not first: return first.add(1)\n"
        "        if kind == 'raise': raise KeyError(path)\n"
        "        if kind == 'memory': return bytearray(3 << 30)\n"
        "        while True: pass\n"
        "    return parse\n"
        "raising, hungry, endless = bad('raise'), bad('memory'), bad('hang')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    for name, shown in (("raising", "KeyError"), ("hungry", "MemoryError"), ("endless", "Timeout")):
        with pytest.raises(AssertionError, match=f"round 0: (?s:.*){shown}"):
            mutations.fuzz(f"bad_parsers:{name}", ERROR, [seed], 2, limit_s=0.5)


def test_fuzz_copies_repeat_and_differ() -> None:
    data = hand_made_report()

    copies = [mutations.mutate(data, random.Random(i)) for i in range(50)]

    assert copies == [mutations.mutate(data, random.Random(i)) for i in range(50)]
    assert len(set(copies)) > 45 and data not in copies[:5]


def test_hostile_zstd_bomb_stops_early(tmp_path: Path) -> None:
    path = tmp_path / "bomb.ncu-repz"
    block = made.sized(made.number(1, 1) + made.number(2, 0) + made.number(5, 1 << 30)) + made.sized(b"")[:0]
    content = made.report() + block + made.sized(b"\0" * (64 << 20))
    path.write_bytes(pa.compress(content, codec="zstd", asbytes=True))

    report = parse_ncu_rep(path)

    assert path.stat().st_size < 1 << 20
    assert any("too much unpacked from so small a file" in finding for finding in report.findings)


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        # A string table of many empty strings; a result of as many empty metrics; a deep stack.
        (made.report(made.block(extra=made.text(4, b"\x0a\x00" * 600_000))), "damaged at byte "),
        (made.report(made.block(results=[b"\x6a\x00" * 600_000])), "1 damaged results were left out"),
        (
            made.report(made.block(results=[made.text(28, made.text(1, b"") * 9000)])),
            "not read: CPU stack frames beyond",
        ),
    ],
)
def test_hostile_counts_are_bounded(tmp_path: Path, content: bytes, finding: str) -> None:
    path = tmp_path / "many.ncu-rep"
    path.write_bytes(content)

    try:
        findings = parse_ncu_rep(path).findings
    except ReportError as error:
        findings = [str(error)]

    assert [f for f in findings if f.startswith(finding)], findings
