"""pprof's ``profile.proto``, gzipped: for ``go tool pprof``, Grafana Pyroscope, Parca and others.

Message and field numbers: https://github.com/google/pprof/blob/main/proto/profile.proto. All measures are in one file;
``-sample_index`` chooses. Layer, kind and API are labels: ``-tagfocus gpu``, ``-tagroot layer``.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence

from leakscope.report.export import protobuf as pb
from leakscope.report.export.stacks import StackValue, frame_parts
from leakscope.report.text import printable

SAMPLE_TYPES = (
    ("live_objects", "count"),
    ("live_space", "bytes"),
    ("growth_space_per_hour", "bytes"),
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
)
_DEFAULT = {"live": "live_space", "growth": "growth_space_per_hour", "allocated": "alloc_space"}

# Profile
SAMPLE_TYPE, SAMPLE, LOCATION, FUNCTION, STRING_TABLE = 1, 2, 4, 5, 6
DURATION_NANOS, COMMENT, DEFAULT_SAMPLE_TYPE = 10, 13, 14


class _Tables:
    """Strings, functions and locations of a profile; ids count from 1, string 0 is ''."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[str, int] = {}
        self.encoded: list[bytes] = []

    def string(self, text: str) -> int:
        return self.strings.setdefault(printable(text), len(self.strings))

    def location(self, frame: str) -> int:
        if frame not in self._locations:
            name, file, line = frame_parts(frame)
            function = self._functions.get((name, file))
            if function is None:
                function = self._functions[name, file] = len(self._functions) + 1
                at = self.string(name)
                fields = pb.integer(1, function) + pb.integer(2, at) + pb.integer(3, at)
                self.encoded.append(pb.message(FUNCTION, fields + pb.integer(4, self.string(file))))
            self._locations[frame] = number = len(self._locations) + 1
            of_line = pb.message(4, pb.integer(1, function) + pb.integer(2, line))
            self.encoded.append(pb.message(LOCATION, pb.integer(1, number) + of_line))
        return self._locations[frame]


def pprof(values: Iterable[StackValue], of: str, *, duration_ns: int = 0, comments: Sequence[str] = ()) -> bytes:
    """The file: one sample a site, innermost frame first as the format has it. ``of`` is the default measure."""
    tables = _Tables()
    types = [
        pb.message(SAMPLE_TYPE, pb.integer(1, tables.string(name)) + pb.integer(2, tables.string(unit)))
        for name, unit in SAMPLE_TYPES
    ]
    samples = []
    for value in values:
        amounts = (value.live_objects, value.live, value.growth, value.allocated_objects, value.allocated)
        if not any(amounts):
            continue
        where = pb.packed(1, [tables.location(frame) for frame in reversed(value.frames)])
        labels = {"evidence": value.source, "layer": value.layer, "kind": value.kind, "api": value.api}
        tagged = [
            pb.message(3, pb.integer(1, tables.string(key)) + pb.integer(2, tables.string(text)))
            for key, text in labels.items()
            if text
        ]
        samples.append(pb.message(SAMPLE, where + pb.packed(2, amounts) + b"".join(tagged)))
    noted = [tables.string(comment) for comment in comments]
    end = [
        pb.integer(DURATION_NANOS, duration_ns),
        pb.packed(COMMENT, noted) if noted else b"",
        pb.integer(DEFAULT_SAMPLE_TYPE, tables.string(_DEFAULT[of])),
    ]
    strings = [pb.text(STRING_TABLE, string) for string in tables.strings]
    return gzip.compress(b"".join([*types, *samples, *tables.encoded, *strings, *end]), mtime=0)
