"""What a recording knows to be missing: counters of the probes, as rows of the `losses` table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from leakscope.model.recording import Loss
from leakscope.model.tables import LOSSES
from leakscope.record.kernel.bpf import Map, program_facts
from leakscope.record.records import COUNTERS

_COUNTED = {
    "mem_dropped": ("mem_ring", "ring_drop", "kernel object and page events lost to a full ring"),
    "call_dropped": ("call_ring", "ring_drop", "call, map and process events lost to a full ring"),
    "live_full": ("live maps", "live_map_full", "allocations whose frees cannot be matched"),
    "live_busy": ("live maps", "live_map_busy", "allocations whose frees cannot be matched"),
    "stack_dropped": ("stack_ring", "stack_miss", "stacks lost to a full ring"),
    "stack_fault": ("stacks", "stack_miss", "kernel stacks that could not be walked"),
    "stack_busy": ("stacks", "stack_miss", "not walked: too many other walks were under way on the CPU"),
    "site_full": ("sites", "live_map_full", "allocations not recorded: the map of sites is full"),
    "call_map_full": ("calls in flight", "call_map_full", "calls not recorded"),
    "identity_full": ("identities", "stack_miss", "allocations without their stacks: the map of identities is full"),
    "python_dropped": ("python_ring", "python_frames_unavailable", "Python stacks lost to a full ring"),
    "python_busy": ("python_stack", "python_frames_unavailable", "not walked: another walk was under way on the CPU"),
    "mark_dropped": ("mark_ring", "mark_lost", "NVTX ranges or their ends lost to a full ring"),
    "mark_too_deep": (
        "injection library",
        "mark_lost",
        "NVTX ranges inside 64 others: their allocations carry the 64th",
    ),
    "mark_threads_full": ("thread_marks", "mark_lost", "ranges of threads beyond those that can be followed at once"),
    "launch_dropped": ("launch_ring", "arguments_lost", "launches whose arguments were lost to a full ring"),
    "kernel_dropped": ("kernel_ring", "kernel_names_lost", "names or images of GPU kernels lost to a full ring"),
    "dump_dropped": ("dump_ring", "native_unwind_unavailable", "stacks not unwound: lost to a full ring"),
    "dump_skipped": ("dump budget", "native_unwind_unavailable", "stacks not unwound: more than a CPU may dump"),
    "page_user": ("on_mm_page_alloc", "page_user_not_streamed", "pages of user memory: in RSS samples, not events"),
    "free_unmatched": ("frees", "address_only_free", "frees of objects older than the recording or out of its scope"),
}


class Counters:
    """The per-CPU `counters` map."""

    def __init__(self, counters: Map) -> None:
        self._map = counters

    def per_cpu(self, name: str) -> np.ndarray:
        """One counter's value on each possible CPU."""
        raw = self._map.lookup(COUNTERS.index(name).to_bytes(4, "little"))
        return np.frombuffer(raw or b"", np.uint64)

    def total(self, name: str) -> int:
        """One counter summed over CPUs."""
        return int(self.per_cpu(name).sum())

    def losses(self) -> list[Loss]:
        """A row for each counter of losses that is not zero; the detail names the CPUs of ring drops."""
        found = []
        for name, (probe, what, detail) in _COUNTED.items():
            values = self.per_cpu(name)
            if values.sum():
                if what == "ring_drop":
                    detail += "; by CPU: " + ", ".join(f"{cpu}: {n}" for cpu, n in enumerate(values) if n)
                found.append(Loss(probe, what, int(values.sum()), detail))
        return found

    def left_out(self) -> list[Loss]:
        """What was not recorded because options say so, by number; its bytes are in the detail."""
        found = []
        for name, what, why in (
            ("small", "below_min_size", "allocations smaller than --min-size"),
            ("unsampled", "not_sampled", "allocations that --sample-bytes passed over"),
        ):
            if objects := self.total(f"{name}_objects"):
                size = self.total(f"{name}_bytes")
                found.append(Loss("kernel and heap objects", what, objects, f"{why}: {size:,} bytes"))
        return found


def recursion_losses(programs: dict[str, int]) -> list[Loss]:
    """Events skipped because they hit while the same program ran on that CPU (recursion_misses in fdinfo)."""
    found = []
    for program, fd in sorted(programs.items()):
        misses = program_facts(fd).get("recursion_misses", 0)
        if misses:
            found.append(Loss(program, "recursion_miss", misses, "events nested in this program's own run"))
    return found


def losses_table(source_id: int, ts_ns: int, losses: list[Loss]) -> pa.Table:
    """Rows of `losses`."""
    rows = [{"source_id": source_id, "ts_ns": ts_ns, **vars(loss)} for loss in losses]
    return pa.Table.from_pylist(rows, schema=LOSSES)
