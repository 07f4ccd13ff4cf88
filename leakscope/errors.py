"""The exceptions that reach a user, and the exit code of each.

Every error that leakscope foresees is a :class:`LeakscopeError`: one line that says what is wrong, where,
and what to do. ``leakscope.cli.main`` prints it bare on stderr and exits with its code; a traceback is a bug.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, the same for every verb (DESIGN: "Exit codes")."""

    DONE = 0
    LEAK_FOUND = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    NOT_CAPABLE = 4
    OUTPUT_INCOMPLETE = 5
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done; no leak found where the verb was asked to judge",
    ExitCode.LEAK_FOUND: "a leak or a regression was found (only check, and attribute --exit-code)",
    ExitCode.BAD_INPUT: "wrong usage or bad input (an unknown PID too)",
    ExitCode.INCONCLUSIVE: "inconclusive: the evidence cannot tell (check, and attribute --exit-code)",
    ExitCode.NOT_CAPABLE: "this host lacks a privilege or capability; the message has the remedy",
    ExitCode.OUTPUT_INCOMPLETE: "the output could not be completed (disk full, closed pipe)",
    ExitCode.INTERRUPTED: "interrupted, after saving",
}
"""What each exit code tells, as ``--help`` prints it."""


class LeakscopeError(Exception):
    """Base of all foreseen errors; ``exit_code`` is what the process exits with."""

    exit_code: ExitCode = ExitCode.BAD_INPUT


class BadInputError(LeakscopeError):
    """A file, PID, option or query that cannot be used (exit 2)."""

    exit_code = ExitCode.BAD_INPUT


class NotCapableError(LeakscopeError):
    """This host lacks a privilege or capability; the message carries the remedy (exit 4)."""

    exit_code = ExitCode.NOT_CAPABLE


class OutputIncompleteError(LeakscopeError):
    """An output could not be completed, e.g. the disk is full; what was written before still reads (exit 5)."""

    exit_code = ExitCode.OUTPUT_INCOMPLETE
