"""Hand-made Nsight Compute files, for what no public report shows: written from the field numbers that the readers
document, not by NVIDIA's tools. A test that uses them shows that the readers agree with that description, no more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

MAGIC = b"NVR\0"
ACCESSIBLE = "profiler__replayer_bytes_mem_accessible.avg"


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(content)) + content


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def sized(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def process(pid: int, path: str) -> bytes:
    return number(1, pid) + text(2, "127.0.0.1") + text(3, path)


def block(
    *,
    results: Sequence[bytes] = (),
    sources: Sequence[bytes] = (),
    strings: Sequence[str] = (),
    session: bytes = b"",
    program: bytes = b"",
    extra: bytes = b"",
    others: Sequence[bytes] = (),
) -> bytes:
    """A block; ``extra`` goes into its header, ``others`` are messages behind the results."""
    payload = b"".join(map(sized, [*sources, *results, *others]))
    header = number(1, len(sources)) + number(2, len(results))
    header += text(3, session) if session else b""
    header += text(4, b"".join(text(1, string) for string in strings))
    header += number(5, len(payload)) + (text(6, program) if program else b"") + extra
    return sized(header) + payload


def report(*blocks: bytes, version: int = 7) -> bytes:
    return MAGIC + sized(number(1, version)) + b"".join(blocks)


def metric(name: int, value: float | int | str) -> bytes:
    kinds = {float: lambda: double(3, value), int: lambda: number(5, value), str: lambda: text(1, value)}  # type: ignore[arg-type]
    return text(13, number(1, name) + text(2, kinds[type(value)]()))


def frame(module: str, pc: int, file: str, function: str, line: int = 0) -> bytes:
    return text(1, text(1, module) + number(2, pc) + text(3, file) + text(4, function) + number(5, line))


def nvtx(tid: int, ranges: Sequence[str], domain: str = "<default domain>") -> bytes:
    stack = b"".join(text(3, text(1, name)) for name in ranges)
    return text(1, number(1, 0) + text(2, domain)) + text(2, number(1, tid) + text(2, number(1, 0) + stack))


def result(kernel: str, **columns: Any) -> bytes:
    """A kernel result; columns: tid, api, created, context, stream, metrics, nvtx, stack, extra."""
    grid = number(1, 4) + number(2, 2) + number(3, 1)
    message = number(1, columns.get("tid", 1)) + number(2, columns.get("api", 1))
    message += text(5, f"_Z{len(kernel)}{kernel}v") + text(6, kernel) + text(7, f"{kernel}()")
    message += text(10, grid) + text(11, number(1, 64) + number(2, 1) + number(3, 1))
    message += b"".join(columns.get("metrics", ()))
    message += number(14, columns.get("created", 1_700_000_000))
    message += text(21, columns["nvtx"]) if "nvtx" in columns else b""
    message += number(22, columns.get("context", 1)) + number(23, columns.get("stream", 7))
    message += text(28, columns["stack"]) if "stack" in columns else b""
    return message + columns.get("extra", b"")


def command_session(line: str) -> bytes:
    return text(11, line)


def tool_session(version: str) -> bytes:
    return text(8, text(1, "Nsight Compute Target") + text(2, f"{version} (build 1) (public-release)"))


DETAILS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
RAW_IDENTITY = (
    '"ID","Process ID","Process Name","Host Name",'
    '"thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
    '"Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC"'
)


def details_row(
    identity: int, metric_name: str, unit: str, value: str, pid: int = 4711, kernel: str = "k(int, int)"
) -> str:
    cells = [
        identity, pid, "python3", "127.0.0.1", kernel, 1, 7, "(256, 1, 1)", "(8, 4, 1)", 0, "8.0",
        "Command line profiler metrics", metric_name, unit, value,
    ]  # fmt: skip
    return ",".join(f'"{cell}"' for cell in cells)
