"""Growth by iteration: curves whose answer is known, and synthetic captures of a body that was run again and again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture

from leakscope.capture import Capture
from leakscope.detect.attribution import Options, attribute
from leakscope.detect.growth import steadily_rises
from leakscope.detect.iterations import Iterations
from leakscope.model.results import Report

COUNT, WARM_UP = 20, 5
LEAKING = {"user": ["main", "body"], "layer": "host", "kind": "heap", "api": "malloc"}
OBJECT = {"layer": "kernel", "kind": "slab", "cache": "thing", "kernel": ["__x64_sys_do", "make_thing"]}


def curve(*increments: float) -> np.ndarray:
    """Readings that begin at 100 and grow by these."""
    return np.cumsum([100.0, *increments])


@pytest.mark.parametrize(
    ("what", "increments", "rises"),
    [
        ("one an iteration", [1] * 20, True),
        ("the fewest iterations, each with one", [1] * 4, True),
        ("one every fifth iteration", [1, 0, 0, 0, 0] * 4, True),
        ("a leak beside a buffer that fills and empties", [9, 9, -17] * 7, True),
        ("nothing", [0] * 20, False),
        ("all at once", [500] + [0] * 19, False),
        ("all at once, late", [0] * 15 + [500] + [0] * 4, False),
        ("a cache that fills in the first half", [3] * 10 + [0] * 10, False),
        ("the fewest iterations, one without", [1, 1, 0, 1], False),
        ("up and down", [5, -5] * 10, False),
        ("only the last value is kept", [0] * 19 + [7], False),
        ("falls", [-1] * 20, False),
        ("one large step over a trickle", [0.01] * 10 + [500] + [0.01] * 9, False),
    ],
)
def test_what_rises_in_every_part_of_the_run_rises(what: str, increments: list[float], rises: bool) -> None:
    assert steadily_rises(curve(*increments)[None, :]).tolist() == [rises], what


def windows(count: int = COUNT) -> tuple[tuple[int, int], ...]:
    """The judged iterations: 100 ms each of 400 ms, so that there is time between them; 5 of warm-up before."""
    made = SyntheticCapture()
    return tuple((made.ns(0.4 * i), made.ns(0.4 * i + 0.1)) for i in range(WARM_UP, WARM_UP + count))


def made(seconds: float = 11.0) -> SyntheticCapture:
    capture = SyntheticCapture(seconds)
    capture.process()
    return capture


def judged(capture: SyntheticCapture, path: Path, descriptors_rise: bool = False) -> Report:
    opened = Capture.open(capture.write(path / "run.lscope"))
    with opened.connect() as con:
        return attribute(con, opened.manifest, Options(iterations=Iterations(windows(), descriptors_rise)))


def test_what_each_iteration_leaves_behind_is_told_to_the_byte(tmp_path: Path) -> None:
    # given a body that keeps two objects of 37 and 100 bytes each time, beside what it gives back, and more outside
    capture = made()
    for i in range(WARM_UP + COUNT):
        capture.alloc(0.4 * i + 0.01, 37, **LEAKING)
        capture.alloc(0.4 * i + 0.02, 100, **LEAKING)
        capture.free(capture.alloc(0.4 * i + 0.03, 5000, **LEAKING), 0.4 * i + 0.05)
        capture.alloc(0.4 * i + 0.2, 4096, user=["main", "runner"], layer="host", kind="heap", api="malloc")
    # when it is judged by iteration
    report = judged(capture, tmp_path)
    # then that is found, and nothing of what the runner keeps between the iterations
    assert (report.verdict.verdict, report.verdict.layer) == ("leak", "host")
    assert report.verdict.culprit and report.verdict.culprit.frame == "body"
    assert report.verdict.growth and report.verdict.growth.per_unit == ("iteration", 137.0)
    assert (report.verdict.kept_bytes, report.verdict.kept_objects) == (137 * COUNT, 2 * COUNT)
    assert report.findings == []
    (host,) = report.layers
    assert host.growth and host.growth.per_unit == ("iteration", 137.0)


def test_a_cache_that_fills_once_and_a_value_that_is_replaced_are_no_leak(tmp_path: Path) -> None:
    # given a cache that is filled in the third judged iteration, and a value that each iteration replaces
    capture = made()
    last = None
    for i in range(WARM_UP + COUNT):
        if last:
            capture.free(last, 0.4 * i + 0.01)
        last = capture.alloc(0.4 * i + 0.02, 1000, **LEAKING)
        for k in range(50 if i == WARM_UP + 2 else 0):
            capture.alloc(0.4 * i + 0.03 + k / 1e4, 200, **LEAKING)
    report = judged(capture, tmp_path)
    assert report.verdict.verdict == "not_leak"
    # then what they left behind is told all the same: 50 of 200 bytes and the last value
    (host,) = report.layers
    assert host.growth and host.growth.per_unit == ("iteration", pytest.approx((50 * 200 + 1000) / COUNT))


def test_one_leak_below_native_stacks_that_differ_by_chance_is_found_by_its_python_stack(tmp_path: Path) -> None:
    # given that the walk through the interpreter ends elsewhere each time
    capture = made()
    for i in range(WARM_UP + COUNT):
        stack = {
            "user": ["python3.11!main", f"python3.11!lost{i}"],
            "python": ["py:test@test_x.py:3", "py:keep@app.py:9"],
        }
        capture.alloc(0.4 * i + 0.01, 64, **(LEAKING | stack))
    report = judged(capture, tmp_path)
    assert report.verdict.culprit and report.verdict.culprit.frame == "keep (app.py:9)"
    assert report.verdict.growth and report.verdict.growth.per_unit == ("iteration", 64.0)


def test_kernel_objects_whose_frees_cannot_be_seen_need_a_witness(tmp_path: Path) -> None:
    # given an object of the kernel in each iteration, of which no free is ever seen (kfree_rcu)
    def capture() -> SyntheticCapture:
        run = made()
        for i in range(WARM_UP + COUNT):
            run.alloc(0.4 * i + 0.01, 256, user=["main", "body"], **OBJECT)
        return run

    # then that alone is no leak; with descriptors that rise as well it is
    assert judged(capture(), tmp_path / "alone").verdict.verdict == "not_leak"
    assert judged(capture(), tmp_path / "descriptors", descriptors_rise=True).verdict.verdict == "leak"
    # and so it is when another object of the same kernel function was seen to be freed
    run = capture()
    run.free(run.alloc(0.31, 256, user=["main", "other"], **OBJECT), 0.32)
    report = judged(run, tmp_path / "freed")
    assert (report.verdict.verdict, report.verdict.kept_objects) == ("leak", COUNT)


def test_what_a_child_of_one_iteration_held_ends_with_it(tmp_path: Path) -> None:
    # given a child in each iteration that holds memory until it exits
    capture = made()
    for i in range(WARM_UP + COUNT):
        pid = 200 + i
        capture.process(pid, "child", 0.4 * i + 0.01, 0.4 * i + 0.08)
        held = capture.alloc(0.4 * i + 0.02, 4096, **(LEAKING | {"pid": pid}))
        capture.free(held, 0.4 * i + 0.09, cause="exit")
    assert judged(capture, tmp_path).verdict.verdict != "leak"


def test_frees_that_may_be_lost_withhold_what_is_not_kept_in_each_iteration(tmp_path: Path) -> None:
    # given objects kept in every second iteration, and as many frees lost as there are allocations
    capture = made()
    for i in range(WARM_UP + COUNT):
        for k in range(30):
            capture.free(capture.alloc(0.4 * i + 0.01 + k / 1e3, 64, **LEAKING), 0.4 * i + 0.05)
        if i % 2:
            capture.alloc(0.4 * i + 0.06, 64, **LEAKING)
    capture.loss("call_ring", "ring_drop", 10_000)
    report = judged(capture, tmp_path)
    # then it cannot be told, and the report says so
    assert (report.verdict.verdict, report.verdict.kind) == ("inconclusive", "partial_data")
