"""The gate as JUnit XML, SARIF, annotations, Markdown and text: valid, complete, and safe with hostile names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as SarifSchema

from leakscope.model.gate import Check, Difference, Gate, SiteChange, Suppressed
from leakscope.model.results import Report, Verdict
from leakscope.report.gate import gate_json, gate_lines
from leakscope.report.github import (
    MAX_ANNOTATIONS,
    annotation_lines,
    escaped_data,
    escaped_property,
    inert,
    summary,
    workflow_command,
)
from leakscope.report.junit import junit_xml
from leakscope.report.sarif import relative, sarif, sarif_text

XSD = etree.XMLSchema(etree.parse(Path(__file__).parent / "schemas" / "junit.xsd"))
HOSTILE = "evil\x1b[31m</failure>]]>\n::error::x|`*<script>%0A,:\u2028\ud800\x00&\uffff"


def check(rule: str, outcome: str, **how: object) -> Check:
    values = {"name": f"host: {rule} {outcome}", "message": f"{rule} is {outcome}", "key": f"{rule}-{outcome}"}
    return Check(rule, outcome, **(values | how))  # type: ignore[arg-type]


LEAK = check(
    "regression", "fail", kind="regression", layer="host", frame="copy (/repo/src/q.c:14)", measured=590.5,
    stack=("main (/repo/src/m.c:3)", "libx.so+0x30", "copy (/repo/src/q.c:14)"), unit="bytes/s", chain="main → copy",
)  # fmt: skip
GATE = Gate(
    "fail", 1,
    (
        LEAK, check("budget", "fail", measured=7.0, limit=5.0, unit="bytes"), check("evidence", "inconclusive"),
        check("leak", "suppressed", reason="by design"), check("leak", "known"), check("leak", "pass"),
    ),
    Difference("base.json", "requests_total", 100, 200, 2.0,
               (SiteChange("new", "host", "heap", ("main", "copy (q.c)"), 55, 11440, 0.0, 0.0, "abc"),), 4),
    (Suppressed("pool", "by design", "s.txt:2", 1, 0, 6400, 100), Suppressed("old", "gone", "s.txt:3")),
    notes=("s.txt:3: leak:old suppresses nothing; remove it",),
)  # fmt: skip


def gate_with(text: str) -> Gate:
    """A gate in which every text is ``text``."""
    bad = Check("leak", "fail", text, text, "0f", text, "host", f"{text} ({text}:7)", (text, text), text, reason=text)
    change = SiteChange("new", "host", text, (text, text), 1, 1, 0.0, 0.0, "k")
    return Gate(
        "fail", 1, (bad, Check("budget", "suppressed", text, text, "1f", reason=text)),
        Difference(text, text, 1, 1, 1.0, (change,), 0), (Suppressed(text, text, text, 1, 0, 1, 1),), notes=(text,),
    )  # fmt: skip


def test_junit_is_valid_and_counts_every_check() -> None:
    root = etree.fromstring(junit_xml(GATE).encode())
    XSD.assertValid(root)
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "2", "errors": "1", "skipped": "2",
    }  # fmt: skip
    assert [suite.get("name") for suite in root] == [
        "leakscope.leaks", "leakscope.regressions", "leakscope.budgets", "leakscope.evidence",
    ]  # fmt: skip
    (failure,) = root.xpath("//testsuite[@name='leakscope.regressions']//failure")
    assert (failure.get("type"), failure.get("message")) == ("regression", "regression is fail")
    assert "  copy (/repo/src/q.c:14)" in failure.text and "chain: main → copy" in failure.text
    assert root.xpath("//skipped/@message") == ["leak is suppressed (reason: by design)", "leak is known"]
    allowed = etree.fromstring(junit_xml(Gate("pass", 0, GATE.checks[2:], allow_inconclusive=True)).encode())
    XSD.assertValid(allowed)
    assert (allowed.get("errors"), allowed.get("skipped")) == ("0", "3")


def test_sarif_is_valid_and_says_where() -> None:
    log = json.loads(sarif_text(GATE, ["run.lscope.tar"], "/repo"))
    SarifSchema.model_validate(log)
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [
        "leakscope/leak", "leakscope/regression", "leakscope/budget", "leakscope/evidence",
    ]  # fmt: skip
    by_rule = {result["ruleId"] + "/" + result["message"]["text"].split()[-1]: result for result in run["results"]}
    leak = by_rule["leakscope/regression/fail"]
    assert leak["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "src/q.c", "uriBaseId": "SRCROOT"}, "region": {"startLine": 14},
    }  # fmt: skip
    assert leak["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "copy"
    assert [f["location"]["logicalLocations"][0]["fullyQualifiedName"] for f in leak["stacks"][0]["frames"]] == [
        "copy", "libx.so+0x30", "main",
    ]  # fmt: skip
    assert (leak["level"], leak["baselineState"]) == ("error", "new")
    assert leak["partialFingerprints"] == {"leakscopeCheck/v1": "regression-fail"}
    # code scanning drops results without a file: those are on the evidence
    budget = by_rule["leakscope/budget/fail"]
    assert budget["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "run.lscope.tar"
    assert budget["properties"] == {"measured": 7.0, "limit": 5.0, "unit": "bytes"}
    assert by_rule["leakscope/leak/suppressed"]["suppressions"] == [{"kind": "external", "justification": "by design"}]
    assert by_rule["leakscope/leak/known"]["baselineState"] == "unchanged"
    assert by_rule["leakscope/evidence/inconclusive"]["level"] == "warning"
    assert all(run["results"][i]["ruleIndex"] < 4 for i in range(5))
    SarifSchema.model_validate(sarif(Gate("pass", 0, (check("leak", "pass"),))))


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/repo/a b/c.py", "a b/c.py"), ("/repository/c.py", None), ("/usr/lib/x.c", None), ("src/c.py", "src/c.py"),
        ("./misc/mmap.c", "misc/mmap.c"),
    ],
)  # fmt: skip
def test_only_files_below_the_root_are_relative(path: str, inside: str | None) -> None:
    assert relative(path, "/repo") == inside


def test_annotations_stand_at_the_line_and_are_escaped() -> None:
    lines = list(annotation_lines(GATE, "/repo"))
    assert lines == [
        "::error title=leakscope%3A host%3A regression fail,file=src/q.c,line=14::regression is fail",
        "::error title=leakscope%3A host%3A budget fail::budget is fail",
        "::warning title=leakscope%3A host%3A evidence inconclusive::evidence is inconclusive",
        "::notice title=leakscope%3A host%3A leak suppressed::leak is suppressed",
        "::notice title=leakscope%3A host%3A leak known::leak is known",
    ]
    assert "file=" not in next(annotation_lines(GATE, "/elsewhere"))
    assert escaped_data("100%\r\n:,") == "100%25%0D%0A:,"
    assert escaped_property("100%\r\n:,") == "100%25%0D%0A%3A%2C"
    assert workflow_command("error", "a::b\n::warning::c") == "::error::a::b%0A::warning::c"


def test_no_more_annotations_than_github_shows() -> None:
    many = Gate("fail", 1, tuple(check("leak", "fail", key=str(number)) for number in range(25)))
    lines = list(annotation_lines(many))
    assert len(lines) == MAX_ANNOTATIONS + 1
    assert lines[-1] == "::notice title=leakscope::15 more checks did not pass: see the log"


def is_command(line: str) -> bool:
    """Whether the runner of GitHub Actions acts on a line: by its begin after trimming, or by ``##[`` anywhere."""
    return line.strip().startswith("::") or "##[" in line


@pytest.mark.parametrize("line", ["::add-mask::x", "   ::stop-commands::t", "x ##[add-mask]y", "\u00a0::error::x"])
def test_other_output_is_no_command(line: str) -> None:
    assert is_command(line) and not is_command(inert(line))
    assert inert("std::vector # fine") == "std::vector # fine"


def test_the_summary_is_a_table_without_markup_from_evidence() -> None:
    text = summary(GATE, ["run.tar"])
    assert text.startswith("## ❌ Memory leaks\n")
    assert "Against `base.json`: head did 2.00 times its work (`requests_total`)." in text
    assert "| new | host: main → copy (q.c) | 11.2 KiB | — |" in text
    assert "| leak:pool | by design | 6,400 B (6.2 KiB) |" in text
    hostile = summary(gate_with(HOSTILE), [HOSTILE])
    assert "<script>" not in re.sub(r"(`+)[^`].*?[^`]?\1", "", hostile)  # outside of code there is none
    assert "\x1b" not in hostile and "\n::error" not in hostile
    for row in (line for line in hostile.splitlines() if line.startswith("|")):
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 5), row


def test_text_says_the_result_first_and_what_is_suppressed() -> None:
    lines = [line for line, _ in gate_lines(Report(Verdict("leak", "regression")), GATE, ["run.tar"])]
    assert lines[0] == "FAIL  host: regression fail and 1 other"
    assert "sites against the baseline: 1 new, 4 unchanged" in lines
    assert "suppressed: 6,400 B (6.2 KiB) by 1 pattern" in lines
    assert "note: s.txt:3: leak:old suppresses nothing; remove it" in lines
    assert all(len(line) <= 80 for line in lines if "next:" not in line)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=40).map(lambda text: text or " "))
def test_hostile_names_break_no_format(text: str) -> None:
    for value in (text, HOSTILE):
        gate = gate_with(value)
        XSD.assertValid(etree.fromstring(junit_xml(gate).encode()))
        json.loads(sarif_text(gate, [value], "/repo").encode())
        json.dumps(gate_json(Report(Verdict("leak", "x")), gate)).encode()
        for line in annotation_lines(gate, "/repo"):
            assert line.startswith("::") and line.isprintable()
        for line, _ in gate_lines(Report(Verdict("leak", "x")), gate, [value]):
            assert line.isprintable() and not is_command(inert(line))
        summary(gate, [value]).encode()
