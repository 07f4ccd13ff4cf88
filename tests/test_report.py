"""How a report looks: text at two widths, JSON, and nothing that a terminal would act on."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from leakscope.detect.sentence import sentence
from leakscope.model.results import (
    Chain,
    ChainLink,
    Culprit,
    Growth,
    LayerTotal,
    Report,
    Row,
    Site,
    Verdict,
)
from leakscope.quantities import counted, exact, rate, size
from leakscope.report.json import report_json
from leakscope.report.terminal import plain_lines, print_report
from leakscope.report.text import printable

SNAPSHOTS = Path(__file__).parent / "snapshots"


def site(number: int, **changes: object) -> Site:
    """A site of a kernel slab cache."""
    values: dict[str, object] = {
        "id": f"k-{number:08x}", "layer": "kernel", "kind": "slab", "api": "kmem_cache_alloc", "slab_cache": "filp",
        "stack": ["main", "serve"], "culprit_frame": "serve", "live_bytes": 1000 * number, "live_objects": number,
        "allocated_bytes": 4000 * number, "allocated_objects": 4 * number, "kept_share": 0.25, "first_ns": 1,
        "last_ns": 2, "free_seen_share": 1.0, "frees_visible": True, "outlives_process_bytes": 0,
        "ended_with_process_bytes": 0, "processes": 1, "stack_sampled": False, "standard_error_bytes": 0.0,
    }  # fmt: skip
    return Site(**(values | changes))  # type: ignore[arg-type]


def full_report() -> Report:
    """A report with something in every part."""
    gpu = Verdict(
        "leak", "per_call", "gpu", 0.94, Culprit("kv_block_alloc", ("main", "kv_block_alloc")),
        Growth("gpu_live", 2_621_440.0, 2_500_000.0, 2_700_000.0), 0.5, 26_214_400, 100, ("g-1",), (),
        ("100 of 100 allocated objects are kept (100% of the bytes)", "it rises"),
    )  # fmt: skip
    kernel = Verdict(
        "leak", "descriptor_leak", "kernel", 0.9,
        Culprit("session_open_without_close", ("main",), "sock_inode_cache", ("sock_inode_cache", "filp")),
        Growth("slab_live", 51_200.0, 50_000.0, 52_000.0), 1.0, 512_000, 800, ("k-1",), ("k-00000009",),
        ("800 of 800 allocated objects are kept (100% of the bytes)", "it rises", "4,096 bytes outlive their process"),
    )  # fmt: skip
    unclear = Verdict(
        "inconclusive", "partial_data", "host", 0.5, Culprit("buffer_map"), Growth("maps_live", 10.0, -5.0, 20.0),
        0.0, 65_536, 16, ("h-1",), (), ("kept memory rises, but 20 frees may be unseen",), ("events lost",),
    )  # fmt: skip
    links = (
        ChainLink("frame", "libc.so.6+0x2724a", "stack", 1.0, 100, 26_214_400),
        ChainLink("frame", "main", "stack", 1.0, 100, 26_214_400),
        ChainLink("frame", "kv_block_alloc", "stack", 1.0, 100, 26_214_400),
        ChainLink("call", "cudaMalloc", "event", 1.0, 100, 26_214_400),
        ChainLink("call", "cuMemAlloc_v2", "nesting", 1.0, 100, 26_214_400),
        ChainLink("device", "device", "event", 1.0, 100, 26_214_400),
    )
    detail = (
        ChainLink("syscall", "ioctl", "nesting", 1.0, 100, 25_600),
        ChainLink("slab_cache", "filp", "nesting", 1.0, 100, 25_600),
    )
    return Report(
        verdict=gpu,
        findings=[kernel, unclear],
        layers=[
            LayerTotal("kernel", 557_600, 1000, 1_258_291, Growth("kernel_live", 55_760.0, 49_000.0, 59_000.0)),
            LayerTotal("gpu", 26_214_400, 100, 26_214_400, Growth("gpu_live", 2_621_440.0, 2_500_000.0, 2_700_000.0)),
        ],
        chains=[Chain("g-1", links, detail)],
        sites=[
            site(9, slab_cache="kmalloc-192"),
            site(8, culprit_frame="cache_fill", growth=Growth("live", 12.0, 0.0, 20.0)),
            site(7, culprit_frame="cache_fill", stack_sampled=True),
            site(6, culprit_frame="watch", slab_cache="eventpoll_epi", frees_visible=False),
            site(5, kind="page_slab", slab_cache=""),
        ],
        sites_total=5,
        losses=[Row("on_kmem_cache_free", "recursion_miss", 37, "count", "nested")],
        reconciliation=[
            Row("slabinfo", "growth of 2 slab caches", 530_000, "bytes", "filp, sock_inode_cache"),
            Row("events", "kept in these caches", 512_000, "bytes"),
            Row("slabinfo", "unexplained", 18_000, "bytes"),
            Row("NVML", "GPU memory was not sampled twice: not reconciled", None, "bytes"),
        ],
        inputs=[{"path": "run.lscope", "problems": ["the capture is incomplete: it was stopped"]}],
    )


@pytest.mark.parametrize("width", [80, 140])
def test_terminal_looks_as_pinned(width: int) -> None:
    assert "\n".join(plain_lines(full_report(), width)) + "\n" == (SNAPSHOTS / f"attribute_{width}.txt").read_text()


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal_but_the_commands_to_copy(width: int) -> None:
    lines = [line for line in plain_lines(full_report(), width) if not line.startswith("next:")]
    assert max(len(line) for line in lines) <= width


def test_top_limits_the_other_sites() -> None:
    assert not any("cache_fill" in line for line in plain_lines(full_report(), 80, top=0))
    assert any("cache_fill" in line for line in plain_lines(full_report(), 80, top=1))


def test_control_characters_of_a_capture_never_reach_the_terminal() -> None:
    evil = "evil\x1b[2Jframe\nLEAK\r[red]"
    report = full_report()
    assert report.verdict.culprit is not None
    report.verdict = replace(report.verdict, culprit=replace(report.verdict.culprit, frame=evil))
    report.findings[0] = replace(report.findings[0], culprit=Culprit(evil, (), evil, (evil, evil)))
    report.chains = [Chain("g-1", (ChainLink("frame", evil, "stack", 1.0, 1, 1),), ())]
    report.sites = [site(3, culprit_frame=evil, slab_cache=evil), site(2, culprit_frame=evil, frees_visible=False)]
    report.losses = [Row(evil, "ring_drop", 1, "count")]
    report.inputs = [{"path": evil, "problems": [evil]}]
    text = "\n".join(plain_lines(report, 140))
    assert "\x1b" not in text and "\r" not in text
    assert not any(line.startswith("LEAK") for line in text.split("\n")[1:])
    assert r"evil\x1b[2Jframe\nLEAK\r[red]" in text.replace("\n", "")


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(**options: object) -> str:
        out = io.StringIO()
        print_report(Console(file=out, width=100, highlight=False, **options), full_report())  # type: ignore[arg-type]
        return out.getvalue()

    assert "\x1b[" not in printed()
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mLEAK" in printed(force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in printed(force_terminal=True)


def test_verdicts_in_words() -> None:
    healthy = Verdict("not_leak", "cache_warmup", reasons=("what grew has levelled off",))
    assert sentence(healthy) == "what grew has levelled off (cache_warmup)"
    assert sentence(full_report().findings[1]) == (
        "buffer_map may leak: it keeps 65,536 B (64.0 KiB) of host memory in 16 objects, growing by 10 B/s "
        "(partial_data)"
    )


def test_json_is_plain_and_complete() -> None:
    report = report_json(full_report())
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["verdict"]["class"] == "per_call"
    assert report["verdict"]["culprit"] == {"frame": "kv_block_alloc", "stack": ["main", "kv_block_alloc"]}
    assert report["findings"][0]["consequences"] == ["k-00000009"]
    assert report["losses"] == [
        {"source": "on_kmem_cache_free", "what": "recursion_miss", "count": 37, "detail": "nested"}
    ]
    assert report["reconciliation"][2] == {"source": "slabinfo", "what": "unexplained", "bytes": 18_000}
    assert report["reconciliation"][3]["bytes"] is None
    assert (report["sites"][4]["added_to_layer"], report["sites"][3]["frees_visible"]) == (False, False)


def test_sizes_in_words() -> None:
    assert [size(v) for v in (0, 1023, 1024, 1536, -26_214_400, 1023.99 * 1024)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "-25.0 MiB", "1.0 MiB",
    ]  # fmt: skip
    assert (size(float("nan")), rate(2048.0), exact(100), exact(4096)) == (
        "?",
        "2.0 KiB/s",
        "100 B",
        "4,096 B (4.0 KiB)",
    )
    assert (counted(1, "object"), counted(3000, "object"), printable("a\tb")) == ("1 object", "3,000 objects", "a\\tb")
