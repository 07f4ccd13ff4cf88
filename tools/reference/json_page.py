"""Page of what ``--json`` prints: every object that a command prints, and the classes within it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from leakscope.ingest import files
from leakscope.model import calibration, diff, gate, liveness, results, soak, stores, symbolized
from leakscope.report import doctor
from leakscope.report.json import report_json
from leakscope.report.liveness import liveness_json
from tools.reference import plain, table
from tools.reference.json_keys import Key, keys_of_class, keys_of_function

OBJECTS: tuple[tuple[str, str, Callable[..., Any] | None, tuple[type, ...]], ...] = (
    (
        "leakscope-report/1",
        "`attribute --json`; `check --json` and `soak --json` have it too, with a key more.",
        report_json,
        (results.Verdict, results.Culprit, results.Growth, soak.Forecast, results.LayerTotal, results.Site,
         results.Chain, results.ChainLink, results.Row, results.JoinOutcome, calibration.Calibrated,
         stores.StoreAudit, stores.KeyGroup, stores.Figure),
    ),
    (
        "gate",
        "`check --json`: the report and `gate`.",
        None,
        (gate.Gate, gate.Check, gate.Difference, gate.SiteChange, gate.Suppressed),
    ),
    ("soak", "`soak --json`: the report and `soak`.", None, (soak.SoakSummary, soak.Look, soak.Happening)),
    (
        "leakscope-diff/1",
        "`diff --json`.",
        None,
        (diff.Diff, diff.LayerDiff, diff.SiteDiff, diff.CounterDiff, diff.Holding),
    ),
    (
        "leakscope-liveness/1",
        "`liveness --json`.",
        liveness_json,
        (liveness.SourceLiveness, liveness.DocumentRules, liveness.Keeper, liveness.Stale, liveness.Why, liveness.Step,
         liveness.Pool),
    ),
    ("import", "`import --json`: `capture`, its path, and `files`, a list of these.", None, (files.Imported,)),
    (
        "leakscope-symbolize/1",
        "`symbolize --json`: `schema`, `output`, the capture, and these.",
        None,
        (symbolized.Symbolized, symbolized.MissingSymbols),
    ),
    ("leakscope-doctor/1", "`doctor --json`.", doctor.doctor_json, ()),
)  # fmt: skip
"""Of each object: its schema or key, which command prints it, the function that makes it, the classes within it."""

ADDED = {"Diff": [Key("inputs", "object", "of `a` and `b`, as in leakscope-report/1")]}
"""Keys that a command adds to what a class gives."""


def json_page() -> str:
    """Markdown of all objects."""
    parts = [
        "# JSON",
        "Keys are added without a new `schema`; a key that goes, or changes its meaning, makes a new one. "
        "Times that end in `_ns` are on the clock of their source, those in `_s` since the start of the capture. "
        "Stacks are outermost first.",
    ]
    for title, where, function, classes in OBJECTS:
        parts += [f"## {title}", where]
        if function:
            parts.append(_table(keys_of_function(function)))
        for cls in classes:
            text = " ".join((inspect.getdoc(cls) or "").replace(":data:", "").split())
            parts += [f"### {cls.__name__}", plain(text), _table(_keys(cls))]
    return "\n\n".join(parts)


def documented() -> dict[str, list[Key]]:
    """The keys that the page has of each object and class, by its heading."""
    found = {}
    for title, _, function, classes in OBJECTS:
        if function:
            found[title] = keys_of_function(function)
        found |= {cls.__name__: _keys(cls) for cls in classes}
    return found


def _keys(cls: type) -> list[Key]:
    return keys_of_class(cls) + ADDED.get(cls.__name__, [])


def _table(keys: list[Key]) -> str:
    return table(("key", "type", "meaning"), [(f"`{key.name}`", key.type, plain(key.meaning)) for key in keys])
