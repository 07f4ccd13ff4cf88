"""Python frames in the place of the interpreter's: paired entry by entry, and never at the price of another frame."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.capture import Capture
from leakscope.correlate.mixed_stacks import UNKNOWN_PYTHON, is_interpreter, merge, unify_stacks
from leakscope.correlate.stacks import Frame
from leakscope.correlate.wrappers import application_frames, culprit
from tests.capture_rows import manifest, rows

LIBPYTHON, TORCH, CUDA = (
    "/usr/lib/libpython3.12.so.1.0",
    "/opt/x/site-packages/torch/lib/libtorch.so",
    "/usr/lib/libcuda.so.1",
)


def native(function: str, module: str = "/usr/lib/x86_64-linux-gnu/libc.so.6") -> Frame:
    return Frame(function, module=module, offset=1)


def inside(*functions: str) -> list[Frame]:
    return [native(function, LIBPYTHON) for function in functions]


def loop(*after: str) -> list[Frame]:
    """The interpreter's loop, as it is entered, and what it calls in the interpreter."""
    return inside("PyEval_EvalCode", "_PyEval_EvalFrameDefault", *after)


def python(*functions: str) -> list[Frame]:
    """One entry: the first frame was called by C code."""
    return [Frame(f, "/app/main.py", 10 + i, "", int(i == 0), "python") for i, f in enumerate(functions)]


def texts(frames: list[Frame]) -> list[str]:
    return [frame.function for frame in frames]


START, PROBED = [native("_start"), native("__libc_start_main")], native("cuMemAlloc_v2", CUDA)


def test_each_loop_gives_way_to_the_frames_of_its_entry() -> None:
    # given an extension that calls back, between two entries
    between = [native("torch::autograd", TORCH), native("THPFunction_apply", TORCH)]
    stack = [
        *START,
        *loop("_PyObject_MakeTpCall"),
        *between,
        *loop("cfunction_call"),
        native("at::empty", TORCH),
        PROBED,
    ]
    merged = merge(stack, [*python("<module>", "train"), *python("backward", "scale")])
    assert texts(merged) == [
        "_start", "__libc_start_main", "<module>", "train", "torch::autograd", "THPFunction_apply", "backward", "scale",
        "at::empty", "cuMemAlloc_v2",
    ]  # fmt: skip


def test_a_stack_cut_short_keeps_its_frames_behind_all_of_python() -> None:
    frames = [*python("<module>", "train"), *python("backward")]
    assert texts(merge([native("ffi_call"), PROBED], frames)) == [
        "<module>",
        "train",
        "backward",
        "ffi_call",
        "cuMemAlloc_v2",
    ]
    # and what lies outside the interpreter stays outside
    stack = [*START, *loop("x"), native("middle", TORCH), *inside("_PyObject_Vectorcall"), native("ffi_call"), PROBED]
    assert texts(merge(stack, frames)) == [
        "_start", "__libc_start_main", "<module>", "train", "backward", "middle", "ffi_call", "cuMemAlloc_v2",
    ]  # fmt: skip


def test_entries_beyond_the_frames_that_were_recorded_are_said_to_be_missing() -> None:
    # given a Python stack that begins in the middle of an entry, and two loops more than it has entries
    cut = [frame._replace(offset=0) for frame in python("inner")] + python("backward")
    stack = [*START, *loop(), *loop(), native("a", TORCH), *loop(), native("b", TORCH), *loop(), PROBED]
    merged = merge(stack, cut)
    assert texts(merged) == [*texts(START), UNKNOWN_PYTHON.function, "a", "inner", "b", "backward", "cuMemAlloc_v2"]


def test_one_of_the_two_alone_stays_as_it_is() -> None:
    assert merge([*START, *loop(), PROBED], []) == [*START, *loop(), PROBED]
    assert merge([], python("f")) == python("f")


FRAMES = st.lists(
    st.sampled_from([native("f", TORCH), native("", ""), *inside("_PyEval_EvalFrameDefault", "call", ""), *START]),
    max_size=12,
)
ENTRIES = st.lists(st.builds(Frame, st.sampled_from("fgh"), st.just("/app/m.py"), st.integers(1, 9), st.just(""),
                             st.integers(0, 1), st.just("python")), min_size=1, max_size=8)  # fmt: skip


@given(FRAMES, ENTRIES)
def test_nothing_but_the_interpreter_is_ever_left_out(stack: list[Frame], frames: list[Frame]) -> None:
    merged = merge(stack, frames)
    kept = [frame for frame in merged if frame.kind == "native"]
    assert kept == [frame for frame in stack if not is_interpreter(frame)]
    assert [frame for frame in merged if frame.kind == "python" and frame != UNKNOWN_PYTHON] == frames


def test_the_culprit_may_be_an_extension_of_the_application() -> None:
    stack, frames = [*START, *loop("x"), native("grow", "/app/build/pool.so"), PROBED], python("<module>", "serve")
    assert culprit(stack, frames, []) == native("grow", "/app/build/pool.so")
    assert texts(application_frames(stack, frames)) == ["<module>", "serve", "grow"]
    # but not one that was installed
    installed = [*START, *loop("x"), native("at::empty", TORCH), PROBED]
    assert culprit(installed, frames, []) == frames[-1]


@pytest.mark.parametrize(("other_python", "replaced"), [(1, 1), (2, 0)])
def test_paths_that_differ_inside_the_interpreter_alone_are_one(
    tmp_path: Path, other_python: int, replaced: int
) -> None:
    # given a call that the interpreter makes in two ways, before and after it has specialised it
    from leakscope.capture import CaptureWriter

    writer = CaptureWriter.create(tmp_path / "c.lscope", manifest())
    names = ["_PyEval_EvalFrameDefault", "_PyEval_EvalFrameDefault", "_PyObject_MakeTpCall", "cudaMalloc", "f", "g"]
    modules, kinds = [LIBPYTHON] * 3 + [CUDA, "", ""], ["native"] * 4 + ["python"] * 2
    columns = {"id": range(1, 7), "function": names, "offset": [10, 20, 30, 40, 1, 1], "module": modules, "kind": kinds}
    writer.write("frames", rows("frames", 6, **columns))
    writer.write("stacks", rows("stacks", 4, id=[1, 2, 3, 4], frames=[[5], [6], [1, 3, 4], [2, 4]]))
    events = rows("mem_events", 3, ts_ns=[1, 2, 3], user_stack=[3, 4, 4], python_stack=[1, other_python, 0])
    writer.write("mem_events", events)
    writer.finish()
    # then events of the same Python stack share one; without a Python stack they are told apart
    with Capture.open(tmp_path / "c.lscope").connect() as con:
        assert unify_stacks(con) == replaced
        found = con.execute("SELECT user_stack FROM mem_events ORDER BY ts_ns").fetchall()
    assert found == [(3,), (3 if replaced else 4,), (4,)]


def test_what_is_inlined_into_the_interpreter_is_its_own_too() -> None:
    # given an interpreter with debug information
    inlined = Frame("_Py_DECREF", "/src/object.h", 5, LIBPYTHON, 0, "inlined")
    stack = [*START, *loop("cfunction_call"), inlined, native("at::empty", TORCH), PROBED]
    assert texts(merge(stack, python("<module>", "train"))) == [
        "_start", "__libc_start_main", "<module>", "train", "at::empty", "cuMemAlloc_v2",
    ]  # fmt: skip
