"""`leakscope record`: a live recording with eBPF probes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def record(
    command: Annotated[list[str] | None, typer.Argument(metavar="[-- CMD…]", help="Command to run and record.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Capture to make; default: leakscope-DATE-TIME.lscope")
    ] = None,
    pid: Annotated[list[int] | None, typer.Option("-p", "--pid", help="Process to record (repeatable).")] = None,
    cgroup: Annotated[Path | None, typer.Option(help="Control group to record: its directory, v1 or v2.")] = None,
    duration: Annotated[float | None, typer.Option("-d", "--duration", help="Seconds to record.", min=0.1)] = None,
    mode: Annotated[
        str,
        typer.Option(help="stream: every event; census: what is live, counted by site each interval (hours and days)."),
    ] = "stream",
    stacks: Annotated[
        str, typer.Option(help="Stacks of kernel allocations: none, sampled, or all (about three times the price).")
    ] = "sampled",
    unwind: Annotated[
        str,
        typer.Option(
            help="Stacks of code without frame pointers: none, gpu (calls that allocate or launch), or all (maps, "
            "kernel allocations, malloc too). Price: see docs; a path is unwound once, then known again in about 2 µs."
        ),
    ] = "gpu",
    launches: Annotated[bool, typer.Option("--launches", help="Record GPU kernel launches too.")] = False,
    launch_args: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=64,
            help="With --launches: words of a launch's parameters to read for pointers, 0 none.",
        ),
    ] = 16,
    malloc: Annotated[
        bool, typer.Option("--malloc", help="Record libc's malloc family too: 2-20 µs a call, see docs.")
    ] = False,
    library: Annotated[
        list[Path] | None, typer.Option(help="CUDA library (or binary with CUDA linked in) to probe (repeatable).")
    ] = None,
    min_size: Annotated[
        str, typer.Option(metavar="BYTES", help="Smallest kernel, map or heap allocation to record, such as 4KiB.")
    ] = "0",
    sample_bytes: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Record kernel and heap objects by chance, one in so many bytes; 0: all."),
    ] = "0",
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time between samples of RSS, cgroup, slab, GPU, and readouts of a census: 500ms, 10s.",
            show_default="1s, census 10s",
        ),
    ] = None,
    flush: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time between parts written: the most that kill -9 loses.",
            show_default="1s, census its interval",
        ),
    ] = None,
    ring: Annotated[
        str, typer.Option(help="Size of the event ring, a power of two: 64MiB holds 0.9 s of a storm.")
    ] = "64MiB",
    live_entries: Annotated[
        int, typer.Option(help="Kernel objects that can be live at once (100 bytes each).", min=1024)
    ] = 1 << 20,
    loader: Annotated[
        str,
        typer.Option(help="Loader of the probes: bcc (compiles), core (built beforehand), auto (core if there)."),
    ] = "auto",
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx/--no-nvtx",
            help="Record NVTX ranges of a command, for which this sets NVTX_INJECTION64_PATH, and of processes that "
            "were started with it. Costs about 3 µs a range.",
        ),
    ] = True,
    progress: Annotated[
        str,
        typer.Option(help="What stderr shows meanwhile: live (a view), lines (every 10 s), none, or auto: see docs."),
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace the capture that is there.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Record processes (-p), a cgroup, a command (-- CMD) or, with none of them, the whole host.

    Follows children. Ends with the targets, after --duration, or on Ctrl-C, and writes all that was seen. Own text goes
    to stderr; the command's streams pass through. Needs root or CAP_BPF and CAP_PERFMON: see `leakscope doctor`.
    """
    import time

    from leakscope.cli.live_view import LiveView, shown_as, target_of
    from leakscope.errors import BadInputError, ExitCode
    from leakscope.quantities import seconds, size_bytes
    from leakscope.record.capabilities import require_capable
    from leakscope.record.options import RecordOptions
    from leakscope.record.recorder import Recorder
    from leakscope.report.recording import render_summary, show_price, summary_json

    if mode not in ("stream", "census"):
        raise BadInputError(f"--mode {mode}: choose stream or census")
    if mode == "census" and launches:
        raise BadInputError("--launches records every launch, a census does not: leave it out, or use --mode stream")
    if stacks not in ("none", "sampled", "all"):
        raise BadInputError(f"--stacks {stacks}: choose none, sampled or all")
    if unwind not in ("none", "gpu", "all"):
        raise BadInputError(f"--unwind {unwind}: choose none, gpu or all")
    how = shown_as(progress, sys.stderr, command=bool(command))
    interval_s = seconds(interval, "--interval") if interval else (10.0 if mode == "census" else 1.0)
    options = RecordOptions(
        output=output or Path(time.strftime("leakscope-%Y%m%d-%H%M%S.lscope")),
        pids=list(dict.fromkeys(pid or [])),
        cgroup=cgroup,
        command=command or [],
        duration_s=duration,
        force=force,
        mode=mode,
        stacks=stacks,
        min_size=size_bytes(min_size, "--min-size"),
        sample_bytes=size_bytes(sample_bytes, "--sample-bytes"),
        unwind=unwind,
        launches=launches,
        launch_args=launch_args if launches else 0,
        malloc=malloc,
        libraries=library or [],
        interval_s=interval_s,
        flush_s=seconds(flush, "--flush") if flush else (interval_s if mode == "census" else 1.0),
        ring_bytes=_ring_bytes(ring),
        live_entries=live_entries,
        loader=loader,
        nvtx=nvtx,
    )
    require_capable(loader)
    price = None if json_output else show_price
    if how == "none":
        summary = Recorder(options, price).run()
    else:
        target = target_of(options.pids, cgroup, options.command)
        with LiveView(
            how, sys.stderr, target, options.output, duration, everyone=options.everyone, command=bool(command)
        ) as view:
            recorder = Recorder(options, price, view.take, view)
            view.on_quit = recorder.stop
            summary = recorder.run()
        if view.error is not None:
            summary.notes.append(f"the live view ended early: {type(view.error).__name__}: {view.error}")
    render_summary(summary, sys.stderr)
    if json_output:
        import json

        print(json.dumps(summary_json(summary)))
    if summary.ended_by == "signal":
        raise typer.Exit(ExitCode.INTERRUPTED)


def _ring_bytes(text: str) -> int:
    """A size such as 64MiB or 65536; raises BadInputError unless it is a power of two of at least a page."""
    from leakscope.errors import BadInputError
    from leakscope.quantities import size_bytes

    value = size_bytes(text, "--ring")
    if value < 4096 or value & (value - 1) or value > 2 << 30:
        raise BadInputError(f"--ring {text}: needs a power of two from 4KiB to 2GiB, such as 64MiB")
    return value
