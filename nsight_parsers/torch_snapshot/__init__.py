"""PyTorch's CUDA memory snapshots: what ``torch.cuda.memory._dump_snapshot`` pickles.

``device_traces`` become ``mem_events``, ``segments`` and their blocks the table ``segments``, the state of each device
``samples``, annotations ``marks``. The dictionary is documented in PyTorch's ``torch/cuda/memory.py`` (``_snapshot``);
it holds plain data only, and a pickle with anything else is refused (:mod:`nsight_parsers.plain_pickle`).

Two levels of the same memory are in it. Segments, which the caching allocator took from the driver by cudaMalloc or by
mapping, are kind ``pool_segment``. Blocks, which it hands out of them to tensors, are kind ``pool_block``: shown, and
never added to the layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import build_table, not_empty
from nsight_parsers.plain_pickle import PickleRefusedError, PlainPickle
from nsight_parsers.torch_snapshot import tables
from nsight_parsers.torch_snapshot.collect import Collected, WrongShapeError

MAX_JSON_BYTES = 256 << 20

LIMITS = [
    "the file names neither process, thread, host nor GPU: --pid says which process it is of",
    "it shows the allocator's view: a live tensor is no leak by itself, growth across equal iterations is",
    "the trace is a ring buffer: memory allocated before its first row shows in the segments only",
    "sizes of the trace are those that were asked for, before the allocator's rounding",
    "its clock is Unix time that PyTorch derives from the CPU's cycle counter: expect a small skew",
]


def parse_torch_snapshot(
    path: Path | str, *, pid: int = 0, progress: Callable[[int, int], None] | None = None
) -> ParsedReport:
    """Reads a snapshot, pickled or as JSON.

    ``pid`` is the process that it is of, 0 = unknown. ``progress(done_bytes, total_bytes)``. Pickles are read in one
    pass in memory of about the size of the file. Raises ReportError for a file that is damaged, cut short or hostile.
    """
    path = Path(path)
    snapshot: Collected
    try:
        total = path.stat().st_size
        snapshot = Collected(total, pid)
        with path.open("rb") as file:
            if file.peek(1)[:1] == b"\x80":
                tell = (lambda done: progress(done, total)) if progress else (lambda done: None)
                reader = PlainPickle(file, snapshot.append, tell)
                snapshot.forget, snapshot.is_shared = reader.forget, reader.is_shared
                top = reader.load()
            else:
                top = _load_json(path, total)
                snapshot.add_json(top)
        return _report(snapshot, top)
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except PickleRefusedError as error:
        raise ReportError(f"{path}: {error}") from None
    except WrongShapeError as error:
        raise ReportError(f"{path}: not a PyTorch memory snapshot: {error}") from None
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, pa.ArrowException) as error:
        if isinstance(error, ReportError):
            raise
        raise ReportError(f"{path}: damaged: a value of the snapshot has the wrong type or is out of range") from error


def _load_json(path: Path, size: int) -> Any:
    if size > MAX_JSON_BYTES:
        raise ReportError(f"{path}: {size:,} bytes of JSON; pickle a snapshot of this size, its reader streams")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ReportError(f"{path}: damaged or cut short: not valid JSON") from None


def _report(of: Collected, top: Any) -> ParsedReport:
    """The parsed report. ``top`` is the outermost object, without what was taken out of it."""
    if isinstance(top, list) and of.segment_count:  # torch.cuda.memory_snapshot()
        top = {"segments": []}
    if not isinstance(top, dict) or not {"segments", "device_traces"} & set(top):
        raise WrongShapeError("neither segments nor device_traces in it")
    traces = top.get("device_traces", [])
    if not isinstance(traces, list) or not isinstance(top.get("segments", []), list):
        raise WrongShapeError("segments or device_traces are no lists")
    devices = {of.trace_slots[id(rows)]: device for device, rows in enumerate(traces) if id(rows) in of.trace_slots}
    events = tables.events(of)
    at_ns = int(of.snapshot_us or of.last_us) * 1000
    segments = tables.segments(of, at_ns)
    fragmentation = tables.fragmentation(of, segments)
    marks, open_marks = tables.marks(top.get("external_annotations", []), of.pid)
    found = {
        "mem_events": events.table,
        "segments": segments,
        "samples": tables.samples(fragmentation, at_ns),
        "marks": marks,
        **of.stacks.tables(),
    }
    if of.pid:
        found["processes"] = build_table("processes", 1, pid=of.pid, role="root")
    for oom in of.oom:
        oom["device"] = devices.get(oom["device"], oom["device"])
    settings = top.get("allocator_settings")
    report = ParsedReport(not_empty(found), tool="PyTorch", limits=list(LIMITS))
    report.clock = "none" if of.without_time or not at_ns else "utc"
    report.facts = {
        "pid": of.pid,
        "actions": dict(sorted(of.actions.items())),
        "devices": sorted(fragmentation),
        "fragmentation": {str(device): figures for device, figures in sorted(fragmentation.items())},
        "out_of_memory": of.oom,
        "trace_start_ns": events.first_ns,
        "trace_end_ns": events.last_ns,
        "allocator_settings": _plain_settings(settings),
    }
    report.findings = _findings(of, events, fragmentation, open_marks)
    return report


def _findings(
    of: Collected, events: tables.Events, fragmentation: dict[int, dict[str, int]], open_marks: int
) -> list[str]:
    found = []
    if not of.actions:
        found.append(
            "no allocation history in it (torch.cuda.memory._record_memory_history was off): a state, no growth"
        )
    elif of.without_time:
        found.append("written by a PyTorch of 2023 without times: rows are in order, rates have no meaning")
    if events.unknown_frees:
        found.append(f"{events.unknown_frees:,} frees of memory that was allocated before the first row of the trace")
    if events.never_freed:
        found.append(f"{events.never_freed:,} allocations are not freed inside the trace")
    for device, figures in fragmentation.items():
        failed = [oom for oom in of.oom if oom["device"] == device]
        if not failed:
            continue
        wanted = failed[-1]["requested_bytes"]
        largest, inactive = figures["largest_inactive_block_bytes"], figures["inactive_bytes"]
        text = (
            f"device {device} ran out of memory: {wanted:,} bytes asked for, {failed[-1]['device_free_bytes']:,} "
            f"free on the device; the pool holds {inactive:,} bytes in free blocks, the largest {largest:,}"
        )
        found.append(text + (": fragmentation" if largest < wanted <= inactive else ""))
    if open_marks:
        found.append(f"{open_marks:,} annotations were never closed")
    if of.stacks.cut:
        found.append(f"{of.stacks.cut:,} stacks were cut to their innermost 1,024 frames")
    return found


def _plain_settings(settings: Any) -> dict[str, Any]:
    """Numbers and switches only: the configuration text comes from the environment."""
    if not isinstance(settings, dict):
        return {}
    kept = {str(k)[:64]: v for k, v in settings.items() if isinstance(v, bool | int | float) and math.isfinite(v)}
    return dict(list(kept.items())[:64])
