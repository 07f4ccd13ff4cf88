"""Nsight Compute reports (``.ncu-rep``, ``.ncu-repz``) without any NVIDIA software.

Gives ``kernel_profiles``, ``kernel_metrics``, ``processes`` and, with ``--call-stack``, ``stacks`` and ``frames``. Of
the rest only the facts named below are kept: no environment, no path of a program, no address, no command line but
its launch filters; the computer's name as a hash, so that it can be compared and not read.

session (one field a block): 2 creation time (s, local wall clock as if UTC), 4 target system {1 OS, 5 computer name},
6 devices {1 id, 2 name, 3 attributes {1 name, 2 value}}, 8 repeated {1 component, 2 version}, 9 present where the
user interface started the run, 11 ncu's command line. process: 1 PID, 3 path of the executable.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsight_parsers import ParsedReport
from nsight_parsers.interning import StackInterner
from nsight_parsers.launch_order import launch_order
from nsight_parsers.ncu_command import LaunchFilters, base_name, parse_command_line
from nsight_parsers.ncu_container import KNOWN_VERSION, Block, Walk, walk_blocks
from nsight_parsers.ncu_memory import LIMITS as MEMORY_LIMITS
from nsight_parsers.ncu_memory import describe, growth_series
from nsight_parsers.ncu_result import KernelResult, decode_result
from nsight_parsers.profile_tables import WRITABLE_BYTES, ProfileTables, in_range, process_table
from nsight_parsers.wire import WireError, as_text, fields, integer, messages, texts

MAX_STRINGS = 1_000_000
MAX_RESULTS = 1_000_000
MAX_DEVICES = 64
QUARTER_HOUR_S = 900
DAY_S = 86_400

UNITS = {
    "gpu__time_duration.sum": "ns",
    f"{WRITABLE_BYTES}.avg": "byte",
    f"{WRITABLE_BYTES}.sum": "byte",
    "dram__bytes_read.sum": "byte",
    "dram__bytes_write.sum": "byte",
    "launch__registers_per_thread": "register/thread",
}
"""Units that NVIDIA documents, of the metrics that joins and reports read. The report itself stores none."""

LIMITS = (
    "ncu profiles kernels and sees no allocation: no address, no owner, no lifetime, no host memory",
    "no time of a launch: created_s is when its result was complete, in whole seconds of local time without a zone",
    "PIDs are those of the PID namespace that ncu ran in",
    "offset of a native frame is the absolute program counter in its process",
    "single values of metrics only, without units but for a few: values per source line or sample are not read",
    *MEMORY_LIMITS,
)


@dataclass
class _Session:
    """What the session messages of the report say, spread over its blocks."""

    created_s: int = 0
    components: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    os: str = ""
    host_hash: str = ""
    from_ui: bool = False
    filters: LaunchFilters | None = None


@dataclass
class _Reading:
    """The report as it is read block by block."""

    session: _Session = field(default_factory=_Session)
    strings: list[bytes] = field(default_factory=list)
    results: list[tuple[int, KernelResult]] = field(default_factory=list)
    programs: dict[int, str] = field(default_factory=dict)
    announced: int = 0
    damaged: int = 0
    beyond_limit: int = 0
    unknown: dict[str, int] = field(default_factory=dict)


def parse_ncu_rep(path: Path | str) -> ParsedReport:
    """Reads the report at ``path``.

    ``facts``: ``devices``, ``created_s``, ``pids``, ``os``, ``cuda``, ``driver``, ``host_hash`` (16 hex digits of the
    SHA-256 of the computer's name), ``started_from`` (command line, user interface, unknown), ``launch_filters`` and
    ``launch_order`` (see :mod:`nsight_parsers.launch_order`), ``growth`` (see :mod:`nsight_parsers.ncu_memory`) and,
    with PM sampling, ``gpu_clock``. A report that is cut short gives what was whole and a finding. Raises
    :class:`nsight_parsers.ReportError` for a file that is empty or no report.
    """
    path = Path(path)
    walk, reading = Walk(), _Reading()
    for block in walk_blocks(path, walk):
        _read_block(block, reading)
    return _report(walk, reading)


def _read_block(block: Block, reading: _Reading) -> None:
    reading.strings.extend(block.strings[: MAX_STRINGS - len(reading.strings)])
    reading.announced += block.results_announced
    for number, count in block.unknown_counts.items():
        _count(reading, f"results of an unknown kind (block header field {number})", count)
    if block.unknown_messages:
        _count(reading, "messages of an unknown kind", block.unknown_messages)
    try:
        _read_session(block.session, reading.session)
        pid = in_range(integer(block.process, 1), 32)
        name = base_name(next(iter(texts(block.process, 3)), ""))[:256]
    except WireError:
        _count(reading, "damaged session or process messages", 1)
        pid, name = 0, ""
    if pid:
        reading.programs.setdefault(pid, name)
    for message in block.results:
        if len(reading.results) >= MAX_RESULTS:
            reading.beyond_limit += 1
            continue
        try:
            reading.results.append((pid, decode_result(message, reading.strings)))
        except WireError:
            reading.damaged += 1


def _read_session(message: bytes, session: _Session) -> None:
    for number, _, value in fields(message):
        if number == 2 and isinstance(value, int):
            session.created_s = in_range(value, 63)
        elif not isinstance(value, bytes):
            continue
        elif number == 4:
            session.os = next(iter(texts(value, 1)), "")[:64]
            name = next(iter(texts(value, 5)), "")
            session.host_hash = hashlib.sha256(name.encode()).hexdigest()[:16] if name else ""
        elif number == 6 and len(session.devices) < MAX_DEVICES:
            session.devices.append(_device(value))
        elif number == 8 and len(session.components) < MAX_DEVICES:
            component, version = ((*texts(value, part), "")[0][:128] for part in (1, 2))
            session.components[component] = version
        elif number == 9:
            session.from_ui = True
        elif number == 11:
            session.filters = parse_command_line(as_text(value))


def _device(message: bytes) -> dict[str, Any]:
    wanted = {
        "device__attribute_total_memory": "total_bytes",
        "device__attribute_pci_bus_id": "pci_bus",
        "device__attribute_compute_capability_major": "cc_major",
        "device__attribute_compute_capability_minor": "cc_minor",
    }
    device: dict[str, Any] = {"id": integer(message, 1), "name": next(iter(texts(message, 2)), "")[:128]}
    for attribute in messages(message, 3):
        key = wanted.get(next(iter(texts(attribute, 1)), ""))
        if key:
            device[key] = next((integer(value, 5) for value in messages(attribute, 2)), 0)
    return device


def _report(walk: Walk, reading: _Reading) -> ParsedReport:
    tables, stacks = ProfileTables(), StackInterner()
    unnamed = sum(_add_result(tables, stacks, reading, pid, result) for pid, result in reading.results)
    session = reading.session
    pids = sorted({pid for pid, _ in reading.results if pid} or reading.programs)
    order = launch_order(session.filters, processes=max(len(pids), 1), ids_rise=_ids_rise(reading.results))
    report = ParsedReport(
        tables={**tables.tables(), **stacks.tables(), **process_table(reading.programs)},
        tool="Nsight Compute",
        version=session.components.get("Nsight Compute Target", "").split(" ")[0],
        facts={
            "created_s": session.created_s,
            "devices": session.devices,
            "pids": pids,
            "os": session.os,
            "cuda": session.components.get("CUDA Version", ""),
            "driver": session.components.get("Display Driver Version", ""),
            "host_hash": session.host_hash,
            "started_from": "command line" if session.filters else "user interface" if session.from_ui else "unknown",
            "launch_filters": asdict(session.filters) if session.filters else None,
            "launch_order": asdict(order),
        },
        limits=list(LIMITS),
    )
    series = growth_series(report.tables["kernel_profiles"])
    report.facts["growth"] = [{**asdict(one), "shape": one.shape} for one in series]
    clock = _gpu_clock(reading.results)
    if clock:
        report.facts["gpu_clock"] = clock
    report.findings = _findings(walk, reading, tables, unnamed)
    report.findings.append(f"launch order {order.status.replace('_', ' ')}: {order.reason}")
    report.findings.extend(describe(one) for one in series)
    return report


def _add_result(tables: ProfileTables, stacks: StackInterner, reading: _Reading, pid: int, result: KernelResult) -> int:
    """Adds the rows of one result; returns how many of its metrics have no name in the string table."""
    for what in result.unread:
        _count(reading, what, 1)
    named = [(_name(reading.strings, metric.name), metric) for metric in result.metrics]
    values = {name: metric for name, metric in named if name}
    writable, device = values.get(f"{WRITABLE_BYTES}.avg"), values.get("launch__device_id")
    number = tables.add_profile(
        pid=pid,
        tid=in_range(result.tid, 32),
        api_call_id=in_range(result.api_call_id, 64),
        created_s=result.created_s,
        device=_whole(device.number if device else None),
        context=in_range(result.context, 64),
        stream=in_range(result.stream, 64),
        kernel=result.demangled or result.function or result.mangled,
        mangled=result.mangled,
        grid=result.grid,
        block=result.block,
        ranges=result.ranges,
        user_stack=stacks.add(result.native_stack),
        python_stack=stacks.add(result.python_stack),
        writable_bytes=math.nan if writable is None or writable.number is None else float(writable.number),
    )
    for name, metric in named:
        if name:
            value = math.nan if metric.number is None else metric.number
            tables.add_metric(number, result.sections.get(name, ""), name, UNITS.get(name, ""), value, metric.text)
    return sum(not name for name, _ in named)


def _name(strings: list[bytes], index: int) -> str:
    return as_text(strings[index])[:512] if index < len(strings) else ""


def _whole(number: float | None) -> int:
    return in_range(int(number), 32) if number is not None and math.isfinite(number) else 0


def _ids_rise(results: list[tuple[int, KernelResult]]) -> bool:
    last: dict[int, int] = {}
    for pid, result in results:
        if result.api_call_id <= last.get(pid, 0):
            return False
        last[pid] = result.api_call_id
    return True


def _gpu_clock(results: list[tuple[int, KernelResult]]) -> dict[str, Any] | None:
    """Times of the replay passes on the GPU's own timer, by profile id, and what that timer's epoch seems to be.

    A timer within a day of the creation time counts from the Unix epoch as the GPU knows it; the difference to the
    creation time then hints at the host's zone (quarter hours) and bounds the error of the timer. Otherwise only
    differences mean something.
    """
    spans = {number: result.gpu_ns for number, (_, result) in enumerate(results, 1) if result.gpu_ns}
    if not spans:
        return None
    ahead = [results[number - 1][1].created_s - last / 1e9 for number, (_, last) in spans.items()]
    clock: dict[str, Any] = {"spans_ns": {str(number): list(span) for number, span in spans.items()}}
    if all(abs(seconds) < DAY_S for seconds in ahead):
        nearest = round(min(ahead) / QUARTER_HOUR_S) * QUARTER_HOUR_S
        clock |= {"epoch": "unix", "zone_hint_s": nearest, "creation_minus_gpu_s": round(min(ahead), 3)}
    else:
        clock["epoch"] = "arbitrary"
    return clock


def _findings(walk: Walk, reading: _Reading, tables: ProfileTables, unnamed: int) -> list[str]:
    whole = len(reading.results)
    said = []
    if walk.stopped:
        said.append(f"{walk.stopped}: {whole} of at least {reading.announced} results are whole, the rest is lost")
    if not walk.has_magic:
        said.append("the file does not start with NVR: an unfinished report, its run may have crashed")
    elif walk.version != KNOWN_VERSION:
        said.append(f"file version {walk.version} is not known to this reader ({KNOWN_VERSION} is): check what it says")
    if reading.damaged:
        said.append(f"{reading.damaged} damaged results were left out")
    if reading.beyond_limit:
        said.append(f"only the first {MAX_RESULTS} results were read, {reading.beyond_limit} were left out")
    said.extend(f"not read: {what} ({count} times)" for what, count in sorted(reading.unknown.items()))
    if not whole and not walk.stopped and not reading.damaged:
        known = "none of a known kind" if reading.unknown else "nothing was profiled, or every launch was filtered out"
        said.append(f"the report holds no kernel result: {known}")
    if unnamed:
        said.append(f"{unnamed} metrics have no name in the report's string table and were left out")
    if tables.dropped_metrics:
        said.append(f"{tables.dropped_metrics} metric values beyond this reader's limit were left out")
    if whole and not reading.programs:
        said.append("the report names no process: its kernels cannot be joined by PID")
    return said


def _count(reading: _Reading, what: str, count: int) -> None:
    reading.unknown[what] = reading.unknown.get(what, 0) + count
