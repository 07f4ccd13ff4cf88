"""Budgets: how much may be kept, by layer, by site and by counter. Read from ``leakscope.toml``.

[layer.gpu]                    # kernel, host, gpu
kept = "64MiB"                 # bytes kept at the end
rate = "1MiB/h"                # mean growth after the warm-up
per_unit = "1KiB"              # bytes kept for each unit of work…
unit = "requests_total"        # …counted by a *_total counter or an NVTX range

[[site]]                       # all sites that match, together; also layer = "…"
name = "the prefix cache"
frames = "PrefixCache.*"       # glob on one frame; or regex = "…"; or cache = "kmalloc-*"
rate = "1MiB/h"

[[counter]]
name = "rss"                   # glob on names
peak = "2GiB"                  # highest reading
growth = "10MiB"               # rise after the warm-up
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from leakscope.errors import BadInputError
from leakscope.model.frames import parsed_frame
from leakscope.model.results import Site
from leakscope.model.words import LAYERS
from leakscope.quantities import amount, rate_per_s

MAX_BYTES = 1 << 20
MAX_RULES = 1000
MAX_PATTERN = 1000
LIMITS = {"layer": ("kept", "rate", "per_unit"), "site": ("kept", "objects", "rate", "per_unit"),
          "counter": ("peak", "growth", "rate", "per_unit")}  # fmt: skip
"""What each kind of rule can limit."""
WRAPPERS = "wrappers"
"""A table of the same file that is not about budgets (leakscope.correlate.wrapper_rules)."""
OTHER_KEYS = {"layer": ("unit",), "site": ("name", "frames", "regex", "cache", "layer", "unit"),
              "counter": ("name", "unit")}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """One rule. ``limits``: what is limited → the limit, in bytes, objects, or bytes a second (or a unit of work)."""

    what: str  # layer, site, counter
    name: str
    limits: tuple[tuple[str, float], ...]
    unit: str = ""
    layer: str = ""
    frames: str = ""
    regex: str = ""
    cache: str = ""
    where: str = ""  # file:line

    @cached_property
    def _frame(self) -> re.Pattern[str] | None:
        source = self.regex or (fnmatch.translate(self.frames) if self.frames else "")
        return re.compile(source) if source else None

    def covers(self, site: Site) -> bool:
        """Whether a site falls under this rule."""
        if self.what == "counter" or (self.layer and site.layer != self.layer):
            return False
        if self.cache and not fnmatch.fnmatchcase(site.slab_cache, self.cache):
            return False
        if self._frame is None:
            return True
        # A glob is of a whole name: of the frame, or of its function alone. A regex is searched.
        look = self._frame.search if self.regex else self._frame.match
        return any(look(name) for text in site.stack for name in (text, parsed_frame(text)[0]))

    def names(self, counter: str) -> bool:
        """Whether a counter falls under this rule; with or without its ending ``_bytes``."""
        short = self.name.removesuffix("_bytes")
        return self.what == "counter" and fnmatch.fnmatchcase(counter.removesuffix("_bytes"), short)


def parse_budgets(text: str, path: str) -> list[Budget]:
    """The rules of a file's text, in its order. Raises BadInputError: one line that says where and what."""
    if len(text) > MAX_BYTES:
        raise BadInputError(f"{path}: longer than {MAX_BYTES:,} characters; no file of budgets is")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: not TOML: {str(error).splitlines()[0]}") from None
    lines = _Lines(text, path)
    for key in data:
        if key not in (*LIMITS, WRAPPERS):
            raise BadInputError(f"{lines.of(key)}: unknown key {key!r}; known are {', '.join((*LIMITS, WRAPPERS))}")
    rules: list[Budget] = []
    for layer, table in _table(data.get("layer", {}), lines.of("layer"), "[layer.NAME]").items():
        at = lines.of("layer", layer)
        if layer not in LAYERS:
            raise BadInputError(f"{at}: no layer {layer!r}; the layers are {', '.join(LAYERS)}")
        rules.append(_rule("layer", layer, _table(table, at, f"[layer.{layer}]"), lines, ("layer", layer)))
    for what in ("site", "counter"):
        tables = data.get(what, [])
        if not isinstance(tables, list):
            raise BadInputError(f"{lines.of(what)}: write [[{what}]], a table a rule")
        for number, table in enumerate(tables):
            place = (what, str(number))
            rules.append(_rule(what, "", _table(table, lines.of(*place), f"[[{what}]]"), lines, place))
    if len(rules) > MAX_RULES:
        raise BadInputError(f"{path}: more than {MAX_RULES:,} budgets")
    if not rules:
        raise BadInputError(f"{path}: has no budgets; write [layer.NAME], [[site]] or [[counter]]")
    return rules


def _rule(what: str, name: str, table: Mapping[str, Any], lines: _Lines, place: tuple[str, ...]) -> Budget:
    at = lines.of(*place)
    limits: list[tuple[str, float]] = []
    texts: dict[str, str] = {}
    for key, value in table.items():
        where = f"{lines.of(*place, key)}: {key}"
        if key in LIMITS[what]:
            limits.append((key, rate_per_s(value, where) if key == "rate" else amount(value, where)))
        elif key in OTHER_KEYS[what]:
            if not isinstance(value, str) or not value or len(value) > MAX_PATTERN:
                raise BadInputError(f"{where}: needs a text of 1 to {MAX_PATTERN:,} characters")
            texts[key] = value
        else:
            known = ", ".join((*LIMITS[what], *OTHER_KEYS[what]))
            raise BadInputError(f"{lines.of(*place, key)}: unknown key {key!r} in {what}; known are {known}")
    if not limits:
        raise BadInputError(f"{at}: this {what} has no limit; give one of {', '.join(LIMITS[what])}")
    if "per_unit" in table and "unit" not in texts:
        raise BadInputError(f"{at}: per_unit needs unit, the count of work to divide by, such as requests_total")
    if what == "counter" and "name" not in texts:
        raise BadInputError(f"{at}: this counter has no name")
    if what == "site":
        if not {"frames", "regex", "cache"} & texts.keys():
            raise BadInputError(f"{at}: this site says of no site; give frames, regex or cache")
        if {"frames", "regex"} <= texts.keys():
            raise BadInputError(f"{at}: give frames or regex, not both")
    layer = name if what == "layer" else texts.get("layer", "")
    if layer and layer not in LAYERS:
        raise BadInputError(f"{lines.of(*place, 'layer')}: no layer {layer!r}; the layers are {', '.join(LAYERS)}")
    try:
        re.compile(texts.get("regex", ""))
    except (re.error, RecursionError) as error:
        raise BadInputError(f"{lines.of(*place, 'regex')}: regex: {error}") from None
    shown = name or texts.get("name") or texts.get("frames") or texts.get("regex") or texts.get("cache", "")
    return Budget(
        what,
        shown,
        tuple(sorted(limits)),
        texts.get("unit", ""),
        layer,
        texts.get("frames", ""),
        texts.get("regex", ""),
        texts.get("cache", ""),
        at,
    )


def _table(value: object, at: str, how: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadInputError(f"{at}: write a table, {how}")
    return value


class _Lines:
    """Where keys stand: tomllib does not say. Headers and keys at the begin of a line are found, others are not."""

    _HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
    _KEY = re.compile(r"\s*([\w\"'.\- ]+?)\s*=")

    def __init__(self, text: str, path: str) -> None:
        self._path = path
        self._at: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        counts: dict[tuple[str, ...], int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if header := self._HEADER.fullmatch(line):
                table = self._parts(header[2])
                self._at.setdefault(table[:1], number)
                if header[1] == "[[":
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, str(counts[table]))
                self._at.setdefault(table, number)
            elif key := self._KEY.match(line):
                self._at.setdefault((*table, *self._parts(key[1])), number)

    @staticmethod
    def _parts(text: str) -> tuple[str, ...]:
        return tuple(part.strip().strip("\"'") for part in text.split("."))

    def of(self, *place: str) -> str:
        """``file:line`` of a key, of the table around it, or the file alone."""
        for length in range(len(place), 0, -1):
            if (number := self._at.get(place[:length])) is not None:
                return f"{self._path}:{number}"
        return self._path
