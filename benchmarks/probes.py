"""The kernel probes loaded into this process, and what one hit of each program costs."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from benchmarks.results import Options, Result, Spread, Table
from benchmarks.workloads import OPERATIONS, build_storms, finish_storm, operations, start_storm
from leakscope.record import losses, records
from leakscope.record.kernel.bpf import program_facts
from leakscope.record.kernel.syscalls import syscall
from leakscope.record.loader import LoadedPrograms, ProgramConfig, load
from leakscope.record.loader.base import SCOPE_HOST
from leakscope.record.probes import tracepoints
from leakscope.record.ring import Ring

_BPF_ENABLE_STATS = 32  # enum bpf_cmd, kernel 5.8 (d46edd671a14)
_DRAIN_INTERVAL_S = 0.01
_POLICIES = ("none", "sampled", "all")


@dataclass
class Probes:
    """Loaded and attached, recording the whole host but this process."""

    programs: LoadedPrograms
    attachments: tracepoints.Attachments
    ring: Ring
    counters: losses.Counters

    def drain_while(self, running: list[str], count: dict[str, int]) -> int:
        """Run storms at once and read the ring like the recorder does; events read."""
        started = [start_storm(storm, count[storm]) for storm in running]
        events = 0
        while any(storm.poll() is None for storm in started):
            events += len(self.ring.read())
            time.sleep(_DRAIN_INTERVAL_S)
        for storm in started:
            finish_storm(storm)
        return events + len(self.ring.read())


@contextmanager
def attached(stacks: str, ring_bytes: int, *, everything: bool = False) -> Iterator[Probes]:
    """Probes on kernel objects and pages; with ``everything`` also those on maps and processes."""
    config = ProgramConfig(scope=SCOPE_HOST, stacks=stacks, mem_ring_bytes=ring_bytes)
    with closing(load(config)) as programs:
        attachments = tracepoints.Attachments()
        ring = Ring(programs.map("mem_ring").fd, ring_bytes, records.MEM_RECORD)
        try:
            if everything:
                tracepoints.attach_raw(programs, attachments, tracepoints.PROCESS_LIVES)
                tracepoints.attach_raw(programs, attachments, tracepoints.RESIDENT_SETS)
                tracepoints.attach_classic(programs, attachments, tracepoints.MAP_CALLS)
            tracepoints.attach_raw(programs, attachments, tracepoints.KERNEL_OBJECTS)
            yield Probes(programs, attachments, ring, losses.Counters(programs.map("counters")))
        finally:
            attachments.close()


def fill(probes: Probes, options: Options) -> None:
    """Run the open storm, unread, until the ring is full (or once, when quick), then detach the probes."""
    while True:
        finish_storm(start_storm("open", operations("open", options)))
        if options.quick or probes.ring.fill_share() > 0.999 or probes.counters.total("mem_dropped"):
            break
    probes.attachments.close()


@contextmanager
def _run_time_statistics() -> Iterator[None]:
    """Let the kernel time every BPF program while this is open (adds some 20 ns a hit, part of the figures)."""
    attr = ctypes.create_string_buffer(128)  # type 0: BPF_STATS_RUN_TIME
    fd = syscall("bpf", _BPF_ENABLE_STATS, ctypes.addressof(attr), len(attr))
    try:
        yield
    finally:
        os.close(fd)


def run(options: Options) -> Result:
    """Average run time of each program in each storm, for each stack policy."""
    build_storms()
    count = {storm: operations(storm, options) for storm in OPERATIONS}
    costs: dict[str, dict[str, dict[str, list[float]]]] = {}  # program: storm: policy: ns a hit, by round
    hits: Counter[str] = Counter()
    for _ in range(1 if options.quick else options.rounds):
        for stacks in _POLICIES:
            with _run_time_statistics(), attached(stacks, 64 << 20, everything=True) as probes:
                before = _run_times(probes)
                for storm in OPERATIONS:
                    probes.drain_while([storm], count)
                    after = _run_times(probes)
                    for program, (runs, ns) in after.items():
                        new_runs, new_ns = runs - before[program][0], ns - before[program][1]
                        if new_runs:
                            by_policy = costs.setdefault(program, {}).setdefault(storm, {})
                            by_policy.setdefault(stacks, []).append(new_ns / new_runs)
                            hits[program] += new_runs
                    before = after
    order = [program for program, _ in hits.most_common()]
    tables = [
        Table(
            f"{storm}, ns a hit, the kernel's own timing included",
            ["program", *(f"--stacks {stacks}" for stacks in _POLICIES)],
            [[program, *(_text(costs[program][storm].get(stacks)) for stacks in _POLICIES)]
             for program in order if storm in costs[program]],
        )
        for storm in OPERATIONS
    ]  # fmt: skip
    figures = {"ns_per_hit": costs, "hits": dict(hits)}
    return Result("probes", "Cost of one hit of each BPF program", tables, figures=figures)


def _run_times(probes: Probes) -> dict[str, tuple[int, int]]:
    """(runs, ns) of each attached program so far."""
    facts = {program: program_facts(fd) for program, fd in probes.attachments.programs.items()}
    return {program: (known["run_cnt"], known["run_time_ns"]) for program, known in facts.items()}


def _text(values: list[float] | None) -> str:
    return Spread.of(values).text(0) if values else ""
