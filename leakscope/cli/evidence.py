"""Evidence as it stands on the command line: captures, packed ones, and files of other tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from leakscope.capture import Capture
    from leakscope.ingest import Imported


@dataclass
class Opened:
    """``captures`` in the order of the command line; files of other tools are together in a last one, kept until this
    process ends. ``inputs``: the rows of a report's inputs, a list a capture. ``imported``: what was read of files."""

    captures: list[Capture]
    inputs: list[list[dict[str, Any]]]
    imported: list[Imported] = field(default_factory=list)


def open_evidence(evidence: list[Path], pid: int | None = None) -> Opened:
    """Open everything. ``pid``: what files of other tools that name no process are about.

    Raises BadInputError for a path that is missing, or neither a capture nor a report that import knows.
    """
    import secrets

    from leakscope.capture import Capture
    from leakscope.capture.reader import scratch_directory
    from leakscope.ingest import Options, import_files, kind_of

    missing = next((path for path in evidence if not path.exists()), None)
    if missing is not None:
        raise BadInputError(f"{missing}: no such file or capture")
    files = [path for path in evidence if kind_of(path) is not None]
    paths = [path for path in evidence if path not in files]
    opened = Opened([_opened(path) for path in paths], [])
    opened.inputs = [[_input(capture, path)] for capture, path in zip(opened.captures, paths, strict=True)]
    if files:
        scratch = Path(scratch_directory()) / f"imported-{secrets.token_hex(4)}.lscope"
        opened.imported = import_files(files, scratch, Options(pid=pid))
        opened.captures.append(Capture.open(scratch))
        opened.inputs.append(
            [file.to_json() | {"mem_events": file.rows.get("mem_events", 0)} for file in opened.imported]
        )
    return opened


def _opened(path: Path) -> Capture:
    from leakscope.capture import Capture

    try:
        return Capture.open(path)
    except BadInputError as error:
        raise BadInputError(f"{error}; nor is it a report that 'leakscope import' knows") from None


def _input(capture: Capture, path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "kind": "capture",
        "complete": capture.manifest.complete,
        "mem_events": capture.rows("mem_events"),
        "command": next((s.command for s in capture.manifest.sources if s.command), []),
        "problems": capture.problems,
    }
