"""Trees of stacks: what they share, what is cut of them, what kinds their frames are."""

from __future__ import annotations

import pytest

from leakscope.correlate.stack_trees import frame_kind, stack_tree
from leakscope.correlate.stacks import Frame
from leakscope.model.stack_tree import WeighedStack
from leakscope.report.html.icicle import cut_note


def frames(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "native") for name in names)


def test_a_tree_shares_what_stacks_have_in_common() -> None:
    tree = stack_tree(
        [
            WeighedStack(("a",), frames("main", "f"), (3, 0)),
            WeighedStack(("a",), frames("main", "g"), (5, 1)),
            WeighedStack(("a",), frames("main"), (7, 0), sampled=True),
            WeighedStack(("b",), frames("main", "f"), (11, 2)),
            WeighedStack(("c",), frames("nothing"), (0, 0)),
        ],
        2,
    )
    assert tree.roots == (("a",), ("b",))
    assert tree.parent == (-1, -1, 0, 2, 2, 1, 5)
    assert [tree.frames[frame][0] if frame >= 0 else "" for frame in tree.frame] == [
        "",
        "",
        "main",
        "f",
        "g",
        "main",
        "f",
    ]
    assert tree.totals(0) == [15, 11, 15, 3, 5, 11, 11] and tree.totals(1) == [1, 2, 1, 0, 1, 2, 2]
    assert tree.sampled == {2} and not tree.share and cut_note(tree) == ""
    with pytest.raises(ValueError, match="negative"):
        stack_tree([WeighedStack(("a",), frames("f"), (-1,))], 1)


def test_what_is_cut_of_a_tree_is_counted_and_keeps_its_bytes() -> None:
    stacks = [WeighedStack(("a",), frames("main", f"f{i}", "g"), (i + 1, i == 0)) for i in range(1000)]
    tree = stack_tree(stacks, 2, max_nodes=1100)
    # f0 alone has the second measure, so it stays though it has least of the first
    assert tree.share == 1e-3 and tree.totals(0)[0] == 500_500 and tree.totals(1)[0] == 1
    kept = [i for i in range(1000) if (i + 1) / 500_500 >= 1e-3 or i == 0]
    assert len(tree.parent) == 2 + 2 * len(kept) + 1
    ((node, count),) = (tree.merged or {}).items()
    assert count == 1000 - len(kept) and tree.totals(0)[node] == 500_500 - sum(i + 1 for i in kept)
    assert "less than 0.1 %" in cut_note(tree) and f"{count:,} stacks" in cut_note(tree)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (Frame("cudaMalloc", module="/app/server"), "cuda"),
        (Frame("cuMemAlloc_v2"), "cuda"),
        (Frame("", module="/usr/lib/libcuda.so.535.1", offset=7), "cuda"),
        (Frame("custom_allocator"), "native"),
        (Frame("cuddle", module="libcudadnn_like.so"), "native"),
        (Frame("cudaMalloc", "app.py", 3, kind="python"), "python"),
        (Frame("do_open", kind="kernel"), "kernel"),
        (Frame("inner", kind="inlined"), "native"),
    ],
)
def test_kinds_of_frames(frame: Frame, kind: str) -> None:
    assert frame_kind(frame) == kind
