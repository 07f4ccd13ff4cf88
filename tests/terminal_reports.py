"""Reports that are made by hand, for tests of how they look: what every part of a report can say, once."""

from __future__ import annotations

from dataclasses import replace

from leakscope.model.breakdown import Breakdown, Group
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


def three_layers() -> Report:
    """A leak in each layer, more sites than a screen has room for, and losses of many kinds."""
    report = full_report()
    frame = "Service.kv_block_alloc (/srv/inference/releases/2026-11-30/service/blocks.py:79)"
    links = (
        ChainLink("range", "request", "recorded on the thread", 1.0, 100, 26_214_400),
        ChainLink("range", "kv_block", "recorded on the thread", 1.0, 100, 26_214_400),
        ChainLink(
            "frame", "Service.handle (/srv/inference/releases/2026-11-30/service/app.py:120)", "stack", 1.0, 100, 1
        ),
        ChainLink("frame", frame, "stack", 1.0, 100, 26_214_400),
        *report.chains[0].links[3:],
    )
    host = Verdict(
        "leak", "mapping_outside_heap", "host", 0.88, Culprit("Service.response_buffer_map (service.py:75)"),
        Growth("maps_live", 622_592.0, 582_000.0, 662_000.0), 0.7, 5_046_272, 77, ("h-00000077",), (),
        ("77 of 77 allocated objects are kept (100% of the bytes)", "it rises"),
    )  # fmt: skip
    report.verdict = replace(report.verdict, culprit=Culprit(frame, ("main", frame)))
    report.findings = [host, report.findings[0], replace(report.findings[0], culprit=Culprit("second_socket_user"))]
    report.layers.insert(
        1, LayerTotal("host", 176_930_816, 331, 310_951_936, Growth("host_live", 924_270.0, 6e5, 1.4e6))
    )
    report.chains = [Chain("g-1", links, report.chains[0].detail)]
    report.sites += [
        site(
            20 + n,
            layer="host",
            kind="mmap_anon",
            slab_cache="",
            culprit_frame=f"cache_{n}.fill (service/cache.py:{n})",
        )
        for n in range(15)
    ]
    report.sites_total = len(report.sites)
    report.losses = [
        Row(f"on_{probe}", what, count, "count")
        for probe, what, count in (
            ("kfree", "recursion_miss", 41), ("mm_page_free", "recursion_miss", 2), ("ring", "ring_drop", 12_345_678),
            ("frees", "address_only_free", 378_981), ("symbols", "symbol_unresolved", 52), ("stacks", "stack_miss", 7),
            ("python frames", "python_frames_unavailable", 30), ("marks", "mark_lost", 1), ("ring", "sideband_lost", 3),
        )
    ]  # fmt: skip
    report.inputs = [{"path": "run 1.lscope", "problems": []}]
    return report


def no_leak() -> Report:
    """Nothing leaks."""
    verdict = Verdict(
        "not_leak", "cache_warmup", reasons=("what grew has levelled off",), smallest_provable_bytes_per_s=2048.0
    )
    layers = [LayerTotal("kernel", 20_000, 78, 9_000_000, Growth("kernel_live", -3.0, -120.0, 88.0))]
    return Report(verdict, layers=layers, sites=[site(20, culprit_frame="cache_fill")], inputs=[{"path": "ok.lscope"}])


def cannot_tell() -> Report:
    """Too little evidence, most of it lost."""
    verdict = Verdict(
        "inconclusive", "window_too_short", reasons=("the recording spans 9 s, a verdict on counters needs 600 s",),
        missing=("the lost events", "readings of rss"), smallest_provable_bytes_per_s=1_048_576.0,
    )  # fmt: skip
    return Report(verdict, losses=[Row("ring", "ring_drop", 9_000, "count")], inputs=[{"path": "short.lscope"}])


def sampled() -> Report:
    """Figures that were estimated: stacks sampled, allocations sampled by bytes."""
    report = no_leak()
    report.verdict = Verdict(
        "leak", "retained_growth", "kernel", 0.8, Culprit("open_it"), Growth("slab_live", 2560.0, 2000.0, 3000.0),
        1.0, 25_600, 100, ("k-00000020",), (), ("100 of 120 allocated objects are kept (83% of the bytes)",),
    )  # fmt: skip
    report.layers = [replace(report.layers[0], standard_error_bytes=1500.0)]
    report.sites = [
        site(20, stack_sampled=True, standard_error_bytes=1234.0),
        site(8, culprit_frame="by_stack", stack_sampled=True, standard_error_bytes=99.0),
        site(7, culprit_frame="by_bytes", bytes_sampled=True, standard_error_bytes=512.0),
    ]
    return report


WIDE = "模型服务.分配显存块并且永远不释放它们 (/srv/服务/非常长的目录名称/推理/块.py:79)"
EVIL = "evil\x1b[2Jframe\nLEAK\r[red]\u202egnp.exe"
RIGHT_TO_LEFT = "שירות.הקצאה (service.py:7)"
ENDLESS = "f" * 10_000 + " (" + "d/" * 5_000 + "x.py:1)"
ZALGO = "z" + "\u0301" * 5_000


def hostile() -> Report:
    """Names that are wide, endless, written from right to left, or meant for the terminal."""
    report = three_layers()
    assert report.verdict.culprit is not None
    report.verdict = replace(report.verdict, culprit=replace(report.verdict.culprit, frame=WIDE))
    report.findings = [
        replace(report.findings[0], culprit=Culprit(EVIL, (), EVIL, (EVIL, EVIL)), reasons=(EVIL,)),
        replace(report.findings[1], culprit=Culprit(ENDLESS)),
        replace(report.findings[1], culprit=Culprit(ZALGO)),
    ]
    links = [ChainLink("frame", name, "stack", 1.0, 1, 1) for name in (RIGHT_TO_LEFT, EVIL, WIDE, ENDLESS)]
    report.chains = [Chain("g-1", (ChainLink("range", EVIL, "range", 1.0, 1, 1), *links), ())]
    names = (WIDE, EVIL, RIGHT_TO_LEFT, ENDLESS, ZALGO)
    report.sites = [
        site(9 - n, culprit_frame=name, slab_cache=EVIL if n == 1 else "filp") for n, name in enumerate(names)
    ]
    report.sites.append(site(2, culprit_frame=ENDLESS, slab_cache=EVIL, frees_visible=False))
    report.losses = [Row(EVIL, "ring_drop", 1, "count"), Row(WIDE, EVIL, 2, "count")]
    report.reconciliation = [Row(EVIL, ENDLESS, 1, "bytes"), Row("events", "kept", 1, "bytes")]
    report.reconciliation += [Row("slabinfo", "unexplained", 0, "bytes"), Row("NVML", EVIL, None, "bytes")]
    report.inputs = [{"path": EVIL, "problems": [EVIL]}]
    return report


def imported() -> Report:
    """A snapshot of another tool, alone."""
    verdict = Verdict("not_leak", "fragmentation", "gpu", 0.7, reasons=("40.0 MiB of 64.0 MiB reserved are in use",))
    file = {
        "path": "snapshot.pickle", "kind": "torch_snapshot", "tool": "PyTorch", "version": "", "source_id": 0,
        "clock": "utc", "rows": {"mem_events": 1_234, "segments": 17}, "mem_events": 1_234,
        "findings": ["24.0 MiB are fragmentation"], "limits": ["memory that PyTorch did not allocate"],
    }  # fmt: skip
    layers = [LayerTotal("gpu", 67_108_864, 17, 67_108_864, None, not_added_bytes=41_943_040)]
    return Report(verdict, layers=layers, inputs=[file])


def broken_down(by: str) -> Report:
    """A report by process, range, cache or site, of two captures, some of it estimated, some apart."""
    report = three_layers()
    growth = Growth("live", 2_621_440.0, 2_500_000.0, 2_700_000.0)
    label = {
        "site": {"name": "Service.kv_block_alloc (/srv/inference/releases/2026-11-30/blocks.py:79)", "kind": "device"},
        "pid": {"name": "/usr/bin/python3 -m serve --model /models/llama-3.1-70b-instruct", "pid": 31_448},
        "range": {"name": "request / kv_block", "ranges": ("request", "kv_block")},
        "cache": {"name": "device", "kind": "device"},
    }[by]  # fmt: skip
    groups = [
        Group(layer="gpu", added=True, frees_visible=True, live_bytes=26_214_400, live_objects=100, sites=2,
              allocated_bytes=26_214_400, allocated_objects=100, growth=growth, layer_share=0.75, **label),
        Group("cache_fill", "gpu", True, True, 8_738_133, 7, 9_000_000, 9, Growth("live", -3.0, -40.0, 12.0), 0.25),
    ]  # fmt: skip
    groups += [
        Group(f"small_{n}", "kernel", True, True, 4096 - n, 9, 8192, 18, None, 0.05, sites=1, stack_sampled=n == 1,
              standard_error_bytes=n * 77.0)
        for n in range(20)
    ]  # fmt: skip
    groups += [
        Group("nothing left", "kernel", True, True, 0, 0, 8192, 18, None, 0.0),
        Group("maple", "kernel", True, False, 192, 1, 19_200, 100),
        Group("reserve", "host", False, True, 274_877_906_944, 1, 274_877_906_944, 1),
    ]
    report.breakdown = Breakdown(by, groups)
    return report
