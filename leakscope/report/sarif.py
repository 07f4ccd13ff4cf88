"""The gate as SARIF 2.1.0 (OASIS), as GitHub code scanning and editors read it.

A rule for each kind of check, a result for each check that did not pass. Where the culprit's frame has a file and a
line, the result is there; else it is on the evidence, since code scanning shows no result without a file. Fingerprints
are of stacks without lines, so that an alert stays the same one when code moves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from leakscope import __version__
from leakscope.model.frames import parsed_frame
from leakscope.model.gate import Check, Gate
from leakscope.report.text import printable

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 5000
"""Code scanning takes 25,000 and shows the first 5,000."""
FINGERPRINT = "leakscopeCheck/v1"

_RULES = {
    "leak": ("Leak", "Memory is kept that nothing frees.", "error"),
    "regression": ("Regression", "More memory is kept than in the baseline for the same work.", "error"),
    "budget": ("BudgetExceeded", "A budget for memory is exceeded.", "error"),
    "evidence": ("Inconclusive", "The evidence cannot tell whether memory leaks.", "warning"),
}


def sarif_text(gate: Gate, evidence: Sequence[str] = (), root: str = "") -> str:
    """The SARIF log as text. ``evidence``: the paths that were checked. ``root``: the folder that relative locations
    are relative to; frames in files below it are relative."""
    return json.dumps(sarif(gate, evidence, root), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def sarif(gate: Gate, evidence: Sequence[str] = (), root: str = "") -> dict[str, Any]:
    """The SARIF log as plain JSON types; arguments as in :func:`sarif_text`."""
    shown = [check for check in gate.checks if check.outcome != "pass"][:MAX_RESULTS]
    rules = [name for name in _RULES if any(check.rule == name for check in shown)]
    where = evidence[0] if evidence else "leakscope.toml"
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "leakscope",
                "version": __version__,
                "rules": [_rule(name) for name in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"SRCROOT": {"description": {"text": "The folder of the sources."}}},
        "results": [_result(check, rules.index(check.rule), gate, where, root) for check in shown],
        "properties": {"result": gate.result, "exitCode": gate.exit_code},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    title, text, level = _RULES[name]
    return {
        "id": f"leakscope/{name}",
        "name": title,
        "shortDescription": {"text": text},
        "fullDescription": {"text": text},
        "defaultConfiguration": {"level": level},
        "help": {"text": "Run `leakscope attribute` on the evidence for every chain and number."},
    }


def _result(check: Check, index: int, gate: Gate, evidence: str, root: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": f"leakscope/{check.rule}",
        "ruleIndex": index,
        "level": _level(check, gate),
        "message": {"text": printable(f"{check.name}: {check.message}")},
        "locations": [_location(check, evidence, root)],
        "partialFingerprints": {FINGERPRINT: check.key},
    }
    if check.stack:
        frames = [{"location": _frame(text, root)} for text in reversed(check.stack)]  # SARIF: innermost first
        result["stacks"] = [{"message": {"text": "who allocates"}, "frames": frames}]
    if check.outcome == "suppressed":
        result["suppressions"] = [{"kind": "external", "justification": printable(check.reason)}]
    if gate.difference is not None and check.rule in ("leak", "regression"):
        result["baselineState"] = "unchanged" if check.outcome == "known" else "new"
    if check.measured is not None:
        result["properties"] = {"measured": round(check.measured, 3), "unit": printable(check.unit)}
        if check.limit is not None:
            result["properties"]["limit"] = round(check.limit, 3)
    return result


def _level(check: Check, gate: Gate) -> str:
    if check.outcome == "fail":
        return "error"
    if check.outcome == "inconclusive":
        return "note" if gate.allow_inconclusive else "warning"
    return "note"


def _location(check: Check, evidence: str, root: str) -> dict[str, Any]:
    location = _frame(check.frame, root) if check.frame else {}
    if "physicalLocation" not in location:
        location["physicalLocation"] = {"artifactLocation": _artifact(evidence, root)}
    return location


def _frame(text: str, root: str) -> dict[str, Any]:
    """A frame as a location: its function as a logical one, its file and line where it has them."""
    function, file, line = parsed_frame(text)
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": printable(function), "kind": "function"}]}
    if file:
        physical: dict[str, Any] = {"artifactLocation": _artifact(file, root)}
        if line > 0:
            physical["region"] = {"startLine": line}
        location["physicalLocation"] = physical
    return location


def _artifact(path: str, root: str) -> dict[str, Any]:
    inside = relative(path, root)
    if inside is None:
        return {"uri": f"file://{quote(printable(path))}"}
    return {"uri": quote(printable(inside)), "uriBaseId": "SRCROOT"}


def relative(path: str, root: str) -> str | None:
    """``path`` relative to ``root``; None for a path outside of it. No path is looked up."""
    if not path.startswith("/"):
        return path.removeprefix("./")
    if root and PurePosixPath(path).is_relative_to(root):
        return PurePosixPath(path).relative_to(root).as_posix()
    return None
