"""What a leak test is asked to do: from a marker, the ini file and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from leakscope.errors import BadInputError
from leakscope.model.words import LAYERS
from leakscope.quantities import size_bytes

MIN_REPEAT = 4  # leakscope.detect.growth.MIN_ITERATIONS, without its imports


@dataclass(frozen=True)
class Settings:
    """``repeat`` iterations are judged after ``warmup`` ones; together they may leave ``max_growth_bytes`` behind
    (None: any amount that is no leak). ``malloc``: record the heap too."""

    repeat: int = 20
    warmup: int = 5
    max_growth_bytes: int | None = None
    layers: tuple[str, ...] = LAYERS
    malloc: bool = True

    @property
    def heap(self) -> bool:
        """Whether libc's malloc is recorded."""
        return self.malloc and "host" in self.layers


ARGUMENTS = ("max_growth", "layers", "repeat", "warmup", "malloc")


def settings(values: Mapping[str, Any], positional: tuple[Any, ...] = ()) -> Settings:
    """Settings of marker arguments (or ini values, which are text). Raises BadInputError, one line each."""
    if positional:
        raise BadInputError(f"takes no positional arguments, was given {positional[0]!r}; name it: {_known()}")
    unknown = [name for name in values if name not in ARGUMENTS]
    if unknown:
        raise BadInputError(f"no argument {unknown[0]!r}; there are {_known()}")
    chosen: dict[str, Any] = {}
    for name, least in (("repeat", MIN_REPEAT), ("warmup", 0)):
        if name in values:
            chosen[name] = _whole(name, values[name], least)
    if values.get("max_growth") is not None:
        chosen["max_growth_bytes"] = _size(values["max_growth"])
    if "layers" in values:
        chosen["layers"] = _layers(values["layers"])
    if "malloc" in values:
        if not isinstance(values["malloc"], bool):
            raise BadInputError(f"malloc={values['malloc']!r}: needs True or False")
        chosen["malloc"] = values["malloc"]
    return Settings(**chosen)


def _known() -> str:
    return ", ".join(ARGUMENTS)


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInputError(f"{name}={value!r}: needs a whole number of at least {least}")
    return value


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise BadInputError(f"max_growth={value!r}: needs a size such as 65536, '64KiB' or '1MiB'")
    try:
        return size_bytes(value, "max_growth")
    except BadInputError:
        raise BadInputError(f"max_growth={value!r}: needs a size such as 65536, '64KiB' or '1MiB'") from None


def _layers(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or not names:
        raise BadInputError(f"layers={value!r}: needs a list of {', '.join(LAYERS)}")
    wrong = [name for name in names if name not in LAYERS]
    if wrong:
        raise BadInputError(f"layers={value!r}: no layer {wrong[0]!r}; the layers are {', '.join(LAYERS)}")
    return tuple(layer for layer in LAYERS if layer in names)


def to_json(chosen: Settings) -> dict[str, Any]:
    """Plain JSON types."""
    return {field.name: getattr(chosen, field.name) for field in fields(chosen)} | {"layers": list(chosen.layers)}


def from_json(value: Mapping[str, Any]) -> Settings:
    """Back from :func:`to_json`."""
    return Settings(**{**value, "layers": tuple(value["layers"])})
