"""The command ``leakscope``: finds the verb, loads only what it needs, turns errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import keyword
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from leakscope import __version__
from leakscope.errors import ExitCode, LeakscopeError
from leakscope.report.text import printable


class Verb(NamedTuple):
    """Where a verb's function of the same name lives, and its line in ``leakscope --help``."""

    module: str
    help: str


VERBS = {
    "record": Verb("leakscope.cli.record", "Record processes, a cgroup, a command or the whole host."),
    "soak": Verb("leakscope.cli.soak", "Watch a service for days, through its restarts."),
    "import": Verb("leakscope.cli.import_", "Import reports of Nsight, PyTorch and memleak into a capture."),
    "attribute": Verb("leakscope.cli.attribute", "Say what leaks, who caused it, and how sure that is."),
    "check": Verb("leakscope.cli.check", "Pass or fail on memory: the gate of a pull request."),
    "baseline": Verb("leakscope.cli.baseline", "Write what a run keeps into a file for check."),
    "liveness": Verb("leakscope.cli.liveness", "Say who keeps memory alive, and what nobody uses any more."),
    "diff": Verb("leakscope.cli.diff", "Compare two captures: growth by layer, site and counter."),
    "export": Verb("leakscope.cli.export", "Write results in the formats of other tools."),
    "serve": Verb("leakscope.cli.serve", "Serve metrics for Prometheus: verdicts, memory, caches."),
    "query": Verb("leakscope.cli.query", "Run SQL on the tables of a capture."),
    "symbolize": Verb("leakscope.cli.symbolize", "Find names and lines of native frames after the fact."),
    "pack": Verb("leakscope.cli.pack", "Make one file of a capture."),
    "unpack": Verb("leakscope.cli.pack", "Make a capture of a packed file."),
    "cache": Verb("leakscope.cli.cache", "Replay policies, check keys, lifetimes and consistency of caches."),
    "doctor": Verb("leakscope.cli.doctor", "Check what this host can record, and how to mend what it cannot."),
}

HELP = """Memory-leak forensics across the kernel, the host and the GPU: which layer grows, who caused it, and
whether it is a leak at all."""

EXIT_CODES = """Exit codes, the same for every verb:

\b
  0    done; no leak found where the verb was asked to judge
  1    a leak or a regression was found (only check, and attribute --exit-code)
  2    wrong usage or bad input (an unknown PID too)
  3    inconclusive: the evidence cannot tell (check, and attribute --exit-code)
  4    this host lacks a privilege or capability; the message has the remedy
  5    the output could not be completed (disk full, closed pipe)
  130  interrupted, after saving
"""

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""click's UsageError, wherever this release of typer keeps its click (its own copy since 0.2x)."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})


def main(argv: list[str] | None = None) -> int:
    """Run ``leakscope`` with ``argv`` (default: the process's arguments) and return the exit code.

    Foreseen errors (LeakscopeError) are one bare line on stderr. Others are a bug of ours: still one line and
    never exit code 1, which means a leak; ``LEAKSCOPE_DEBUG=1`` lets the traceback through.
    """
    args = sys.argv[1:] if argv is None else argv
    if argv is None and _wanted(args) == "record":
        # pyarrow imports pandas at its first array: 0.2 s and 30 MB of which a recorder has no use. Its process does
        # nothing but record.
        from leakscope.cli.left_out import leave_out

        leave_out("pandas")
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except LeakscopeError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return _abandon_stdout()
    except OSError as error:
        if os.environ.get("LEAKSCOPE_DEBUG"):
            raise
        code = ExitCode.OUTPUT_INCOMPLETE if error.errno in DISK_ERRORS else ExitCode.BAD_INPUT
        if code == ExitCode.OUTPUT_INCOMPLETE:
            _abandon_stdout()
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}", code)
    except Exception as error:
        if os.environ.get("LEAKSCOPE_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"a bug in leakscope, please report it with LEAKSCOPE_DEBUG=1: {what}", ExitCode.BAD_INPUT)


def _run(args: list[str]) -> int:
    command = typer.main.get_command(_app(_wanted(args)))
    try:
        # Not command.main(): it turns a closed pipe into exit code 1, which means a leak here.
        with command.make_context("leakscope", list(args)) as context:
            outcome = command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except USAGE_ERROR as error:
        failed = getattr(error, "ctx", None)
        where = failed.command_path if failed is not None else "leakscope"
        message = error.format_message().removesuffix(".")  # type: ignore[attr-defined]
        return _fail(f"{message}. See '{where} --help'.", ExitCode.BAD_INPUT)
    return outcome if isinstance(outcome, int) else ExitCode.DONE


def _wanted(args: list[str]) -> str | None:
    """The verb among the arguments."""
    return next((arg for arg in args if not arg.startswith("-")), None)


def _app(wanted: str | None) -> typer.Typer:
    """The command line with the verb ``wanted`` in full and the others as a name and a line of help."""
    # No rich markup and no shell completion: both cost more start-up time than all the rest.
    app = typer.Typer(
        help=HELP,
        epilog=EXIT_CODES,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_top)
    for name, verb in VERBS.items():
        function = _load(verb.module, name) if name == wanted else _stub
        if isinstance(function, typer.Typer):  # a verb of several: leakscope cache simulate
            app.add_typer(function, name=name, short_help=verb.help)
        else:
            app.command(name, short_help=verb.help)(function)
    return app


def _load(module: str, name: str) -> Callable[..., Any] | typer.Typer:
    return getattr(importlib.import_module(module), f"{name}_" if keyword.iskeyword(name) else name)


def _stub() -> None:
    """Stand in for a verb that was not asked for; it is listed, never run."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"leakscope {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _fail(message: str, code: ExitCode) -> int:
    with contextlib.suppress(OSError):  # stderr on a full disk: the code still tells
        print(f"leakscope: {printable(message)}", file=sys.stderr)
    return code


def _abandon_stdout() -> int:
    """Output cannot be written, or nobody reads it any more: drop the rest, so that exiting stays quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OUTPUT_INCOMPLETE
