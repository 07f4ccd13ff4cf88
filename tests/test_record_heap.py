"""malloc's probes in single processes: exact there and in their children, and in no other process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from heap_forker import CHILD_BYTES, PARENT, PARENT_BYTES
from recording import ROOT, Recorder, Recording, waiting

from leakscope.model.recording import Loss
from leakscope.record.mapped import mapped_files
from leakscope.record.options import RecordOptions
from leakscope.record.probes import heap as heap_probes
from leakscope.record.probes.heap import HeapProbes, wants_single_processes
from leakscope.record.side_band import SideBandEvent
from leakscope.symbols.elf import ElfFile

COUNT, ROUNDS, FOLLOWED = 211, 80, 20
INT3 = 0xCC


def first_byte_of_malloc(pid: int) -> set[int]:
    """The bytes that a process has where malloc begins, and behind an endbr64."""
    libc = next(f for f in mapped_files(pid) if f.executable and Path(f.path).name.startswith("libc.so"))
    offset = ElfFile(Path(libc.path).read_bytes()).function_offsets()["malloc"]
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(libc.start + offset - libc.file_offset)
        code = memory.read(5)
    return {code[0], code[4]}


@dataclass
class Heap:
    recording: Recording
    report: dict[str, Any]
    forker: dict[str, int]
    probed: dict[str, bool] = field(default_factory=dict)


@pytest.fixture(scope="module")
def heap(bpf: str, samples: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heap]:
    """A leaker and one that forks, recorded; the same leaker beside them, not recorded."""
    path = tmp_path_factory.mktemp("by_process") / "heap.lscope"
    leaker_options = ("--count", COUNT, "--churn", 2, "--pause-us", 0)
    forker = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "heap_forker.py"), str(ROUNDS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert forker.stdin and forker.stdout
    assert forker.stdout.readline() == "ready\n"
    with (
        waiting("leak_heap", *leaker_options) as leaker,
        waiting("leak_heap", *leaker_options) as other,
        Recorder(path, "--malloc", "-p", leaker.pid, "-p", forker.pid) as recorder,
    ):
        recorder.wait_ready()
        probed = {name: INT3 in first_byte_of_malloc(p.pid) for name, p in (("it", leaker), ("other", other))}
        forker.stdin.write("\n")
        forker.stdin.flush()
        told = json.loads(forker.stdout.readline())
        report = leaker.go()
        other.go()
        time.sleep(ROUNDS * 0.05 + 1)
        recording = recorder.stop()
    forker.stdin.close()
    forker.wait()
    assert recording.code == 130, recording.stderr
    yield Heap(recording, report, told, probed)


@pytest.mark.bpf
def test_breakpoints_are_in_the_recorded_process_alone(heap: Heap) -> None:
    assert heap.probed == {"it": True, "other": False}
    assert "every other process" not in heap.recording.stderr


@pytest.mark.bpf
@pytest.mark.parametrize("function", ["parse_record_and_forget", "load_document_and_forget"])
def test_malloc_is_exact_by_site(heap: Heap, function: str) -> None:
    site = next(s for s in heap.report["sites"] if s["function"] == function)
    where = "pid = ? AND kind = 'heap' AND list_contains(functions, ?)"
    live = heap.recording.live("api", where, heap.report["pid"], function)
    assert live == {"malloc": (site["objects"], site["bytes"])}


@pytest.mark.bpf
def test_a_child_is_followed_and_what_it_frees_is_its_own(heap: Heap) -> None:
    # given a child that kept a block of another size each 50 ms, the first of them perhaps before it was followed
    sizes = f"size_bytes BETWEEN {CHILD_BYTES} AND {CHILD_BYTES + ROUNDS - 1}"
    live = heap.recording.live("size_bytes", f"pid = ? AND kind = 'heap' AND {sizes}", heap.forker["child"])
    last = range(CHILD_BYTES + ROUNDS - FOLLOWED, CHILD_BYTES + ROUNDS)
    assert {size: live.get(size) for size in last} == {size: (1, size) for size in last}
    # and freed its copies of the parent's blocks: these live on in the parent
    where = f"kind = 'heap' AND size_bytes = {PARENT_BYTES}"
    assert heap.recording.live("pid", where) == {heap.forker["parent"]: (PARENT, PARENT * PARENT_BYTES)}
    # what may be missing of it is told
    losses = heap.recording.rows("SELECT probe, count, detail FROM losses WHERE what = 'attach_failed'")
    ((count, detail),) = [(count, detail) for probe, count, detail in losses if probe == "malloc"]
    assert count == 1 and detail.startswith("children: their malloc and free in the first ")


def test_only_named_processes_are_probed_one_by_one() -> None:
    def options(**more: Any) -> RecordOptions:
        return RecordOptions(Path("x.lscope"), **more)

    assert wants_single_processes(options(malloc=True, pids=[1]))
    assert not wants_single_processes(options(pids=[1]))
    assert not wants_single_processes(options(malloc=True))
    assert not wants_single_processes(options(malloc=True, command=["true"]))
    assert not wants_single_processes(options(malloc=True, cgroup=Path("/")))


class Functions:
    """Stands for FunctionProbes: links are descriptors of nothing."""

    def __init__(self) -> None:
        self.linked: list[int] = []

    def link(self, path: str, pid: int) -> list[int]:
        self.linked.append(pid)
        return [os.open("/dev/null", os.O_RDONLY)]


def test_children_are_followed_while_there_is_room_and_told_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_probes, "MOST_FOLLOWED", 3)
    functions = Functions()
    probes = HeapProbes(functions, [10])  # type: ignore[arg-type]
    probes.attach(10, "/bin/sh")
    probes.attach(10, "/bin/sh")  # the same file
    probes.attach(99, "/bin/sh")  # of nobody
    # given two children and a grandchild, a thread, and a child of a process that is not recorded
    for parent, child in ((10, 11), (11, 12), (12, 13), (98, 97)):
        probes.follow(SideBandEvent(1, "fork", child, child, other=parent))
    probes.follow(SideBandEvent(1, "fork", 10, 14, other=10))
    assert functions.linked == [10, 11, 12]
    late, beyond = probes.losses()
    assert (late.count, beyond) == (
        2, Loss("malloc", "attach_failed", 1, "children beyond 3 processes at once: their heap is not recorded"),
    )  # fmt: skip
    # when one ends there is room for another
    probes.follow(SideBandEvent(2, "exit", 12, 12))
    probes.follow(SideBandEvent(3, "fork", 15, 15, other=11))
    assert functions.linked == [10, 11, 12, 15]
    # and once the probes are closed nothing is attached any more, though forks are still told
    probes.close()
    probes.follow(SideBandEvent(4, "fork", 16, 16, other=11))
    probes.close()
    assert functions.linked == [10, 11, 12, 15]
