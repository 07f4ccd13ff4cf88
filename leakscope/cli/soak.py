"""``leakscope soak``: watch a service for days."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli.options import ReportOption
from leakscope.cli.outputs import require_place, write_page
from leakscope.errors import BadInputError, ExitCode

if TYPE_CHECKING:
    from leakscope.capture import Capture
    from leakscope.model.results import Report
    from leakscope.model.soak import SoakSummary
    from leakscope.report.soak import SoakScreen
    from leakscope.soak.watch import Plan


def soak(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- CMD…]", help="Command to run and watch.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="CAPTURE", help="Capture to make; one that an earlier soak made is continued."
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("-p", "--pid", help="Process to watch (repeatable); one like it is followed when it ends."),
    ] = None,
    cgroup: Annotated[Path | None, typer.Option(help="Control group to watch: its directory, v1 or v2.")] = None,
    duration: Annotated[
        str, typer.Option("-d", "--duration", metavar="TIME", help="How long, from the start of the capture.")
    ] = "72h",
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between readings: samplers and census.")] = "30s",
    limit: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory limit to forecast against; default that of the control group."),
    ] = None,
    look: Annotated[str, typer.Option(metavar="TIME", help="Time between interim verdicts.")] = "1h",
    restart: Annotated[
        str, typer.Option(help="Start a command that ended again: no, on-failure or always.")
    ] = "on-failure",
    stacks: Annotated[str, typer.Option(help="Stacks of kernel allocations: none, sampled, or all.")] = "sampled",
    malloc: Annotated[bool, typer.Option("--malloc", help="Record libc's malloc family too: see docs.")] = False,
    min_size: Annotated[str, typer.Option(metavar="BYTES", help="Smallest allocation to record, such as 4KiB.")] = "0",
    sample_bytes: Annotated[
        str, typer.Option(metavar="BYTES", help="Record kernel and heap objects by chance, one in so many bytes.")
    ] = "0",
    loader: Annotated[str, typer.Option(help="Loader of the probes: bcc, core, auto.")] = "auto",
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Watch what a capture or a table of counters holds, in place of a service."),
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, help="With --replay: N times as fast as it was.", show_default="as fast as it goes"
        ),
    ] = None,
    progress: Annotated[
        str,
        typer.Option(
            help="What stderr shows meanwhile: live (a view), lines (each interval), none, or auto: see docs."
        ),
    ] = "auto",
    html: ReportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    top: Annotated[int, typer.Option(min=0, help="Sites to list besides those of the findings.")] = 10,
) -> int:
    """Watch a process (-p), a control group, a command (-- CMD) or the whole host for days: a census and samplers each
    --interval, through restarts of the target and of this command, an interim verdict each hour, a report at the end.

    The looks share one chance of a false alarm, 5 % in 72 hours. Own text goes to stderr, the report to stdout. Needs
    what `record` needs; --replay needs nothing.
    """
    from leakscope.quantities import seconds, size_bytes
    from leakscope.soak.watch import Plan

    if time_scale is not None and replay is None:
        raise BadInputError("--time-scale: time can be scaled with --replay alone")
    plan = Plan(
        target=_target(pid, cgroup, command, replay),
        output=str(output or ""),
        duration_s=seconds(duration, "--duration"),
        look_every_s=seconds(look, "--look"),
        limit_bytes=size_bytes(limit, "--limit") if limit else None,
        everyone=not (pid or cgroup or command),
        cgroup=str(cgroup or ""),
        scale=(time_scale or 0.0) if replay is not None else None,
    )
    if html is not None:
        require_place(html)
    if replay is not None:
        if pid or cgroup or command:
            raise BadInputError("--replay: watches what is there; leave -p, --cgroup and -- CMD out")
        summary, report, capture = _replayed(replay, output, plan, progress, html is not None)
    else:
        summary, report, capture = _recorded(
            plan, output, pid or [], cgroup, command or [], seconds(interval, "--interval"), restart, stacks, malloc,
            size_bytes(min_size, "--min-size"), size_bytes(sample_bytes, "--sample-bytes"), loader, progress,
            html is not None,
        )  # fmt: skip
    if html is not None:
        from leakscope.report.html.soak import soak_page
        from leakscope.soak.course import soak_course

        write_page(html, soak_page(summary, report, soak_course(capture), plan.output))
    _print(summary, report, as_json, top)
    return ExitCode.INTERRUPTED if summary.ended_by == "signal" else ExitCode.DONE


def _screen(progress: str, interval_s: float, *, command: bool) -> SoakScreen:
    from leakscope.cli.keyboard import keyboard_of
    from leakscope.cli.live_view import shown_as
    from leakscope.report.soak import LINE_EVERY_S, SoakScreen

    how = shown_as(progress, sys.stderr, command=command, quiet="lines")
    keyboard = keyboard_of(sys.stderr, shared=command) if how == "live" else None
    return SoakScreen(sys.stderr, how, keyboard, interval_s if progress == "lines" else LINE_EVERY_S)


def _target(pid: list[int] | None, cgroup: Path | None, command: list[str] | None, replay: Path | None) -> str:
    if replay is not None:
        return replay.name
    if command:
        return shlex.join(command)
    if cgroup:
        return str(cgroup)
    return "PID " + ", ".join(map(str, pid)) if pid else "the whole host"


def _replayed(
    path: Path, output: Path | None, plan: Plan, progress: str, timelines: bool
) -> tuple[SoakSummary, Report, Capture]:
    from leakscope.soak.final import final_report
    from leakscope.soak.replay import Replay, open_evidence
    from leakscope.soak.watch import Watch

    capture, inputs = open_evidence(path, output)
    plan.output = str(path)
    with _screen(progress, 0.0, command=False) as screen:
        replay = Replay(capture, Watch(plan), screen.update)
        screen.on_quit = replay.stop
        summary = replay.run()
    return summary, final_report(capture.path, plan.limit_bytes, inputs, timelines=timelines), capture


def _recorded(
    plan: Plan,
    output: Path | None,
    pids: list[int],
    cgroup: Path | None,
    command: list[str],
    interval_s: float,
    restart: str,
    stacks: str,
    malloc: bool,
    min_size: int,
    sample_bytes: int,
    loader: str,
    progress: str,
    timelines: bool,
) -> tuple[SoakSummary, Report, Capture]:
    import time

    from leakscope.capture import Capture
    from leakscope.record.capabilities import require_capable
    from leakscope.record.options import RecordOptions
    from leakscope.soak.final import final_report
    from leakscope.soak.live import RESTARTS, LiveSoak
    from leakscope.soak.watch import Watch

    if restart not in RESTARTS:
        raise BadInputError(f"--restart {restart}: choose {', '.join(RESTARTS[:-1])} or {RESTARTS[-1]}")
    if stacks not in ("none", "sampled", "all"):
        raise BadInputError(f"--stacks {stacks}: choose none, sampled or all")
    options = RecordOptions(
        output=output or Path(time.strftime("leakscope-soak-%Y%m%d-%H%M%S.lscope")),
        pids=list(dict.fromkeys(pids)),
        cgroup=cgroup,
        command=command,
        mode="census",
        stacks=stacks,
        malloc=malloc,
        min_size=min_size,
        sample_bytes=sample_bytes,
        interval_s=interval_s,
        flush_s=interval_s,
        loader=loader,
        resume=True,
        steady=True,
        follow=not command,
    )
    plan.output = str(options.output)
    shown = _screen(progress, interval_s, command=bool(command))
    require_capable(loader)
    with shown as screen:
        live = LiveSoak(options, Watch(plan), restart, screen.update, screen.say, screen.how == "live")
        screen.on_quit = live.stop
        summary = live.run()
    for recording in live.summaries:
        for note in dict.fromkeys([*recording.warnings, *recording.notes]):
            screen.say(note)
    report = final_report(options.output, plan.limit_bytes, timelines=timelines)
    return summary, report, Capture.open(options.output)


def _print(summary: SoakSummary, report: Report, as_json: bool, top: int) -> None:
    from leakscope.report.json import report_json

    if as_json:
        json.dump(report_json(report) | {"soak": summary.to_json()}, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from leakscope.report.console import ReportConsole
    from leakscope.report.soak import print_soak
    from leakscope.report.terminal import print_report

    console = ReportConsole()
    print_report(console, report, top)
    print_soak(console, summary)
