"""The verb ``leakscope check``: exit codes, baselines, budgets, suppressions; the same inputs give the same bytes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leakscope.cli.check import judged
from leakscope.cli.main import main
from leakscope.detect.attribution import Options
from leakscope.errors import BadInputError
from leakscope.gate.budgets import parse_budgets
from leakscope.gate.decide import Rules, decide
from leakscope.gate.suppressions import Suppression
from leakscope.model.gate import Gate
from leakscope.model.results import Report, Verdict
from tests.event_files import EventFile
from tests.recording import ROOT
from tests.synthetic import SyntheticCapture

CACHED = ("k:entry_SYSCALL_64", "k:__x64_sys_openat", "k:alloc_empty_file")
KMALLOC = {"kind": "kmalloc", "cache": "kmalloc-rnd-03-64"}


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``leakscope check``."""
    code = main(["check", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """The object of ``check --json``."""
    code, out, _ = run(capsys, *args, "--json")
    report = json.loads(out)
    assert report["gate"]["exit_code"] == code
    return report


def service(path: Path, *, kept: int = 0, rounds: int = 300, line: int = 10, labels: int = 0) -> Path:
    """A run of 20 s: churn, ``labels`` that leak 64 B each, and copies of rows that leak 208 B each."""
    events = EventFile()
    events.churn(f"main;query (q.c:{line});malloc", rounds, 20.0)
    for number in range(labels):
        events.keep(0.5 + number * 19.0 / labels, 64, f"main;label (l.c:{line});malloc")
    for number in range(kept):
        events.keep(0.3 + number * 19.0 / kept, 208, f"main;copy_row (q.c:{line + 4});malloc")
    return events.write(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Event files of five runs."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "base": service(folder / "base.csv", labels=40),
        "moved": service(folder / "moved.csv", labels=80, rounds=600, line=33),
        "worse": service(folder / "worse.csv", labels=40, kept=60, line=14),
        "clean": service(folder / "clean.csv"),
        "leaking": service(folder / "leaking.csv", kept=60),
    }


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 objects of 64 B that leak in the kernel, 32 MiB of host memory kept from the start, 50 requests, an RSS that
    rises from 100 MiB by 1 MiB a second."""
    made = SyntheticCapture(10)
    made.process()
    made.leak(100, 64, user=("main", "serve", "keep_entry"), kernel=("k:__x64_sys_bpf", "k:map_alloc"), **KMALLOC)
    for number in range(4):
        made.alloc(0.001 * number, 8 << 20, layer="host", kind="mmap_anon", user=("main", "load_model"))
    for second in range(101):
        made.sample(second / 10, "requests_total", second // 2)
        made.sample(second / 10, "rss", (100 << 20) + second * (1 << 20) / 10, "process", "100")
    return made.write(tmp_path_factory.mktemp("capture") / "run.lscope")


# --- alone ------------------------------------------------------------------------------------------------------------


def test_evidence_alone_passes_fails_or_cannot_tell(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, runs["clean"])[0] == 0
    code, out, err = run(capsys, runs["leaking"])
    assert (code, err) == (1, "")
    assert out.startswith("FAIL  host: copy_row (q.c)\n")
    empty = SyntheticCapture(10).write(tmp_path / "empty.lscope")
    assert run(capsys, empty)[0] == 3
    code, out, _ = run(capsys, empty, "--allow-inconclusive")
    assert (code, out.splitlines()[0]) == (0, "PASS  1 check cannot be told, which is allowed")


def test_json_is_that_of_attribute_and_the_gate(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(runs["leaking"]), "--json"]) == 0
    attributed = json.loads(capsys.readouterr().out)
    report = as_json(capsys, runs["leaking"])
    gate = report.pop("gate")
    assert report == attributed
    assert (gate["result"], gate["exit_code"], gate["counts"]["fail"]) == ("fail", 1, 1)
    (check,) = gate["checks"]
    assert (check["rule"], check["outcome"], check["frame"], check["layer"]) == (
        "leak",
        "fail",
        "copy_row (q.c:14)",
        "host",
    )
    assert check["sites"] == report["verdict"]["sites"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["MISSING"], "MISSING: no such file or capture"),
        (["RUN", "RUN"], "given twice"),
        (["RUN", "--baseline", "MISSING"], "MISSING: no such file or capture"),
        (["RUN", "--budget", "MISSING"], "MISSING: No such file or directory"),
        (["RUN", "--per", "requests_total"], "give a --baseline"),
        (["RUN", "--layer", "cpu"], "no such layer"),
        (["RUN", "--junit", "no/such/folder/x.xml"], "there is no folder no/such/folder"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    args: list[str], said: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *(str(runs["clean"]) if arg == "RUN" else arg for arg in args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


# --- against a baseline -----------------------------------------------------------------------------------------------


def test_twice_the_work_at_other_lines_is_no_regression(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report = as_json(capsys, runs["moved"], "--baseline", runs["base"])
    gate = report["gate"]
    assert (gate["exit_code"], report["verdict"]["verdict"]) == (0, "not_leak")
    assert [(c["outcome"], c["frame"]) for c in gate["checks"]] == [("known", "label (l.c:33)"), ("pass", None)]
    assert gate["difference"]["work"] == {"unit": "allocations", "base": 340, "head": 680, "ratio": 2.0}
    assert (gate["difference"]["changes"], gate["difference"]["unchanged"]) == ([], 2)


def test_a_regression_fails_with_its_exact_bytes(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, runs["worse"], "--baseline", runs["base"])
    verdict, gate = report["verdict"], report["gate"]
    assert (verdict["verdict"], verdict["class"], gate["exit_code"]) == ("leak", "regression", 1)
    assert (verdict["kept_objects"], verdict["kept_bytes"]) == (60, 60 * 208)
    assert verdict["leak_start_s"] == pytest.approx(0.3)
    (change,) = gate["difference"]["changes"]
    assert (change["change"], change["frames"]) == ("new", ["main", "copy_row (q.c)"])
    assert [check["frame"] for check in gate["checks"] if check["outcome"] == "known"] == ["label (l.c:14)"]
    # the other way round it went away
    gate = as_json(capsys, runs["base"], "--baseline", runs["worse"])["gate"]
    assert (gate["exit_code"], gate["difference"]["changes"][0]["change"]) == (0, "vanished")


def test_a_baseline_file_says_what_the_evidence_says(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    assert main(["baseline", "update", str(runs["base"]), "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}  (2 sites, 0 known leaks)\n"
    first = file.read_bytes()
    assert main(["baseline", "update", str(runs["base"]), "-o", str(file)]) == 0
    capsys.readouterr()
    assert file.read_bytes() == first
    assert json.loads(first)["sites"] == [
        {"layer": "host", "kind": "heap", "stack": ["main", "label (l.c)"], "kept_objects": 40, "kept_bytes": 2560,
         "allocated_objects": 40, "allocated_bytes": 2560},
        {"layer": "host", "kind": "heap", "stack": ["main", "query (q.c)"], "kept_objects": 0, "kept_bytes": 0,
         "allocated_objects": 300, "allocated_bytes": json.loads(first)["sites"][1]["allocated_bytes"]},
    ]  # fmt: skip
    assert sum(b'"stack"' in line for line in first.splitlines()) == 2  # a line a site

    by_file = as_json(capsys, runs["worse"], "--baseline", file)
    by_evidence = as_json(capsys, runs["worse"], "--baseline", runs["base"])
    by_file["gate"]["difference"]["baseline"] = by_evidence["gate"]["difference"]["baseline"]
    assert by_file == by_evidence


def test_baseline_update_replaces_nothing_else(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "package.json"
    precious.write_text('{"name": "mine"}')
    assert main(["baseline", "update", str(runs["base"]), "-o", str(precious)]) == 2
    assert "is no baseline file; it is not replaced" in capsys.readouterr().err
    assert precious.read_text() == '{"name": "mine"}'
    assert list(tmp_path.iterdir()) == [precious]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"schema": "leakscope-baseline/9", "sites": []}', "is of leakscope-baseline/9, this leakscope reads"),
        ('{"schema": "leakscope-baseline/1"', "not JSON"),
        ('{"schema": "leakscope-baseline/1"}', "damaged baseline file: no 'sites'"),
        ('{"schema": "leakscope-baseline/1", "duration_s": -1, "totals": [], "marks": [], "leaks": [], "sites": []}',
         "-1 is no number in its range"),
        ('{"schema": "leakscope-baseline/1", "duration_s": 1, "totals": [], "marks": [], "leaks": [], "sites": [7]}',
         "damaged baseline file"),
        ('{"schema": "leakscope-baseline/1", "duration_s": 1, "totals": [], "marks": [], "leaks": [], "sites": '
         '[{"layer": "host", "kind": "heap", "stack": [], "kept_objects": 1e3}]}', "1000.0 is no count"),
    ],
)  # fmt: skip
def test_a_damaged_baseline_file_is_one_line(
    text: str, said: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text)
    code, out, err = run(capsys, runs["clean"], "--baseline", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err and "Traceback" not in err


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(capture: Path) -> Report:
    """The report of the capture, which decisions are made on."""
    return judged([capture], Options(), "1GiB")


def decided(report: Report, text: str) -> Gate:
    """The gate with these budgets."""
    return decide(report, Rules(parse_budgets(text, "leakscope.toml")))[1]


@pytest.mark.parametrize(
    ("text", "outcome", "measured", "unit"),
    [
        ("[layer.kernel]\nkept = 6400", "pass", 6400, "bytes"),
        ("[layer.kernel]\nkept = 6399", "fail", 6400, "bytes"),
        ('[layer.host]\nkept = "32MiB"', "pass", 32 << 20, "bytes"),
        ('[layer.gpu]\nkept = "0B"', "pass", 0, "bytes"),
        ('[layer.kernel]\nper_unit = 127\nunit = "requests_total"', "fail", 128, "bytes per requests_total"),
        ('[layer.kernel]\nrate = "100B/s"', "fail", 640, "bytes/s"),
        ('[layer.kernel]\nrate = "1MiB/h"', "fail", 640, "bytes/s"),
        ('[layer.kernel]\nrate = "60KiB/min"', "pass", 640, "bytes/s"),
        ('[[site]]\nframes = "keep_*"\nobjects = 99', "fail", 100, "objects"),
        ('[[site]]\nregex = "^load_.*l$"\nkept = "31MiB"', "fail", 32 << 20, "bytes"),
        ('[[site]]\ncache = "kmalloc-64"\nlayer = "kernel"\nkept = 6400', "pass", 6400, "bytes"),
        ('[[site]]\nframes = "keep"\nkept = 0', "pass", 0, "bytes"),
        ('[[counter]]\nname = "rss_bytes"\npeak = "110MiB"', "pass", 110 << 20, "bytes"),
        ('[[counter]]\nname = "rs*"\npeak = "109MiB"', "fail", 110 << 20, "bytes"),
        ('[[counter]]\nname = "rss"\ngrowth = "5MiB"', "fail", round(7.2 * (1 << 20), 3), "bytes"),
        ('[[counter]]\nname = "gpu_used"\npeak = "1GiB"', "inconclusive", None, ""),
    ],
)
def test_budgets_are_measured_to_the_byte(
    text: str, outcome: str, measured: float | None, unit: str, report: Report
) -> None:
    (check,) = [check for check in decided(report, text).checks if check.rule == "budget"]
    assert (check.outcome, check.unit) == (outcome, unit)
    assert check.measured == (pytest.approx(measured, rel=0.03) if measured else measured)
    if unit == "bytes" and "growth" not in text:
        assert check.measured == measured


def test_a_budget_of_its_own_allows_a_leak_and_that_of_a_layer_does_not(report: Report) -> None:
    assert decided(report, '[layer.kernel]\nkept = "1MiB"\n').result == "fail"
    rule = '[[site]]\nname = "entries"\nframes = "keep_entry"\nrate = '
    gate = decided(report, f'{rule}"1KiB/s"')
    assert gate.result == "pass"
    assert [(check.outcome, check.rule) for check in gate.checks] == [("known", "leak"), ("pass", "budget")]
    assert len(decided(report, f'{rule}"100B/s"').of("fail")) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[layer.kernel]\n\nkepd = 1", "leakscope.toml:3: unknown key 'kepd' in layer; known are kept, rate"),
        ("# x\n[layers.kernel]\nkept = 1", "leakscope.toml:2: unknown key 'layers'; known are layer, site, counter,"),
        ("[layer.cpu]\nkept = 1", "leakscope.toml:1: no layer 'cpu'"),
        ('[layer.gpu]\nkept = "1 parsec"', "leakscope.toml:2: kept: '1 parsec' is no size"),
        ("[layer.gpu]\nkept = -1", "leakscope.toml:2: kept: -1 is no size"),
        ("[layer.gpu]\nkept = nan", "kept: nan is no size"),
        ("[layer.gpu]\nkept = true", "kept: True is no size"),
        ('[layer.gpu]\nrate = "1MiB/fortnight"', "leakscope.toml:2: rate: '1MiB/fortnight' is no rate"),
        ("[layer.gpu]\nper_unit = 1", "leakscope.toml:1: per_unit needs unit"),
        ('[[site]]\nframes = "a"\nkept = 1\n[[site]]\nkept = 1', "leakscope.toml:4: this site says of no site"),
        ('[[site]]\nframes = "a"', "leakscope.toml:1: this site has no limit"),
        ('[[site]]\nregex = "("\nkept = 1', "leakscope.toml:2: regex: missing )"),
        ('[[site]]\nframes = "a"\nregex = "a"\nkept = 1', "give frames or regex, not both"),
        ("[[counter]]\npeak = 1", "leakscope.toml:1: this counter has no name"),
        ("[site]\nkept = 1", "leakscope.toml:1: write [[site]]"),
        ("layer = 3", "leakscope.toml:1: write a table"),
        ("[layer.gpu\nkept = 1", "not TOML: "),
        ("", "has no budgets"),
        ('[layer.kernel]\nper_unit = 1\nunit = "jobs_total"', "unit jobs_total: the evidence counts no such work"),
    ],
)  # fmt: skip
def test_a_wrong_budget_is_one_line_that_says_where(text: str, said: str, report: Report) -> None:
    with pytest.raises(BadInputError) as refused:
        decided(report, text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


# --- suppressions -----------------------------------------------------------------------------------------------------


def test_what_is_suppressed_is_told_and_does_not_fail(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "suppressions.txt"
    file.write_text("# entries are dropped by the next release\nleak:^keep_*y$\n\nleak:nowhere  # an old one\n")
    code, out, _ = run(capsys, capture, "--suppressions", file)
    assert code == 0
    assert f"note: {file}:4: leak:nowhere suppresses" in " ".join(out.split())
    assert "suppressed: 6,400 B (6.2 KiB) by 1 pattern" in out
    report = as_json(capsys, capture, "--suppressions", file)
    assert report["verdict"]["verdict"] == "not_leak"
    used, unused = report["gate"]["suppressions"]
    assert (used["bytes"], used["objects"], used["sites"], used["reason"]) == (
        6400, 100, 1, "entries are dropped by the next release",
    )  # fmt: skip
    assert (unused["used"], unused["where"]) == (False, f"{file}:4")
    assert [c["outcome"] for c in report["gate"]["checks"]] == ["suppressed", "pass"]


def test_short_counters_do_not_decide_when_all_that_events_show_is_suppressed(report: Report) -> None:
    short = Verdict("inconclusive", "window_too_short", reasons=("10 s of counters",))
    rules = Rules(suppressions=[Suppression("keep_entry", "by design", "s.txt", 1)])
    assert decide(replace(report, findings=[short]), rules)[1].result == "pass"
    unclear = replace(short, kind="missing_data")
    assert decide(replace(report, findings=[unclear]), rules)[1].result == "inconclusive"


def test_suppressed_sites_count_in_no_comparison_and_no_budget(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, budget = tmp_path / "suppressions.txt", tmp_path / "leakscope.toml"
    file.write_text("leak:copy_row # by design\n")
    budget.write_text("[layer.host]\nkept = 2560\n")  # the 40 labels
    args = (runs["worse"], "--baseline", runs["base"], "--budget", budget)
    assert as_json(capsys, *args)["gate"]["counts"]["fail"] == 2
    report = as_json(capsys, *args, "--suppressions", file)
    assert (report["gate"]["result"], report["verdict"]["verdict"]) == ("pass", "not_leak")


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_in_github_actions_annotations_and_the_summary_of_the_job_are_written(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, own = tmp_path / "job.md", tmp_path / "own.md"
    job.write_text("of a step before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(job))
    code, out, _ = run(capsys, runs["leaking"], "--github", "--summary", own)
    assert code == 1
    assert next(line for line in out.splitlines() if line.startswith("::")).startswith(
        "::error title=leakscope%3A host%3A copy_row (q.c),file=q.c,line=14::copy_row (q.c:14) keeps 12,480 B"
    )
    assert job.read_text() == "of a step before\n" + own.read_text()
    code, out, err = run(capsys, runs["leaking"], "--github", "--json")
    assert json.loads(out)["gate"]["exit_code"] == code == 1
    assert err.startswith("::error ")


def test_a_full_disk_is_exit_5_and_leaves_what_was_there(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capfd, runs["clean"], "--junit", "/dev/full")[0] == 5
    assert Path("/dev/full").is_char_device()
    before = tmp_path / "leaks.xml"
    before.write_text("before")

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    assert run(capfd, runs["clean"], "--junit", before)[0] == 5
    assert before.read_text() == "before" and list(tmp_path.iterdir()) == [before]


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bytes(runs: dict[str, Path], tmp_path: Path) -> None:
    """In other processes, with other hash seeds, and named in another order."""
    outputs = []
    for number, (seed, evidence) in enumerate([("0", ["leaking", "worse"]), ("77", ["worse", "leaking"])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        reports = [str(folder / name) for name in ("j.xml", "s.sarif", "s.md")]
        files = ["--junit", reports[0], "--sarif", reports[1], "--summary", reports[2]]
        done = subprocess.run(
            [sys.executable, "-m", "leakscope", "check", *(str(runs[name]) for name in evidence), "--json",
             "--baseline", str(runs["base"]), *files],
            capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, b"")
        outputs.append([done.stdout, *(Path(report).read_bytes() for report in reports)])
    assert outputs[0] == outputs[1]
