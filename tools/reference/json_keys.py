"""Keys, types and meanings of JSON objects, from the functions that make them.

Keys are read from the code of ``to_json`` (the dictionary that it returns), types from the fields that they show,
meanings from the comments of these fields. What this cannot read raises, so that no key is left out without a word.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tools.reference.comments import Comments

LINK = "](#"
LEFT_OUT = "left out where there is none"
SCALARS = {str: "text", int: "number", float: "number", bool: "true or false", object: "any"}


GIVEN: dict[tuple[str, str], tuple[str, str]] = {
    ("report_json", "inputs"): ("list of objects", "each capture, and each [imported file](#imported)"),
    ("liveness_json", "inputs"): ("list of objects", "as in leakscope-report/1"),
    ("liveness_json", "sources"): ("list of [SourceLiveness](#sourceliveness)", "one a source"),
    ("liveness_json", "graph"): ("object or null", "node-link form of networkx; null where it has too many nodes"),
    ("Growth", "per_unit"): (
        "object",
        "`unit`, a running count of work, and `bytes` for each unit of it; left out where unknown",
    ),
    ("Touches", "idle"): (
        "list of objects",
        "`seconds`, and `bytes` that were not touched for as long; left out as above",
    ),
    ("Row", "self.unit"): ("number or null", "the key is `count`, `bytes` or `ns`: what is measured"),
    ("Calibrated", "z_rule"): ("object", "`alarms`, `rebaselines`, `swallowed_bytes`, `log` of `t_s` and `bytes`"),
    ("Calibrated", "robust"): (
        "object",
        "`offset_bytes`, `mad_bytes`, `calibrated_from_s`, `calibrated_until_s`, `settled`, `rebaselines`, "
        "`swallowed_bytes`, `log` of `t_s` and `bytes`",
    ),
    ("StoreAudit", "largest"): ("list of objects", "`object`, `bytes`, `type`"),
    ("StoreAudit", "memory"): ("list of objects", "`what`, `bytes`"),
    ("Imported", "path"): ("text", "of a live source its address"),
    ("Imported", "rows"): ("object of number", "by table"),
    ("Imported", "facts"): ("object", "what the file says of itself, by kind of file"),
    ("Gate", "counts"): ("object of number", "checks by outcome: fail, inconclusive, suppressed, known, pass"),
    ("Difference", "work"): ("object", "`unit`, `base`, `head`, `ratio`"),
    ("SoakSummary", "first_alarm_s"): ("number or null", "when the first look alarmed"),
    ("Diff", "sites"): (
        "list of [SiteDiff](#sitediff)",
        "those that differ beyond chance, that gained most bytes first",
    ),
    ("Diff", "sites_unchanged"): ("number", ""),
    ("CounterDiff", "a"): ("object or null", "`first`, `last`, `peak`, `rise`, `rate`, `rate_low`, `rate_high`"),
    ("CounterDiff", "b"): ("object or null", "the same"),
    ("SourceLiveness", "classes"): ("object", "by class: `objects`, `bytes`, `share` of all objects"),
    ("SourceLiveness", "windows"): ("list of objects", "`t_s`; `bytes` and `objects` by class at that time"),
    ("SourceLiveness", "pools"): ("list of [Pool](#pool)", "with `fragmentation`, 1 - largest free block / free bytes"),
    ("DocumentRules", "faults"): ("list of text", "known faults of that scheme"),
    ("doctor_json", "recording_possible"): ("true or false", ""),
    ("doctor_json", "loader"): ("text or null", "bcc or core; null where none can be used"),
    ("doctor_json", "loader_reason"): ("text", ""),
    ("doctor_json", "platform"): ("text", "debian, fedora, container or kubernetes"),
}
"""What code does not show: (function or class, key) → (type, meaning)."""


@dataclass(frozen=True)
class Key:
    """One key of an object; dots lead into objects within it. ``of``: the class whose objects it holds."""

    name: str
    kind: str
    meaning: str
    of: type | None = None


@cache
def keys_of_class(cls: type) -> list[Key]:
    """Keys of what ``to_json`` of a result class returns; its fields where it has none."""
    method = vars(cls).get("to_json")
    if method is None:
        return _fields(cls)
    return keys_of_function(method, cls)


def keys_of_function(function: Callable[..., Any], cls: type | None = None) -> list[Key]:
    """Keys of the object that a function returns. Raises ValueError for a form that is not known here."""
    return list({key.name: key for key in _Reader(function, cls).read()}.values())


def _fields(cls: type) -> list[Key]:
    hints, comments = _hints(cls), _field_comments(cls)
    given = {field.name: GIVEN.get((cls.__name__, field.name)) for field in fields(cls)}
    found = {name: given[name] or (_type_text(hints[name]), comments.get(name, "")) for name in given}
    return [Key(name, *told, _class_in(hints[name]) if LINK in told[0] else None) for name, told in found.items()]


class _Reader:
    """Reads the code of one function that makes an object."""

    def __init__(self, function: Callable[..., Any], cls: type | None) -> None:
        self.name = cls.__name__ if cls else function.__name__
        self.globals = function.__globals__
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(definition, ast.FunctionDef)
        self.body = definition
        hints = typing.get_type_hints(function, localns=_Names(function.__globals__))
        self.shown: dict[str, type] = {"self": cls} if cls else {}
        self.shown |= {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
        self._name_locals(hints)

    def _name_locals(self, hints: dict[str, Any]) -> None:
        """Names that stand for a field (`growth = self.growth`), and those of loops over some."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Assign):
                target, source = node.targets[0], node.value
            elif isinstance(node, ast.comprehension | ast.For):
                target, source = node.target, node.iter
            else:
                continue
            if isinstance(target, ast.Name) and isinstance(source, ast.Attribute | ast.Name):
                known = self.shown.get(ast.unparse(source))
                found = self._attribute(source) or (hints.get(ast.unparse(source), known),)
                self._show(target.id, found[0])

    def _show(self, name: str, hint: Any) -> None:
        if (cls := _class_in(hint)) is not None:
            self.shown.setdefault(name, cls)

    def read(self) -> Iterator[Key]:
        """Every key, some twice where branches give it."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Return) and node.value and not _is_none(node.value):
                yield from self._object(node.value)

    def _object(self, node: ast.expr, optional: str = "") -> Iterator[Key]:
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if name is None:
                    yield from self._object(value, optional)
                else:
                    yield from self._key(name, value, optional)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self._object(node.left, optional)
            yield from self._object(node.right, optional)
        elif isinstance(node, ast.IfExp):
            yield from self._object(node.body, LEFT_OUT)
        elif isinstance(node, ast.Name):
            yield from self._local(node.id, optional)
        elif isinstance(node, ast.DictComp):
            yield from self._comprehension(node)
        elif isinstance(node, ast.Call):
            yield from self._made(node, optional)
        else:
            raise ValueError(f"{self.name}: cannot read keys from {ast.unparse(node)}")

    def _key(self, name: ast.expr, value: ast.expr, optional: str) -> Iterator[Key]:
        text = str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)
        if given := GIVEN.get((self.name, text)):
            yield Key(text.removeprefix("self."), *given, of=self._class(value) if LINK in given[0] else None)
            return
        inner = value.elt if isinstance(value, ast.ListComp) else value
        if isinstance(inner, ast.Dict):
            mark = "[]" if isinstance(value, ast.ListComp) else ""
            yield from (Key(f"{text}{mark}.{key.name}", key.kind, key.meaning) for key in self._object(inner))
            return
        kind, meaning = self._value(value)
        yield Key(text, kind, "; ".join(filter(None, (meaning, optional))), self._class(value))

    def _local(self, name: str, optional: str) -> Iterator[Key]:
        for node in ast.walk(self.body):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    yield from self._object(value, optional)
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                    yield from self._object(value, optional)
                case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                    yield from self._object(value, optional)
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=key)], value=value) if (
                    target == name
                ):
                    yield from self._key(key, value, optional)

    def _comprehension(self, node: ast.DictComp) -> Iterator[Key]:
        source = node.generators[0].iter
        if isinstance(source, ast.Call) and ast.unparse(source).endswith(".items()"):
            assert isinstance(source.func, ast.Attribute)
            yield from self._object(source.func.value, LEFT_OUT)
            return
        names = next(
            ast.literal_eval(each.value)
            for each in ast.walk(self.body)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == ast.unparse(source)
        )
        for name in names:
            value = ast.parse(f"self.{name}", mode="eval").body
            yield Key(name, *self._value(value), self._class(value))

    def _made(self, node: ast.Call, optional: str) -> Iterator[Key]:
        if ast.unparse(node.func) == "asdict":
            yield from _fields(self.shown[ast.unparse(node.args[0])])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "to_json":
            cls = self._class(node)
            assert cls
            for key in keys_of_class(cls):
                yield replace(key, meaning="; ".join(filter(None, (key.meaning, optional))))
        else:
            yield from keys_of_function(self.globals[ast.unparse(node.func)])

    def _class(self, node: ast.expr) -> type | None:
        """The result class that an expression shows, by a field or by a name that stands for one."""
        if found := self._attribute(node):
            return _class_in(found[0])
        names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id != "self")
        return next((self.shown[name] for name in names if name in self.shown), None)

    def _value(self, node: ast.expr) -> tuple[str, str]:
        """(type, meaning) of what a key shows."""
        null = " or null" if ast.unparse(node).endswith(" or None") or _may_be_none(node) else ""
        if isinstance(node, ast.Compare):
            return "true or false", ""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("len", "sum"):
            return "number", ""
        if isinstance(node, ast.Constant):
            return f"`{node.value!r}`", ""
        if isinstance(node, ast.Name) and isinstance(value := self.globals.get(node.id), str):
            return f"`{json.dumps(value)}`", ""
        found = self._attribute(node)
        if found is None:
            raise ValueError(f"{self.name}: cannot tell the type of {ast.unparse(node)}; say it in GIVEN")
        kind, meaning = found
        text = _type_text(kind).removesuffix(" or null")
        return f"{text}{null or (' or null' if type(None) in _parts(kind) else '')}", meaning

    def _attribute(self, node: ast.expr) -> tuple[Any, str] | None:
        """(annotation, comment) of the first field or property that an expression shows: `self.verdict.growth`."""
        for each in ast.walk(node):
            path: list[str] = []
            inner: ast.expr = each if isinstance(each, ast.expr) else node
            while isinstance(inner, ast.Attribute):
                path.insert(0, inner.attr)
                inner = inner.value
            path = [name for name in path if name != "to_json"]
            if path and isinstance(inner, ast.Name) and inner.id in self.shown:
                return _member(self.shown[inner.id], path)
        return None


def _member(cls: type, path: list[str]) -> tuple[Any, str] | None:
    name, *rest = path
    member = vars(cls).get(name)
    if isinstance(member, property):
        assert member.fget
        hint, comment = typing.get_type_hints(member.fget)["return"], (member.fget.__doc__ or "").rstrip(".")
    else:
        hint, comment = _hints(cls).get(name), _field_comments(cls).get(name, "")
    if rest:
        inner = _class_in(hint)
        return _member(inner, rest) if inner else None
    return (hint, comment) if hint is not None else None


class _Names(dict[str, Any]):
    """Names for annotations: those of the module, and what it imports for types alone."""

    def __init__(self, module: Mapping[str, Any]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name in self._module:
            return self._module[name]
        return getattr(builtins, name) if hasattr(builtins, name) else _imported_for_types(self._module, name)


def _imported_for_types(module: Mapping[str, Any], name: str) -> Any:
    for node in ast.walk(ast.parse(Path(module["__file__"]).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            return getattr(importlib.import_module(node.module or ""), name)
    return Any


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, localns=_Names(vars(sys.modules[cls.__module__])))


@cache
def _field_comments(cls: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments = Comments(source)
    return {
        node.target.id: comments.of(node)
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _may_be_none(node: ast.expr) -> bool:
    return isinstance(node, ast.IfExp) and (_is_none(node.body) or _is_none(node.orelse))


def _parts(kind: Any) -> tuple[Any, ...]:
    return (kind, *(part for inner in typing.get_args(kind) for part in _parts(inner)))


def _class_in(kind: Any) -> type | None:
    """The first result class in an annotation."""
    return next((part for part in _parts(kind) if isinstance(part, type) and is_dataclass(part)), None)


def _type_text(kind: Any) -> str:
    if kind in SCALARS:
        return SCALARS[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        names = [_type_text(one) for one in inner if one is not type(None)]
        return " or ".join([*names, *(["null"] if type(None) in inner else [])])
    if origin is dict:
        return f"object of {_type_text(inner[1])}" if inner[1] is not Any else "object"
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return f"list of {_type_text(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(_type_text(one) for one in inner)}]"
    if is_dataclass(kind) and isinstance(kind, type):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return "object" if kind is Any or kind is dict else str(getattr(kind, "__name__", kind))
