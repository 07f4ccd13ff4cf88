"""A planted multi-source capture: a recording and reports of the same run whose every pair is known.

Two processes use one PID, one after another; a third lives in a container (PID 7 inside, 900 outside). Threads allocate
device memory in runtime calls with driver calls inside, the kernel allocates inside those and near them, ranges are
open around all of it, kernels are launched and some of them profiled. Reports run on clocks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from capture_rows import rows

from leakscope.capture import Capture, CaptureWriter
from leakscope.correlate.joins.driver import Joined, JoinOptions, join
from leakscope.correlate.joins.evidence import evidence_of
from leakscope.model.manifest import ClockAnchor, Manifest, Source

SECOND = 1_000_000_000
BEGIN_NS = 50 * SECOND
UTC_AHEAD_NS = 1_700_000_000 * SECOND + 123_456_789
ASLEEP_NS = 7 * SECOND
PID, INNER_PID, OUTER_PID = 700, 7, 900
STEP_NS = 2_000_000
KERNELS = ("void ns::gemm<float>(float*, int)", "softmax", "void reduce<4>(int*)")


@dataclass
class Life:
    """A process of the run: PID as the recording and as the reports see it, first step and number of steps."""

    pid: int
    inner_pid: int
    start_ns: int
    steps: int
    threads: tuple[int, ...]

    @property
    def end_ns(self) -> int:
        """When it exits."""
        return self.start_ns + self.steps * STEP_NS + STEP_NS


LIVES = (
    Life(PID, PID, BEGIN_NS, 300, (PID, 701, 702)),
    Life(PID, PID, BEGIN_NS + 2 * SECOND, 200, (PID, 801)),
    Life(OUTER_PID, INNER_PID, BEGIN_NS, 400, (OUTER_PID, 903)),
)


@dataclass
class Planted:
    """The run. Rows are dictionaries of columns; ``truth`` of an event names its call, range or launch."""

    allocations: list[dict[str, Any]] = field(default_factory=list)
    frees: list[dict[str, Any]] = field(default_factory=list)  # of allocations; none unless a test adds some
    kernel: list[dict[str, Any]] = field(default_factory=list)
    kernel_call: list[int] = field(default_factory=list)  # id of the call that each kernel event is nested in, 0 = none
    calls: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    range_of: dict[int, str] = field(default_factory=dict)  # address → name of the range around its allocation

    def of_life(self, life: Life, table: str) -> list[dict[str, Any]]:
        """The rows of a process."""
        time = {"calls": "enter_ns", "marks": "start_ns"}.get(table, "ts_ns")
        return [r for r in getattr(self, table) if r["pid"] == life.pid and life.start_ns <= r[time] <= life.end_ns]


def planted(seed: int = 3) -> Planted:
    """Make the run; the same for the same seed."""
    rng = np.random.default_rng(seed)
    run = Planted()
    address = 0x7F00_0000_0000
    for number, life in enumerate(LIVES):
        kept: list[tuple[int, int]] = []
        for step in range(life.steps):
            tid = life.threads[step % len(life.threads)]
            at = life.start_ns + step * STEP_NS + int(rng.integers(0, 200_000))
            who = {"pid": life.pid, "tid": tid}
            outer_mark = _mark(run, who, at, at + 900_000, "step", 0)
            name = ("attention", "mlp")[step % 2]
            _mark(run, who, at + 10_000, at + 700_000, name, outer_mark)
            outer = _call(run, who, "cudaMalloc", at + 20_000, at + 220_000, 0)
            inner = _call(run, who, "cuMemAlloc", at + 40_000, at + 200_000, outer)
            # The kernel allocates inside the driver call, inside the runtime call alone, at an edge, and outside.
            inside = int(rng.integers(1, 4))
            for i in range(inside):
                _kernel(run, who, at + 50_000 + i * 1_000, inner)
            _kernel(run, who, at + 30_000, outer)
            _kernel(run, who, at + 40_000, inner)
            _kernel(run, who, at + 220_000, outer)
            _kernel(run, who, at + 220_001 + int(rng.integers(0, 40_000)), 0)
            _kernel(run, {"pid": life.pid, "tid": life.pid + 50}, at + 60_000, 0)
            if step % 5 == 4:  # an address that is handed out again, with the same size
                reused, size = kept.pop()
            else:
                address += 1 << 21
                reused, size = address, 1 << (12 + step % 5)
            kept.append((reused, size))
            run.allocations.append(
                {**who, "ts_ns": at + 220_000, "addr": reused, "size_bytes": size, "call_id": outer, "life": number}
            )
            run.range_of[reused] = f"step / {name}"
            for _ in range(1 + step % 2):
                kernel = int(rng.integers(0, len(KERNELS)))
                run.launches.append(
                    {
                        **who, "id": len(run.launches) + 1, "ts_ns": at + 300_000 + len(run.launches) % 7,
                        "kernel": KERNELS[kernel], "grid": [kernel + 1, 1 + step % 3, 1], "block": [128, 1, 1],
                    }
                )  # fmt: skip
    for table, time in (("calls", "enter_ns"), ("launches", "ts_ns"), ("marks", "start_ns"), ("allocations", "ts_ns")):
        getattr(run, table).sort(key=lambda row, time=time: row[time])
    return run


def _call(run: Planted, who: dict[str, int], api: str, enter: int, leave: int, parent: int) -> int:
    number = len(run.calls) + 1
    run.calls.append({**who, "id": number, "parent_id": parent, "api": api, "enter_ns": enter, "exit_ns": leave})
    return number


def _mark(run: Planted, who: dict[str, int], start: int, end: int, name: str, parent: int) -> int:
    number = len(run.marks) + 1
    run.marks.append({**who, "id": number, "parent_id": parent, "start_ns": start, "end_ns": end, "name": name})
    return number


def _kernel(run: Planted, who: dict[str, int], at: int, call: int) -> None:
    run.kernel.append({**who, "ts_ns": at, "addr": 0xFFFF_8880_0000_0000 + 64 * len(run.kernel), "size_bytes": 64})
    run.kernel_call.append(call)


def table(name: str, rows_of: list[dict[str, Any]], **constant: Any) -> pa.Table:
    """An Arrow table of dictionaries; columns that a row lacks are zero, keys that are no column are left out."""
    from leakscope.model.tables import TABLES

    names = [c for c in TABLES[name].names if c in constant or any(c in row for row in rows_of[:1])]
    columns = {c: [constant.get(c, row.get(c)) for row in rows_of] for c in names}
    return rows(name, len(rows_of), **columns)


def anchors(step_ns: int = 0) -> list[ClockAnchor]:
    """Readings of the clocks at start and end; ``step_ns``: how far the wall clock was set forward in between."""
    return [
        ClockAnchor(UTC_AHEAD_NS + at + step, at, at + ASLEEP_NS)
        for at, step in ((BEGIN_NS, 0), (BEGIN_NS + 10 * SECOND, step_ns))
    ]


Segments = Sequence[tuple[int, int, str]]
"""Address, size in bytes and type of segments."""
DEVICE = {"op": "alloc", "cause": "call", "layer": "gpu", "kind": "device", "api": "cudaMalloc", "weight": 1}
KMALLOC = {
    "op": "alloc", "cause": "call", "layer": "kernel", "kind": "kmalloc", "api": "kmalloc", "slab_cache": "kmalloc-64",
    "weight": 1, "call_site": 1, "kernel_stack": 1,
}  # fmt: skip


def write_recording(
    path: Path,
    run: Planted,
    *,
    marks: bool = False,
    calls: bool = True,
    name: str = "run",
    host: str = "",
    boot: str = "",
    awake_ns: int = UTC_AHEAD_NS,
    samples: Sequence[tuple[int, str, str, float]] = (),
) -> Path:
    """The recording of the run, on a host that booted at ``awake_ns`` of UTC. ``samples``: ts_ns, scope_id, counter and
    value of readings of processes."""
    source = Source(
        0, "recording", name, "monotonic", start_ns=BEGIN_NS, end_ns=BEGIN_NS + 10 * SECOND, command=["./app"],
        anchors=[replace(a, realtime_ns=a.realtime_ns - UTC_AHEAD_NS + awake_ns) for a in anchors()], host=host,
        boot_id=boot,
    )  # fmt: skip
    writer = CaptureWriter.create(path, Manifest(sources=[source]))
    writer.write("mem_events", table("mem_events", run.allocations, **DEVICE))
    if run.frees:
        writer.write("mem_events", table("mem_events", run.frees, **DEVICE | {"op": "free"}))
    writer.write("mem_events", table("mem_events", run.kernel, **KMALLOC))
    if calls:
        writer.write("calls", table("calls", run.calls))
    writer.write("launches", table("launches", run.launches, api="cuLaunchKernel"))
    if marks:
        writer.write("marks", table("marks", run.marks))
    writer.write("stacks", rows("stacks", 1, id=[1], frames=[[1]]))
    writer.write("frames", rows("frames", 1, id=[1], function=["kmalloc_user"], kind=["kernel"]))
    writer.write("processes", processes())
    if samples:
        at, whose, counter, value = zip(*samples, strict=True)
        writer.write(
            "samples",
            rows(
                "samples", len(at), ts_ns=at, scope=["process"] * len(at), scope_id=whose, counter=counter, value=value
            ),
        )
    writer.finish()
    return path


def processes() -> pa.Table:
    """The processes as the recording has them."""
    return rows(
        "processes", len(LIVES), pid=[life.pid for life in LIVES], namespace_pid=[life.inner_pid for life in LIVES],
        start_ns=[life.start_ns - 1_000 for life in LIVES], exit_ns=[life.end_ns for life in LIVES],
        name=["app"] * len(LIVES), role=["root"] * len(LIVES),
    )  # fmt: skip


def nsys_source(clock: str, number: int = 0) -> tuple[Source, int]:
    """A source as importing an export makes it, and what must be added to the run's times for its clock.

    ``monotonic``: system clock; ``boottime``: the same, counting sleep; ``utc``: 400 µs off; ``relative``: since its
    own start; ``other_boot``: the system clock of another boot.
    """
    ahead = {
        "monotonic": 0, "boottime": ASLEEP_NS, "utc": UTC_AHEAD_NS + 400_000, "relative": -BEGIN_NS + 987_654,
        "other_boot": 3600 * SECOND,
    }[clock]  # fmt: skip
    named = "monotonic" if clock in ("boottime", "other_boot") else clock
    held = [ClockAnchor(UTC_AHEAD_NS + BEGIN_NS, BEGIN_NS + ahead, 0)] if named == "monotonic" else []
    return Source(number, "nsys", f"{clock}.sqlite", named, anchors=held), ahead


def write_nsys(path: Path, run: Planted, clock: str, lives: tuple[Life, ...], *, memory: bool = True) -> Path:
    """An import of an export of some of the processes, as their own PID namespace numbers them.

    Its times are those of the API call's start, the recording's those of its end.
    """
    source, ahead = nsys_source(clock)
    events, calls, marks = [], [], []
    for life in lives:
        inner = {tid: life.inner_pid + i for i, tid in enumerate(life.threads)} if life.inner_pid != life.pid else {}

        def moved(row: dict[str, Any], inner: dict[int, int] = inner) -> dict[str, Any]:
            row = {**row, "pid": inner.get(row["pid"], row["pid"]), "tid": inner.get(row["tid"], row["tid"])}
            return row | {c: row[c] + ahead for c in ("ts_ns", "enter_ns", "exit_ns", "start_ns", "end_ns") if c in row}

        events += [moved(r | {"ts_ns": r["ts_ns"] - 150_000}) for r in run.of_life(life, "allocations")]
        calls += [moved(r) for r in run.of_life(life, "calls")]
        marks += [moved(r) for r in run.of_life(life, "marks")]
    writer = CaptureWriter.create(path, Manifest(sources=[source]))
    if memory:
        writer.write("mem_events", table("mem_events", sorted(events, key=lambda r: r["ts_ns"]), **DEVICE))
    writer.write("calls", table("calls", calls))
    writer.write("marks", table("marks", marks))
    writer.finish()
    return path


def write_ncu(
    path: Path, run: Planted, life: Life, order: dict[str, Any], launches: list[dict[str, Any]], zone_s: int = 0
) -> Path:
    """An import of a report of the profiled ``launches`` of a process, in a time zone."""
    source = Source(0, "ncu_rep", "report.ncu-rep", "none", facts={"launch_order": order})
    utc = [(row["ts_ns"] + UTC_AHEAD_NS) // SECOND for row in launches]
    profiles = rows(
        "kernel_profiles", len(launches), id=range(1, len(launches) + 1), pid=[life.inner_pid] * len(launches),
        tid=[life.inner_pid if r["tid"] == life.pid else r["tid"] for r in launches],
        api_call_id=range(10, 10 + 3 * len(launches), 3), created_s=[t + zone_s for t in utc],
        **{name: [r[name] for r in launches] for name in ("kernel", "grid", "block")},
        writable_bytes=[float(1 << 20)] * len(launches),
    )  # fmt: skip
    writer = CaptureWriter.create(path, Manifest(sources=[source]))
    writer.write("kernel_profiles", profiles)
    metrics = rows(
        "kernel_metrics", len(launches), profile_id=range(1, len(launches) + 1),
        metric=["dram__bytes_read.sum"] * len(launches), unit=["byte"] * len(launches), value=[4096.0] * len(launches),
    )  # fmt: skip
    writer.write("kernel_metrics", metrics)
    writer.finish()
    return path


def under_load(calls_per_s: int, seconds: float = 2.0, seed: int = 11) -> dict[str, np.ndarray]:
    """Kernel events of one process that its CUDA calls cause on other threads shortly after, amid unrelated ones.

    Calls of 20 µs come at random times (Poisson) on eight threads. Each third call causes one kernel event, delayed by
    an exponential of 20 µs on average; as many unrelated events come at random. Returns enter_ns, exit_ns of calls,
    at_ns of events, and cause: the row of the call of each event, -1 for none.
    """
    rng = np.random.default_rng(seed)
    count = int(calls_per_s * seconds)
    enter = np.sort(rng.integers(0, int(seconds * SECOND), count))
    leave = enter + 20_000
    causing = np.arange(0, count, 3)
    caused = leave[causing] + rng.exponential(20_000, len(causing)).astype(np.int64)
    unrelated = rng.integers(0, int(seconds * SECOND), len(causing))
    at = np.concatenate([caused, unrelated])
    cause = np.concatenate([causing, np.full(len(unrelated), -1)])
    order = np.argsort(at, kind="stable")
    return {"enter_ns": enter, "exit_ns": leave, "at_ns": at[order], "cause": cause[order]}


def write_torch(path: Path, run: Planted, life: Life, *, traced: int | None = None, segments: Segments = ()) -> Path:
    """An import of a snapshot of a process: it names none, its clock is UTC and off by 30 ms, and half of each segment
    is a block that its pool handed out. The trace has the last ``traced`` allocations; ``segments`` are what the
    snapshot holds when the process ends."""
    source = Source(0, "torch_snapshot", "snapshot.pickle", "utc")
    ahead = UTC_AHEAD_NS + 30_000_000
    own = run.of_life(life, "allocations")
    own = own[len(own) - (len(own) if traced is None else traced) :]
    taken = [row | {"ts_ns": row["ts_ns"] + ahead, "pid": 0, "tid": 0} for row in own]
    blocks = [row | {"ts_ns": row["ts_ns"] + 1_000, "size_bytes": row["size_bytes"] // 2} for row in taken]
    writer = CaptureWriter.create(path, Manifest(sources=[source]))
    device = DEVICE | {"api": "segment_alloc", "python_stack": 1}
    if own:
        writer.write("mem_events", table("mem_events", taken, **device))
        writer.write("mem_events", table("mem_events", blocks, **device | {"kind": "pool_block", "api": "alloc"}))
    if segments:  # two blocks each
        address, size, kind = (list(column) for column in zip(*(s for s in segments for _ in range(2)), strict=True))
        halves = [size // 2 for size in size]
        held = rows(
            "segments", len(address), segment_addr=address, segment_bytes=size, segment_type=kind, size_bytes=halves,
            ts_ns=[life.end_ns - 1_000 + ahead] * len(address),
        )  # fmt: skip
        writer.write("segments", held)
    writer.write("stacks", rows("stacks", 1, id=[1], frames=[[1, 2]]))
    functions = {"function": ["train", "forward"], "file": ["train.py", "model.py"], "line": [3, 14]}
    writer.write("frames", rows("frames", 2, id=[1, 2], kind=["python"] * 2, **functions))
    writer.finish()
    return path


class Opened:
    """Captures as evidence, open as long as ``stack``."""

    def __init__(self, stack: ExitStack, paths: Sequence[Path]) -> None:
        captures = [Capture.open(path) for path in paths]
        self.evidence = [
            evidence
            for number, capture in enumerate(captures)
            for evidence in evidence_of(stack.enter_context(capture.connect()), capture.manifest, number)
        ]

    def joined(self, options: JoinOptions | None = None) -> Joined:
        """All of them joined."""
        return join(self.evidence, options)


def outcome(joined: Joined, rule: str, left: str = "", right: str = "") -> Any:
    """The one outcome of a rule, of sources whose names contain these."""
    (found,) = [o for o in joined.outcomes if o.rule == rule and left in o.left and right in o.right]
    return found
