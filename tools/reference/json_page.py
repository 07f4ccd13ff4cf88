"""Page of what ``--json`` prints: every object that a command prints, and the classes within it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from leakscope.ingest import files
from leakscope.model import diff, gate, liveness, soak, symbolized
from leakscope.report import doctor
from leakscope.report.json import report_json
from leakscope.report.liveness import liveness_json
from tools.reference import plain, table
from tools.reference.json_keys import Key, keys_of_class, keys_of_function

OBJECTS: tuple[tuple[str, str, Callable[..., Any] | type], ...] = (
    (
        "leakscope-report/1",
        "`attribute --json`; `check --json` and `soak --json` have it too, with a key more.",
        report_json,
    ),
    ("gate", "`check --json`: the report and `gate`, which is this.", gate.Gate),
    ("soak", "`soak --json`: the report and `soak`, which is this.", soak.SoakSummary),
    ("leakscope-diff/1", "`diff --json`.", diff.Diff),
    ("leakscope-liveness/1", "`liveness --json`.", liveness_json),
    ("import", "`import --json`: `capture`, its path, and `files`, a list of these.", files.Imported),
    ("leakscope-symbolize/1", "`symbolize --json`: `schema`, `output` and these.", symbolized.Symbolized),
    ("leakscope-doctor/1", "`doctor --json`.", doctor.doctor_json),
)
"""Of each object: its schema or key, which command prints it, and the function or class that makes it."""

MORE: dict[str, tuple[type, ...]] = {
    "leakscope-liveness/1": (liveness.SourceLiveness, liveness.DocumentRules),
    "leakscope-report/1": (files.Imported,),
}
"""Classes of an object that its code names in a way that is not followed."""
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
    for title, where, keys, classes in _objects():
        parts += [f"## {title}", where, _table(keys)]
        for cls in classes:
            text = " ".join((inspect.getdoc(cls) or "").replace(":data:", "").split())
            parts += [f"### {cls.__name__}", plain(text), _table(_keys(cls))]
    return "\n\n".join(parts)


def documented() -> dict[str, list[Key]]:
    """The keys that the page has of each object and class, by its heading."""
    found: dict[str, list[Key]] = {}
    for title, _, keys, classes in _objects():
        found |= {title: keys} | {cls.__name__: _keys(cls) for cls in classes}
    return found


def _objects() -> Iterator[tuple[str, str, list[Key], list[type]]]:
    """(title, where, keys, classes that it holds and that no object before it does, in the order of their keys)."""
    listed: set[type] = set()
    for title, where, maker in OBJECTS:
        keys = _keys(maker) if isinstance(maker, type) else keys_of_function(maker)
        classes: list[type] = []
        waiting = [*MORE.get(title, ()), *(key.of for key in keys)]
        while waiting:
            cls = waiting.pop(0)
            if cls is not None and cls not in listed:
                listed.add(cls)
                classes.append(cls)
                waiting += [key.of for key in _keys(cls)]
        yield title, where, keys, classes


def _keys(cls: type) -> list[Key]:
    return keys_of_class(cls) + ADDED.get(cls.__name__, [])


def _table(keys: list[Key]) -> str:
    return table(("key", "type", "meaning"), [(f"`{key.name}`", key.kind, plain(key.meaning)) for key in keys])
