"""What the Python samples share: options, pacing, and the one line of JSON at the end, as in ``common.h``."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

LAYERS = ("kernel", "host", "gpu")


@dataclass(frozen=True)
class Site:
    """One place that leaks; the fields are those of ``struct site`` in ``common.h``."""

    function: str
    layer: str
    kind: str
    api: str
    objects: int
    bytes: int


def options(description: str, *, count: int, pause_us: int, churn: int) -> argparse.ArgumentParser:
    """A parser of the options that every sample takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count, help="objects to leak, or requests to serve")
    parser.add_argument("--pause-us", type=int, default=pause_us, help="from one to the next, microseconds")
    parser.add_argument("--churn", type=int, default=churn, help="healthy rounds beside each leaked object")
    parser.add_argument("--hold", type=float, default=0, help="stay alive this many seconds after the report")
    parser.add_argument("--wait", action="store_true", help="start when a line arrives on stdin, or its end")
    return parser


def rounds(arguments: argparse.Namespace) -> Iterator[int]:
    """Yield 0 … count-1 at the steady rate that ``--pause-us`` sets, after ``--wait``."""
    if arguments.wait:
        sys.stdin.readline()
    start = time.monotonic()
    for i in range(arguments.count):
        time.sleep(max(0.0, start + i * arguments.pause_us / 1e6 - time.monotonic()))
        yield i


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def finish(sample: str, sites: list[Site], churned: int, hold_seconds: float, **more: Any) -> None:
    """Print the report and hold."""
    leaked = {
        layer: {"objects": sum(s.objects for s in own), "bytes": sum(s.bytes for s in own)}
        for layer in LAYERS
        if (own := [s for s in sites if s.layer == layer and s.objects])
    }
    report = {"sample": sample, "pid": os.getpid(), "leaked": leaked, "sites": [asdict(s) for s in sites]}
    print(json.dumps(report | {"churned": churned} | more), flush=True)
    time.sleep(hold_seconds)
    os._exit(0)  # as a killed service ends: the interpreter's own teardown would close what was leaked
