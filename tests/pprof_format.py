"""pprof's profile.proto for the protobuf library, field by field, and files read through it.

Independent of leakscope's own writer: the library decodes, and knows the format from here alone.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_INT64, _UINT64, _BOOL, _STRING, _MESSAGE = 3, 4, 8, 9, 11
_MESSAGES: dict[str, list[tuple[str, int, int | str, bool]]] = {
    "Profile": [
        ("sample_type", 1, "ValueType", True), ("sample", 2, "Sample", True), ("mapping", 3, "Mapping", True),
        ("location", 4, "Location", True), ("function", 5, "Function", True), ("string_table", 6, _STRING, True),
        ("drop_frames", 7, _INT64, False), ("keep_frames", 8, _INT64, False), ("time_nanos", 9, _INT64, False),
        ("duration_nanos", 10, _INT64, False), ("period_type", 11, "ValueType", False), ("period", 12, _INT64, False),
        ("comment", 13, _INT64, True), ("default_sample_type", 14, _INT64, False),
    ],
    "ValueType": [("type", 1, _INT64, False), ("unit", 2, _INT64, False)],
    "Sample": [("location_id", 1, _UINT64, True), ("value", 2, _INT64, True), ("label", 3, "Label", True)],
    "Label": [("key", 1, _INT64, False), ("str", 2, _INT64, False), ("num", 3, _INT64, False)],
    "Mapping": [("id", 1, _UINT64, False)],
    "Location": [
        ("id", 1, _UINT64, False), ("mapping_id", 2, _UINT64, False), ("address", 3, _UINT64, False),
        ("line", 4, "Line", True), ("is_folded", 5, _BOOL, False),
    ],
    "Line": [("function_id", 1, _UINT64, False), ("line", 2, _INT64, False)],
    "Function": [
        ("id", 1, _UINT64, False), ("name", 2, _INT64, False), ("system_name", 3, _INT64, False),
        ("filename", 4, _INT64, False), ("start_line", 5, _INT64, False),
    ],
}  # fmt: skip


def _profile_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools.profiles", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            one = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                one.type, one.type_name = _MESSAGE, f".perftools.profiles.{kind}"
            else:
                one.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.profiles.Profile"))


def read_pprof(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The message, and its samples: frames outermost first as (name, file, line), values and labels by name."""
    profile = _profile_class()()
    profile.ParseFromString(gzip.decompress(path.read_bytes()))
    strings = list(profile.string_table)
    functions = {f.id: (strings[f.name], strings[f.filename]) for f in profile.function}
    locations = {at.id: (*functions[at.line[0].function_id], at.line[0].line) for at in profile.location}
    types = [strings[t.type] for t in profile.sample_type]
    samples = [
        {
            "frames": [locations[at] for at in reversed(sample.location_id)],
            **dict(zip(types, sample.value, strict=True)),
            **{strings[label.key]: strings[label.str] for label in sample.label},
        }
        for sample in profile.sample
    ]
    return profile, samples
