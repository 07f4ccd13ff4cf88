"""Head against baseline: pure comparisons of sites whose truth is known to the object."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leakscope.detect.pair import Comparison, compare
from leakscope.detect.profile import Profile, key_of, profile_of, sides_of, stable_frame
from leakscope.errors import BadInputError
from leakscope.model.results import Culprit, Growth, Report, Site, Verdict
from leakscope.model.runs import Run

SECOND = 1_000_000_000
FLAT = Verdict("not_leak", "cache_warmup")


def site(stack: str, kept: int, allocated: int, size: int = 100, layer: str = "host", **how: object) -> Site:
    """A site that allocates all through a run of 10 s; ``stack`` with ``;`` between frames, outermost first."""
    frames = stack.split(";")
    rate = kept * size / 10
    values = {
        "id": stack, "layer": layer, "kind": "heap" if layer == "host" else "slab", "api": "malloc", "slab_cache": "",
        "stack": frames, "culprit_frame": frames[-1], "live_bytes": kept * size, "live_objects": kept,
        "allocated_bytes": allocated * size, "allocated_objects": allocated, "kept_share": kept / max(allocated, 1),
        "first_ns": SECOND, "last_ns": 11 * SECOND, "free_seen_share": None, "frees_visible": True,
        "outlives_process_bytes": 0, "ended_with_process_bytes": 0, "processes": 1, "stack_sampled": False,
        "standard_error_bytes": 0.0, "growth": Growth("live", rate, rate / 2, rate * 2) if kept else None,
    }  # fmt: skip
    return Site(**(values | how))  # type: ignore[arg-type]


def profile(*sites: Site, **run: object) -> Profile:
    return profile_of(Report(FLAT, sites=list(sites), runs=[Run(SECOND, SECOND, 11 * SECOND, **run)]))  # type: ignore[arg-type]


def judged(base: Profile, head: Profile, unit: str | None = None) -> Comparison:
    return compare(base, head, [FLAT], [head.run], unit)


CHURN = site("main;work", 0, 1000)


def test_a_site_is_the_same_without_addresses_lines_folders_wrappers_and_recursion() -> None:
    here = ["main (/src/a.c:10)", "walk (/src/a.c:20)", "walk (/src/a.c:21)", "keep (/src/b.c:5)", "malloc"]
    there = ["main (/build/7/a.c:12)", "walk (/build/7/a.c:24)", "keep (/build/7/b.c:9)", "libc.so.6+0x8f2a1"]

    assert key_of("host", "heap", here) == key_of("host", "heap", there)
    assert key_of("host", "heap", here) == ("host", "heap", "main (a.c)", "walk (a.c)", "keep (b.c)")
    assert stable_frame("alloc_inode.isra.0") == "alloc_inode"
    assert stable_frame("app::keep::h0123456789abcdef") == "app::keep"
    assert stable_frame("libfoo.so.2+0x1f30") == "libfoo.so.2"
    # a stack of nothing but plumbing is still a stack
    assert key_of("host", "brk", ["_start", "malloc"]) == ("host", "brk", "_start", "malloc")
    assert key_of("kernel", "slab", ["entry_SYSCALL_64", "__x64_sys_open", "do_open", "kmem_cache_alloc_noprof"]) == (
        "kernel", "slab", "do_open",
    )  # fmt: skip


def test_a_new_stack_that_keeps_is_a_regression_with_its_exact_bytes() -> None:
    found = judged(profile(CHURN), profile(CHURN, site("main;copy (q.c:9)", 55, 55, 208)))

    verdict = found.verdict
    assert (verdict.verdict, verdict.kind, verdict.layer) == ("leak", "regression", "host")
    assert verdict.culprit is not None and verdict.culprit.frame == "copy (q.c:9)"
    assert (verdict.kept_objects, verdict.kept_bytes, found.others) == (55, 55 * 208, ())
    assert verdict.growth is not None and verdict.growth.bytes_per_s == pytest.approx(55 * 208 / 10)
    assert verdict.leak_start_s == 0
    assert verdict.reasons[0] == "the stack is new in head"
    assert [(c.what, c.kept_objects) for c in found.changes if c.what != "same"] == [("new", 55)]


def test_a_busy_site_that_begins_to_keep_midway_starts_where_its_own_verdict_says() -> None:
    busy = site("main;serve", 100, 5000)
    own = Verdict("leak", "retained_growth", "host", leak_start_s=6.0, sites=(busy.id,))
    head = profile(CHURN, busy)
    verdict = compare(profile(CHURN, site("main;serve", 0, 5000)), head, [own], [head.run]).verdict
    assert verdict.leak_start_s == 6.0
    assert verdict.growth is not None and verdict.growth.bytes_per_s == pytest.approx(100 * 100 / 4)


def test_what_both_leak_for_their_work_is_none() -> None:
    base = profile(CHURN, site("main;label", 100, 100))
    for factor in (1, 3):  # head may have run for longer
        head = profile(site("main;work", 0, 1000 * factor), site("main;label", 100 * factor, 100 * factor))
        found = judged(base, head)
        assert found.verdict.verdict == "not_leak"
        assert (found.work.unit, found.work.ratio) == ("allocations", factor)


@pytest.mark.parametrize(("kept", "verdict"), [(139, "not_leak"), (200, "leak")])
def test_more_must_be_beyond_chance(kept: int, verdict: str) -> None:
    """100 kept objects of the same work vary by √200; of two sites 3.9 standard deviations are asked for."""
    found = judged(profile(CHURN, site("main;label", 100, 100)), profile(CHURN, site("main;label", kept, 100)))
    assert found.verdict.verdict == verdict
    if verdict == "leak":
        assert (found.verdict.kept_objects, found.changes[0].what) == (100, "grown")


def test_start_up_plateaus_saw_teeth_and_caches_of_the_kernel_are_none() -> None:
    late = {"first_ns": SECOND, "last_ns": 3 * SECOND}
    for tempting in (
        site("main;load", 500, 500, **late),
        site("main;cache", 500, 900, levelled_off=True),
        site("main;collect", 500, 90_000, growth=Growth("live", 10.0, -5.0, 20.0)),
        site("main;open", 500, 900, layer="kernel", slab_cache="dentry"),
        site("main;unseen", 500, 500, frees_visible=False),
        replace(site("main;pages", 500, 500, layer="kernel"), kind="page_slab"),
    ):
        assert judged(profile(CHURN), profile(CHURN, tempting)).verdict.verdict == "not_leak", tempting.id


def test_a_leak_that_no_single_stack_shows_is_found_at_the_fork() -> None:
    scattered = [site(f"main;serve;route;handler_{number}", 4, 4) for number in range(40)]
    elsewhere = [site(f"main;idle;part_{number}", 1, 4) for number in range(5)]
    found = judged(profile(CHURN, *elsewhere), profile(CHURN, *elsewhere, *scattered))
    assert (found.verdict.verdict, found.verdict.kept_objects) == ("leak", 160)
    assert found.verdict.culprit is not None and found.verdict.culprit.frame == "route"


def test_improved_and_vanished_sites_are_told() -> None:
    base = profile(CHURN, site("main;fixed", 300, 300), site("main;gone", 300, 300), site("main;less", 300, 300))
    found = judged(base, profile(CHURN, site("main;fixed", 0, 300), site("main;less", 100, 300)))
    changes = {change.key[-1]: change.what for change in found.changes}
    assert found.verdict.verdict == "not_leak"
    assert changes == {"work": "same", "fixed": "vanished", "gone": "vanished", "less": "improved"}


def test_work_is_counted_by_totals_then_ranges_then_allocations() -> None:
    base = profile(
        CHURN, totals={"requests_total": 1000.0, "tokens_total": 5e6, "bytes_total": 10.0}, marks={"step": 50}
    )
    head = profile(
        CHURN, totals={"requests_total": 3000.0, "tokens_total": 1.5e7, "bytes_total": 9.0}, marks={"step": 40}
    )
    assert judged(base, head).work.unit == "requests_total"
    assert judged(base, head).work.ratio == 3
    assert judged(base, head, "step").work.ratio == 0.8
    assert judged(base, head, "seconds").work.ratio == 1
    assert judged(profile(CHURN, marks={"step": 50}), profile(CHURN, marks={"step": 100})).work.unit == "step"
    with pytest.raises(BadInputError, match="--per jobs_total: the baseline has no such count"):
        judged(base, head, "jobs_total")
    # a regression is then told for each unit
    leaking = profile(CHURN, site("main;keep", 3000, 3000, 64), totals={"requests_total": 3000.0})
    growth = judged(base, leaking).verdict.growth
    assert growth is not None and growth.per_unit == ("requests_total", 64.0)


def test_runs_without_common_work_cannot_be_compared() -> None:
    found = judged(profile(site("main;one", 0, 1000)), profile(site("main;other", 0, 1000)))
    assert (found.verdict.verdict, found.verdict.kind) == ("inconclusive", "partial_data")
    found = judged(profile(), profile(CHURN))
    assert (found.verdict.verdict, found.verdict.kind) == ("inconclusive", "missing_data")


def test_more_churn_is_no_leak() -> None:
    found = judged(profile(CHURN, site("main;sort", 0, 1000)), profile(CHURN, site("main;sort", 0, 1900)), "seconds")
    assert (found.verdict.verdict, found.verdict.kind) == ("not_leak", "more_churn")
    assert found.verdict.culprit is not None and found.verdict.culprit.frame == "sort"


def counter(rate: float, width: float, per_unit: float | None = None) -> Verdict:
    unit = ("requests_total", per_unit) if per_unit else None
    growth = Growth("rss_bytes", rate, rate - width, rate + width, unit)
    return Verdict("leak", "retained_growth", "host", culprit=Culprit(counter="rss_bytes"), growth=growth)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (counter(100, 5), counter(104, 5), "not_leak"),  # apart by less than their intervals
        (counter(100, 1), counter(115, 1), "not_leak"),  # apart, but by less than a fifth
        (counter(100, 5), counter(200, 5), "leak"),
        (counter(100, 5, per_unit=10), counter(200, 5, per_unit=10), "not_leak"),  # twice the requests a second
        (counter(100, 5, per_unit=10), counter(100, 5, per_unit=20), "leak"),
    ],
)
def test_leaks_of_counters_are_compared_by_rate(before: Verdict, after: Verdict, verdict: str) -> None:
    base = profile_of(Report(before, runs=[Run()]))
    head = profile_of(Report(after, runs=[Run()]))
    found = compare(base, head, [after], [Run()])
    assert found.verdict.verdict == verdict
    assert len(found.known) == (verdict == "not_leak")
    assert compare(profile_of(Report(FLAT)), head, [after], [Run()]).verdict.verdict == "leak"


def test_no_false_alarm_and_no_miss_over_400_random_pairs() -> None:
    """Clean pairs: each site keeps a Poisson number of objects in flight, for 0.5 to 2 times the work. Leaking ones
    keep 5 % of the 1,000 objects of one site more."""
    rng = np.random.default_rng(20261130)
    alarms = found = 0
    for _ in range(400):
        means = rng.uniform(0.5, 40, 30)
        work = rng.uniform(0.5, 2)
        base = profile(*(site(f"main;s{i}", int(rng.poisson(m)), 1000) for i, m in enumerate(means)))
        kept = [int(rng.poisson(m * work)) for m in means]
        sides = [site(f"main;s{i}", k, int(1000 * work)) for i, k in enumerate(kept)]
        alarms += judged(base, profile(*sides)).verdict.verdict == "leak"
        leaking = int(rng.integers(30))
        more = kept[leaking] + int(100 * work)
        sides[leaking] = site(f"main;s{leaking}", more, int(1000 * work))
        verdict = judged(base, profile(*sides)).verdict
        found += verdict.verdict == "leak" and verdict.culprit is not None and verdict.culprit.frame == f"s{leaking}"
    assert (alarms, found) == (0, 400)


def test_sides_add_up_over_captures() -> None:
    one, other = site("main;keep", 3, 5), site("main;keep", 4, 6)
    (side,) = sides_of([one, replace(other, id="1:main;keep", source=1)]).values()
    assert (side.kept_objects, side.allocated_objects, side.ids) == (7, 11, ("main;keep", "1:main;keep"))
    assert side.growth is not None and side.growth.bytes_per_s == 70
