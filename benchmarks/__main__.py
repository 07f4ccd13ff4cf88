"""``python -m benchmarks``: run them, print tables, keep the generated sections of docs/performance.md up to date."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.results import ROOT, Options, Result
from leakscope.errors import LeakscopeError

NAMES = (
    *("startup", "overhead", "probes", "reader", "end_to_end", "attribute", "joins", "census", "liveness"),
    *("page", "live_view"),
)
PAGE = ROOT / "docs" / "performance.md"


def run(name: str, options: Options) -> Result:
    """Run one benchmark by the name of its module."""
    return importlib.import_module(f"benchmarks.{name}").run(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 whatever the bars say: they are told, not judged; 1 when a benchmark could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)}; default all")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the operations of a storm")
    parser.add_argument("--quick", action="store_true", help="smallest size, to see that all runs; writes no docs")
    parser.add_argument("--full", action="store_true", help="attribute on 100 million events as well: 6 GB of disk")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, tables on stderr")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    if arguments.rounds < 1 or arguments.scale <= 0:
        parser.error("--rounds and --scale must be positive")
    options = Options(arguments.rounds, arguments.quick, arguments.full, arguments.scale)

    from rich.console import Console

    from benchmarks.machine import machine_facts
    from benchmarks.render import markdown, print_result, replace_section

    console = Console(stderr=arguments.json, width=None if sys.stdout.isatty() else 110)
    results, failed = [], False
    for name in arguments.names or NAMES:
        machine = machine_facts()  # anew for each: the load changes
        try:
            result = run(name, options)
        except (LeakscopeError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"benchmark {name} could not run: {error}", file=sys.stderr)
            failed = True
            continue
        print_result(result, console)
        if not (arguments.quick or arguments.no_docs):
            replace_section(PAGE, name, markdown(result, machine))
        results.append({**result.to_json(), "machine": machine})
    if arguments.json:
        print(json.dumps({"schema": "leakscope-benchmarks/1", "options": vars(options), "benchmarks": results}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
