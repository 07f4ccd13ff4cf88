"""The kernel probes loaded into this process, and what one hit of each program costs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from benchmarks.results import Options, Result, Spread, Table
from benchmarks.workloads import OPERATIONS, build_storms, finish_storm, operations, start_storm
from leakscope.record import records
from leakscope.record.kernel.bpf import program_facts
from leakscope.record.kernel.syscalls import syscall
from leakscope.record.loader import LoadedPrograms, ProgramConfig, load
from leakscope.record.loader.base import SCOPE_HOST
from leakscope.record.losses import Counters
from leakscope.record.probes import tracepoints
from leakscope.record.ring import Ring

_BPF_ENABLE_STATS = 32  # enum bpf_cmd, kernel 5.8 (d46edd671a14)
_DRAIN_INTERVAL_S = 0.01


@dataclass
class Probes:
    """Loaded and attached, recording the whole host but this process."""

    programs: LoadedPrograms
    attachments: tracepoints.Attachments
    ring: Ring
    counters: Counters

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
                tracepoints.attach_classic(programs, attachments, tracepoints.PROCESS_LIVES)
                tracepoints.attach_classic(programs, attachments, tracepoints.MAP_CALLS)
            tracepoints.attach_raw(programs, attachments, tracepoints.KERNEL_OBJECTS)
            yield Probes(programs, attachments, ring, Counters(programs.map("counters")))
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
    """Average run time of each program over the three storms, for each stack policy."""
    build_storms()
    count = {storm: operations(storm, options) for storm in OPERATIONS}
    per_hit: dict[str, dict[str, list[float]]] = {}
    hits: dict[str, int] = {}
    for _ in range(1 if options.quick else options.rounds):
        for stacks in ("none", "sampled", "all"):
            with _run_time_statistics(), attached(stacks, 64 << 20, everything=True) as probes:
                for storm in OPERATIONS:
                    probes.drain_while([storm], count)
                for name, fd in probes.attachments.programs.items():
                    facts = program_facts(fd)
                    if facts.get("run_cnt"):
                        cost = facts["run_time_ns"] / facts["run_cnt"]
                        per_hit.setdefault(name, {}).setdefault(stacks, []).append(cost)
                        hits[name] = hits.get(name, 0) + facts["run_cnt"]
    ordered = sorted(per_hit, key=lambda name: -hits[name])
    rows = [
        [name, f"{hits[name]:,}", *(Spread.of(values).text(0) if values else "" for values in _policies(per_hit[name]))]
        for name in ordered
    ]
    table = Table("ns a hit, the kernel's own timing included", ["program", "hits", "none", "sampled", "all"], rows)
    figures = {"ns_per_hit": per_hit, "hits": hits}
    return Result("probes", "Cost of one hit of each BPF program", [table], figures=figures)


def _policies(costs: dict[str, list[float]]) -> list[list[float]]:
    return [costs.get(stacks, []) for stacks in ("none", "sampled", "all")]
