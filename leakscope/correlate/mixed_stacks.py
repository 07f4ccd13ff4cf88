"""One stack out of two: Python frames in the place of the interpreter's C frames.

A thread that runs Python has two stacks: the native one, in which ``_PyEval_EvalFrameDefault`` appears once for each
time that C code entered the interpreter, and Python's own, in which one such entry runs any number of frames
(since 3.11 a Python function that calls another stays in the same loop). Each frame that begins an entry is marked, so
entries and loops are paired one to one, and native frames of extensions keep their place between Python frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from leakscope.correlate.stacks import Frame, Stacks

if TYPE_CHECKING:
    import duckdb

EVAL_LOOP = re.compile(r"_PyEval_EvalFrameDefault(\.\w+)*")
"""The interpreter's loop (Python/ceval.c), with the suffixes of parts that a compiler splits off."""

_IN_LOOP = "kind = 'native' AND starts_with(function, '_PyEval_EvalFrameDefault')"

INTERPRETER = re.compile(r"(lib)?python(\d+(\.\d+)?[a-z]*)?(\.so(\.[\d.]+)?)?")
"""File name of the module that holds the interpreter: python3.11, libpython3.12.so.1.0."""

UNKNOWN_PYTHON = Frame("[Python frames that were not recorded]", kind="python")
"""Stands for an entry into the interpreter whose frames are missing: a Python stack holds the innermost 64."""


def merge(native: Sequence[Frame], python: Sequence[Frame]) -> list[Frame]:
    """The frames of both stacks in the order in which they called each other, outermost first.

    Frames of the interpreter's own module are left out where Python frames stand for them. Where entries and loops
    cannot be paired (a native stack that frame pointers cut short, an entry that is missing), all Python frames stand
    together where the interpreter begins, or outermost where no frame of it is seen; no other frame is ever left out.
    """
    if not python:
        return list(native)
    runs = _entries(python)
    loops = [index for index, frame in enumerate(native) if EVAL_LOOP.fullmatch(frame.function)]
    if not python[0].offset and len(runs) < len(loops) and loops:
        # The outermost frames were not recorded: the inner entries are paired, those outside have no frames.
        runs = [[UNKNOWN_PYTHON]] * (len(loops) - len(runs)) + runs
    if len(runs) == len(loops):
        return _paired(native, dict(zip(loops, runs, strict=True)))
    first = next((index for index, frame in enumerate(native) if is_interpreter(frame)), 0)
    inner = [frame for frame in native[first:] if not is_interpreter(frame)]
    return [*native[:first], *python, *inner]


def _entries(python: Sequence[Frame]) -> list[list[Frame]]:
    """Python frames by the entry into the interpreter that runs them."""
    runs: list[list[Frame]] = []
    for frame in python:
        if frame.offset or not runs:
            runs.append([])
        runs[-1].append(frame)
    return runs


def _paired(native: Sequence[Frame], runs: dict[int, list[Frame]]) -> list[Frame]:
    merged: list[Frame] = []
    for index, frame in enumerate(native):
        if index in runs:
            if runs[index] != [UNKNOWN_PYTHON] or merged[-1:] != [UNKNOWN_PYTHON]:
                merged += runs[index]
        elif not is_interpreter(frame):
            merged.append(frame)
    return merged


def unify_stacks(con: duckdb.DuckDBPyConnection) -> int:
    """Give stacks that read the same the same id: a temporary view ``mem_events`` over the table of that name.

    The interpreter calls C through other functions of its own once it has specialised an instruction, so one path of a
    program has several native stacks, whose merged form is one. Returns how many native stacks were replaced, each
    only where it comes together with the same Python stack; 0 leaves everything as it is.
    """
    if not con.execute(f"SELECT 1 FROM frames WHERE {_IN_LOOP} LIMIT 1").fetchall():
        return 0
    (database,) = con.execute("SELECT current_database()").fetchone() or ("memory",)
    events = f'"{database}".main.mem_events'  # a bare name would mean the view made here
    pairs = con.execute(
        f"""
        WITH loops AS (SELECT list(id) AS ids FROM frames WHERE {_IN_LOOP}),
        unwound AS (SELECT id FROM stacks, loops WHERE list_has_any(frames, ids))
        SELECT DISTINCT user_stack, python_stack FROM {events}
        WHERE python_stack > 0 AND user_stack IN (SELECT id FROM unwound) ORDER BY ALL
        """
    ).fetchall()
    stacks = Stacks(con, [stack for pair in pairs for stack in pair])
    first: dict[tuple[Frame, ...], int] = {}
    replaced = []
    for user, python in pairs:
        same = first.setdefault(tuple(merge(stacks[user], stacks[python])), user)
        if same != user:
            replaced.append((user, python, same))
    if replaced:
        import pandas as pd

        con.register("replaced", pd.DataFrame(replaced, columns=["user_stack", "python_stack", "same"], dtype="int32"))
        con.execute("CREATE OR REPLACE TEMP TABLE same_stacks AS SELECT * FROM replaced")
        con.unregister("replaced")
        con.execute(
            f"""
            CREATE OR REPLACE TEMP VIEW mem_events AS
            SELECT e.* REPLACE (coalesce(s.same, e.user_stack) AS user_stack)
            FROM {events} e LEFT JOIN same_stacks s USING (user_stack, python_stack)
            """
        )
    return len(replaced)


def is_interpreter(frame: Frame) -> bool:
    """Whether a native frame (or what is inlined into it) belongs to the interpreter's own module."""
    return frame.kind in ("native", "inlined") and (
        INTERPRETER.fullmatch(PurePosixPath(frame.module).name) is not None
        or EVAL_LOOP.fullmatch(frame.function) is not None
    )
