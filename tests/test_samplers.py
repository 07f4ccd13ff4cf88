"""Samplers of processes and the host against independent readings of the kernel, and the set of all."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_child import StepChild

from leakscope.model.tables import SAMPLES
from leakscope.record.samplers import Reading, SamplerSet
from leakscope.record.samplers.base import ChangeFilter
from leakscope.record.samplers.meminfo import parse_meminfo
from leakscope.record.samplers.process import ProcessSampler, TimeBudget, parse_maps
from leakscope.record.samplers.slabinfo import SlabinfoSampler

MIB = 1 << 20


@pytest.fixture
def child() -> Iterator[StepChild]:
    step_child = StepChild()
    yield step_child
    if step_child.process.poll() is None:
        step_child.end()


def process_counters(pid: int, **options: bool) -> dict[str, float]:
    return {r.counter: r.value for r in ProcessSampler(lambda: [pid], **options).sample(0)}


def smaps_sum(pid: int, line: str) -> int:
    """Sum of one line over every map of /proc/PID/smaps, in bytes: another path than status and rollup."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(rf"^{line}:\s+(\d+) kB$", text, re.MULTILINE))


# --- process ---------------------------------------------------------------------------------------------


def test_anonymous_memory_is_what_the_child_touched(child: StepChild) -> None:
    # given a child that is warm, when it touches exactly 37 MiB of fresh anonymous memory
    child.do("import mmap; warm = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)")
    before = process_counters(child.pid)
    child.do("m = mmap.mmap(-1, 37 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); n = m.write(b'x' * len(m))")
    child.do("pass")  # the bytes object of the write is freed by now
    after = process_counters(child.pid)
    # then all views agree: status here, smaps there
    assert after["rss_anon"] == smaps_sum(child.pid, "Anonymous")
    assert after["rss"] == after["rss_anon"] + after["rss_file"] + after["rss_shmem"] == smaps_sum(child.pid, "Rss")
    assert after["pss"] == pytest.approx(smaps_sum(child.pid, "Pss"), abs=1024 * 200)  # smaps rounds each map
    assert 0 <= after["rss_anon"] - before["rss_anon"] - 37 * MIB <= MIB // 2
    assert 0 <= after["vss"] - before["vss"] - 37 * MIB <= MIB // 2
    assert after["threads"] == 1


def test_file_and_shared_maps_are_told_apart(child: StepChild, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"x" * (5 * MIB))
    shared = Path(f"/dev/shm/leakscope-test-{os.getpid()}")
    shared.write_bytes(b"x" * (3 * MIB))
    try:
        child.do("import mmap, os")
        before = process_counters(child.pid)
        child.do(f"f = os.open({str(plain)!r}, os.O_RDWR); a = mmap.mmap(f, 0); s = sum(a[::4096])")
        child.do(f"g = os.open({str(shared)!r}, os.O_RDWR); b = mmap.mmap(g, 0); s = sum(b[::4096])")
        after = process_counters(child.pid)
        file_mib, shmem_mib = (0, 8) if filesystem_of(tmp_path) == "tmpfs" else (5, 3)
        assert (after["rss_shmem"] - before["rss_shmem"]) == shmem_mib * MIB
        assert file_mib * MIB <= after["rss_file"] - before["rss_file"] <= file_mib * MIB + MIB // 4
        # mmap duplicates the descriptor: two each
        assert after["fds"] - before["fds"] == 4
        assert after["fds"] == len(list(Path(f"/proc/{child.pid}/fd").iterdir()))
        # when a second process maps the same 3 MiB, its share is divided by two
        with shared.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mine:
            assert sum(mine[::4096]) > 0
            divided = process_counters(child.pid)
        assert after["pss"] - divided["pss"] == pytest.approx(1.5 * MIB, abs=64 * 1024)
    finally:
        shared.unlink()


def filesystem_of(path: Path) -> str:
    return subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()


def test_maps_by_kind_add_up_to_the_address_space(child: StepChild) -> None:
    child.do("import mmap")
    before = process_counters(child.pid, maps=True)
    child.do("m = [mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)]")
    child.do("m += [mmap.mmap(-1, 2 << 20, mmap.MAP_SHARED)]")
    after = process_counters(child.pid, maps=True)
    assert after["maps_reserved"] - before["maps_reserved"] == 8 * MIB
    assert after["maps_shmem"] - before["maps_shmem"] == 2 * MIB
    assert after["map_count"] - before["map_count"] == 2
    # vsyscall is not part of VmSize
    kinds = sum(v for k, v in after.items() if k.startswith("maps_"))
    assert kinds - 4096 == after["vss"] == before["vss"] + 10 * MIB


def test_parse_maps_knows_every_kind() -> None:
    text = textwrap.dedent("""\
        00400000-00402000 r-xp 00000000 08:01 12 /usr/bin/with space (deleted)
        01000000-01003000 rw-p 00000000 00:00 0 [heap]
        7f0000000000-7f0000001000 rw-p 00000000 00:00 0
        7f0000002000-7f0000004000 ---p 00000000 00:00 0
        7f0000005000-7f000000a000 rw-s 00000000 00:01 9 /memfd:kv (deleted)
        7f000000a000-7f000000b000 rw-s 00000000 00:01 9 /SYSV00000000 (deleted)
        7f000000b000-7f000000c000 rw-p 00000000 00:00 0 [anon:arena]
        7fff00000000-7fff00006000 rw-p 00000000 00:00 0 [stack]
        """).encode()
    assert parse_maps(text) == {
        "maps_anon": 0x2000, "maps_file": 0x2000, "maps_shmem": 0x6000, "maps_heap": 0x3000,
        "maps_stack": 0x6000, "maps_reserved": 0x2000, "map_count": 8,
    }  # fmt: skip


def test_exited_processes_and_zombies_give_nothing_and_no_loss(child: StepChild) -> None:
    gone = StepChild()
    gone.end()
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    try:
        while b"State:\tZ" not in Path(f"/proc/{zombie}/status").read_bytes():
            time.sleep(0.001)
        samplers = SamplerSet(lambda: [gone.pid, zombie, child.pid])
        rows = samplers.read(5).to_pylist()
    finally:
        os.waitpid(zombie, 0)
    assert {r["scope_id"] for r in rows if r["scope"] == "process"} == {str(child.pid)}
    assert [loss for loss in samplers.losses() if "process" in loss[0]] == []


def test_a_process_that_vanishes_between_two_files_is_no_loss(tmp_path: Path) -> None:
    # given a PID whose status was still there, and nothing else
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nVmSize:\t 8 kB\nVmRSS:\t 4 kB\nThreads:\t2\n")
    sampler = ProcessSampler(lambda: [7], tmp_path, maps=True)
    assert list(sampler.sample(0)) == [
        Reading("process", "7", "vss", 8192),
        Reading("process", "7", "rss", 4096),
        Reading("process", "7", "threads", 2),
    ]
    assert sampler.errors == Counter()


def test_rollup_is_read_no_more_often_than_its_budget_permits(child: StepChild) -> None:
    # given a budget of 1 % that one reading has overdrawn by 2 s
    now = [0.0]
    budget = TimeBudget(0.01, 0.1, clock=lambda: now[0])
    assert budget.allows()
    budget.spend(2.1)
    sampler = ProcessSampler(lambda: [child.pid], rollup_budget=budget)
    now[0] = 199.0
    assert "pss" not in {r.counter for r in sampler.sample(1)}
    now[0] = 201.0
    assert "pss" in {r.counter for r in sampler.sample(2)}


def test_rollup_takes_turns_when_the_budget_is_short() -> None:
    children = [StepChild() for _ in range(3)]
    try:
        now = [0.0]

        class OneEach(TimeBudget):
            def spend(self, seconds: float) -> None:
                super().spend(10.0)  # any reading takes ten seconds of the budget

        budget = OneEach(1.0, 1.0, clock=lambda: now[0])
        sampler = ProcessSampler(lambda: [c.pid for c in children], rollup_budget=budget)
        turns = []
        for step in range(6):
            now[0] = step * 20.0
            turns.append([r.scope_id for r in sampler.sample(step) if r.counter == "pss"])
        order = [[str(c.pid)] for c in children]
        assert turns == order + order
    finally:
        for c in children:
            c.end()


# --- host ------------------------------------------------------------------------------------------------


def test_slabinfo_agrees_with_a_plain_parse_of_the_same_text(tmp_path: Path) -> None:
    if not os.access("/proc/slabinfo", os.R_OK):
        pytest.skip("/proc/slabinfo is not readable by this user")
    shutil.copy("/proc/slabinfo", tmp_path / "slabinfo")
    expected = {}
    for line in (tmp_path / "slabinfo").read_text().splitlines()[2:]:
        name, active, total, size = line.split()[:4]
        if int(total):
            expected[f"slab_{name}"] = int(active) * int(size)
            expected[f"slab_{name}_num"] = int(total) * int(size)
    readings = {r.counter: r.value for r in SlabinfoSampler(tmp_path).sample(0)}
    assert len(expected) > 100
    assert readings == expected


def test_a_cache_is_emitted_from_its_first_object_on_and_same_names_are_summed(tmp_path: Path) -> None:
    head = "slabinfo - version: 2.1\n# name            <active_objs> <num_objs> <objsize> <objperslab>\n"
    sampler = SlabinfoSampler(tmp_path)
    (tmp_path / "slabinfo").write_text(head + "empty 0 0 64 1\nodd:name-8k(7) 2 3 100 1\nodd:name-8k(7) 1 1 10 1\n")
    assert [(r.counter, r.value) for r in sampler.sample(0)] == [
        ("slab_odd:name-8k(7)", 210),
        ("slab_odd:name-8k(7)_num", 310),
    ]
    (tmp_path / "slabinfo").write_text(head + "empty 1 8 64 1\n")
    assert [r.value for r in sampler.sample(1)] == [64, 512]
    (tmp_path / "slabinfo").write_text(head + "empty 0 0 64 1\n")
    assert [r.value for r in sampler.sample(2)] == [0, 0]  # it has been seen: its fall to zero is shown


def test_meminfo_lines() -> None:
    text = b"MemTotal:  24684096 kB\nActive(anon):    8 kB\nHugePages_Total:   3\nHugepagesize: 2048 kB\n"
    assert parse_meminfo(text) == {
        "MemTotal": 24684096 * 1024, "Active(anon)": 8192, "HugePages_Total": 3, "Hugepagesize": 2 * MIB,
    }  # fmt: skip
    real = parse_meminfo(Path("/proc/meminfo").read_bytes())
    assert len(real) == len(Path("/proc/meminfo").read_text().splitlines())
    assert real["MemTotal"] == int(Path("/proc/meminfo").read_text().split()[1]) * 1024


# --- the set ---------------------------------------------------------------------------------------------


class ListSampler:
    """Gives the next of a list of readings; an exception in the list is raised."""

    def __init__(self, name: str, steps: list[list[Reading] | Exception], *, sparse: bool = False) -> None:
        self.name, self.sparse, self.errors = name, sparse, Counter[str]()
        self._steps = iter(steps)

    def sample(self, ts_ns: int) -> list[Reading]:
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step

    def facts(self) -> dict[str, int]:
        return {self.name: 1}


def host(value: float, counter: str = "meminfo_Slab") -> Reading:
    return Reading("host", "", counter, value)


def test_rows_have_the_schema_of_the_samples_table() -> None:
    samplers = SamplerSet(lambda: [os.getpid()], source_id=3)
    table = samplers.read(123)
    table.validate(full=True)
    assert table.schema == SAMPLES
    assert set(table["source_id"].to_pylist()) == {3}
    assert set(table["ts_ns"].to_pylist()) == {123}
    counters = set(table["counter"].to_pylist())
    assert {
        "rss",
        "vss",
        "pss",
        "rss_anon",
        "rss_file",
        "rss_shmem",
        "threads",
        "fds",
        "meminfo_MemFree",
    } <= counters


def test_a_failing_sampler_is_a_counted_loss_and_the_others_go_on() -> None:
    bad = ListSampler(
        "bad", [ValueError("odd text"), OSError(5, "Input/output error"), OSError(5, "Input/output error")]
    )
    good = ListSampler("good", [[host(1.5)], [host(2.5)], [host(3.5)]])
    samplers = SamplerSet(list, samplers=[bad, good])
    assert [samplers.read(ts)["value"].to_pylist() for ts in (1, 2, 3)] == [[1.5], [2.5], [3.5]]
    assert samplers.losses() == [
        ("sampler bad", "sampler_error", 2, "bad: Input/output error"),
        ("sampler bad", "sampler_error", 1, "bad: odd text"),
    ]
    assert samplers.facts() == {"bad": 1, "good": 1}


def test_unreadable_slabinfo_is_a_loss_with_its_reason(tmp_path: Path) -> None:
    samplers = SamplerSet(list, samplers=[SlabinfoSampler(tmp_path)])
    assert samplers.read(1).num_rows == samplers.read(2).num_rows == 0
    assert samplers.losses() == [
        ("sampler slabinfo", "sampler_error", 2, "/proc/slabinfo: No such file or directory"),
    ]


def test_sparse_rows_leave_out_what_lies_between_equal_values() -> None:
    values = [5, 5, 5, 7, 7, 7]
    samplers = SamplerSet(list, samplers=[ListSampler("m", [[host(v)] for v in values], sparse=True)])
    rows = [samplers.read(ts, everything=ts == 5) for ts in range(6)]
    emitted = [[(r["ts_ns"], r["value"]) for r in table.to_pylist()] for table in rows]
    # first value | nothing | nothing | the late unchanged one and the change | nothing | everything
    assert emitted == [[(0, 5)], [], [], [(2, 5), (3, 7)], [], [(5, 7)]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_change_filter_loses_nothing(values: list[int]) -> None:
    keep = ChangeFilter()
    last = len(values) - 1
    rows = [row for ts, v in enumerate(values) for row in keep.pass_changed(ts, [host(v)], everything=ts == last)]
    times = [row.ts_ns for row in rows]
    assert times == sorted(set(times))
    rebuilt = np.interp(range(len(values)), times, [row.reading.value for row in rows])
    assert rebuilt.tolist() == values


def test_nothing_heavy_is_imported_before_a_reading() -> None:
    code = "import sys, leakscope.record.samplers; print({'pyarrow', 'pynvml'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
