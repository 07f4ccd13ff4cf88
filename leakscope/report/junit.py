"""The gate as JUnit XML: a test case for each check, as Jenkins, GitLab and others read it.

The format has no standard; this is the part on which the Ant task and Jenkins's xUnit plug-in agree: ``testsuites`` →
``testsuite`` → ``testcase`` → ``failure`` | ``error`` | ``skipped``. There are no times in it: the same checks give the
same bytes.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from leakscope.model.gate import RULES, Check, Gate
from leakscope.report.text import printable

_SUITES = {"leak": "leaks", "regression": "regressions", "budget": "budgets", "evidence": "evidence"}


def junit_xml(gate: Gate) -> str:
    """The XML document. A failed check is a ``failure``, an inconclusive one an ``error`` (``skipped`` where it is
    allowed), a suppressed or known one ``skipped``."""
    root = Element("testsuites", {"name": "leakscope check"} | _counts(gate, list(gate.checks)))
    for rule in RULES:
        checks = [check for check in gate.checks if check.rule == rule]
        if not checks:
            continue
        suite = SubElement(root, "testsuite", {"name": f"leakscope.{_SUITES[rule]}"} | _counts(gate, checks))
        for check in checks:
            _case(suite, gate, check)
    indent(root, " ")
    return "<?xml version='1.0' encoding='UTF-8'?>\n" + tostring(root, encoding="unicode") + "\n"


def _kind(gate: Gate, check: Check) -> str:
    if check.outcome == "fail":
        return "failure"
    if check.outcome == "inconclusive":
        return "skipped" if gate.allow_inconclusive else "error"
    return "" if check.outcome == "pass" else "skipped"


def _counts(gate: Gate, checks: list[Check]) -> dict[str, str]:
    kinds = [_kind(gate, check) for check in checks]
    of = {"tests": len(kinds)} | {f"{k}s": kinds.count(k) for k in ("failure", "error")}
    return {name: str(count) for name, count in of.items()} | {"skipped": str(kinds.count("skipped"))}


def _case(suite: Element, gate: Gate, check: Check) -> None:
    case = SubElement(suite, "testcase", classname=f"leakscope.{check.layer or check.rule}", name=_text(check.name))
    kind = _kind(gate, check)
    if kind == "skipped":
        SubElement(case, kind, message=_text(_said(check)))
    elif kind:
        entry = SubElement(case, kind, message=_text(check.message), type=_text(check.kind or check.rule))
        entry.text = "\n".join(_text(line) for line in _lines(check))
    else:
        SubElement(case, "system-out").text = _text(check.message)


def _said(check: Check) -> str:
    return f"{check.message} (reason: {check.reason})" if check.reason else check.message


def _lines(check: Check) -> list[str]:
    lines = [check.message]
    if check.stack:
        lines += ["stack, outermost first:", *(f"  {frame}" for frame in check.stack)]
    if check.chain:
        lines.append(f"chain: {check.chain}")
    return lines


def _text(text: str) -> str:
    """XML 1.0 has no way to write control characters."""
    return printable(text)
