"""The backend of NVIDIA's ncu_report package, with a stand-in: the package itself is never installed by these tests."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import ncu_files as made
import pytest

from nsight_parsers import ReportError
from nsight_parsers.ncu_report_backend import parse_with_ncu_report


def fake_ncu_report(names: list[str]) -> types.ModuleType:
    """A stand-in with the interface that NVIDIA documents: one range, actions with one metric."""

    class Metric:
        def has_value(self) -> bool:
            return True

        def value(self) -> float:
            return 64.0

        def unit(self) -> str:
            return "byte"

    class Action:
        NameBase_DEMANGLED, NameBase_MANGLED = 1, 2

        def __init__(self, name: str) -> None:
            self._name = name

        def name(self, base: int = 0) -> str:
            return self._name

        def metric_names(self) -> list[str]:
            return [made.ACCESSIBLE]

        def metric_by_name(self, name: str) -> Metric:
            return Metric()

        def nvtx_state(self) -> None:
            return None

    class Range:
        def num_actions(self) -> int:
            return len(names)

        def action_by_idx(self, index: int) -> Action:
            return Action(names[index])

    class Context:
        def num_ranges(self) -> int:
            return 1

        def range_by_idx(self, index: int) -> Range:
            return Range()

    module = types.ModuleType("ncu_report")
    module.load_report = lambda path: Context()  # type: ignore[attr-defined]
    return module


def test_backend_says_when_nvidias_package_gives_fewer_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "made.ncu-rep"
    path.write_bytes(made.report(made.block(results=[made.result("a"), made.result("b", api=2)])))
    monkeypatch.setitem(sys.modules, "ncu_report", fake_ncu_report(["a"]))

    report = parse_with_ncu_report(path)

    (row,) = report.tables["kernel_profiles"].to_pylist()
    assert (row["kernel"], row["writable_bytes"]) == ("a", 64.0)
    assert report.findings == ["ncu_report gave 1 results where the file announces 2"]


def test_backend_without_the_package_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "made.ncu-rep"
    path.write_bytes(made.report(made.block()))
    monkeypatch.setitem(sys.modules, "ncu_report", None)

    with pytest.raises(ReportError, match=r"pip install 'leakscope\[ncu\]'"):
        parse_with_ncu_report(path)
