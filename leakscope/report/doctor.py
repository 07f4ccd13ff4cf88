"""How ``leakscope doctor`` looks: a table, the commands that mend, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leakscope.model.capability import PLATFORMS, Capability, Platform

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "leakscope-doctor/1"
_STYLES = {"ok": "green", "degraded": "yellow", "missing": "red", "unknown": "magenta"}


def doctor_json(
    capabilities: Sequence[Capability], platform: Platform, loader: tuple[str, str], possible: bool
) -> dict[str, Any]:
    """One object: ``schema``, ``recording_possible``, ``loader`` (null where none), ``loader_reason``, ``platform``
    and ``capabilities`` of {name, state, detail, needed_for, required, remedies {platform: command}}.

    ``loader`` is the name of the one that is taken (empty where none can be) and why.
    """
    return {
        "schema": SCHEMA,
        "recording_possible": possible,
        "loader": loader[0] or None,
        "loader_reason": loader[1],
        "platform": platform,
        "capabilities": [
            {
                "name": capability.name,
                "state": capability.state,
                "detail": capability.detail,
                "needed_for": capability.needed_for,
                "required": capability.required,
                "remedies": dict(capability.remedies),
            }
            for capability in capabilities
        ],
    }


def print_doctor(
    console: Console, capabilities: Sequence[Capability], platform: Platform, loader: tuple[str, str], possible: bool
) -> None:
    """Print the table of capabilities, the commands for what is not ok, and the conclusion last.

    ``loader`` as in :func:`doctor_json`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state")
    table.add_column("capability", no_wrap=True)
    table.add_column("found", overflow="fold")
    for capability in capabilities:
        found = Text(_printable(capability.detail))
        if capability.state != "ok":
            found.append(f"\nneeded for {_printable(capability.needed_for)}", "dim")
        name = capability.name + (" *" if capability.required else "")
        table.add_row(Text(capability.state, _style(capability)), Text(_printable(name)), found)
    console.print(table)
    console.print("* without it nothing can be recorded", style="dim")
    for name, commands in _commands(capabilities, platform).items():
        here = name == platform
        console.print(Text(f"\n{PLATFORMS[name]}{' (here)' if here else ''}", "bold" if here else "dim"))
        for command, mended in commands.items():
            line = Text(f"  {_printable(command)}", "bold" if here else "dim")
            line.append(f"  # {_printable(', '.join(mended))}", "dim")
            console.print(line, soft_wrap=True)  # a command must survive copying
    console.print()
    console.print(
        Text(_printable(_conclusion(capabilities, loader, possible)), "bold green" if possible else "bold red")
    )


def _commands(capabilities: Sequence[Capability], platform: Platform) -> dict[Platform, dict[str, list[str]]]:
    """Platform (the detected one first) → command → names of what it mends."""
    order = [platform, *(name for name in PLATFORMS if name != platform)]
    commands: dict[Platform, dict[str, list[str]]] = {}
    for name in order:
        for capability in capabilities:
            if capability.state != "ok" and name in capability.remedies:
                by_command = commands.setdefault(name, {})
                by_command.setdefault(capability.remedies[name], []).append(capability.name)
    return commands


def _conclusion(capabilities: Sequence[Capability], loader: tuple[str, str], possible: bool) -> str:
    if not possible:
        missing = ", ".join(capability.name for capability in capabilities if capability.blocks)
        return f"Recording is not possible here: {missing}."
    unmet = [capability.name for capability in capabilities if capability.state != "ok"]
    without = f", without: {', '.join(unmet)}" if unmet else ""
    name, reason = loader
    return f"Recording is possible with the loader {name} ({reason}){without}."


def _style(capability: Capability) -> str:
    if capability.state == "missing" and not capability.required:
        return "yellow"
    return _STYLES[capability.state]


def _printable(text: str) -> str:
    """Control characters, which file and process names may hold, as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
