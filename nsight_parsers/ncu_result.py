"""One kernel result of an Nsight Compute report, decoded from its protobuf message.

Field numbers, read off report files of 2019 to 2026 (the same in all of them):

kernel result: 1 TID, 2 API call id, 5/6/7 mangled, function and demangled name, 10/11 grid and block {1, 2, 3},
13 repeated metric, 14 creation time (seconds, local wall clock written as if UTC), 17 repeated section, 21 NVTX
state, 22 context, 23 stream, 28 CPU stack.
metric: 1 index of its name in the string table of the report, 2 value, 3 repeated instance {1 id, 2 value}.
value: 1 text, 3 double, 5 unsigned integer.
section: 2 title, 4 header {2 repeated metric {1 name}}.
NVTX state: 1 domains {1 id, 2 name}, 2 threads {1 TID, 2 per domain {1 id, 3 push/pop range {1 name}}}.
CPU stack: 1 repeated frame {1 module, 2 absolute PC, 3 file, 4 function, 5 line}, innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nsight_parsers.interning import Frame
from nsight_parsers.wire import BYTES, FIXED64, VARINT, WireError, as_text, double, fields, integer, messages, signed

KNOWN_FIELDS = frozenset({*range(1, 12), 13, 14, 15, 16, 17, 19, 21, 22, 23, 25, 28, 31, 35})
MAX_METRICS = 100_000
"""Metrics of one result (the most seen: 1,224)."""
MAX_FRAMES = 1024
MAX_NAME_CHARACTERS = 64 << 10
CLOCK_PREFIXES = (b"pmsampling:", b"profiler__timestamp_workload_")
"""Metrics whose instance ids are times of the GPU's own timer, in ns."""


@dataclass
class Metric:
    """``name`` is an index into the string table; one of ``number`` and ``text`` holds the value."""

    name: int
    number: float | int | None
    text: str = ""


@dataclass
class KernelResult:
    """A profiled kernel as the report stores it; zeros and empty values where it says nothing."""

    tid: int = 0
    api_call_id: int = 0
    created_s: int = 0
    context: int = 0
    stream: int = 0
    mangled: str = ""
    function: str = ""
    demangled: str = ""
    grid: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    nvtx: bool = False
    ranges: list[str] = field(default_factory=list)
    native_stack: list[Frame] = field(default_factory=list)
    python_stack: list[Frame] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)
    gpu_ns: tuple[int, int] | None = None
    unread: set[str] = field(default_factory=set)


def decode_result(message: bytes, strings: Sequence[bytes]) -> KernelResult:
    """The kernel result in ``message``; ``strings`` is the report's string table as far as it is known.

    ``sections`` maps the name of a metric to the title of the first section that shows it; ``unread`` names what the
    message holds beyond the known. Raises :class:`WireError` for a message that is damaged anywhere.
    """
    result = KernelResult()
    nvtx_state = b""
    for number, _, value in fields(message):
        if isinstance(value, int):
            _set_number(result, number, value)
        elif number == 13:
            _add_metric(result, value, strings)
        elif number in (5, 6, 7):
            setattr(result, ("mangled", "function", "demangled")[number - 5], as_text(value)[:MAX_NAME_CHARACTERS])
        elif number in (10, 11):
            setattr(result, "grid" if number == 10 else "block", _dimensions(value))
        elif number == 17:
            _add_section(result, value)
        elif number == 21:
            result.nvtx, nvtx_state = True, value
        elif number == 28:
            _add_stack(result, value)
        if number not in KNOWN_FIELDS and value not in (0, b""):
            result.unread.add(f"result field {number}")
    if nvtx_state:
        _set_ranges(result, nvtx_state)
    return result


def _set_number(result: KernelResult, number: int, value: int) -> None:
    if number == 1:
        result.tid = value
    elif number == 2:
        result.api_call_id = value
    elif number == 14:
        result.created_s = signed(value)
    elif number == 22:
        result.context = value
    elif number == 23:
        result.stream = value


def _dimensions(message: bytes) -> list[int]:
    return [min(integer(message, axis), 2**31 - 1) for axis in (1, 2, 3)]


def _add_metric(result: KernelResult, message: bytes, strings: Sequence[bytes]) -> None:
    if len(result.metrics) >= MAX_METRICS:
        raise WireError(f"more than {MAX_METRICS} metrics")
    name, number, text, has_value = 0, None, "", False
    instances: list[int] = []
    for field_number, wire_type, value in fields(message):
        if field_number == 1 and wire_type == VARINT and isinstance(value, int):
            name = value
        elif field_number == 2 and isinstance(value, bytes):
            has_value = True
            number, text = _decode_value(value)
        elif field_number == 3 and isinstance(value, bytes):
            if name >= len(strings) or not strings[name].startswith(CLOCK_PREFIXES):
                break  # instances come last and are many: one a source line or sample
            instances.append(next((integer(part, 5) for part in messages(value, 1)), 0))
    times = [time for time in instances if time]
    if times:
        first, last = result.gpu_ns or (times[0], times[0])
        result.gpu_ns = min(first, *times), max(last, *times)
    if has_value and (number is not None or text):
        result.metrics.append(Metric(name, number, text))


def _decode_value(message: bytes) -> tuple[float | int | None, str]:
    number: float | int | None = None
    text = ""
    for field_number, wire_type, value in fields(message):
        if wire_type == BYTES and field_number == 1:
            text = as_text(value)[:MAX_NAME_CHARACTERS]
        elif isinstance(value, int):
            number = double(value) if wire_type == FIXED64 else value
    return number, text


def _add_section(result: KernelResult, message: bytes) -> None:
    title = ""
    for number, _, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 2:
            title = as_text(value)[:256]
        elif number == 4:
            for metric in messages(value, 2):
                for name in messages(metric, 1):
                    result.sections.setdefault(as_text(name), title)


def _add_stack(result: KernelResult, message: bytes) -> None:
    """Splits the frames by file: no report with Python frames is known, so a frame is one when its file is."""
    for number, _, value in fields(message):
        if number != 1 or not isinstance(value, bytes):
            result.unread.add(f"CPU stack field {number}")
            continue
        if len(result.native_stack) + len(result.python_stack) >= MAX_FRAMES:
            result.unread.add(f"CPU stack frames beyond {MAX_FRAMES}")
            break
        texts: dict[int, str] = {}
        numbers: dict[int, int] = {}
        for part, _, content in fields(value):
            if isinstance(content, int):
                numbers[part] = content
            else:
                texts[part] = as_text(content)[:MAX_NAME_CHARACTERS]
        file, line = texts.get(3, ""), min(numbers.get(5, 0), 2**31 - 1)
        if file.endswith((".py", ".pyx")):
            result.python_stack.append(Frame(texts.get(4, ""), file, line, kind="python"))
        else:
            frame = Frame(texts.get(4, ""), file, line, texts.get(1, ""), offset=numbers.get(2, 0))
            result.native_stack.append(frame)
    result.native_stack.reverse()
    result.python_stack.reverse()


def _set_ranges(result: KernelResult, message: bytes) -> None:
    """The push/pop ranges open on the launching thread, outermost first, domain by domain.

    A range of a named domain reads ``domain@range``, as in ncu's own filters.
    """
    domains: dict[int, str] = {}
    for number, _, value in fields(message):
        if number == 1 and isinstance(value, bytes):
            domains[integer(value, 1)] = next(iter(_strings(value, 2)), "")
        elif number == 3 and isinstance(value, bytes) and any(part != 1 for part, _, _ in fields(value)):
            result.unread.add("NVTX start/end ranges")
    for thread in messages(message, 2):
        if integer(thread, 1) != result.tid:
            continue
        for stack in messages(thread, 2):
            domain = domains.get(integer(stack, 1), "")
            prefix = "" if domain in ("", "<default domain>") else f"{domain}@"
            for entry in messages(stack, 3):
                result.ranges.extend(prefix + name for name in _strings(entry, 1))
    del result.ranges[MAX_FRAMES:]


def _strings(message: bytes, number: int) -> list[str]:
    return [as_text(value)[:MAX_NAME_CHARACTERS] for value in messages(message, number)]
