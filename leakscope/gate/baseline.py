"""Baseline files: what a run keeps, small enough to be committed and read in a diff.

One JSON object; each site stands on a line of its own. The same evidence gives the same bytes: there is no path, no
time and no version in it but that of the format.
"""

from __future__ import annotations

import json
from typing import Any

from leakscope.detect.profile import Known, Profile, Side
from leakscope.errors import BadInputError
from leakscope.model.results import Growth
from leakscope.model.runs import Run

SCHEMA = "leakscope-baseline/1"
MAX_BYTES = 64 << 20
MAX_SITES = 100_000
MIN_ALLOCATED = 20
"""A site that keeps nothing is written from so many allocations on."""


def looks_like_baseline(head: bytes) -> bool:
    """Whether a file that begins so is a baseline file."""
    return head.lstrip()[:200].startswith(b"{") and b'"leakscope-baseline/' in head[:200]


def baseline_text(profile: Profile) -> str:
    """The text of a baseline file."""
    run = profile.run
    totals = [_line({"name": name, "count": _number(value)}) for name, value in sorted(run.totals.items())]
    marks = [_line({"name": name, "count": count}) for name, count in sorted(run.marks.items())]
    leaks = [_line(_leak(known)) for known in sorted(profile.leaks, key=lambda k: (k.layer, k.what))]
    sites = [_line(_site(side)) for _, side in sorted(profile.sides.items()) if is_told(side)]
    tables = (("totals", totals), ("marks", marks), ("leaks", leaks), ("sites", sites))
    parts = [
        f' "schema": {json.dumps(SCHEMA)}',
        f' "duration_s": {json.dumps(round(run.duration_s, 3))}',
        *(_rows(name, rows) for name, rows in tables),
    ]  # fmt: skip
    return "{\n" + ",\n".join(parts) + "\n}\n"


def is_told(side: Side) -> bool:
    """Not what kept nothing and did little: to a comparison it is as if it were not there."""
    return bool(side.kept_objects) or side.allocated_objects >= MIN_ALLOCATED


def _rows(name: str, rows: list[str]) -> str:
    return f' "{name}": []' if not rows else f' "{name}": [\n  ' + ",\n  ".join(rows) + "\n ]"


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False)


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 6)


def _site(side: Side) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": side.layer, "kind": side.kind, "stack": list(side.frames)}
    row |= {"cache": side.slab_cache} if side.slab_cache else {}
    row |= {"kept_objects": side.kept_objects, "kept_bytes": side.kept_bytes}
    return row | {"allocated_objects": side.allocated_objects, "allocated_bytes": side.allocated_bytes}


def _leak(known: Known) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": known.layer, "what": list(known.what), "class": known.kind}
    return row | ({"growth": known.growth.to_json()} if known.growth else {})


def parse_baseline(text: str, path: str) -> Profile:
    """The profile in a baseline file. Raises BadInputError: one line that says what is wrong."""
    if len(text) > MAX_BYTES:
        raise BadInputError(f"{path}: larger than {MAX_BYTES >> 20} MiB; no baseline file is")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not JSON: {str(error).splitlines()[0]}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        if isinstance(schema, str) and schema.startswith("leakscope-baseline/"):
            raise BadInputError(f"{path}: is of {schema}, this leakscope reads {SCHEMA}; update one of the two")
        raise BadInputError(f"{path}: not a baseline file of leakscope")
    try:
        return _profile(data, path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise BadInputError(f"{path}: damaged baseline file: {what}; make it anew with baseline update") from None


def _profile(data: dict[str, Any], path: str) -> Profile:
    if len(data["sites"]) > MAX_SITES:
        raise BadInputError(f"{path}: more than {MAX_SITES:,} sites")
    sides = {}
    for row in data["sites"]:
        frames = tuple(_text(frame) for frame in row["stack"])
        key = (_text(row["layer"]), _text(row["kind"]), *frames)
        if key in sides:
            raise ValueError(f"two sites with the stack {';'.join(frames)[:200]}")
        sides[key] = Side(
            key,
            frames,
            frames[-1] if frames else "",
            _text(row.get("cache", "")),
            kept_objects=_count(row["kept_objects"]),
            kept_bytes=_count(row["kept_bytes"]),
            allocated_objects=_count(row["allocated_objects"]),
            allocated_bytes=_count(row["allocated_bytes"]),
        )
    leaks = tuple(
        Known(
            _text(row["layer"]), tuple(_text(t) for t in row["what"]), _text(row["class"]), _growth(row.get("growth"))
        )
        for row in data["leaks"]
    )
    totals = {_text(row["name"]): _float(row["count"]) for row in data["totals"]}
    marks = {_text(row["name"]): _count(row["count"]) for row in data["marks"]}
    end_ns = round(_float(data["duration_s"]) * 1e9)
    return Profile(Run(end_ns=end_ns, totals=totals, marks=marks), sides, leaks)


def _known(row: dict[str, Any]) -> Known:
    what = tuple(_text(part) for part in row["what"])
    return Known(_text(row["layer"]), what, _text(row["class"]), _growth(row.get("growth")))


def _growth(row: dict[str, Any] | None) -> Growth | None:
    if row is None:
        return None
    unit = row.get("per_unit")
    per_unit = (_text(unit["unit"]), _float(unit["bytes"])) if unit else None
    low, value, high = (_float(row[name], least=-1e18) for name in ("ci_low", "bytes_per_s", "ci_high"))
    return Growth(_text(row["counter"]), value, low, high, per_unit)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.60} is no count")
    return value


def _float(value: object, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e18:
        raise ValueError(f"{value!r:.60} is no number in its range")
    return float(value)
