"""The verb ``leakscope attribute``: JSON, exit codes, several inputs, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leakscope.capture import Capture, pack
from leakscope.cli.main import main
from tests.synthetic import PID, SyntheticCapture
from tests.test_attribute import FILP, HEALTHY, LEAKER, OPEN, SOCKETPAIR


@pytest.fixture
def leaking(tmp_path: Path) -> Path:
    """A capture of a kernel leak."""
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 256, user=LEAKER, kernel=SOCKETPAIR, **FILP)
    return capture.write(tmp_path / "leak.lscope")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``leakscope attribute``."""
    code = main(["attribute", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_documented_shape(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(leaking), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert list(report) == [
        "schema", "verdict", "findings", "layers", "chains", "sites", "sites_total", "losses", "reconciliation",
        "joins", "clocks", "calibration", "stores", "inputs",
    ]  # fmt: skip
    assert report["schema"] == "leakscope-report/1"
    verdict = report["verdict"]
    assert (verdict["verdict"], verdict["class"], verdict["layer"]) == ("leak", "descriptor_leak", "kernel")
    assert verdict["culprit"] == {
        "frame": "session_open_without_close",
        "stack": ["main", "serve", "session_open_without_close", "socketpair", "entry_SYSCALL_64",
                  "__x64_sys_socketpair", "alloc_empty_file"],
        "slab_cache": "filp",
        "slab_caches": ["filp"],
    }  # fmt: skip
    assert set(verdict["growth"]) == {"counter", "bytes_per_s", "ci_low", "ci_high"}
    assert verdict["growth"]["bytes_per_s"] == pytest.approx(2560, rel=0.05)
    (site,) = report["sites"]
    expected = {
        "layer": "kernel", "kind": "slab", "live_bytes": 25600, "live_objects": 100, "allocated_bytes": 25600,
        "kept_share": 1.0, "first_ns": 1_050_000_000, "last_ns": 10_950_000_000, "free_seen_share": None,
        "outlives_process": False, "stack_sampled": False,
    }  # fmt: skip
    assert {key: site[key] for key in expected} == expected
    assert [chain["site"] for chain in report["chains"]] == [site["id"]] == verdict["sites"]
    assert set(report["chains"][0]["links"][0]) == {"what", "name", "rule", "confidence", "count", "bytes"}
    assert report["inputs"][0]["mem_events"] == 100


def test_the_same_capture_gives_the_same_report(leaking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, str(leaking), "--json")[1] == run(capsys, str(leaking), "--json")[1]


def test_exit_code_says_leak_no_leak_or_inconclusive(
    leaking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = SyntheticCapture(10)
    healthy.process()
    healthy.churn(500, 256, user=HEALTHY, kernel=OPEN, **FILP)
    empty = SyntheticCapture(10)
    assert run(capsys, str(leaking))[0] == 0
    assert run(capsys, str(leaking), "--exit-code")[0] == 1
    assert run(capsys, str(healthy.write(tmp_path / "h.lscope")), "--exit-code")[0] == 0
    assert run(capsys, str(empty.write(tmp_path / "e.lscope")), "--exit-code")[0] == 3


def test_several_captures_and_packed_ones_make_one_report(
    leaking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = pack(Capture.open(leaking), tmp_path / "packed.lscope.tar")
    code, out, _ = run(capsys, str(leaking), str(packed), "--json")
    report = json.loads(out)
    assert code == 0
    assert [len(report[key]) for key in ("inputs", "sites", "layers", "findings")] == [2, 2, 2, 1]
    assert [site["id"][:2] for site in report["sites"]] == ["0:", "1:"]
    assert [finding["sites"][0][:2] for finding in report["findings"]] == ["1:"]


def test_impossible_numbers_are_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = SyntheticCapture(10)
    odd.process()
    odd.leak(20, 64, user=("main",), kernel=("k:f",), cache="filp")
    for at, value in ((1, float("nan")), (2, float("inf")), (3, -1.0), (4, 1e300)):
        odd.sample(at, "slab_filp", value)
        odd.sample(at, "vss", value, "process", str(PID))
    assert run(capsys, str(odd.write(tmp_path / "odd.lscope")))[0] == 0
    huge = SyntheticCapture(10)
    huge.process()
    huge.leak(20, (1 << 63) - 1, user=("main",), kernel=("k:f",))
    code, out, err = run(capsys, str(huge.write(tmp_path / "huge.lscope")))
    assert (code, out) == (2, "") and "huge.lscope: cannot be attributed" in err and err.count("\n") == 1


def test_other_evidence_and_layers_are_refused_in_one_line(
    tmp_path: Path, leaking: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "events.csv"
    text.write_text("ts_ns,pid\n")
    code, out, err = run(capsys, str(text))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "not a packed leakscope capture" in err and "nor is it a report that 'leakscope import' knows" in err
    code, out, err = run(capsys, str(leaking), "--layer", "cpu")
    assert (code, out) == (2, "")
    assert err == "leakscope: --layer cpu: no such layer; the layers are kernel, host, gpu\n"
