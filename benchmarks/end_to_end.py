"""From the ring to Parquet: what the sink takes, and what a whole recording of two storms at once keeps up with."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import probes
from benchmarks.recorders import Recording, leakscope
from benchmarks.results import Bar, Options, Result, Spread, Table
from benchmarks.workloads import build_storms, finish_storm, operations, start_storm
from leakscope.capture import CaptureWriter
from leakscope.model.manifest import Manifest, Source
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.columns import EventColumns
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.kernel_objects import KernelObjects
from leakscope.record.decode.marks import Marks
from leakscope.record.decode.sites import Sites
from leakscope.record.gathering import BATCH_ROWS
from leakscope.record.kernel.btf import KernelTypes
from leakscope.record.kernel.objects import SlabCacheOfAddress
from leakscope.record.processes import Processes
from leakscope.record.ring import RecordRing
from leakscope.record.sink import Batch, Sink
from leakscope.record.symbols.address_space import AddressSpaces
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.kernel import KernelSymbols
from leakscope.record.symbols.stack_numbers import StackNumbers

_STORMS_AT_ONCE = {"open + open": ["open", "open"], "open + socketpair": ["open", "socketpair"]}
_LONGER = 5  # times the operations of the other benchmarks


@contextmanager
def _sink(attached: probes.Probes, output: Path) -> Iterator[Sink]:
    """A sink as the recorder makes it, on the maps of loaded probes."""
    types, spaces, columns = KernelTypes(), AddressSpaces(), EventColumns(0)
    interner = Interner(KernelSymbols(), spaces)
    numbers = StackNumbers(interner, spaces)
    cache_of = SlabCacheOfAddress(types)
    exits = Exits()
    sites = Sites(
        attached.programs.map("sites"), interner, columns, cache_of, lambda: types.enum_bit("___GFP_ACCOUNT_BIT")
    )
    sink = Sink(
        CaptureWriter.create(output, Manifest(sources=[Source(0, "recording", "bench", "monotonic")])),
        spaces=spaces,
        processes=Processes(everyone=True),
        interner=interner,
        numbers=numbers,
        calls=Calls(columns, numbers, attached.programs.map("live_ranges"), exits),
        objects=KernelObjects(columns, sites, interner, numbers, exits),
        marks=Marks(0),
    )
    try:
        yield sink
    finally:
        sink.close()
        cache_of.close()


def _feed(records: np.ndarray, attached: probes.Probes, output: Path, batches: int) -> float:
    """Put real records through a sink, again and again with later times; M events a CPU second of decode and write."""
    with _sink(attached, output) as sink:
        span_ns = int(records["ts_ns"][-1] - records["ts_ns"][0]) + 1
        size = min(BATCH_ROWS, len(records))
        pieces = [records[at : at + size].copy() for at in range(0, len(records) - size + 1, size)]
        ring = attached.programs.map("stack_ring")
        stacks = RecordRing(ring.fd, ring.entries).read()
        sink.put(Batch(int(pieces[0]["ts_ns"][-1]), stacks=stacks, objects=[pieces[0]]))  # reads the sites and symbols
        while not sink.rows["mem_events"] and sink.error is None:
            time.sleep(0.01)
        began = time.process_time()
        for number in range(1, batches + 1):
            piece = pieces[number % len(pieces)]
            if number >= len(pieces):
                piece = piece.copy()
                piece["ts_ns"] += np.uint64(number // len(pieces) * span_ns)
            sink.put(Batch(int(piece["ts_ns"][-1]), objects=[piece]))
        sink.close()
        if sink.error is not None:
            raise sink.error
        return batches * size / (time.process_time() - began) / 1e6


def _record_two_storms(storms: list[str], options: Options) -> dict[str, float]:
    """One recording of the whole host by the real recorder while two storms run at once."""
    with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
        recording = Recording(leakscope("leakscope (default)"), Path(folder))
        cpu_before = recording.cpu_seconds()
        began = time.perf_counter()
        factor = 1 if options.quick else _LONGER
        running = [start_storm(storm, factor * operations(storm, options)) for storm in storms]
        for storm in running:
            finish_storm(storm)
        seconds = time.perf_counter() - began
        cpu_s = recording.cpu_seconds() - cpu_before
        summary = recording.stop()
    events = summary["rows"].get("mem_events", 0)
    lost = sum(loss["count"] for loss in summary["losses"] if loss["what"] == "ring_drop")
    return {
        "events": events,
        "m_events_per_s": events / seconds / 1e6,
        "ring_drops": lost,
        "recorder_cpu_s_per_m_events": cpu_s / (events / 1e6),
    }


def run(options: Options) -> Result:
    """Rounds of: a sink fed from memory; a recording of two storms of each kind."""
    build_storms()
    result = Result("end_to_end", "From the ring to Parquet")
    rates: list[float] = []
    recorded: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if options.quick else options.rounds):
        with probes.attached("sampled", 1 << 20 if options.quick else 64 << 20) as attached:
            probes.fill(attached, options)
            records = attached.ring.read()
            with tempfile.TemporaryDirectory(prefix="leakscope-bench-") as folder:
                rates.append(_feed(records, attached, Path(folder) / "fed.lscope", 2 if options.quick else 20))
        for name, storms in list(_STORMS_AT_ONCE.items())[: 1 if options.quick else None]:
            recorded.setdefault(name, []).append(_record_two_storms(storms, options))
    fed = Spread.of(rates)
    result.tables.append(
        Table(
            "Decode and write alone: real records fed from memory",
            ["", "M events a CPU second"],
            [["sink", fed.text()]],
        )
    )
    columns = {"m_events_per_s": 2, "recorder_cpu_s_per_m_events": 2, "ring_drops": 0}
    rows = [
        [name, *(Spread.of(r[column] for r in rounds).text(digits) for column, digits in columns.items())]
        for name, rounds in recorded.items()
    ]
    headers = ["storms", "M events/s", "recorder CPU s per M events", "ring drops"]
    result.tables.append(Table("Two storms at once, recorded with the defaults", headers, rows))
    drops = max(r["ring_drops"] for rounds in recorded.values() for r in rounds)
    fastest = max(Spread.of(r["m_events_per_s"] for r in rounds).median for rounds in recorded.values())
    result.bars = [
        Bar("sink: decode and write", fed.median, 1.5, at_least=True, unit="M events a CPU second"),
        Bar("two storms recorded, the faster pair", fastest, 1.5, at_least=True, unit="M events/s"),
        Bar("two storms recorded, most ring drops of a round", drops, 0),
    ]
    result.figures = {"sink_m_events_per_cpu_s": rates, "recorded": recorded}
    result.notes.append(
        "The storms and the recorder share the machine's processors, so the rate of recorded storms is what the "
        "storms could produce beside the recorder, not the most that it could take."
    )
    return result
