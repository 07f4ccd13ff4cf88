"""speedscope's own file format: a sampled profile for each layer, all with the same frames.

The format: https://www.speedscope.app/file-format-schema.json, explained in speedscope's wiki ("Importing from custom
sources").
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from leakscope import __version__
from leakscope.report.export.stacks import MEASURES, StackValue, frame_parts
from leakscope.report.text import printable

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(values: Iterable[StackValue], of: str, name: str) -> bytes:
    """The file; profiles with most bytes first. Without anything to show it has one empty profile."""
    what, unit = MEASURES[of]
    frames: list[dict[str, Any]] = []
    index: dict[str, int] = {}
    profiles: dict[tuple[str, str], tuple[list[list[int]], list[int]]] = {}
    values = list(values)
    several = len({value.source for value in values}) > 1
    for value in values:
        if not (weight := value.value(of)):
            continue
        samples, weights = profiles.setdefault((value.source, value.layer), ([], []))
        samples.append([_frame(text, index, frames) for text in value.frames])
        weights.append(weight)
    ranked = sorted(profiles.items(), key=lambda item: (-sum(item[1][1]), item[0])) or [(("", "nothing"), ([], []))]
    return json.dumps(
        {
            "$schema": SCHEMA,
            "exporter": f"leakscope@{__version__}",
            "name": printable(name),
            "activeProfileIndex": 0,
            "shared": {"frames": frames},
            "profiles": [
                {
                    "type": "sampled",
                    "name": printable(f"{source}: {layer}, {what}" if several else f"{layer}, {what}"),
                    "unit": unit,
                    "startValue": 0,
                    "endValue": sum(weights),
                    "samples": samples,
                    "weights": weights,
                }
                for (source, layer), (samples, weights) in ranked
            ],
        },
        separators=(",", ":"),
    ).encode()


def _frame(text: str, index: dict[str, int], frames: list[dict[str, Any]]) -> int:
    if text not in index:
        name, file, line = frame_parts(text)
        index[text] = len(frames)
        frames.append({"name": name} | ({"file": file} if file else {}) | ({"line": line} if line else {}))
    return index[text]
