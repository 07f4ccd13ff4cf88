"""Touches of allocations by launches, on synthetic lives and captures whose truth is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import SyntheticCapture

from leakscope.capture import Capture
from leakscope.correlate.touches import ALWAYS, Lives, find_lives
from leakscope.detect.attribution import Options, attribute
from leakscope.model.results import Report, Site
from leakscope.report.json import report_json
from leakscope.report.terminal import plain_lines


def lives(*rows: tuple[int, int, int, int, int]) -> Lives:
    """(owner, start, end, from_ns, until_ns) a row."""
    owner, start, end, from_ns, until_ns = (np.array(column) for column in zip(*rows, strict=True))
    return Lives(
        owner.astype(np.int64), start.astype(np.uint64), end.astype(np.uint64), from_ns.astype(np.int64),
        until_ns.astype(np.int64),
    )  # fmt: skip


def find(table: Lives, *questions: tuple[int, int, int]) -> list[int]:
    owner, address, ts_ns = (np.array(column) for column in zip(*questions, strict=True))
    return find_lives(table, owner.astype(np.int64), address.astype(np.uint64), ts_ns.astype(np.int64)).tolist()


def test_an_address_belongs_to_who_has_it_at_the_time() -> None:
    # given an address that was handed out three times, the second time as part of a larger block
    table = lives((1, 1000, 1100, 10, 20), (1, 900, 1500, 20, 30), (1, 1000, 1050, 35, ALWAYS))
    # then a pointer belongs to the block that was alive, ends and times of freeing excluded
    assert find(table, (1, 1000, 10), (1, 1099, 19), (1, 1000, 20), (1, 1499, 29)) == [0, 0, 1, 1]
    assert find(table, (1, 1049, 35), (1, 1049, 10**12)) == [2, 2]
    assert find(table, (1, 1100, 15), (1, 1000, 9), (1, 1000, 30), (1, 1050, 40), (1, 899, 25)) == [-1] * 5
    # and another process has its own addresses
    assert find(table, (2, 1000, 15), (1, 1000, 15)) == [-1, 0]


def test_lives_that_never_share_an_address() -> None:
    table = lives((1, 100, 200, 5, ALWAYS), (1, 300, 400, 7, 9), (2, 100, 200, 6, ALWAYS))
    assert find(table, (1, 100, 5), (1, 199, 5), (1, 100, 4), (1, 300, 8), (1, 300, 9)) == [0, 0, -1, 1, -1]
    assert find(table, (2, 150, 6), (2, 150, 5), (1, 200, 8), (1, 99, 8), (3, 150, 8)) == [2, -1, -1, -1, -1]


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_against_a_plain_search(seed: int) -> None:
    # given an allocator that hands out addresses at random, of two processes
    chance = random.Random(seed)
    rows: list[list[int]] = []
    for owner in (1, 2):
        alive: list[list[int]] = []
        for now in range(400):
            start, size = chance.randrange(0, 4000), chance.randrange(1, 400)
            if all(start + size <= row[1] or row[2] <= start for row in alive):
                alive.append([owner, start, start + size, now, ALWAYS])
                rows.append(alive[-1])
            elif alive and chance.random() < 0.7:
                alive.pop(chance.randrange(len(alive)))[4] = now
    table = lives(*(tuple(row) for row in rows))  # type: ignore[arg-type]
    questions = [(chance.randrange(1, 4), chance.randrange(0, 4500), chance.randrange(-5, 420)) for _ in range(2000)]
    # then each answer is that of looking at every life
    plain = [
        next((i for i, r in enumerate(rows) if r[0] == o and r[1] <= a < r[2] and r[3] <= t < r[4]), -1)
        for o, a, t in questions
    ]
    assert find(table, *questions) == plain
    assert sum(hit >= 0 for hit in plain) > 300


class Launches(SyntheticCapture):
    """A synthetic capture with launches."""

    def launch(
        self, at_s: float, kernel: str, *pointers: int, approximate: int = 0, whole: bool = True, result: int = 0
    ) -> int:
        """A launch of a kernel with pointer arguments; not `whole`: not all of its parameters were read."""
        number = len(self.rows["launches"]) + 1
        common = {"ts_ns": self.ns(at_s), "pid": 100}
        self.rows["launches"].append(
            {"id": number, "kernel": kernel, "api": "cuLaunchKernel", "result": result, **common}
        )
        for position, value in enumerate(pointers):
            self.rows["launch_arguments"].append(
                {"launch_id": number, "position": position, "value": value, "approximate": approximate, **common}
            )
        if not whole:
            self.rows["launch_arguments"].append(
                {"launch_id": number, "position": -1, "value": 0, "approximate": approximate, **common}
            )
        return number

    def block(self, at_s: float, addr: int, size: int, site: str, **more: Any) -> dict[str, Any]:
        """Device memory."""
        how = {"layer": "gpu", "kind": "device", "api": "cudaMalloc", "user": ["main", site, "cudaMalloc"], **more}
        return self.alloc(at_s, size, addr=addr, **how)

    def report(self, tmp_path: Path) -> Report:
        capture = Capture.open(self.write(tmp_path / "synthetic.lscope"))
        with capture.connect() as connection:
            return attribute(connection, capture.manifest, Options())


def site(report: Report, function: str) -> Site:
    return next(s for s in report.sites if s.culprit_frame == function)


def exact_history(seconds: float = 100.0) -> Launches:
    """Three blocks that are kept: one in use, one touched until 20 s, one never; and a freed one of shared address."""
    made = Launches(seconds)
    made.process()
    made.block(1, 0x10000, 4000, "in_use")
    made.block(2, 0x20000, 2000, "stale")
    passing = made.block(3, 0x30000, 5000, "passing")
    made.launch(4, "other", 0x30000, 0x30008)
    made.free(passing, 5)
    made.block(6, 0x30000, 1000, "never")
    for at in range(10, 95, 5):
        made.launch(at, "attend", 0x10000, 0x10FA0 - 1 if at == 10 else 0x10000 + 3999)
    made.launch(20, "fill", 0x20000 + 8)
    made.launch(21, "fill", 0x20000 + 2000)  # the first byte behind it
    made.launch(30, "fill", 0x20000, result=700)  # refused
    return made


def test_the_last_touch_of_what_is_kept(tmp_path: Path) -> None:
    # when a capture is attributed whose launches are known whole
    report = exact_history().report(tmp_path)
    # then the block in use was touched last by its kernel's last launch, a launch with two pointers counting once
    used = site(report, "in_use").touches
    assert used is not None
    assert (used.launches, used.last_kernel, used.last_touch_ns) == (17, "attend", 91_000_000_000)
    assert (used.touched_bytes, used.live_bytes, used.approximate) == (4000, 4000, False)
    assert used.idle == ((1, 4000), (10, 4000))
    # the stale one by the only launch that succeeded with a pointer into it
    stale = site(report, "stale").touches
    assert stale is not None
    assert (stale.launches, stale.last_kernel, stale.last_touch_ns, stale.touched_bytes) == (
        1,
        "fill",
        21_000_000_000,
        2000,
    )
    assert (stale.idle, stale.approximate) == (((1, 2000), (10, 2000), (60, 2000)), False)
    # and who got the address of a freed block that was touched has no touch
    never = site(report, "never").touches
    assert never is not None
    assert (never.launches, never.last_touch_ns, never.last_kernel, never.touched_bytes) == (0, 0, "", 0)
    assert never.idle[-1] == (60, 1000)


def test_chains_and_json_name_the_launches(tmp_path: Path) -> None:
    report = report_json(exact_history().report(tmp_path))
    sites = {s["culprit_frame"]: s for s in report["sites"]}
    ends = {chain["site"]: chain["links"][-1] for chain in report["chains"]}
    assert ends[sites["stale"]["id"]] == {
        "what": "launches", "name": "fill", "rule": "argument", "confidence": 1.0, "count": 1, "bytes": 2000,
    }  # fmt: skip
    assert ends[sites["never"]["id"]]["what"] == "device"
    keys = ("last_touch_ns", "last_kernel", "touching_launches", "touched_share", "touches_approximate")
    assert [sites["stale"][key] for key in keys] == [21_000_000_000, "fill", 1, 1.0, False]
    assert [sites["never"][key] for key in keys] == [None, None, 0, 0.0, False]
    assert sites["never"]["idle"] == [{"seconds": s, "bytes": 1000} for s in (1, 10, 60)]


@pytest.mark.parametrize("how", ["guessed", "not whole", "graph"])
def test_what_was_not_seen_makes_idleness_approximate(tmp_path: Path, how: str) -> None:
    # given launches at 50 s of which not all is known
    made = exact_history()
    if how == "guessed":
        made.launch(50, "", 0x20000, approximate=1, whole=False)
    elif how == "not whole":
        made.launch(50, "attend", 0x10000, whole=False)
    else:
        outer = made.call("cudaGraphLaunch", 50, 50.002)
        made.call("cuGraphLaunch", 50.0005, 50.001, parent=outer)
    report = made.report(tmp_path)
    # then it is exact only for what was touched later
    approximate = {name: site(report, name).touches.approximate for name in ("in_use", "stale", "never")}  # type: ignore[union-attr]
    assert approximate == {"in_use": False, "stale": True, "never": True}
    stale = site(report, "stale")
    assert stale.touches is not None
    if how == "guessed":
        assert (stale.touches.launches, stale.touches.last_touch_ns) == (2, 51_000_000_000)
        links = next(chain for chain in report.chains if chain.site == stale.id).links[-2:]
        assert [(link.name, link.confidence) for link in links] == [("unknown kernel", 0.5), ("fill", 1.0)]
    graphs = [(row.what, row.value) for row in report.losses if "graph" in row.what]
    assert graphs == ([("graph launches, whose kernels and buffers are not seen", 1)] if how == "graph" else [])


def test_memory_behind_a_handle_is_touched_through_its_mappings(tmp_path: Path) -> None:
    # given a handle mapped at two places after one another, and a place that another handle had before
    made = Launches(100)
    made.process()
    vmm = {"kind": "vmm", "api": "cuMemCreate"}
    released = made.block(1, 7, 4096, "released", **vmm)
    made.rows["device_maps"] += [
        {"ts_ns": made.ns(at), "pid": 100, "op": op, "addr": addr, "size_bytes": size, "handle": handle}
        for at, op, addr, size, handle in (
            (2, "map", 0x50000, 4096, 7), (10, "unmap", 0x50000, 8192, 0), (12, "map", 0x50000, 4096, 9),
            (20, "unmap", 0x4F000, 8192, 0), (22, "map", 0x60000, 4096, 9),
        )
    ]  # fmt: skip
    made.free(released, 11)
    made.block(11.5, 9, 4096, "mapped", **vmm)
    for at, addr in ((5, 0x50000), (15, 0x50FFF), (21, 0x50000), (21, 9), (25, 0x60010), (30, 0x61000)):
        made.launch(at, f"at_{at}", addr)
    touches = site(made.report(tmp_path), "mapped").touches
    # then what was launched with an address while it was the handle's counts
    assert touches is not None
    assert [kernel.kernel for kernel in touches.kernels] == ["at_25", "at_15"]
    assert (touches.launches, touches.touched_bytes) == (2, 4096)


def test_without_launch_arguments_nothing_is_said(tmp_path: Path) -> None:
    made = Launches(100)
    made.process()
    made.block(1, 0x10000, 4000, "in_use")
    report = made.report(tmp_path)
    assert site(report, "in_use").touches is None
    assert "last_touch_ns" not in site(report, "in_use").to_json()


def test_a_leak_that_nobody_touches_is_told_on_the_terminal(tmp_path: Path) -> None:
    # given a leak of 100 blocks, each filled once as it is made, one of them by a kernel of a hostile name
    made = Launches(100)
    made.process()
    for i in range(100):
        made.block(i + 0.5, 0x100000 + 0x1000 * i, 4096, "forget")
        made.launch(i + 0.6, "fill\x1b[2J" if i == 99 else "fill", 0x100000 + 0x1000 * i)
    report = made.report(tmp_path)
    text = "\n".join(plain_lines(report, 200))
    # then the finding says since when
    assert report.verdict.verdict == "leak"
    assert "kernels got pointers into 100% of it, last fill\\x1b[2J; 160.0 KiB untouched for 60 s or more" in text
    assert "\x1b" not in text
    assert "device 400.0 KiB → fill\\x1b[2J ×1 → fill ×99" in text
