"""``leakscope serve``: a Prometheus endpoint over captures, live caches and processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli import warn
from leakscope.cli.live import split_evidence
from leakscope.cli.options import DEFAULT_MEMORY, MemoryOption
from leakscope.errors import BadInputError, ExitCode
from leakscope.report.text import printable

if TYPE_CHECKING:
    from leakscope.serve.source import Source

DEFAULT_LISTEN = "127.0.0.1:9469"


def serve(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE…",
            help="Captures, also while they are recorded, and live sources (redis://…, memcached://…, tcp://HOST:PORT "
            "of KV events, http://…/metrics).",
            show_default=False,
        ),
    ] = None,
    pid: Annotated[
        list[int] | None, typer.Option("-p", "--pid", min=1, help="Process to read, with its children (repeatable).")
    ] = None,
    cgroup: Annotated[Path | None, typer.Option(help="Control group to read: its directory, v1 or v2.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen. Beyond this host anybody can read.")
    ] = DEFAULT_LISTEN,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between readings of live sources.")] = "10s",
    look: Annotated[str, typer.Option(metavar="TIME", help="Time between verdicts.")] = "5m",
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Forecast when leaks reach this; default the limit of the control group."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Request trace of the caches: their hit ratios beside that of an infinite cache."
        ),
    ] = None,
    latency_histogram: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Histogram of the latencies of requests at an http source, in seconds."),
    ] = None,
    cache_latency_histogram: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="The same of those of a cache.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read everything once, print the metrics and exit.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="With --once: write this file, replaced when it is whole."),
    ] = None,
    duration: Annotated[
        str | None, typer.Option("-d", "--duration", metavar="TIME", help="End after this time; default never.")
    ] = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> int:
    """Serve metrics for Prometheus: memory by layer and process, verdicts, objectives of caches, losses.

    Needs no privileges for processes of the same user. Labels are few: no address, stack or key is one. Ends at
    Ctrl-C or SIGTERM, with exit code 130.
    """
    from leakscope.quantities import seconds, size_bytes
    from leakscope.serve.endpoint import is_loopback, listen_address
    from leakscope.serve.service import interruptible
    from leakscope.serve.service import serve as run
    from leakscope.serve.sources import Settings, open_sources

    if output is not None and not once:
        raise BadInputError("-o: is for --once")
    host, port = listen_address(listen)
    how = Settings(
        every_s=seconds(interval, "--interval"),
        look_s=seconds(look, "--look"),
        memory=memory,
        limit_bytes=size_bytes(limit, "--limit") if limit else None,
        trace=trace,
        request_latency=tuple(latency_histogram or ()),
        cache_latency=tuple(cache_latency_histogram or ()),
    )
    duration_s = seconds(duration, "--duration") if duration else None
    addresses, captures = split_evidence(source or [])
    with interruptible():  # while it is getting ready, which may take a while with a large capture
        sources = open_sources(addresses, captures, list(dict.fromkeys(pid or [])), cgroup, how)
        if once:
            return _once(sources, output)

        def ready(url: str) -> None:
            if not is_loopback(host):
                warn([f"--listen {listen}: anybody who can reach it can read the metrics; there is no authentication"])
            print(printable(f"serving {url}"), file=sys.stderr, flush=True)

        by_signal = run(sources, host, port, ready, lambda line: warn([line]), duration_s)
    return ExitCode.INTERRUPTED if by_signal else ExitCode.DONE


def _once(sources: list[Source], output: Path | None) -> int:
    from leakscope.cli.outputs import require_place, write_whole
    from leakscope.serve.service import once

    if output is not None:
        require_place(output)
    text = once(sources, lambda line: warn([line])).decode()
    if output is not None:
        write_whole(output, text)
    else:
        sys.stdout.write(text)
    return ExitCode.DONE
