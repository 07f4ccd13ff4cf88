"""The text that memleak prints: bcc's tool and the one of libbpf-tools.

Each report lists what is outstanding at its time, by stack: a state, no change. The rows of ``mem_events`` made here
are the differences between reports, so that what is live after a report is exactly what it lists. With ``-a`` they are
the listed addresses; without, a stack that grew by n objects and b bytes makes n allocations of b bytes together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, build_table, not_empty
from nsight_parsers.interning import Frame, StackInterner
from nsight_parsers.slabinfo import read_text

MAX_FILE_BYTES = 256 << 20
MAX_STEP_OBJECTS = 100
"""Objects that one stack may gain in one report before several are shown as one row."""
MAX_EVENTS = 5_000_000
DAY_NS = 86_400 * 1_000_000_000

_HEADER = re.compile(r"\[(\d\d):(\d\d):(\d\d)\] Top (\d{1,9}) stacks with outstanding allocations:")
_STACK = re.compile(r"\s*(\d{1,18}) bytes in (\d{1,15}) allocations from stack\s*")
_ADDRESS = re.compile(r"\s*addr = (?:0x)?([0-9a-f]{1,16}) size = (\d{1,18})\s*")
_ATTACHED = re.compile(r"Attaching to (?:pid (\d{1,9})|(kernel) allocators)")
_LIBBPF = re.compile(r"tracing kernel: (true|false)|tracing pid: (\d{1,9})")
_LIBBPF_FRAME = re.compile(r"\s*\d{1,4} \[<([0-9a-f]{1,16})>\] (.{1,2000}?)\s*")
_SYMBOL = re.compile(r"(?P<name>.+?)(?:\+0x[0-9a-f]+)?(?: (?P<file>\S+):(?P<line>\d{1,9}))?")
_BCC_FRAME = re.compile(
    r"\s+(?:0x(?P<address>[0-9a-f]{1,16})\s+)?"
    r"(?P<name>\S.{0,2000}?)(?:\+0x[0-9a-f]+)?(?: \[(?P<module>[^\]]{1,500})\])?\s*"
)
_LOST = re.compile(r"[Ll]ost (\d{1,15}) (?:samples|events)")

LIMITS = [
    "each report is what was outstanding then: what came and went between two reports does not show",
    "times are local and without a date; with -s only every N-th allocation was traced, and the output does not say so",
    "only the top stacks are listed: one that drops out of the list counts as unchanged",
]


@dataclass
class _Outstanding:
    """One stack in one report."""

    bytes: int
    count: int
    addresses: list[tuple[int, int]] = field(default_factory=list)  # (address, size), with -a


@dataclass
class _Report:
    session: int
    time_ns: int  # since the midnight before the first report
    listed: int
    stacks: dict[int, _Outstanding] = field(default_factory=dict)


@dataclass
class _Session:
    """What one run of memleak was attached to."""

    pid: int = 0
    kernel: bool = False


def parse_memleak(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads the output of memleak as mem_events and samples ``memleak_outstanding``.

    Times are ns since the midnight (local, of an unknown day) before the first report. Raises ReportError for a file
    without a report.
    """
    path = Path(path)
    text = read_text(path, MAX_FILE_BYTES)
    reading = _Reading()
    for line in text.split("\n"):
        reading.line(line)
    if not any(report.stacks for report in reading.reports):
        if reading.untimed:
            raise ReportError(
                f"{path}: its stacks stand under no '[HH:MM:SS] Top N stacks' line: when they were is unknown"
            )
        raise ReportError(f"{path}: no stack with outstanding allocations in it")
    events = _Events(reading.stacks, reading.sessions)
    for report in reading.reports:
        events.add(report)
    tables = {
        "mem_events": events.table(),
        "samples": _samples(reading),
        "processes": _processes(reading),
        "losses": _losses(reading),
        **reading.stacks.tables(),
    }
    result = ParsedReport(not_empty(tables), tool="memleak", clock="relative", limits=list(LIMITS))
    first = reading.reports[0].time_ns // 1_000_000_000
    result.facts = {
        "reports": len(reading.reports),
        "sessions": len(reading.sessions),
        "pids": sorted({s.pid for s in reading.sessions if s.pid}),
        "kernel": any(s.kernel for s in reading.sessions),
        "first_report": f"{first // 3600 % 24:02}:{first // 60 % 60:02}:{first % 60:02}",
    }
    result.findings = _findings(reading, events)
    return result


class _Reading:
    """A state machine over lines."""

    def __init__(self) -> None:
        self.sessions: list[_Session] = []
        self.reports: list[_Report] = []
        self.stacks = StackInterner()
        self.untimed = 0  # stacks before any report line of their session
        self.lost = 0
        self.unnamed = 0
        self._report: _Report | None = None
        self._current: _Outstanding | None = None
        self._frames: list[int] = []
        self._addresses: list[tuple[int, int]] = []
        self._frame_ids: dict[str, int] = {}

    def line(self, line: str) -> None:
        """The next line."""
        if self._current is not None:
            frame = self._frame(line)
            if frame:
                self._frames.append(frame)
                return
            self._close()
        if match := _STACK.fullmatch(line):
            self._current = _Outstanding(int(match[1]), int(match[2]), self._addresses)
            self._frames, self._addresses = [], []
        elif match := _ADDRESS.fullmatch(line):
            self._addresses.append((int(match[1], 16), int(match[2])))
        elif match := _HEADER.match(line):
            self._begin(match)
        elif match := _ATTACHED.match(line):
            self._attach(_Session(int(match[1] or 0), match[2] is not None))
        elif match := _LIBBPF.match(line):
            self._attach(_Session(int(match[2] or 0), match[1] == "true"))
        elif match := _LOST.search(line):
            self.lost += int(match[1])

    def _attach(self, session: _Session) -> None:
        self.sessions.append(session)
        self._report, self._addresses = None, []

    def _begin(self, match: re.Match[str]) -> None:
        if not self.sessions:
            self.sessions.append(_Session())
        hours, minutes, seconds, listed = (int(part) for part in match.groups())
        time_ns = (hours * 3600 + minutes * 60 + seconds) * 1_000_000_000
        if self.reports:
            last = self.reports[-1].time_ns
            time_ns += last // DAY_NS * DAY_NS
            if time_ns < last:  # past midnight, or another run that began earlier in the day
                time_ns += DAY_NS
        self._report = _Report(len(self.sessions) - 1, time_ns, listed)
        self.reports.append(self._report)

    def _close(self) -> None:
        current, self._current = self._current, None
        assert current is not None
        if self._report is None:
            self.untimed += 1
            return
        stack = self.stacks.add_ids(self._frames[::-1])
        known = self._report.stacks.get(stack)
        if known is None:
            self._report.stacks[stack] = current
        else:
            known.bytes += current.bytes
            known.count += current.count
            known.addresses += current.addresses

    def _frame(self, line: str) -> int:
        """The id of the frame on this line; 0 when it is none."""
        if line in self._frame_ids:
            return self._frame_ids[line]
        if not line.strip() or _STACK.fullmatch(line) or _ADDRESS.fullmatch(line) or _HEADER.match(line):
            return 0
        kernel = bool(self.sessions) and self.sessions[-1].kernel
        if match := _LIBBPF_FRAME.fullmatch(line):
            symbol = _SYMBOL.fullmatch(match[2])
            named = match[2] != "<null sym>" and symbol is not None
            frame = self._intern(
                symbol["name"] if named and symbol else "", int(match[1], 16), kernel,
                file=(symbol["file"] or "") if symbol else "", line=int(symbol["line"] or 0) if symbol else 0,
            )  # fmt: skip
        elif match := _BCC_FRAME.fullmatch(line):
            name, module = match["name"], match["module"] or ""
            unknown = name == "[unknown]"
            frame = self._intern(
                "" if unknown else name, int(match["address"] or "0", 16), kernel or module == "kernel",
                module="" if module in ("kernel", "unknown") else module,
            )  # fmt: skip
        else:
            return 0
        self._frame_ids[line] = frame
        return frame

    def _intern(self, name: str, address: int, kernel: bool, **where: str | int) -> int:
        self.unnamed += not name
        kind = "kernel" if kernel else "native"
        return self.stacks.frame_id(Frame(name, offset=0 if name else address, kind=kind, **where))  # type: ignore[arg-type]


class _Events:
    """Makes events of the differences between reports of a session."""

    def __init__(self, stacks: StackInterner, sessions: list[_Session]) -> None:
        self._sessions = sessions
        self._stacks = stacks
        self._live: dict[int, dict[int, tuple[int, int]]] = {}  # stack → address → (size, time)
        self._session = -1
        self._most_listed = 0
        self._last_ns = 0
        self._next_address = 1
        self.merged = 0  # objects that share a row with others
        self.columns: dict[str, list[int]] = {
            n: [] for n in ("ts", "session", "free", "addr", "size", "stack", "alloc", "exit")
        }

    def add(self, report: _Report) -> None:
        """The differences that ``report`` makes."""
        if report.session != self._session:
            self._end()
            self._session, self._most_listed = report.session, 0
        self._last_ns = report.time_ns
        self._most_listed = max(self._most_listed, report.listed)
        for stack, now in report.stacks.items():
            self._change(stack, now)
        if report.listed < self._most_listed:  # shorter than the limit: what is not listed is gone
            for stack in list(self._live.keys() - report.stacks.keys()):
                self._change(stack, _Outstanding(0, 0))

    def _change(self, stack: int, now: _Outstanding) -> None:
        live = self._live.setdefault(stack, {})
        if now.count and len(now.addresses) == now.count and sum(size for _, size in now.addresses) == now.bytes:
            wanted = dict(now.addresses)
            for address in [a for a, (size, _) in live.items() if wanted.get(a) != size]:
                self._free(stack, address)
            for address, size in wanted.items():
                if address not in live:
                    self._alloc(stack, address, size)
            return
        before = sum(size for size, _ in live.values())
        more, more_bytes = now.count - len(live), now.bytes - before
        if more < 0 and live and now.count * before == now.bytes * len(live):  # of one size: the newest go
            for address in list(live)[more:]:
                self._free(stack, address)
            more, more_bytes = now.count - len(live), now.bytes - sum(size for size, _ in live.values())
        if not more_bytes and not more:
            return
        if more <= 0 or more_bytes < 0:
            if len(live) > MAX_STEP_OBJECTS and more_bytes > 0:
                more = 1  # objects share rows already
            else:
                for address in list(live):
                    self._free(stack, address)
                more, more_bytes = now.count, now.bytes
        if more <= 0:
            return
        rows = min(more, MAX_STEP_OBJECTS)
        self.merged += more - rows
        each, rest = divmod(more_bytes, rows)
        for number in range(rows):
            self._alloc(stack, 0, each + (number < rest))

    def _alloc(self, stack: int, address: int, size: int) -> None:
        if not address:
            address, self._next_address = self._next_address, self._next_address + 1
        self._live[stack][address] = (size, self._last_ns)
        self._row(0, address, size, stack, 0, 0)

    def _free(self, stack: int, address: int, at_exit: int = 0) -> None:
        size, since = self._live[stack].pop(address)
        self._row(1, address, size, stack, since, at_exit)

    def _row(self, free: int, address: int, size: int, stack: int, since: int, at_exit: int) -> None:
        values = (self._last_ns, self._session, free, address, size, stack, since, at_exit)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        if len(self.columns["ts"]) > MAX_EVENTS:
            raise ReportError(f"more than {MAX_EVENTS:,} changes between reports; split the file")

    def _end(self) -> None:
        """A run ended: what it listed last is known no more, and was not given back."""
        for stack, live in self._live.items():
            for address in list(live):
                self._free(stack, address, at_exit=1)
        self._live = {}

    def table(self) -> pa.Table:
        """mem_events."""
        column = {name: np.array(values, np.int64) for name, values in self.columns.items()}
        kernel = np.array([session.kernel for session in self._sessions], bool)[column["session"]]
        pid = np.array([session.pid for session in self._sessions], np.int64)[column["session"]]
        stack = column["stack"]
        return build_table(
            "mem_events",
            len(stack),
            ts_ns=column["ts"],
            pid=pid,
            op=Coded(column["free"], ["alloc", "free"]),
            cause=Coded(column["exit"], ["call", "exit"]),
            layer=Coded(kernel.astype(int), ["host", "kernel"]),
            kind=Coded(kernel.astype(int), ["heap", "kmalloc"]),
            api="memleak",
            addr=column["addr"].astype(np.uint64),
            size_bytes=column["size"],
            requested_bytes=column["size"],
            kernel_stack=np.where(kernel, stack, 0),
            user_stack=np.where(kernel, 0, stack),
            weight=1,
            alloc_ts_ns=column["alloc"],
        )


def _pids(reading: _Reading) -> Iterator[int]:
    yield from sorted({session.pid for session in reading.sessions if session.pid})


def _processes(reading: _Reading) -> pa.Table:
    pids = np.array(list(_pids(reading)), np.int64)
    return build_table("processes", len(pids), pid=pids, role="root")


def _samples(reading: _Reading) -> pa.Table:
    sessions = [reading.sessions[report.session] for report in reading.reports]
    return build_table(
        "samples",
        len(reading.reports),
        ts_ns=np.array([report.time_ns for report in reading.reports], np.int64),
        scope=pa.array(["process" if session.pid else "host" for session in sessions], pa.string()),
        scope_id=pa.array([str(session.pid or "") for session in sessions], pa.string()),
        counter="memleak_outstanding",
        value=np.array([sum(s.bytes for s in r.stacks.values()) for r in reading.reports], np.float64),
    )


def _losses(reading: _Reading) -> pa.Table:
    rows = 1 if reading.lost else 0
    return build_table("losses", rows, probe="memleak", what="ring_drop", count=reading.lost)


def _findings(reading: _Reading, events: _Events) -> list[str]:
    found = []
    if len(reading.reports) == 1:
        found.append("a single report: a state, no growth")
    if len(reading.sessions) > 1:
        found.append(f"{len(reading.sessions):,} runs of memleak in one file, one after the other")
    if reading.untimed:
        found.append(f"{reading.untimed:,} stacks stand under no report line and are left out")
    if events.merged:
        found.append(
            f"{events.merged:,} objects share a row with others of their stack: bytes are exact, counts are not"
        )
    if reading.unnamed:
        found.append(f"{reading.unnamed:,} frames have no symbol")
    if reading.lost:
        found.append(f"memleak lost {reading.lost:,} events")
    return found
