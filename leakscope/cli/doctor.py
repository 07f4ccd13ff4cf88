"""``leakscope doctor``: what this host can record, and how to mend what it cannot."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from leakscope.errors import ExitCode


def doctor(
    pid: Annotated[
        int | None,
        typer.Option("--pid", "-p", min=1, help="Also check what can be recorded of this process."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object instead of a table.")] = False,
) -> int:
    """Check everything that recording needs on this host, and print the command for each thing that is
    missing.

    Nothing is changed: tiny BPF maps, programs and probes are made and closed at once. Exit code 4 when
    recording is impossible, else 0.
    """
    from leakscope.record import capabilities as checks
    from leakscope.report.doctor import doctor_json, print_doctor

    capabilities = checks.check_capabilities(pid)
    possible = checks.recording_possible(capabilities)
    conclusion = (checks.Host().platform(), checks.recording_loader(), possible)
    if as_json:
        print(json.dumps(doctor_json(capabilities, *conclusion), indent=2))
    else:
        from leakscope.report.console import ReportConsole

        print_doctor(ReportConsole(), capabilities, *conclusion)
    return ExitCode.DONE if possible else ExitCode.NOT_CAPABLE
