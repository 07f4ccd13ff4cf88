"""The eBPF programs: C sources, the header shim for bcc, and what joins them for a loader.

The sources are written in libbpf style. bcc compiles one text and knows maps by methods, so
:func:`source_for_bcc` joins the files and turns each map helper into bcc's method call.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

DIRECTORY = Path(__file__).parent
SHIM_DIRECTORY = DIRECTORY / "shim"
"""Folder for ``BCC_KERNEL_SOURCE``: nine small headers in place of the kernel's."""

MAIN_SOURCE = "leakscope.bpf.c"
OBJECT = DIRECTORY / "leakscope.bpf.o"
"""The object for libbpf, built by `make build` (bpf_programs/Makefile) and shipped in the wheel."""

NVTX_LIBRARY = DIRECTORY / "nvtx" / "libleakscope_nvtx.so"
"""The library that NVTX loads into a target (NVTX_INJECTION64_PATH): built by `make programs`, shipped in the wheel."""

_SEAL = b"leakscope checksum"
_INCLUDE = re.compile(r'^#include "(?P<name>[^"]+)"$', re.MULTILINE)
_PROGRAM = re.compile(r'^PROGRAM\("(\w+)[^"]*"\).*\nint (\w+)\(', re.MULTILINE)
_MAP_CALLS = [
    (re.compile(r"bpf_map_lookup_elem\(&(\w+), ([^,()]+)\)"), r"\1.lookup(\2)"),
    (re.compile(r"bpf_map_update_elem\(&(\w+), ([^,()]+), ([^,()]+), BPF_ANY\)"), r"\1.update(\2, \3)"),
    (re.compile(r"bpf_map_update_elem\(&(\w+), ([^,()]+), ([^,()]+), BPF_NOEXIST\)"), r"\1.insert(\2, \3)"),
    (re.compile(r"bpf_map_delete_elem\(&(\w+), ([^,()]+)\)"), r"\1.delete(\2)"),
    (re.compile(r"bpf_ringbuf_reserve\(&(\w+), (sizeof\([^()]+\)), 0\)"), r"\1.ringbuf_reserve(\2)"),
    (re.compile(r"bpf_ringbuf_output\(&(\w+), (\w+), (\w+|sizeof\([^()]+\)), "), r"\1.ringbuf_output(\2, \3, "),
]


def joined_source() -> str:
    """The main source with its own headers in place of their includes, each once."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (DIRECTORY / name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match["name"]), text)

    return expand(MAIN_SOURCE)


def programs() -> list[tuple[str, str]]:
    """(function, kind) of each program; kinds are raw_tracepoint, tracepoint, uprobe."""
    kinds = {"raw_tp": "raw_tracepoint", "uretprobe": "uprobe"}
    return [(name, kinds.get(section, section)) for section, name in _PROGRAM.findall(joined_source())]


def sources_id() -> int:
    """64 bits that name the sources; the Makefile puts those that it built into the object."""
    return int.from_bytes(hashlib.sha256(joined_source().encode()).digest()[:8], "big")


def sealed(content: bytes) -> bytes:
    """An object with its checksum behind it, which ELF does not look at: libbpf 1.1 may crash on a damaged one."""
    return content + _SEAL + hashlib.sha256(content).digest()


def is_sealed(content: bytes) -> bool:
    """Whether an object is as the Makefile left it."""
    end = len(content) - len(_SEAL) - hashlib.sha256().digest_size
    return end > 0 and sealed(content[:end]) == content


def source_for_bcc() -> str:
    """The joined source in bcc's dialect; raises ValueError if a map helper is left that bcc would not know."""
    text = joined_source()
    for pattern, method in _MAP_CALLS:
        text = pattern.sub(method, text)
    left = re.search(
        r"bpf_\w+\([^;]*&(?:(?:mem|call|mark|dump|stack)_ring|python_\w+|thread_marks|unwound_paths|open_returns|live|sites"
        r"|known_stacks)\b",
        text,
    )
    if left:
        raise ValueError(f"a map helper that bcc does not know: {left.group(0)}")
    return text
