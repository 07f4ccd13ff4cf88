"""The weaker join rules (window, stack, range) against a planted run whose pairs are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import planted as p
import pytest
from planted import outcome

from leakscope.correlate.joins import stack
from leakscope.correlate.joins.driver import JoinOptions
from leakscope.correlate.joins.nesting import Intervals
from leakscope.correlate.joins.window import GPU_WINDOW_NS, KERNEL_WINDOW_NS, beyond_chance, covered_share, near_calls
from leakscope.correlate.stacks import Frame
from leakscope.model.manifest import Source

DOCS = Path(__file__).resolve().parent.parent / "docs" / "joins.md"


# ---- rule 3 ----

LOADS = (10, 100, 1_000, 5_000, 20_000)


def figures(load: int, window_ns: int) -> tuple[float, float, float, float]:
    """(wrong among pairs with the nearest call, precision and recall of unambiguous pairs, ambiguous events)."""
    made = p.under_load(load, seconds=max(2.0, 2_000 / load))
    one = np.zeros(len(made["enter_ns"]), np.int64)
    near = near_calls(
        Intervals(one, made["enter_ns"], made["exit_ns"]),
        np.zeros(len(made["at_ns"]), np.int64),
        made["at_ns"],
        window_ns,
    )
    paired = near.row >= 0
    sure = near.candidates == 1
    right = near.row == made["cause"]
    caused = made["cause"] >= 0
    return (
        float((~right[paired]).mean()),
        float(right[sure].mean()),
        float((right & sure & caused).sum() / caused.sum()),
        float((near.candidates > 1).mean()),
    )


def window_table() -> str:
    lines = [
        "| calls/s of a process | window | nearest call is wrong | precision, unambiguous | recall | ambiguous |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        for window_ns in (KERNEL_WINDOW_NS, GPU_WINDOW_NS):
            cells = " | ".join(f"{100 * value:.1f} %" for value in figures(load, window_ns))
            lines.append(f"| {load:,} | ±{window_ns // 1000} µs | {cells} |")
    return "\n".join(lines)


def test_the_page_has_the_windows_figures() -> None:
    assert window_table() in DOCS.read_text()


def test_the_nearest_call_counts_and_several_are_ambiguous() -> None:
    calls = Intervals(np.array([1, 1, 1, 2]), np.array([0, 1_000, 5_000, 990]), np.array([100, 1_100, 9_000, 995]))
    near = near_calls(calls, np.array([1, 1, 1, 1, 2, 3]), np.array([120, 540, 8_000, 9_051, 990, 990]), 50)
    assert near.row.tolist() == [0, -1, 2, -1, 3, -1]
    assert near.candidates.tolist() == [1, 0, 1, 0, 1, 0]
    assert near_calls(calls, np.array([1]), np.array([540]), 500).candidates.tolist() == [2]


def test_confidence_of_a_window_is_what_chance_does_not_explain() -> None:
    calls = Intervals(np.zeros(2, np.int64), np.array([100, 150]), np.array([110, 160]))
    assert covered_share(calls, 0, 0, 1_000, 10) == pytest.approx((30 + 30) / 1_000)
    assert covered_share(calls, 0, 0, 1_000, 40) == pytest.approx((200 - 60) / 1_000)
    assert covered_share(calls, 7, 0, 1_000, 40) == 0.0
    assert beyond_chance(0.5, 0.5) == 0.0 and beyond_chance(1.0, 0.3) == 1.0 and beyond_chance(1.0, 1.0) == 0.0


def test_no_window_for_what_nests(run: p.Planted, recording: Path, opened: Any, tmp_path: Path) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "monotonic", p.LIVES[:1])
    joined = opened(recording, report).joined()
    nested = outcome(joined, "nesting", right="calls of run").matched
    rest = [o for o in joined.outcomes if o.left.startswith("kernel allocations")]
    assert sum(o.matched + o.ambiguous + o.refused for o in rest) == len(run.kernel)
    assert nested + sum(o.matched for o in rest if o.rule == "window") <= len(run.kernel)


# ---- rule 4 ----


def test_the_hash_of_top_frames_ignores_addresses_between_runs_and_uses_them_within_one() -> None:
    def frames(base: int, innermost: str = "cudaLaunchKernel") -> list[Frame]:
        cuda = Frame(innermost, module="/usr/lib/libcudart.so.12", offset=base + 1)
        names = ("main", "serve", "step", "attention")
        return [*(Frame(n, module="/srv/app", offset=base + 16 * i) for i, n in enumerate(names, 1)), cuda]

    one, two = frames(0x1000), frames(0x9000, "cudaMalloc")
    assert stack.top_hash(one) == stack.top_hash(two) != 0
    assert stack.top_hash(one) == stack.top_hash(one[1:]) != stack.top_hash(one[:-2])
    assert stack.top_hash(one, absolute=True) != stack.top_hash(two, absolute=True)
    assert stack.top_hash([Frame("", module="app", offset=7)]) == 0 and stack.top_hash(one[-1:]) == 0
    groups = stack.hash_groups({1: 5, 2: 5, 3: 0}, {8: 5, 9: 6})
    assert groups.values.tolist() == [[5, [1, 2], [8]]]


def test_a_refused_order_falls_back_to_stacks(run: p.Planted, tmp_path: Path, opened: Any) -> None:
    from capture_rows import rows

    from leakscope.capture import CaptureWriter
    from leakscope.model.manifest import Manifest

    def write(
        path: Path, source: Source, base: int, table: str, columns: dict[str, Any], count: int, outer: str = "main"
    ) -> Path:
        writer = CaptureWriter.create(path, Manifest(sources=[source]))
        functions = [outer, "attention", "mlp", "cudaLaunchKernel"]
        writer.write(
            "frames",
            rows("frames", 4, id=[1, 2, 3, 4], function=functions, module=["app", "app", "app", "libcudart.so.12"],
                 offset=[base + i for i in range(4)], kind=["native"] * 4),
        )  # fmt: skip
        writer.write("stacks", rows("stacks", 2, id=[1, 2], frames=[[1, 2, 4], [1, 3, 4]]))
        writer.write(table, rows(table, count, **columns))
        writer.finish()
        return path

    launches = {"id": [1, 2, 3], "ts_ns": [5, 6, 7], "pid": [9] * 3, "tid": [9] * 3, "user_stack": [1, 2, 2],
                "kernel": ["", "a", "b"]}  # fmt: skip
    recorded = write(tmp_path / "r.lscope", Source(0, "recording", "r", "monotonic"), 100, "launches", launches, 3)
    profiles = {"id": [1, 2, 3], "pid": [9] * 3, "kernel": ["a", "b", "c"], "user_stack": [1, 2, 2]}
    report = write(tmp_path / "k.lscope", Source(0, "ncu_rep", "k", "none"), 7000, "kernel_profiles", profiles, 3)

    joined = opened(recorded, report).joined()

    pairs = joined.profiles["k"]
    assert pairs[["profile_id", "launch_id", "rule"]].values.tolist() == [[1, 1, "stack"], [2, 3, "stack"]]
    by_stack = outcome(joined, "stack")
    assert (by_stack.matched, by_stack.ambiguous, by_stack.refused) == (2, 0, 1)
    # and where the frame around them has another name, only if the innermost one is asked for alone
    wrapped = write(
        tmp_path / "w.lscope", Source(0, "ncu_rep", "w", "none"), 7000, "kernel_profiles", profiles, 3, "run"
    )
    evidence = opened(recorded, wrapped)
    assert outcome(evidence.joined(), "stack").matched == 0
    assert outcome(evidence.joined(JoinOptions(stack_frames=1)), "stack").matched == 2


# ---- rule 5 ----


def test_ranges_of_a_report_are_found_by_thread_and_time(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path
) -> None:
    report = p.write_nsys(tmp_path / "n.lscope", run, "utc", p.LIVES[:1])
    joined = opened(recording, report).joined()
    found = outcome(joined, "range")
    assert found.matched == 300
    links = [link for of_site in joined.links[0].by_site().values() for place, link in of_site if place == "range"]
    assert links == []  # the one site allocates in two ranges, in neither for half of what it allocates
