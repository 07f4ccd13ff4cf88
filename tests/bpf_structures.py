"""Structures and enumerations of the programs, for a compiler of this machine."""

from __future__ import annotations

import re

import bpf_programs

HEADERS = ("records.h", "maps.h", "common.h", "ranges.bpf.h", "sizes.bpf.h", "unwind.bpf.h", "functions.bpf.h")
WITHOUT_BPF = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;
"""


def definitions() -> str:
    """The structures and enumerations of the programs' headers, without comments, maps and code."""
    text = "".join((bpf_programs.DIRECTORY / name).read_text() for name in HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return "\n".join(re.findall(r"^(?:struct|enum) \w+ \{(?:[^{}]|\{[^{}]*\})*\};", text, re.MULTILINE))
