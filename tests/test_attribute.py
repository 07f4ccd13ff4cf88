"""`attribute` end to end on synthetic captures whose truth is known to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakscope.capture import Capture
from leakscope.detect.attribution import Options, attribute
from leakscope.model.results import Report, Site
from tests.synthetic import PID, SyntheticCapture

SOCKETPAIR = ("k:entry_SYSCALL_64", "k:__x64_sys_socketpair", "k:alloc_empty_file")
OPEN = ("k:entry_SYSCALL_64", "k:__x64_sys_openat", "k:alloc_empty_file")
LEAKER = ("main", "serve", "session_open_without_close", "libc.so.6!socketpair")
HEALTHY = ("main", "serve", "open_and_close", "libc.so.6!open")
FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
MAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}
DEVICE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}


def report_of(capture: SyntheticCapture, tmp_path: Path, options: Options | None = None) -> Report:
    """The report on a capture."""
    opened = Capture.open(capture.write(tmp_path / "case.lscope"))
    with opened.connect() as connection:
        return attribute(connection, opened.manifest, options or Options())


def site_of(report: Report, frame: str, layer: str = "kernel") -> Site:
    """The only site with this culprit in a layer."""
    (site,) = [s for s in report.sites if s.culprit_frame == frame and s.layer == layer]
    return site


def frames(report: Report, verdict: str = "leak") -> list[tuple[str, str]]:
    """(layer, culprit) of each finding with this verdict, the leading one first."""
    found = [v for v in (report.verdict, *report.findings) if v.verdict == verdict and v.culprit]
    return [(v.layer, v.culprit.frame) for v in found if v.culprit]


def three_layers() -> SyntheticCapture:
    """A service that leaks in all three layers, beside churn and a cache that fills and stops."""
    capture = SyntheticCapture(10)
    capture.process(exit_s=9.9)
    capture.leak(400, 1024, end_s=9.5, user=LEAKER, kernel=SOCKETPAIR, **{**FILP, "cache": "sock_inode_cache"})
    capture.leak(400, 256, end_s=9.5, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    capture.churn(2000, 256, end_s=9.5, user=HEALTHY, kernel=OPEN, **FILP)
    mapper = ("main", "serve", "response_buffer_map", "libc.so.6!mmap")
    capture.leak(100, 65536, end_s=9.5, user=mapper, **MAP)
    vma = {**FILP, "cache": "vm_area_struct"}
    capture.leak(100, 200, end_s=9.5, user=mapper, kernel=("k:__x64_sys_mmap", "k:vm_area_alloc"), **vma)
    runtime = ("main", "serve", "kv_block_alloc", "libcudart.so.12!cudaMalloc")
    ioctl = ("k:__x64_sys_ioctl", "k:alloc_empty_file")
    for i in range(100):
        at = 0.05 + i * 0.095
        outer = capture.call("cudaMalloc", at, at + 0.001)
        capture.call("cuMemAlloc_v2", at + 0.0001, at + 0.0009, parent=outer)
        capture.alloc(at + 0.0002, 256, user=(*runtime, "libcuda.so.1!cuMemAlloc_v2"), kernel=ioctl, **FILP)
        capture.alloc(at + 0.001, 262144, user=runtime, call_id=outer, **DEVICE)
    capture.leak(500, 65536, end_s=1.9, user=("main", "prefix_cache_fill", "libc.so.6!mmap"), **MAP)
    for second in range(10):
        share = second / 9.5
        capture.sample(second, "slab_filp", 1e6 + 500 * 256 * share)
        capture.sample(second, "slab_sock_inode_cache", 1e6 + 400 * 1024 * share)
        capture.sample(second, "slab_vm_area_struct", 1e5 + 100 * 200 * share)
    capture.loss("on_kmem_cache_free", "recursion_miss", 37)
    return capture


def test_leaks_in_three_layers_are_three_findings_with_exact_bytes(tmp_path: Path) -> None:
    # given a service that leaks in the kernel, on the host and on the GPU; when it is attributed
    report = report_of(three_layers(), tmp_path)
    # then each layer has one finding, the largest first, and nothing else is called a leak
    assert frames(report) == [
        ("gpu", "kv_block_alloc"),
        ("host", "response_buffer_map"),
        ("kernel", "session_open_without_close"),
    ]
    assert [(v.kept_bytes, v.kept_objects, v.kind) for v in (report.verdict, *report.findings)] == [
        (100 * 262144, 100, "per_call"),
        (100 * 65536, 100, "mapping_outside_heap"),
        (400 * (1024 + 256), 800, "descriptor_leak"),
    ]
    kernel = report.findings[1].culprit
    assert kernel is not None
    assert (kernel.slab_cache, kernel.slab_caches) == ("sock_inode_cache", ("sock_inode_cache", "filp"))
    # and the kernel objects behind maps and device memory follow from them
    vma, ioctl_file = site_of(report, "response_buffer_map"), site_of(report, "kv_block_alloc")
    assert report.findings[0].consequences == (vma.id,)
    assert report.verdict.consequences == (ioctl_file.id,)
    # and the layer totals are exact
    assert {t.layer: (t.live_bytes, t.live_objects) for t in report.layers} == {
        "kernel": (400 * 1280 + 100 * 200 + 100 * 256, 1000),
        "host": (600 * 65536, 600),
        "gpu": (100 * 262144, 100),
    }
    assert report.verdict.growth is not None
    assert report.verdict.growth.bytes_per_s == pytest.approx(262144 / 0.095, rel=0.06)
    assert report.verdict.leak_start_s == pytest.approx(0.05, abs=0.1)


def test_chain_goes_from_frames_through_calls_and_syscall_to_the_bytes(tmp_path: Path) -> None:
    report = report_of(three_layers(), tmp_path)
    chains = {chain.site: chain for chain in report.chains}
    gpu = chains[site_of(report, "kv_block_alloc", "gpu").id]
    assert [(link.what, link.name, link.rule) for link in gpu.links] == [
        ("frame", "main", "stack"),
        ("frame", "serve", "stack"),
        ("frame", "kv_block_alloc", "stack"),
        ("call", "cudaMalloc", "event"),
        ("call", "cuMemAlloc_v2", "nesting"),
        ("device", "device", "event"),
    ]
    assert [(link.count, link.bytes) for link in gpu.links[3:5]] == [(100, 26214400)] * 2
    # the file that the driver's ioctl opens is listed below the GPU memory, with what is kept of it
    assert [(d.what, d.name, d.rule, d.count, d.bytes) for d in gpu.detail] == [
        ("syscall", "ioctl", "nesting", 100, 25600),
        ("slab_cache", "filp", "nesting", 100, 25600),
    ]
    kernel = chains[site_of(report, "kv_block_alloc").id]
    assert [(link.what, link.name) for link in kernel.links] == [
        ("frame", "main"),
        ("frame", "serve"),
        ("frame", "kv_block_alloc"),
        ("call", "cudaMalloc"),
        ("frame", "cuMemAlloc_v2"),
        ("syscall", "ioctl"),
        ("frame", "alloc_empty_file"),
        ("slab_cache", "filp"),
    ]
    socket = chains[report.findings[1].sites[0]]
    assert [link.name for link in socket.links] == [
        "main", "serve", "session_open_without_close", "socketpair", "alloc_empty_file", "sock_inode_cache",
    ]  # fmt: skip
    assert socket.links[-1].bytes == 400 * 1024


def test_reconciliation_compares_the_same_caches_and_states_the_rest(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    for second, grown in ((1.0, 0), (9.0, 21_000)):
        capture.sample(second, "slab_filp", 1e6 + grown)
        capture.sample(second, "slab_dentry", 5e6 + 100 * grown)  # not a cache of ours
        capture.sample(second, "meminfo_SUnreclaim", 9e6 + grown)
    report = report_of(capture, tmp_path)
    # 80 of the 100 objects were allocated between the two samples: 80 × 256 = 20,480
    assert [(r.source, r.what, r.value) for r in report.reconciliation] == [
        ("slabinfo", "growth of 1 slab caches", 21_000),
        ("events", "kept in these caches", 20_480),
        ("slabinfo", "unexplained", 520),
        ("meminfo", "growth of SUnreclaim", 21_000),
        ("events", "kept in slabs", 20_480),
        ("meminfo", "unexplained", 520),
    ]


def test_counters_of_processes_and_devices_are_reconciled(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(10, 65536, start_s=2, end_s=8, user=LEAKER, **MAP)
    capture.leak(10, 1000, start_s=2, end_s=8, user=LEAKER, **DEVICE)
    for second, maps, gpu in ((1.0, 0, 0), (9.0, 700_000, 10_500)):
        capture.sample(second, "vss", 1e8 + maps, "process", str(PID))
        capture.sample(second, "gpu_used", 1e9 + gpu, "device", "GPU-0")
    rows = [(r.source, r.what, r.value) for r in report_of(capture, tmp_path).reconciliation]
    assert rows == [
        ("proc", "growth of VSS of 1 processes", 700_000),
        ("events", "kept in maps", 655_360),
        ("proc", "unexplained", 44_640),
        ("proc", "RSS was not sampled twice: not reconciled", None),
        ("NVML", "growth of GPU memory of the devices", 10_500),
        ("events", "kept on the GPU", 10_000),
        ("NVML", "unexplained", 500),
    ]


def test_what_is_live_when_a_root_process_exits_counts_as_live(tmp_path: Path) -> None:
    # given a leaker that exits at 8 s, whereupon the kernel takes everything back but two messages
    capture = SyntheticCapture(10)
    capture.process(exit_s=8.0)
    for i in range(100):
        capture.free(capture.alloc(0.05 + i * 0.07, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP), 8.1, "exit")
    capture.leak(2, 2048, end_s=7, cache="msg_msg-2k", user=("main", "send"), kernel=("k:load_msg",))
    # and an object that the exit itself allocates and frees, which says nothing
    capture.free(capture.alloc(8.2, 64, user=("main",), kernel=("k:do_exit",)), 8.3, "exit")
    report = report_of(capture, tmp_path)
    # then
    kept = site_of(report, "session_open_without_close")
    assert (kept.live_bytes, kept.live_objects, kept.outlives_process_bytes) == (25_600, 100, 0)
    assert kept.kept_share == 1.0 and kept.free_seen_share is None
    survivors = site_of(report, "send")
    assert (survivors.live_bytes, survivors.outlives_process_bytes) == (4096, 4096)
    assert sum(t.live_bytes for t in report.layers) == 25_600 + 4096
    assert frames(report) == [("kernel", "session_open_without_close")]


def test_what_ends_with_short_lived_processes_is_no_leak(tmp_path: Path) -> None:
    # given a storm of 500 children that each live 10 ms and free by exiting, one page each outliving every 10th
    capture = SyntheticCapture(10)
    capture.process(role="root")
    for i in range(500):
        at, pid = i * 0.019, 1000 + i
        capture.process(pid, "child", at, at + 0.01)
        task = capture.alloc(at + 0.001, 1000, pid=pid, user=("main", "child"), kernel=("k:dup_task",))
        capture.free(task, at + 0.011, "exit")
        if i % 10 == 0:
            capture.alloc(at + 0.002, 2048, pid=pid, user=("main", "send"), kernel=("k:load_msg",))
    report = report_of(capture, tmp_path)
    # then what the exits took back is neither live nor a leak
    child = site_of(report, "child")
    assert (child.live_bytes, child.ended_with_process_bytes) == (0, 500_000)
    # and what outlives the children is
    survivors = site_of(report, "send")
    assert (survivors.live_bytes, survivors.outlives_process_bytes) == (50 * 2048, 50 * 2048)
    assert frames(report) == [("kernel", "send")]


def test_objects_that_end_only_by_reuse_are_listed_apart(tmp_path: Path) -> None:
    # given churn whose frees fire no tracepoint: most addresses are handed out again, 40 stay "live"
    capture = SyntheticCapture(10)
    capture.process()
    where = {"user": ("main", "watch"), "kernel": ("k:__x64_sys_epoll_ctl", "k:ep_insert"), "cache": "eventpoll_epi"}
    for i in range(400):
        row = capture.alloc(i * 0.024, 128, **where)
        if i % 10:
            capture.free(row, i * 0.024 + 0.02, "reuse")
    report = report_of(capture, tmp_path)
    # then it is no finding and in no total
    site = site_of(report, "watch")
    assert (site.frees_visible, site.free_seen_share, site.live_objects) == (False, 0.0, 40)
    assert report.verdict.verdict == "not_leak" and not report.findings
    (kernel,) = report.layers
    assert (kernel.live_bytes, kernel.frees_not_visible_bytes) == (0, 40 * 128)


@pytest.mark.parametrize(
    ("freed", "reused", "verdict"), [(0, 0, "not_leak"), (4, 0, "not_leak"), (5, 5, "leak"), (5, 6, "not_leak")]
)
def test_a_slab_cache_that_did_not_grow_says_nothing_of_objects_that_others_free_visibly(
    tmp_path: Path, freed: int, reused: int, verdict: str
) -> None:
    # given 1,000 kept objects in a cache that did not grow, as a CPU had as many free ones; others of the same kernel
    # function ended by visible frees, or by the reuse of their addresses
    capture = SyntheticCapture(10)
    capture.process()
    where = {"kernel": ("k:load_msg",), "cache": "kmalloc-1k"}
    capture.leak(1000, 1024, user=("main", "post"), **where)
    for i in range(freed + reused):
        row = capture.alloc(1 + i * 0.2, 1024, user=("main", "receive"), **where)
        capture.free(row, 1.1 + i * 0.2, "call" if i < freed else "reuse")
    for second in (0.5, 9.5):
        capture.sample(second, "slab_kmalloc-1k", 874_496)
    report = report_of(capture, tmp_path)
    assert site_of(report, "post").frees_visible is (verdict == "leak")
    assert report.verdict.verdict == verdict


@pytest.mark.parametrize(("grown_share", "verdict"), [(0.1, "not_leak"), (1.0, "leak")])
def test_a_slab_cache_that_did_not_grow_disproves_a_leak(tmp_path: Path, grown_share: float, verdict: str) -> None:
    # given 1,000 objects never freed visibly, in a cache that grew by a tenth of them, or by all
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(1000, 128, user=("main", "arm"), kernel=("k:do_timer_create",), cache="posix_timers_cache")
    capture.sample(0.5, "slab_posix_timers_cache", 4096)
    capture.sample(9.5, "slab_posix_timers_cache", 4096 + 900 * 128 * grown_share)
    report = report_of(capture, tmp_path)
    assert site_of(report, "arm").frees_visible is (verdict == "leak")
    assert report.verdict.verdict == verdict


def test_sampled_stacks_share_the_rest_of_their_call_site_exactly(tmp_path: Path) -> None:
    # given a hot call site: 1 in 10 allocations has a stack, 630 others have none and 600 of those stay
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_socketpair", "k:alloc_empty_file")
    for i in range(60):
        user = ("main", "leaks_two_thirds") if i % 3 else ("main", "leaks_a_third")
        capture.alloc(i * 0.16, 100, user=user, kernel=kernel, weight=10, **FILP)
    for i in range(10):
        row = capture.alloc(i * 0.9, 100, user=("main", "healthy"), kernel=kernel, weight=10, **FILP)
        capture.free(row, i * 0.9 + 0.01)
    capture.leak(601, 100, kernel=kernel, weight=0, **FILP)
    for i in range(30):
        capture.free(capture.alloc(i * 0.3, 100, kernel=kernel, weight=0, **FILP), i * 0.3 + 0.01)
    report = report_of(capture, tmp_path)
    # then the kept bytes of the pool go to the survivors' stacks, 2 : 1, to the object and byte
    two, one, none = (site_of(report, f) for f in ("leaks_two_thirds", "leaks_a_third", "healthy"))
    assert (two.live_bytes, one.live_bytes, none.live_bytes) == (4000 + 40_067, 2000 + 20_033, 0)
    assert (two.live_objects, one.live_objects, none.live_objects) == (40 + 401, 20 + 200, 0)
    # and the 30 that were freed to the stack whose sampled allocations were
    assert [site.allocated_objects for site in (two, one, none)] == [441, 220, 10 + 30]
    assert (two.kept_share, none.kept_share, none.free_seen_share) == (1.0, 0.0, 1.0)
    assert two.stack_sampled and two.standard_error_bytes == pytest.approx(60_100 * (2 / 9 / 60) ** 0.5)
    assert sum(t.live_bytes for t in report.layers) == 66_100
    assert frames(report) == [("kernel", "leaks_two_thirds"), ("kernel", "leaks_a_third")]


def test_a_pool_without_a_sampled_survivor_stays_with_its_call_site(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_open", "k:alloc_empty_file")
    row = capture.alloc(1, 100, user=("main", "healthy"), kernel=kernel, weight=10, **FILP)
    capture.free(row, 1.1)
    capture.leak(50, 100, kernel=kernel, weight=0, **FILP)
    report = report_of(capture, tmp_path)
    rest = site_of(report, "alloc_empty_file")
    assert (rest.live_bytes, rest.stack, rest.stack_sampled) == (5000, ["alloc_empty_file"], True)
    assert site_of(report, "healthy").live_bytes == 0


def test_frees_of_unseen_allocations_are_counted_and_never_subtracted(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(20, 64, user=("main", "keep"), kernel=("k:kept",))
    for i in range(7):
        capture.unknown_free(1 + i)
    report = report_of(capture, tmp_path)
    assert [t.live_bytes for t in report.layers] == [20 * 64]
    assert [(r.source, r.value) for r in report.losses] == [("kernel", 7)]


def test_failed_allocations_and_advice_are_no_bytes(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.alloc(1, 4096, user=("main", "map"), **MAP)
    capture.alloc(2, 1 << 40, user=("main", "map"), **DEVICE)["result"] = 2
    capture.alloc(3, 4096, user=("main", "map"), **MAP)["op"] = "advise"
    report = report_of(capture, tmp_path)
    assert [(t.layer, t.live_bytes, t.allocated_bytes) for t in report.layers] == [("host", 4096, 4096)]


def test_kinds_that_another_kind_counts_are_shown_but_not_added(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(50, 4096, kind="page_slab", api="mm_page_alloc", user=("main", "f"), kernel=("k:new_slab",))
    capture.leak(50, 64, user=("main", "keep"), kernel=("k:kept",))
    report = report_of(capture, tmp_path)
    (kernel,) = report.layers
    assert (kernel.live_bytes, kernel.not_added_bytes) == (50 * 64, 50 * 4096)
    assert frames(report) == [("kernel", "keep")]


def test_only_a_layer_or_a_process(tmp_path: Path) -> None:
    capture = three_layers()
    capture.process(7, "other")
    capture.leak(100, 64, pid=7, user=("other_main", "other_leak"), kernel=("k:kept",))
    only_host = report_of(capture, tmp_path, Options(layer="host"))
    assert frames(only_host) == [("host", "response_buffer_map")]
    assert [t.layer for t in only_host.layers] == ["host"]
    opened = Capture.open(tmp_path / "case.lscope")
    with opened.connect() as connection:
        only_other = attribute(connection, opened.manifest, Options(pid=7))
    assert frames(only_other) == [("kernel", "other_leak")]


def test_growth_of_a_sampled_call_site_is_that_of_each_stacks_own_survivors(tmp_path: Path) -> None:
    # given one hot call site with a cache that fills early and a leak that goes on, 1 in 10 with a stack
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_socketpair", "k:alloc_empty_file")
    for weight, count in ((10, 40), (0, 360)):
        capture.leak(count, 100, end_s=1.5, user=("main", "fill"), kernel=kernel, weight=weight, **FILP)
        capture.leak(count, 100, user=("main", "forget"), kernel=kernel, weight=weight, **FILP)
    report = report_of(capture, tmp_path)
    # then both keep their bytes, and only the leak grows
    fill, forget = site_of(report, "fill"), site_of(report, "forget")
    assert (fill.live_bytes, forget.live_bytes) == (40_000, 40_000)
    assert fill.growth is not None and fill.growth.bytes_per_s == 0.0
    assert forget.growth is not None and forget.growth.bytes_per_s == pytest.approx(4000, rel=0.1)
    assert frames(report) == [("kernel", "forget")]


def test_what_the_slab_allocator_needs_follows_from_the_objects(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(320, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    slab = ("k:__x64_sys_openat", "k:kmem_cache_alloc_noprof", "k:new_slab", "k:alloc_obj_exts", "k:__kmalloc_noprof")
    capture.leak(20, 64, user=HEALTHY, kernel=slab, cache="kmalloc-64")
    report = report_of(capture, tmp_path)
    assert frames(report) == [("kernel", "session_open_without_close")]
    assert report.verdict.consequences == (site_of(report, "open_and_close").id,)


def test_page_tables_of_a_leaked_map_follow_from_it_whoever_touched_it(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 65536, user=("main", "map_it", "libc.so.6!mmap"), **MAP)
    fault = {"kernel": ("k:asm_exc_page_fault", "k:__pte_alloc"), "kind": "page", "api": "mm_page_alloc"}
    capture.leak(50, 4096, user=("main", "touch_it"), **fault)
    report = report_of(capture, tmp_path)
    assert frames(report) == [("host", "map_it")]
    assert report.verdict.consequences == (site_of(report, "touch_it").id,)


def test_own_stacks_speak_for_a_pool_without_a_sampled_survivor(tmp_path: Path) -> None:
    # given 30 leaks that took their own stack, 60 without one, and no survivor that was drawn at random
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_msgget", "k:newque")
    capture.leak(30, 100, user=("main", "forget"), kernel=kernel, **FILP)
    capture.leak(60, 100, kernel=kernel, weight=0, **FILP)
    # when it is attributed, then all 90 are kept at the function that is known, and no site is named by the kernel
    report = report_of(capture, tmp_path)
    site = site_of(report, "forget")
    assert (site.live_objects, site.live_bytes, site.stack_sampled) == (90, 9000, True)
    assert frames(report) == [("kernel", "forget")]
