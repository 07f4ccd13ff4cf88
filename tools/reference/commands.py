"""Page of all commands: arguments, options, defaults, limits and exit codes, from the functions that typer calls.

Read from their signatures and not from ``--help``, which depends on the terminal's width and the release of typer.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, DefaultPlaceholder, OptionInfo

from leakscope.cli.main import VERBS, _load
from leakscope.errors import ExitCode
from tools.reference import plain, table

EVERYWHERE = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.OUTPUT_INCOMPLETE, ExitCode.INTERRUPTED)
BESIDES: dict[str, tuple[tuple[ExitCode, ...], str]] = {
    "record": ((ExitCode.NOT_CAPABLE,), ""),
    "soak": ((ExitCode.NOT_CAPABLE,), ""),
    "doctor": ((ExitCode.NOT_CAPABLE,), ""),
    "check": ((ExitCode.LEAK_FOUND, ExitCode.INCONCLUSIVE), ""),
    "attribute": ((ExitCode.LEAK_FOUND, ExitCode.INCONCLUSIVE), "--exit-code"),
    "cache consistency": ((ExitCode.LEAK_FOUND,), "--exit-code"),
}
"""Exit codes of a command besides those that every one may end with, and the option without which there are none."""

TYPES = {str: "TEXT", int: "N", float: "N", Path: "PATH"}


@dataclass(frozen=True)
class Parameter:
    """One argument or option. ``names``: of an option, a switch's two separated by `` / ``."""

    names: tuple[str, ...]
    metavar: str
    default: str
    help: str
    required: bool


@dataclass(frozen=True)
class Command:
    """One command of the command line, ``cache simulate`` for one of several."""

    name: str
    help: str
    arguments: tuple[Parameter, ...]
    options: tuple[Parameter, ...]

    @property
    def usage(self) -> str:
        """The command line in short."""
        words = ["leakscope", self.name, "[OPTIONS]" if self.options else "", *(one.metavar for one in self.arguments)]
        return " ".join(filter(None, words))


def commands() -> Iterator[Command]:
    """Every command, in the order of ``leakscope --help``."""
    for verb, where in VERBS.items():
        found = _load(where.module, verb)
        if isinstance(found, typer.Typer):
            for one in found.registered_commands:
                assert one.callback
                yield _command(f"{verb} {one.name or one.callback.__name__.replace('_', '-')}", one.callback)
        else:
            yield _command(verb, found)


def exit_codes_of(command: str) -> tuple[ExitCode, ...]:
    """The codes that a command may end with."""
    return tuple(sorted({*EVERYWHERE, *BESIDES.get(command, ((), ""))[0]}))


def commands_page() -> str:
    """Markdown of all commands."""
    found = list(commands())
    parts = ["# Commands", "`leakscope COMMAND --help` prints the same. `-h` is short for `--help`."]
    parts.append(table(("command", "does"), [(_link(one), plain(_short(one))) for one in found]))
    for one in found:
        parts += [f"## {one.name}", f"```usage\n{one.usage}\n```", *_paragraphs(one.help)]
        rows = [(f"`{p.metavar}`", p.default, plain(p.help)) for p in one.arguments]
        rows += [(_names(p), p.default, plain(p.help)) for p in one.options]
        parts.append(table(("argument or option", "default", "meaning"), rows))
        parts.append(_exit_line(one.name))
    return "\n\n".join(parts)


def _exit_line(name: str) -> str:
    codes, option = BESIDES.get(name, ((), ""))
    always = [code for code in exit_codes_of(name) if not (option and code in codes)]
    text = f"Exit codes: {', '.join(str(int(code)) for code in always)}"
    if option:
        text += f"; with `{option}` {' and '.join(str(int(code)) for code in codes)} too"
    return f"{text} ([what they mean](exit-codes.md))."


def _link(command: Command) -> str:
    return f"[`{command.name}`](#{command.name.replace(' ', '-')})"


def _short(command: Command) -> str:
    return VERBS[command.name].help if command.name in VERBS else command.help.split("\n\n")[0]


def _paragraphs(text: str) -> list[str]:
    return [
        f"```text\n{paragraph.removeprefix(chr(8)).strip(chr(10))}\n```"
        if paragraph.startswith("\b")
        else plain(paragraph)
        for paragraph in text.split("\n\n")
    ]


def _names(parameter: Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.names)
    values = " / ".join(f"`{value}`" for value in parameter.metavar.split("|") if value)
    return f"{names} {values}".strip()


def _command(name: str, function: Callable[..., Any]) -> Command:
    hints = typing.get_type_hints(function, include_extras=True)
    arguments, options = [], []
    for parameter in inspect.signature(function).parameters.values():
        kind, info = _annotated(hints[parameter.name])
        if isinstance(info, ArgumentInfo):
            arguments.append(_argument(parameter, kind, info))
        else:
            options.append(_option(parameter, kind, info))
    return Command(name, inspect.cleandoc(function.__doc__ or ""), tuple(arguments), tuple(options))


def _annotated(hint: Any) -> tuple[Any, Any]:
    kind, *metadata = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    info = next((one for one in metadata if isinstance(one, ArgumentInfo | OptionInfo)), OptionInfo())
    return kind, info


def _argument(parameter: inspect.Parameter, kind: Any, info: ArgumentInfo) -> Parameter:
    metavar = info.metavar or parameter.name.upper()
    required = parameter.default is inspect.Parameter.empty
    return Parameter((), metavar, "required" if required else _default(parameter, info), info.help or "", required)


def _option(parameter: inspect.Parameter, kind: Any, info: OptionInfo) -> Parameter:
    base, many = _base(kind)
    # In Annotated the first name stands where an option's default would.
    names = (*((info.default,) if isinstance(info.default, str) else ()), *(info.param_decls or ()))
    if not any(name.startswith("--") for name in names):
        long = f"--{parameter.name.replace('_', '-')}"
        names += (f"{long}/--no-{long[2:]}" if base is bool else long,)
    names = tuple(part.strip() for name in names for part in name.split("/"))
    metavar = "" if base is bool else info.metavar or _type(base)
    text = (info.help or "") + _limits(info)
    if many and "repeatable" not in text:
        text += " Repeatable."
    return Parameter(names, metavar, _default(parameter, info), text, parameter.default is inspect.Parameter.empty)


def _base(kind: Any) -> tuple[Any, bool]:
    """The type without None and list, and whether it was a list."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _base(next(one for one in typing.get_args(kind) if one is not type(None)))
    if typing.get_origin(kind) in (list, tuple):
        return typing.get_args(kind)[0], True
    return kind, False


def _type(base: Any) -> str:
    if isinstance(base, type) and issubclass(base, Enum):
        return "|".join(str(one.value) for one in base)
    return TYPES[base]


def _limits(info: OptionInfo) -> str:
    low, high = info.min, info.max
    if low is None and high is None:
        return ""
    if high is None:
        return f" At least {low:g}."
    return f" {low:g} to {high:g}." if low is not None else f" At most {high:g}."


def _default(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info.show_default, str):
        return plain(info.show_default)
    value = parameter.default.value if isinstance(parameter.default, DefaultPlaceholder) else parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value is False or value == "":
        return ""
    if value is True:
        return "on"
    return f"`{value.value if isinstance(value, Enum) else value}`"
