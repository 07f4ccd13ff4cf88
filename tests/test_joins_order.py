"""Launch order against a planted run whose pairs are known: exact, or refused as a whole."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import planted as p
import pytest
from planted import outcome

from leakscope.correlate.joins import order
from nsight_parsers.launch_order import LaunchOrder
from nsight_parsers.launch_order import launch_order as rule_of
from nsight_parsers.ncu_command import parse_command_line


def profiled(run: p.Planted, life: p.Life, options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The order of an ncu command line and what ncu would have profiled by it, from the run alone."""
    launches = run.of_life(life, "launches")
    for option, keep in {
        "-s 5": lambda rows: rows[5:],
        "-c 40": lambda rows: rows[:40],
        "-k softmax": lambda rows: [r for r in rows if r["kernel"] == "softmax"],
        "-k regex:gem+": lambda rows: [r for r in rows if "gemm" in r["kernel"]],
    }.items():
        if option in options:
            launches = keep(launches)
    return asdict(rule_of(parse_command_line(f"ncu {options} ./app"))), launches


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("options", ["-o x", "-s 5", "-c 40", "-s 5 -c 40", "-k softmax", "-k regex:gem+"])
def test_order_is_exact(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, number: int, options: str
) -> None:
    # given a report of one of the lives, in the zone +08:00, with launches left out by its options
    life = p.LIVES[number]
    how, launches = profiled(run, life, options)
    report = p.write_ncu(tmp_path / "k.lscope", run, life, how, launches, zone_s=8 * 3600)
    # when it is joined
    joined = opened(recording, report).joined()
    # then each action has its launch, and that launch's time: precision and recall 1
    pairs = joined.profiles["report.ncu-rep"]
    assert pairs["launch_id"].tolist() == [row["id"] for row in launches]
    assert pairs["ts_ns"].tolist() == [row["ts_ns"] for row in launches]
    found = outcome(joined, "order")
    assert (found.matched, found.refused) == (len(launches), 0)
    assert found.confidence == (0.95 if "-k" in options else 1.0)  # of one kernel only shapes tell


def drop(rows: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    return rows[:at] + rows[at + 1 :]


def swap(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    at = next(i for i in range(len(rows) - 1) if rows[i]["kernel"] != rows[i + 1]["kernel"])
    return [*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]]


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ("-o x", lambda rows: drop(rows, 7), "launches were recorded where the report has"),
        ("-o x", swap, "pairs differ in kernels"),
        ("-o x", lambda rows: [{**r, "tid": 4711} for r in rows], "pairs differ in threads"),
        ("-o x", lambda rows: [{**r, "grid": [99, 1, 1]} for r in rows], "pairs differ in grids or blocks"),
        ("-o x", lambda rows: [{**r, "ts_ns": r["ts_ns"] - 10 * i * p.SECOND} for i, r in enumerate(rows)], "outside"),
        ("--kernel-id ::gemm:3", lambda rows: rows, "--kernel-id"),
        ("--nvtx --nvtx-include step/", lambda rows: rows, "no range was recorded"),
        ("--nvtx --nvtx-include [step/", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-include step/*/mlp/", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-include step", lambda rows: rows, "more than the name"),
        ("--nvtx --nvtx-exclude regex:st.p/", lambda rows: rows, "more than the name"),
        ("--replay-mode application", lambda rows: rows, "ran several times"),
        ("-k regex:(gemm", lambda rows: rows, "no expression that can be evaluated"),
    ],
)  # fmt: skip
def test_order_is_refused_whole(
    run: p.Planted, recording: Path, opened: Any, tmp_path: Path, options: str, change: Any, reason: str
) -> None:
    how = asdict(rule_of(parse_command_line(f"ncu {options} ./app")))
    launches = change(run.of_life(p.LIVES[0], "launches"))
    report = p.write_ncu(tmp_path / "k.lscope", run, p.LIVES[0], how, launches)
    found = outcome(opened(recording, report).joined(), "order")
    assert (found.matched, found.refused) == (0, len(launches))
    assert reason in found.reasons[0]


@pytest.mark.parametrize(
    ("option", "domain", "usable"),
    [("mlp/", "", True), ("nn@mlp/", "nn", True), ("mlp/", "nn", False), ("other@mlp/", "nn", False)],
)
def test_ranges_make_the_order_usable_where_they_were_recorded(
    tmp_path: Path, opened: Any, option: str, domain: str, usable: bool
) -> None:
    marked = p.planted()
    for row in marked.marks:
        row["domain"] = domain
    marks = pd.DataFrame(marked.marks)
    for row in marked.launches:
        around = marks[
            (marks["tid"] == row["tid"]) & (marks["start_ns"] <= row["ts_ns"]) & (row["ts_ns"] < marks["end_ns"])
        ]
        row["mark_id"] = int(around["id"].iloc[-1])
    recording = p.write_recording(tmp_path / "run.lscope", marked, marks=True)
    inside = [
        r for r in marked.of_life(p.LIVES[0], "launches") if marks.set_index("id").at[r["mark_id"], "name"] == "mlp"
    ]
    how = asdict(rule_of(parse_command_line(f"ncu --nvtx --nvtx-include {option} ./app")))
    report = p.write_ncu(tmp_path / "k.lscope", marked, p.LIVES[0], how, inside)
    pairs = opened(recording, report).joined().profiles["report.ncu-rep"]
    assert pairs["launch_id"].tolist() == [row["id"] for row in inside if usable] and len(inside) > 100


def test_two_lives_that_fit_equally_are_refused(tmp_path: Path, opened: Any) -> None:
    run = p.planted()
    run.launches = [r for r in run.launches if r["pid"] == p.OUTER_PID]
    for number, life in enumerate(p.LIVES[:2]):
        for i in range(3):
            run.launches.append(
                {"pid": p.PID, "tid": p.PID, "id": 9000 + 10 * number + i, "ts_ns": life.start_ns + i, "kernel": "k",
                 "grid": [1, 1, 1], "block": [1, 1, 1]}
            )  # fmt: skip
    run.launches.sort(key=lambda r: r["ts_ns"])
    recording = p.write_recording(tmp_path / "run.lscope", run)
    profiles = pd.DataFrame(
        {"id": [1, 2, 3], "pid": p.PID, "tid": p.PID, "kernel": "k", "mangled": "", "grid": [(1, 1, 1)] * 3,
         "block": [(1, 1, 1)] * 3, "api_call_id": [1, 2, 3], "created_s": 0}
    )  # fmt: skip
    from leakscope.correlate.joins import profiles as joining

    evidence = opened(recording).evidence[0]
    pairs, why = joining._by_order(
        LaunchOrder("usable", ""), joining.outer_launches(evidence), profiles, evidence, p.PID
    )
    assert not len(pairs) and why == "2 lives of this PID fit equally well"


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("gemm", "gemm"),
        ("void ns::gemm<float, (int)4>(float*, int)", "gemm"),
        ("_Z4gemmPf", "gemm"),
        ("_ZN2ns4gemmIfEvPf", "gemm"),
        ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE", "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::elementwise<int>(int)", "elementwise"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_bare_name_of_a_kernel(name: str, bare: str) -> None:
    assert order.bare_name(name) == bare
