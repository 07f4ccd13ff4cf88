"""Wrappers that a user names beside the built-in table (:mod:`leakscope.correlate.wrappers`): a TOML file.

[wrappers]
functions = ["xmalloc", "arena_*"]      # names, with * and ?
modules = ["libarena.so*"]              # file names of libraries and programs
files = ["*/mylib/pool.py"]             # Python files
culprits = ["_PyObject_Malloc"]         # functions that the built-in table folds and that shall be named

A frame that matches is passed over when the culprit is looked for, as libc and the interpreter are.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from leakscope.errors import BadInputError

MAX_BYTES = 1 << 20
MAX_RULES = 1000
MAX_PATTERN = 500
TABLE = "wrappers"
KEYS = ("functions", "modules", "files", "culprits")


@dataclass(frozen=True)
class WrapperRules:
    """Patterns that match in full; None matches nothing."""

    functions: re.Pattern[str] | None = None
    modules: re.Pattern[str] | None = None
    files: re.Pattern[str] | None = None
    culprits: re.Pattern[str] | None = None

    def decides(self, function: str, module: str, file: str, python: bool) -> bool | None:
        """Whether the frame is a wrapper; None where these rules say nothing. ``module`` is a file name alone."""
        if _matches(self.culprits, function):
            return False
        where = _matches(self.files, file) if python else _matches(self.modules, module)
        return True if where or _matches(self.functions, function) else None


def _matches(pattern: re.Pattern[str] | None, text: str) -> bool:
    return pattern is not None and bool(text) and pattern.match(text) is not None


NO_RULES = WrapperRules()
_active: ContextVar[WrapperRules] = ContextVar("wrapper_rules", default=NO_RULES)


def active_rules() -> WrapperRules:
    """The rules of the report that is being made."""
    return _active.get()


@contextmanager
def using(rules: WrapperRules) -> Iterator[None]:
    """Ask ``rules`` before the built-in table inside."""
    token = _active.set(rules)
    try:
        yield
    finally:
        _active.reset(token)


def parse_rules(text: str, path: str) -> WrapperRules | None:
    """The ``[wrappers]`` of the text of a TOML file, None where it has none; other tables in it are of others.

    Raises BadInputError: one line that says what is wrong and where.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: not TOML: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    table = data.get(TABLE)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise BadInputError(f"{path}: {TABLE} is no table; write [{TABLE}] and below it {', '.join(KEYS)}")
    for key in table:
        if key not in KEYS:
            raise BadInputError(f"{path}: [{TABLE}] has no {key!r}; known are {', '.join(KEYS)}")
    return WrapperRules(**{key: _pattern(path, key, table[key]) for key in KEYS if key in table})


def _pattern(path: str, key: str, names: object) -> re.Pattern[str] | None:
    if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) <= MAX_PATTERN for name in names):
        raise BadInputError(f"{path}: {key} is a list of names of 1 to {MAX_PATTERN} characters")
    if len(names) > MAX_RULES:
        raise BadInputError(f"{path}: more than {MAX_RULES:,} {key}")
    return _of_names(names)


def _of_names(names: Sequence[str]) -> re.Pattern[str] | None:
    """One pattern for all; brackets are no sets of characters, as C++ names have them."""
    if not names:
        return None
    return re.compile("|".join(fnmatch.translate(name.replace("[", "[[]")) for name in names))
