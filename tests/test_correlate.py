"""The pieces of the correlation: shares, lives, stacks, plumbing, visibility."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.capture import Capture
from leakscope.correlate import weights
from leakscope.correlate.divergence import freeing_sites, shared_with_freeing
from leakscope.correlate.lives import FOLDED_PID, process_lives, source_bounds
from leakscope.correlate.sites import folded_cache
from leakscope.correlate.stacks import Frame, Stacks
from leakscope.correlate.visibility import frees_visible
from leakscope.correlate.wrappers import allocating, culprit, entry_of, inside_slab_allocator
from tests.synthetic import PID, START_NS, SyntheticCapture


@given(
    st.lists(
        st.tuples(st.integers(0, 10**12), st.lists(st.integers(1, 1000), min_size=1, max_size=8)),
        min_size=1,
        max_size=5,
    )
)
def test_largest_remainder_splits_every_total_exactly(pools: list[tuple[int, list[int]]]) -> None:
    totals = np.array([total for total, _ in pools], dtype=np.int64)
    group = np.repeat(np.arange(len(pools)), [len(masses) for _, masses in pools])
    mass = np.concatenate([np.array(masses, dtype=np.float64) for _, masses in pools])
    shares = weights.shares_within(group, mass, len(pools))
    parts = weights.largest_remainder(totals, group, shares)
    assert np.bincount(group, weights=parts, minlength=len(pools)).astype(np.int64).tolist() == totals.tolist()
    assert (np.abs(parts - totals[group] * shares) <= 1 + 1e-3).all()


def test_largest_remainder_gives_left_over_units_to_the_largest_fractions() -> None:
    parts = weights.largest_remainder(np.array([10]), np.array([0, 0, 0]), np.array([0.55, 0.25, 0.2]))
    assert parts.tolist() == [6, 2, 2]


def lives_of(capture: SyntheticCapture, tmp_path: Path) -> pd.DataFrame:
    """The process lives of a capture by PID."""
    opened = Capture.open(capture.write(tmp_path / "case.lscope"))
    with opened.connect() as con:
        return process_lives(con, source_bounds(con, opened.manifest.sources)).set_index("pid")


def test_lives_end_where_exits_begin_and_short_ones_are_folded(tmp_path: Path) -> None:
    # given a root that exits, a worker alive at the end, one that lived a fifth, one that lived 2 %
    capture = SyntheticCapture(10)
    for pid, role, start, exit_s in (
        (1, "root", 0, 9),
        (2, "child", 1, None),
        (3, "child", 2, 4),
        (4, "child", 5, 5.2),
    ):
        capture.process(pid, role, start, exit_s)
        for i in range(100):
            capture.alloc(start + i * ((exit_s or 10) - start) / 100, 64, pid=pid)
    lives = lives_of(capture, tmp_path)
    assert lives["judged"].to_dict() == {1: True, 2: True, 3: True, 4: False, FOLDED_PID: True}
    assert lives.loc[4, "life"] == lives.loc[FOLDED_PID, "life"]
    assert lives["life"].nunique() == 4
    windows = {
        pid: (lives.loc[pid, "from_ns"] - START_NS, lives.loc[pid, "until_ns"] - START_NS) for pid in (1, 2, 3, 4)
    }
    second = 10**9
    assert windows == {1: (0, 9 * second), 2: (second, 10 * second), 3: (2 * second, 4 * second), 4: (0, 10 * second)}


def test_a_process_without_a_row_is_judged_to_the_end(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    for i in range(20):
        capture.alloc(i * 0.5, 64, pid=77)
    lives = lives_of(capture, tmp_path)
    assert (bool(lives.loc[77, "judged"]), int(lives.loc[77, "exit_ns"]), bool(lives.loc[77, "idle"])) == (
        True,
        0,
        False,
    )


def test_idle_time_is_cut_from_the_judged_window(tmp_path: Path) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    for i in range(100):
        capture.alloc(4 + i * 0.01, 64)
    lives = lives_of(capture, tmp_path)
    assert bool(lives.loc[PID, "idle"])
    assert (lives.loc[PID, "from_ns"] - START_NS, lives.loc[PID, "until_ns"] - START_NS) == (
        4_000_000_000,
        4_990_000_000,
    )


def test_stacks_are_read_outermost_first_with_what_is_unknown(tmp_path: Path) -> None:
    capture = SyntheticCapture(1)
    stack = capture.stack(["py:serve@app.py:7", "libc.so.6!malloc", "k:kmalloc"])
    capture.rows["stacks"].append({"id": 99, "frames": [1, 12345]})
    opened = Capture.open(capture.write(tmp_path / "case.lscope"))
    with opened.connect() as con:
        stacks = Stacks(con, [stack, 99, 0, 1000])
    assert [f.text for f in stacks[stack]] == ["serve (app.py:7)", "malloc", "kmalloc"]
    assert [f.text for f in stacks[99]] == ["serve (app.py:7)", "[unknown]"]
    assert stacks[0] == [] and stacks[1000] == []
    assert Frame("", module="/usr/lib/libx.so", offset=0x1234).text == "libx.so+0x1234"


def named(*names: str, module: str = "/opt/app", kind: str = "native") -> list[Frame]:
    """Frames of one module."""
    return [Frame(name, module=module, kind=kind) for name in names]


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (named("main", "load") + named("mmap64", module="/lib/libc.so.6"), "load"),
        (named("main", "grow", "operator new(unsigned long)"), "grow"),
        (named("main", "put") + named("cudaMalloc", module="/x/libcudart.so.12"), "put"),
        (named("main", "put", "cudaMalloc", "cuMemAlloc_v2"), "put"),  # runtime linked statically
        (named("main", "") + named("write", module="libc.so.6"), "main"),
        (named("start_thread", module="libc.so.6"), "start_thread"),  # better than nothing
    ],
)
def test_culprit_is_the_innermost_frame_of_the_application(user: list[Frame], expected: str) -> None:
    frame = culprit(user, [], named("k", kind="kernel"))
    assert frame is not None and frame.function == expected


def test_culprit_of_python_is_the_innermost_frame_outside_the_library() -> None:
    python = [
        Frame("handler", "/srv/app.py", 5, kind="python"),
        Frame("connect", "/usr/lib/python3.11/socket.py", 608, kind="python"),
    ]
    frame = culprit(named("main"), python, [])
    assert frame is not None and frame.text == "handler (/srv/app.py:5)"


def test_culprit_without_user_frames_is_the_syscall_else_the_kernel_function() -> None:
    kernel = named("entry_SYSCALL_64", "__x64_sys_msgget", "ksys_msgget", "newque", kind="kernel")
    assert culprit([], [], kernel) == kernel[1]
    assert culprit([], [], kernel[3:]) == kernel[3]
    assert culprit([], [], []) is None


def test_entry_into_the_kernel() -> None:
    assert entry_of(named("entry_SYSCALL_64", "__x64_sys_socketpair", "sock_alloc")) == "socketpair"
    assert entry_of(named("asm_exc_page_fault", "exc_page_fault", "handle_mm_fault")) == "page fault"
    assert entry_of(named("ret_from_fork", "kthread")) == ""


def test_what_the_slab_allocator_needs_for_itself_is_told_from_what_is_asked_of_it() -> None:
    own = named("do_sys", "sock_alloc_inode", "kmem_cache_alloc_lru_noprof", "___slab_alloc", "new_slab",
                "alloc_slab_obj_exts", "__kmalloc_node_noprof", kind="kernel")  # fmt: skip
    asked = named("do_sys", "__alloc_skb", "kmalloc_reserve", "__kmalloc_node_track_caller_noprof", kind="kernel")
    assert inside_slab_allocator(own) and not inside_slab_allocator(asked)
    assert allocating(own) == own[5] and allocating(asked) == asked[2]
    assert not inside_slab_allocator(named("alloc_empty_file", kind="kernel")) and not inside_slab_allocator([])


def test_randomised_caches_are_folded() -> None:
    assert folded_cache("kmalloc-rnd-07-64") == "kmalloc-64"
    assert folded_cache("kmalloc-cg-64") == "kmalloc-cg-64"


@pytest.mark.parametrize(
    ("layer", "share", "reused", "kept", "grown", "before", "visible"),
    [
        ("kernel", np.nan, 0, 0, np.nan, 4096, True),  # nothing ever ended: a leak looks like this
        ("kernel", 0.0, 5, 0, np.nan, 4096, True),  # 5 reuses in 1,000 allocations: lost frees
        ("kernel", 0.0, 10, 0, np.nan, 4096, False),  # only ever reused
        ("kernel", 0.04, 500, 0, np.nan, 4096, False),
        ("kernel", 0.9, 100, 0, np.nan, 4096, True),  # mostly freed by calls
        ("kernel", np.nan, 0, 64_000, 10_000, 4096, False),  # its cache did not grow by that
        ("kernel", np.nan, 0, 64_000, 60_000, 4096, True),
        ("kernel", np.nan, 0, 64_000, -9_000, 700_000, True),  # too little of its cache to tell
        ("kernel", 0.5, 0, 64_000, 10_000, 4096, True),  # frees are seen: the cache was shrunk by others
        ("host", 0.0, 1000, 0, np.nan, 4096, True),  # a map over a map is visible
    ],
)
def test_frees_visible(
    layer: str, share: float, reused: int, kept: float, grown: float, before: float, visible: bool
) -> None:
    sites = pd.DataFrame(
        {
            "layer": [layer],
            "free_seen_share": [share],
            "reuse_objects": [reused],
            "alloc_objects": [1000],
            "live_objects": [1000],
            "call_site": [7],
            "slab_cache": ["kmalloc-64"],
            "call_objects": [0],
            "context_objects": [0],
        }
    )
    assert frees_visible(sites, np.array([kept]), np.array([grown]), np.array([before])).tolist() == [visible]


def test_the_culprit_lies_above_what_a_leak_shares_with_those_who_free() -> None:
    # given a wrapper that a leaking and a freeing caller use, and a second leak of its own
    columns = [
        "site",
        "layer",
        "kind",
        "api",
        "call_site",
        "user_stack",
        "python_stack",
        "alloc_objects",
        "live_objects",
    ]
    rows = [
        (0, "host", "heap", "malloc", 0, 1, 0, 100, 100),  # main > keep > wrap
        (1, "host", "heap", "malloc", 0, 2, 0, 100, 0),  # main > serve > wrap
        (2, "host", "heap", "malloc", 0, 3, 0, 100, 100),  # main > hold
        (3, "host", "mmap_anon", "mmap", 0, 2, 0, 100, 100),  # the freeing path, but another kind of memory
    ]
    sites = pd.DataFrame(rows, columns=columns)
    paths = {1: ("main", "keep", "wrap"), 2: ("main", "serve", "wrap"), 3: ("main", "hold")}
    stacks = {0: [], **{number: [Frame(name, module="/bin/app") for name in path] for number, path in paths.items()}}
    growing = sites[sites["live_objects"] > 0]
    # when shared tails are looked for
    freeing = freeing_sites(sites, growing)
    shared = shared_with_freeing(growing, freeing, stacks)
    # then only the wrapper is passed over, and only where someone frees the same kind of memory through it
    assert freeing["site"].tolist() == [1]
    assert shared == {0: 1, 2: 0, 3: 0}
    assert culprit(stacks[1], [], [], shared[0]).function == "keep"
