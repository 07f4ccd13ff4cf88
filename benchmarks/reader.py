"""How fast a full ring is read: numpy in bulk, beside bcc's callback an event, on the same kind of ring."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from benchmarks import probes
from benchmarks.results import Bar, Options, Result, Spread, Table
from benchmarks.workloads import build_storms
from leakscope.record.bcc_location import find_bcc, import_bcc
from leakscope.record.records import MEM_RECORD

RING_BYTES = 64 << 20
_QUICK_RING_BYTES = 1 << 20

Reader = Callable[[probes.Probes], int]


class _Record(ctypes.Structure):
    """The head of MEM_RECORD as bcc's ``.event()`` would map it: as many fields as a tool would look at."""

    _fields_ = [
        ("ts_ns", ctypes.c_uint64),
        ("addr", ctypes.c_uint64),
        ("alloc_ts_ns", ctypes.c_uint64),
        ("caller", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("tid", ctypes.c_uint32),
    ]


def bulk(attached: probes.Probes) -> int:
    """leakscope's reader."""
    events = 0
    while batch := len(attached.ring.read(at_most=1 << 16)):
        events += batch
    return events


def callbacks_that_count(attached: probes.Probes) -> int:
    """bcc's ``ring_buffer_consume`` with a callback that does nothing but count."""
    events = 0

    def callback(context: int | None, data: int, size: int) -> int:
        nonlocal events
        events += 1
        return 0

    _consume(attached, callback)
    return events


def callbacks_that_decode(attached: probes.Probes) -> int:
    """The same with six fields put into a tuple."""
    rows = []

    def callback(context: int | None, data: int, size: int) -> int:
        event = ctypes.cast(data, ctypes.POINTER(_Record)).contents
        rows.append((event.ts_ns, event.addr, event.alloc_ts_ns, event.caller, event.pid, event.tid))
        return 0

    _consume(attached, callback)
    return len(rows)


def _consume(attached: probes.Probes, callback: Callable[[int | None, int, int], int]) -> None:
    """What bcc's BPF.open_ring_buffer and BPF.ring_buffer_consume do, for a map of any loader."""
    libbcc = import_bcc().libbcc
    function = libbcc._RINGBUF_CB_TYPE(callback)
    manager = libbcc.lib.bpf_new_ringbuf(attached.programs.map("mem_ring").fd, function, None)
    libbcc.lib.bpf_consume_ringbuf(manager)
    libbcc.lib.bpf_free_ringbuf(manager)


def run(options: Options) -> Result:
    """Rounds of: each reader drains one full ring; CPU time of this thread, so that neighbours count less."""
    build_storms()
    readers: dict[str, Reader] = {"leakscope (numpy, bulk)": bulk}
    result = Result("reader", "Reading the ring")
    if find_bcc() is not None:
        readers |= {
            "bcc callback, counts only": callbacks_that_count,
            "bcc callback, six fields": callbacks_that_decode,
        }
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(1 if options.quick else options.rounds):
        for name, reader in readers.items():
            with probes.attached("none", _QUICK_RING_BYTES if options.quick else RING_BYTES) as attached:
                probes.fill(attached, options)
                began = time.thread_time()
                events = reader(attached)
                rates[name].append(events / (time.thread_time() - began) / 1e6)
                submitted = attached.ring.submitted()
                if events != submitted:
                    result.notes.append(f"{name}: read {events} of {submitted} records that the ring took")
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    rows = [[name, spread.text(), f"{1 / spread.median:.2f}"] for name, spread in spreads.items()]
    title = f"Drain of a full ring, records of {MEM_RECORD.itemsize} bytes"
    result.tables.append(Table(title, ["reader", "M events a CPU second", "CPU s per M events"], rows))
    result.figures = {"m_events_per_cpu_s": rates}
    median = spreads["leakscope (numpy, bulk)"].median
    result.bars.append(Bar("reader", median, 5.0, at_least=True, unit="M events a CPU second"))
    return result
