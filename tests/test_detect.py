"""Growth, persistence, losses and judgement, on curves and on synthetic captures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from leakscope.detect import growth
from leakscope.detect.attribution import Options
from leakscope.detect.losses import ALL_FREES, Loss, hidden_frees, hidden_frees_of_sites
from tests.synthetic import PID, SyntheticCapture
from tests.test_attribute import DEVICE, FILP, LEAKER, MAP, SOCKETPAIR, frames, report_of

BINS = np.arange(1.0, 121.0)
WARM = np.array([24])
BIN_S = np.array([0.1])


def curve(values: np.ndarray) -> np.ndarray:
    """One curve as the functions take it."""
    return values[None, :].astype(np.float64)


def test_rate_of_a_line_is_its_slope_with_an_interval_of_no_width() -> None:
    rates = growth.rates(curve(BINS * 10), WARM, BIN_S)
    assert (rates.mean[0], rates.low[0], rates.high[0]) == pytest.approx((100.0, 100.0, 100.0))


def test_interval_of_churn_holds_zero_and_that_of_a_leak_in_churn_does_not() -> None:
    noise = np.random.default_rng(7).normal(0, 30, 120)
    both = np.vstack([1000 + noise, 1000 + noise + BINS * 20])
    rates = growth.rates(both, np.repeat(WARM, 2), np.repeat(BIN_S, 2))
    assert rates.low[0] < 0 < rates.high[0]
    assert 0 < rates.low[1] < 200 < rates.high[1]


def test_interval_covers_the_true_rate_of_a_random_walk() -> None:
    # 200 walks of +1 ± 5 a bin: 95 % of the intervals should hold 10 per second
    steps = np.random.default_rng(3).normal(1.0, 5.0, (200, 120))
    rates = growth.rates(np.cumsum(steps, axis=1), np.repeat(WARM, 200), np.repeat(BIN_S, 200))
    covered = int(((rates.low <= 10.0) & (rates.high >= 10.0)).sum())
    assert 175 <= covered <= 200


@pytest.mark.parametrize(
    ("values", "steady", "plateau"),
    [
        (BINS, True, False),
        (np.minimum(BINS, 30), False, True),  # a cache that fills and stops
        (np.where(BINS > 60, 500.0, 0.0), False, True),  # one step
        (np.minimum(BINS, 90) + 0.0, False, True),  # stopped in the last part
        (BINS % 12, False, True),  # a saw-tooth: its floor does not move
        (BINS + (BINS % 12), True, False),  # a saw-tooth on a leak
        (0 * BINS, False, True),
    ],
)
def test_persistence(values: np.ndarray, steady: bool, plateau: bool) -> None:
    found = growth.persistence(curve(values), WARM)
    assert (bool(found.steady[0]), bool(found.plateau[0])) == (steady, plateau)


def test_theil_sen_ignores_a_step() -> None:
    assert growth.theil_sen(curve(BINS * 10), WARM, BIN_S)[0] == pytest.approx(100.0)
    assert growth.theil_sen(curve(np.where(BINS > 110, 1e6, 0.0)), WARM, BIN_S)[0] == 0.0


@pytest.mark.parametrize(
    ("values", "start"),
    [(BINS, 0), (np.maximum(0, BINS - 60), 60), (1000 + np.maximum(0, BINS - 30), 30), (500 + BINS, 0)],
)
def test_leak_start(values: np.ndarray, start: int) -> None:
    assert growth.leak_start_bins(curve(values))[0] == start


def test_warm_up_is_a_fifth_or_as_asked() -> None:
    window = np.array([12.0, 2.0])
    assert growth.warm_up_bins(120, window).tolist() == [24, 24]
    assert growth.warm_up_bins(120, window, 1.0).tolist() == [10, 60]
    assert growth.warm_up_bins(120, window, 99.0).tolist() == [116, 116]


def test_losses_hide_frees_of_the_layers_that_their_probe_serves() -> None:
    losses = [
        Loss("on_kmem_cache_free", "recursion_miss", 50),
        Loss("on_kmem_cache_alloc", "recursion_miss", 1000),  # loses allocations, hides no free
        Loss("mem_records", "ring_drop", 7),
        Loss("call_records", "ring_drop", 3),
        Loss("stacks", "stack_miss", 999),
    ]
    assert hidden_frees(losses, {"kernel": 20}) == {"kernel": 50 - 20 + 7, "host": 3, "gpu": 3}
    assert hidden_frees([Loss("kfree", "attach_failed", 1)], {})["kernel"] == ALL_FREES


# --- judgement ---


@pytest.mark.parametrize(("dropped", "verdict"), [(99, "leak"), (100, "inconclusive")])
def test_as_many_lost_frees_as_kept_objects_withhold_the_verdict(tmp_path: Path, dropped: int, verdict: str) -> None:
    # given 125 kept objects, 100 of them after the warm-up, and frees lost in a full ring
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(125, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    capture.loss("mem_records", "ring_drop", dropped)
    report = report_of(capture, tmp_path)
    assert report.verdict.verdict == verdict
    assert report.verdict.kind == ("descriptor_leak" if verdict == "leak" else "partial_data")
    assert frames(report, verdict) == [("kernel", "session_open_without_close")]
    assert bool(report.verdict.missing and "lost" in report.verdict.missing[0]) is (verdict == "inconclusive")


def test_a_slab_cache_that_grew_as_much_confirms_what_losses_put_in_doubt(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(125, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    capture.loss("mem_records", "ring_drop", 5000)
    capture.sample(0, "slab_filp", 0)
    capture.sample(10, "slab_filp", 125 * 256)
    report = report_of(capture, tmp_path)
    assert report.verdict.verdict == "leak"
    assert "an independent counter grew by as much" in report.verdict.reasons


def test_a_cache_that_fills_and_stops_is_no_leak(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(500, 65536, end_s=6, user=("main", "cache_insert"), **MAP)
    capture.churn(500, 65536, start_s=6, user=("main", "cache_replace"), **MAP)
    report = report_of(capture, tmp_path)
    assert (report.verdict.verdict, report.verdict.kind) == ("not_leak", "cache_warmup")
    assert report.verdict.reasons == ("what grew has levelled off",)
    assert not report.findings


def test_start_up_that_stays_is_no_leak_until_the_warm_up_is_ruled_out(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(300, 4096, end_s=1.5, user=("main", "load"), **MAP)
    capture.churn(500, 4096, user=("main", "work"), **MAP)
    assert report_of(capture, tmp_path).verdict.verdict == "not_leak"


def test_nine_kept_objects_after_the_warm_up_prove_nothing(tmp_path: Path) -> None:
    for count, verdict in ((11, "not_leak"), (15, "leak")):
        capture = SyntheticCapture(10)
        capture.process()
        capture.leak(count, 1 << 20, user=("main", "seldom"), **MAP)
        capture.churn(200, 4096, user=("main", "work"), **MAP)
        report = report_of(capture, tmp_path / str(count))
        assert report.verdict.verdict == verdict


def test_a_leak_that_starts_late_is_found_with_its_start_and_rate(tmp_path: Path) -> None:
    capture = SyntheticCapture(20)
    capture.process()
    capture.leak(200, 1000, start_s=12, user=("main", "late"), **DEVICE)
    capture.churn(1000, 1000, user=("main", "work"), **DEVICE)
    report = report_of(capture, tmp_path)
    assert frames(report) == [("gpu", "late")]
    assert report.verdict.leak_start_s == pytest.approx(12.0, abs=0.2)
    assert report.verdict.growth is not None
    assert report.verdict.growth.bytes_per_s == pytest.approx(25_000, rel=0.03)


def test_a_process_that_sleeps_after_its_work_is_judged_over_its_work(tmp_path: Path) -> None:
    # given 1,000 objects leaked in half a second and then 9.5 s of sleep
    capture = SyntheticCapture(10)
    capture.process(exit_s=9.9)
    capture.leak(1000, 256, start_s=0.2, end_s=0.7, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    report = report_of(capture, tmp_path)
    assert frames(report) == [("kernel", "session_open_without_close")]
    assert report.verdict.growth is not None
    assert report.verdict.growth.bytes_per_s == pytest.approx(1000 * 256 / 0.5, rel=0.02)
    assert "judged over the time in which the process was active" in report.verdict.reasons


def test_a_site_is_judged_in_each_process_and_merged(tmp_path: Path) -> None:
    # given two workers that leak at the same line and one that does not
    capture = SyntheticCapture(10)
    for pid in (PID, PID + 1, PID + 2):
        capture.process(pid, "child")
        capture.churn(100, 512, user=("main", "work"), pid=pid, **DEVICE)
    for pid in (PID, PID + 1):
        capture.leak(100, 512, user=("main", "leak_block"), pid=pid, **DEVICE)
    capture.alloc(0.1, 512, user=("main", "leak_block"), pid=PID + 2, **DEVICE)
    report = report_of(capture, tmp_path)
    assert frames(report) == [("gpu", "leak_block")]
    assert (report.verdict.kept_objects, report.verdict.kept_bytes) == (200, 102_400)
    (site,) = [s for s in report.sites if s.culprit_frame == "leak_block"]
    assert (site.live_objects, site.processes) == (201, 3)


def test_growth_that_slows_down_is_inconclusive(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    for i in range(400):  # fills like 1 - exp(-t / 2.5 s), still rising a little at the end
        share = (i + 0.5) / 400 * (1 - np.exp(-4))
        capture.alloc(float(-2.5 * np.log(1 - share)), 4096, user=("main", "fill"), **DEVICE)
    report = report_of(capture, tmp_path)
    assert (report.verdict.verdict, report.verdict.kind) == ("inconclusive", "window_too_short")
    assert report.verdict.missing[0] == "a longer recording"


def test_caches_that_the_kernel_reclaims_are_no_leak(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    path = ("k:__x64_sys_statx", "k:d_alloc")
    capture.leak(300, 192, user=("main", "walk"), kernel=path, **{**FILP, "cache": "dentry"})
    report = report_of(capture, tmp_path)
    assert (report.verdict.verdict, report.verdict.kind) == ("not_leak", "reclaimable_slab")
    assert frames(report, "not_leak") == [("kernel", "walk")]


def test_objects_that_the_kernel_frees_in_batches_are_no_leak(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    path = ("k:__x64_sys_clone", "k:alloc_vmap_area")
    capture.leak(300, 72, user=("main", "spawn"), kernel=path, **{**FILP, "cache": "vmap_area"})
    report = report_of(capture, tmp_path)
    assert (report.verdict.verdict, report.verdict.kind) == ("not_leak", "pending_free")


def test_ports_of_closed_connections_are_no_leak_but_sockets_beside_them_are(tmp_path: Path) -> None:
    # given connections that this side closed first: the kernel keeps their ports for a minute (TIME_WAIT)
    def ports() -> SyntheticCapture:
        capture = SyntheticCapture(10)
        capture.process()
        for function in ("inet_bind2_bucket_create", "inet_twsk_alloc.isra.0"):
            path = ("k:__x64_sys_connect", f"k:{function}", "k:kmem_cache_alloc_noprof")
            capture.leak(300, 128, user=("main", "ask"), kernel=path, **{**FILP, "cache": "eventpoll_epi"})
        return capture

    report = report_of(ports(), tmp_path / "ports")
    assert (report.verdict.verdict, report.verdict.kind) == ("not_leak", "pending_free")
    # with what the same code really keeps, it is a leak
    capture = ports()
    capture.leak(300, 960, user=("main", "ask"), kernel=("k:__x64_sys_socket", "k:sk_prot_alloc"), **FILP)
    assert report_of(capture, tmp_path / "sockets").verdict.verdict == "leak"


def test_a_cache_whose_stacks_are_sampled_less_while_it_is_busy_is_no_leak(tmp_path: Path) -> None:
    # given 400 objects that are replaced one by one: first without stacks of their own, then with them
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_openat", "k:alloc_empty_file")
    for i in range(400):
        old = capture.alloc(0.001 * i, 100, kernel=kernel, weight=0, **FILP)
        capture.free(old, 2.5 + 0.018 * i)
        capture.alloc(2.501 + 0.018 * i, 100, user=("main", "insert"), kernel=kernel, **FILP)
    # when it is judged, then what is kept is flat: 400 objects at any time
    report = report_of(capture, tmp_path)
    assert frames(report) == []
    assert report.verdict.verdict == "not_leak"


def test_the_last_tooth_of_a_saw_is_no_leak(tmp_path: Path) -> None:
    # given objects that are freed ninety at a time
    capture = SyntheticCapture(10)
    capture.process()
    kernel = ("k:__x64_sys_openat", "k:alloc_empty_file")
    held: list[int] = []
    for i in range(1000):
        held.append(capture.alloc(0.01 * i, 100, user=("main", "defer"), kernel=kernel, **FILP))
        if len(held) == 100:
            for row in held[:90]:
                capture.free(row, 0.01 * i + 0.001)
            held = held[90:]
    report = report_of(capture, tmp_path)
    assert frames(report) == []


def test_falls_are_measured_from_the_highest_value_so_far() -> None:
    curves = np.array([[9.0, 1, 5, 2, 8, 7], [1.0, 2, 3, 4, 5, 6]])
    assert growth.largest_fall(curves, np.array([0, 0])).tolist() == [8.0, 0.0]
    assert growth.largest_fall(curves, np.array([2, 2])).tolist() == [3.0, 0.0]


def test_nothing_to_judge_is_inconclusive(tmp_path: Path) -> None:
    report = report_of(SyntheticCapture(10), tmp_path)
    assert (report.verdict.verdict, report.verdict.kind) == ("inconclusive", "missing_data")
    assert report.verdict.missing == ("allocation events",)


def test_warm_up_as_asked_leaves_later_growth_out(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 4096, end_s=8, user=("main", "fill"), **MAP)
    capture.churn(900, 4096, user=("main", "work"), **MAP)
    report = report_of(capture, tmp_path, Options(warm_up_s=8.1))
    assert report.verdict.verdict == "not_leak"


def test_unseen_frees_are_bounded_by_what_a_site_could_have_lost() -> None:
    # given 100 skipped frees among 10,000 of the kernel, and one cache whose addresses come back without a free
    sites = pd.DataFrame(
        {
            "layer": ["kernel", "kernel", "host"],
            "slab_cache": ["filp", "sock_inode_cache", ""],
            "visible": [True, True, True],
            "alloc_objects": [50, 10_000, 7],
            "call_objects": [0, 5_000, 0],
            "reuse_objects": [0, 500, 0],
        }
    )
    losses = [Loss("on_kfree", "recursion_miss", 100), Loss("frees", "address_only_free", 4_400)]
    # when each site is bounded
    bound = hidden_frees_of_sites(sites, losses, {"kernel": 100, "host": 0, "gpu": 0})
    # then a site without a miss of its own cache lost its share of them, ten times over; the other at most all of them
    assert bound[0] == pytest.approx(50 * 10 * 100 / (100 + 5_500 + 4_400))
    assert bound[1:].tolist() == [100.0, 0.0]


def test_a_probe_that_could_not_be_attached_hides_all_frees_of_its_layer() -> None:
    sites = pd.DataFrame(
        {"layer": ["kernel"], "slab_cache": [""], "visible": [True], "alloc_objects": [5], "call_objects": [0],
         "reuse_objects": [0]}
    )  # fmt: skip
    assert hidden_frees_of_sites(sites, [], {"kernel": ALL_FREES})[0] == ALL_FREES
