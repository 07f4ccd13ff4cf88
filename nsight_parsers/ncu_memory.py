"""The only memory signal of Nsight Compute: how much memory the replayer could write at each launch.

``profiler__replayer_bytes_mem_accessible.avg`` (``writable_bytes`` of ``kernel_profiles``) is the live, writable device
memory of a context at a launch. Only its differences between launches of one (PID, context) mean something: in report
files whose allocators are known they equal the allocated blocks to the byte. No verdict is given here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

LIMITS = (
    "writable_bytes is a volume per CUDA context, never an allocation: no address, no owner, no free",
    "a caching allocator hides frees and reuse inside its segments: flat does not mean that nothing leaks in it, "
    "growth means new segments",
    "whether pinned host memory and managed memory count in writable_bytes is not known",
    "launches that ncu did not profile lie between two values: growth per launch is per profiled launch",
    "ncu serialises and replays kernels: a rate per second from such a run means nothing",
)

BLOCK_SIZES = {
    2 << 20: "2 MiB: the size of a small segment of PyTorch's caching allocator, and of a CUDA memory page",
    20 << 20: "20 MiB: the size of a large segment of PyTorch's caching allocator",
    32 << 20: "32 MiB: the default growth step of a CUDA memory pool",
}
"""Steps whose size is that of a known allocator's block: a hint at who allocated, no proof."""

MIN_LAUNCHES = 12
"""Launches of one kernel from which a rise can be told from a program that is still setting up: set-up code launches
one kernel a few times as well, each time on a new tensor."""
THIRDS = 3


@dataclass(frozen=True)
class GrowthSeries:
    """Writable memory over the profiled launches of one (PID, context), in launch order.

    ``profile_ids`` and ``writable_bytes`` cover the launches that have a value, ``missing`` counts the others;
    ``step_bytes[i]`` leads to ``writable_bytes[i + 1]``.
    """

    pid: int
    context: int
    profile_ids: tuple[int, ...]
    writable_bytes: tuple[int, ...]
    step_bytes: tuple[int, ...]
    missing: int
    kernels: tuple[str, ...]

    @property
    def growth_bytes(self) -> int:
        """From the first launch with a value to the last; negative where memory was given back."""
        return self.writable_bytes[-1] - self.writable_bytes[0] if self.writable_bytes else 0

    @property
    def shape(self) -> str:
        """``unknown`` (under two values), ``flat``, ``falling``, ``one step`` (as at warm-up), ``steady`` (no fall, and
        some kernel of :data:`MIN_LAUNCHES` or more launches found more memory in each third of them), ``rising`` (no
        fall, but not that) or ``uneven``."""
        steps = [step for step in self.step_bytes if step]
        if len(self.writable_bytes) < 2:
            return "unknown"
        if not steps:
            return "flat"
        if max(steps) < 0:
            return "falling"
        if len(steps) == 1:
            return "one step"
        if min(steps) < 0:
            return "uneven"
        return "steady" if self._rises_throughout() else "rising"

    def _rises_throughout(self) -> bool:
        values: dict[str, list[int]] = {}
        for kernel, value in zip(self.kernels, self.writable_bytes, strict=True):
            values.setdefault(kernel, []).append(value)
        for launches in values.values():
            bounds = [launches[(len(launches) - 1) * third // THIRDS] for third in range(THIRDS + 1)]
            if len(launches) >= MIN_LAUNCHES and all(after > before for before, after in pairwise(bounds)):
                return True
        return False


def growth_series(kernel_profiles: pa.Table) -> list[GrowthSeries]:
    """One series a (PID, context) of ``kernel_profiles``, ordered by them."""
    wanted = kernel_profiles.select(["pid", "context", "id", "writable_bytes", "kernel"])
    columns = [wanted.column(name).to_pylist() for name in wanted.column_names]
    groups: dict[tuple[int, int], list[tuple[int, float, str]]] = {}
    for pid, context, number, value, kernel in zip(*columns, strict=True):
        groups.setdefault((pid, context), []).append((number, value, kernel))
    return [_series(pid, context, sorted(rows)) for (pid, context), rows in sorted(groups.items())]


def growth_table(series: list[GrowthSeries]) -> pa.Table:
    """The series as rows: pid, context, profile_id, kernel, writable_bytes, step_bytes (0 in the first of a series)."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = [
        {
            "pid": one.pid,
            "context": one.context,
            "profile_id": number,
            "kernel": kernel,
            "writable_bytes": value,
            "step_bytes": step,
        }
        for one in series
        for number, kernel, value, step in zip(
            one.profile_ids, one.kernels, one.writable_bytes, (0, *one.step_bytes), strict=False
        )
    ]
    schema = pa.schema(
        [
            ("pid", pa.int32()),
            ("context", pa.int64()),
            ("profile_id", pa.int64()),
            ("kernel", pa.string()),
            ("writable_bytes", pa.int64()),
            ("step_bytes", pa.int64()),
        ]
    )
    return pa.Table.from_pylist(rows, schema)


def describe(series: GrowthSeries) -> str:
    """One sentence on a series: what was seen, and what it can mean."""
    where = f"PID {series.pid or 'unknown'}, context {series.context or 'unknown'}"
    launches = len(series.writable_bytes)
    if series.shape == "unknown":
        return (
            f"{where}: writable memory is known at {launches} of {launches + series.missing} launches: no growth known"
        )
    said = f"{where}: writable device memory over {launches} launches"
    if series.shape == "flat":
        return f"{said} did not change ({series.writable_bytes[0]} bytes)"
    rises = [(i, step) for i, step in enumerate(series.step_bytes) if step]
    steps = "one step" if len(rises) == 1 else f"{len(rises)} steps"
    text = f"{said} changed by {series.growth_bytes:+d} bytes in {steps} ({_list(rises)})"
    meaning = {
        "falling": "memory was given back",
        "one step": "as at warm-up, no leak by itself",
        "rising": f"no kernel with {MIN_LAUNCHES} launches rose throughout: it may be a program still setting up",
        "steady": "it rose throughout the launches of one kernel: a leak looks like this",
        "uneven": "it rose and fell",
    }[series.shape]
    sizes = [BLOCK_SIZES[step] for step in dict.fromkeys(step for _, step in rises) if step in BLOCK_SIZES]
    return f"{text}: {meaning}" + "".join(f"; {size}" for size in sizes)


def _series(pid: int, context: int, rows: list[tuple[int, float, str]]) -> GrowthSeries:
    known = [(number, int(value), kernel) for number, value, kernel in rows if math.isfinite(value)]
    values = tuple(value for _, value, _ in known)
    steps = tuple(after - before for before, after in pairwise(values))
    return GrowthSeries(
        pid,
        context,
        tuple(number for number, _, _ in known),
        values,
        steps,
        len(rows) - len(known),
        tuple(kernel for _, _, kernel in known),
    )


def _list(rises: list[tuple[int, int]], most: int = 6) -> str:
    text = ", ".join(f"{step:+d} before launch {i + 2}" for i, step in rises[:most])
    return text + (f", {len(rises) - most} more" if len(rises) > most else "")
