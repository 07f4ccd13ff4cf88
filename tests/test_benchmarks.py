"""The benchmarks run at their smallest size and yield every figure. What the figures are is `make bench`'s business."""

from __future__ import annotations

import os
import shutil

import pytest
from quick_benchmarks import run

from benchmarks.render import markdown, replace_section
from benchmarks.results import Bar, Result, Spread, Table

needs_bpf = pytest.mark.skipif(
    (os.geteuid() != 0 or shutil.which("gcc") is None) and not os.environ.get("LEAKSCOPE_REQUIRE_BPF"),
    reason="needs root and gcc (LEAKSCOPE_REQUIRE_BPF=1 runs it anyway)",
)


def test_startup_and_attribute_yield_their_figures():
    # given the two benchmarks that need no privilege, when they run at the smallest size
    results = run("startup", "attribute")
    # then each has its figures, and those that have a bar at this size say it
    assert list(results) == ["startup", "attribute"]
    assert set(results["startup"]["figures"]["seconds"]) == {"leakscope --help", "python -c pass"}
    assert results["startup"]["bars"][0]["what"] == "leakscope --help"
    # and where this host can record, how long that takes to begin, by loader
    for figures in results["startup"]["figures"]["recordings"].values():
        assert set(figures) == {
            *("start_s", "load_ms", "attach_ms", "load_and_attach_ms", "stop_s", "alone_ms", "alone_cpu_ms")
        }
        assert all(len(values) == 1 and values[0] > 0 for values in figures.values())
    (size,) = results["attribute"]["figures"]["sizes"]
    assert size["million_events"] == 0.1
    assert set(size) == {"million_events", "seconds", "peak_mib", "verdict", "culprit"}
    assert results["startup"]["machine"]["kernel"] == os.uname().release


@needs_bpf
@pytest.mark.bpf
@pytest.mark.usefixtures("can_record")
def test_recording_benchmarks_yield_their_figures():
    # given real probes, when the benchmarks of recording run at the smallest size
    results = run("overhead", "probes", "reader", "end_to_end", "live_view")
    # then every tool has a ratio for every storm, and leakscope a count of drops
    overhead = results["overhead"]["figures"]
    ours = {"leakscope --stacks none", "leakscope (default)"}
    assert ours <= set(overhead["ratios"]) <= ours | {"memleak-bpfcc"}
    assert all(set(ratios) == {"open", "socketpair", "spawn"} for ratios in overhead["ratios"].values())
    assert overhead["ring_drops"] == dict.fromkeys(ours, 0)
    limits = {bar["what"]: bar["limit"] for bar in results["overhead"]["bars"]}
    assert limits["open without stacks"] == limits["socketpair without stacks"] == 1.7
    assert limits["open default"] == limits["socketpair default"] == 1.9
    assert (limits["spawn without stacks"], limits["spawn default"]) == (1.4, 1.6)
    # and the hot programs have a cost under each stack policy
    costs = results["probes"]["figures"]["ns_per_hit"]
    for program in ("on_kmalloc", "on_kmem_cache_alloc", "on_kfree", "on_kmem_cache_free", "on_mm_page_alloc"):
        assert set(costs[program]["spawn"]) == {"none", "sampled", "all"}
    # and no event of the ring is missing to any reader
    assert "leakscope (numpy, bulk)" in results["reader"]["figures"]["m_events_per_cpu_s"]
    # and a recording of two storms at once saw at least the files that they opened, unless it dropped some
    end_to_end = results["end_to_end"]["figures"]
    assert len(end_to_end["sink_m_events_per_cpu_s"]) == 1
    (two_opens,) = end_to_end["recorded"]["open + open"]
    assert two_opens["ring_drops"] == 0
    assert two_opens["events"] >= 2 * 2_200 * 2  # 2,200 opens a storm, an allocation and a free of a file each
    # and a recorder with a view on a terminal has a price beside one without
    for figures in results["live_view"]["figures"].values():
        assert {how: len(values) for how, values in figures.items()} == {"none": 1, "live": 1}


def test_a_bar_is_met_at_its_limit_and_missed_beyond_it():
    # given bars in both directions, then the limit itself is still met
    assert Bar("cost", 1.7, 1.7).met
    assert not Bar("cost", 1.71, 1.7).met
    assert Bar("rate", 5.0, 5.0, at_least=True).met
    assert not Bar("rate", 4.99, 5.0, at_least=True).met


def test_spread_tells_median_lowest_and_highest():
    # given an even number of rounds, when told, then the median lies between the middle ones
    assert Spread.of([3.0, 1.0, 2.0, 10.0]).text(1) == "2.5 (1.0-10.0)"


def test_a_section_of_the_page_is_replaced_and_nothing_else(tmp_path):
    # given a page with prose and one generated section
    page = tmp_path / "performance.md"
    page.write_text("# Cost\n\n<!-- benchmark a: begin -->\nold\n<!-- benchmark a: end -->\n\nMore prose.\n")
    result = Result("a", "A", [Table("T", ["x", "y"], [["r|s", "1"]])], [Bar("b", 2.0, 1.0, unit="s")], notes=["N."])
    # when the section is written again, and one that is new
    replace_section(page, "a", markdown(result, {"kernel": "6.1", "bpftrace": ""}))
    replace_section(page, "b", "new\n")
    # then the prose stays, the new section is at the end, and a pipe in a cell breaks no table
    assert page.read_text() == (
        "# Cost\n\n<!-- benchmark a: begin -->\n"
        "### A\n\nMachine: kernel 6.1.\n\nT:\n\n| x | y |\n| --- | ---: |\n| r\\|s | 1 |\n\n"
        "| bar | measured | limit |  |\n| --- | ---: | ---: | ---: |\n| b | 2 | ≤ 1 s | missed |\n\nN.\n"
        "<!-- benchmark a: end -->\n\nMore prose.\n\n<!-- benchmark b: begin -->\nnew\n<!-- benchmark b: end -->\n"
    )
    assert list(tmp_path.iterdir()) == [page]
