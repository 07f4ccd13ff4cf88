"""numpy mirrors of bpf_programs/records.h and maps.h. Sizes are asserted against the C in tests."""

from __future__ import annotations

import struct

import numpy as np

MEM_RECORD = np.dtype(
    [
        ("ts_ns", "<u8"), ("addr", "<u8"), ("alloc_ts_ns", "<u8"),
        ("pid", "<u4"), ("tid", "<u4"), ("user_stack", "<i4"), ("kernel_stack", "<i4"),
        ("site", "<u4"), ("requested_bytes", "<u4"), ("cpu", "<u2"), ("op", "u1"), ("cause", "u1"), ("weight", "<u4"),
        ("python_stack", "<u4"), ("mark", "<u4"),
    ]
)  # fmt: skip
"""64 bytes: one kernel object or page allocated or freed."""

CALL_RECORD = np.dtype(
    [
        ("enter_ns", "<u8"), ("exit_ns", "<u8"), ("id", "<u8"), ("parent_id", "<u8"), ("addr", "<u8"),
        ("size_bytes", "<u8"), ("requested_bytes", "<u8"), ("alloc_ts_ns", "<u8"), ("context", "<u8"),
        ("arg0", "<u8"), ("arg1", "<u8"), ("pid", "<u4"), ("tid", "<u4"), ("user_stack", "<i4"),
        ("result", "<i4"), ("function", "<u4"), ("cpu", "<u2"), ("type", "u1"), ("flags", "u1"), ("cause", "u1"),
        ("pad", "u1", (3,)), ("python_stack", "<u4"), ("mark", "<u4"), ("pad2", "<u4"),
    ]
)  # fmt: skip
"""128 bytes: a call, a map call, the end of a range, or an event of a process's life."""

SITE_KEY = np.dtype([("call_site", "<u8"), ("what", "<u8")])
SITE_INFO = np.dtype(
    [
        ("id", "<u4"),
        ("kind", "<u4"),
        ("size_bytes", "<u4"),
        ("object_bytes", "<u4"),
        ("first_addr", "<u8"),
        ("cache", "S32"),
    ]
)
RANGE_KEY = np.dtype([("addr", "<u8"), ("pid", "<u4"), ("space", "<u4")])
LIVE_RANGE = np.dtype(
    [
        ("ts_ns", "<u8"), ("size_bytes", "<u8"), ("requested_bytes", "<u8"), ("context", "<u8"),
        ("call_id", "<u8"), ("user_stack", "<i4"), ("function", "<u4"), ("references", "<u4"), ("released", "<u4"),
        ("python_stack", "<u4"), ("mark", "<u4"),
    ]
)  # fmt: skip
PYTHON_FRAMES = 64
PYTHON_RECORD = np.dtype(
    [
        ("id", "<u4"),
        ("pid", "<u4"),
        ("depth", "<u4"),
        ("pad", "<u4"),
        ("frames", [("code", "<u8"), ("instruction", "<u8")], (PYTHON_FRAMES,)),
    ]
)
"""1,040 bytes: one Python stack, innermost frame first."""

MARK_NAME_BYTES = 96
MARK_NAME_UNREADABLE = 0xFFFF
MARK_RECORD = np.dtype(
    [
        ("ts_ns", "<u8"), ("number", "<u4"), ("outer", "<u4"), ("pid", "<u4"), ("tid", "<u4"), ("type", "<u4"),
        ("bytes", "<u4"), ("domain", "S48"), ("name", f"S{MARK_NAME_BYTES}"),
    ]
)  # fmt: skip
"""176 bytes: an NVTX range begins or ends, or a mark."""
LAUNCH_WORDS, LAUNCH_WORDS_MAX = 16, 64
LAUNCH_RECORD = np.dtype(
    [
        ("launch_id", "<u8"), ("ts_ns", "<u8"), ("function", "<u8"), ("pid", "<u4"), ("layout", "<u4"),
        ("first", "<u2"), ("count", "<u2"), ("flags", "<u4"), ("values", "<u8", (LAUNCH_WORDS,)),
    ]
)  # fmt: skip
"""168 bytes: words of a kernel launch that may be pointer arguments."""
LAUNCH_BUFFER = 1  # enum launch_flag

KERNEL_NAME_BYTES = 960
KERNEL_RECORD = np.dtype(
    [
        ("ts_ns", "<u8"), ("handle", "<u8"), ("container", "<u8"), ("address", "<u8"), ("size_bytes", "<u8"),
        ("pid", "<u4"), ("role", "<u4"), ("result", "<i4"), ("name_bytes", "<u4"), ("pad", "<u8"),
        ("name", f"S{KERNEL_NAME_BYTES}"),
    ]
)  # fmt: skip
"""1,024 bytes: where a handle of a GPU kernel, module or library comes from."""

LAUNCH_KEY = np.dtype([("function", "<u8"), ("pid", "<u4"), ("pad", "<u4")])
LAUNCH_LAYOUT = np.dtype(
    [
        ("id", "<u4"),
        ("words", "<u4"),
        ("word", [("slot", "<u2"), ("offset", "<u2"), ("buffer_offset", "<u4")], (LAUNCH_WORDS_MAX,)),
    ]
)
"""520 bytes: which words of a kernel's parameters the probes read."""
LIVE_OBJECT = np.dtype(
    [
        ("ts_ns", "<u8"), ("pid", "<u4"), ("user_stack", "<i4"), ("kernel_stack", "<i4"),
        ("site", "<u4"), ("weight", "<u4"), ("requested_bytes", "<u4"), ("python_stack", "<u4"), ("identity", "<u4"),
    ]
)  # fmt: skip
LIVE_WAYS = 4
LIVE_SLOT = np.dtype([("word", "<u8"), ("object", LIVE_OBJECT), ("unused", "<u8", (2,))])
LIVE_BUCKET = np.dtype([("slots", LIVE_SLOT, (LIVE_WAYS,))])
SLOT_STATE = 7
"""Bits of a slot's word that are no address: 0 in that of a live object (live.bpf.h)."""
IDENTITY_KEY = np.dtype(
    [
        ("pid", "<u4"), ("site", "<u4"), ("kernel_stack", "<i4"),
        ("user_stack", "<i4"), ("python_stack", "<u4"), ("weight", "<u4"), ("call_stack", "<i4"),
        ("call_function", "<u4"),
    ]
)  # fmt: skip
IDENTITY_COUNT = np.dtype([(name, "<u8") for name in ("allocated", "freed", "reused", "exited", "first_ns", "last_ns")])
SAMPLE_GAPS = 4096
DUMP_REGISTERS, OPEN_RETURNS, DUMP_BYTES = 34, 4, 16384
DUMP_RECORD = np.dtype(
    [
        ("ts_ns", "<u8"), ("id", "<u4"), ("pid", "<u4"), ("user_stack", "<i4"), ("bytes", "<u4"),
        ("registers", "<u8", (DUMP_REGISTERS,)), ("open", [("sp", "<u8"), ("caller", "<u8")], (OPEN_RETURNS,)),
        ("stack", "<u8", (DUMP_BYTES // 8,)),
    ]
)  # fmt: skip
"""16,744 bytes: registers and the top of a user stack."""

PATH_KEY = np.dtype([("sp", "<u8"), ("ip", "<u8"), ("pid", "<u4"), ("tag", "<u4")])
PATH_WORDS, PATH_REGISTERS, PATH_BRANCHES, PATH_BRANCH = 256, 12, 8, 65535
UNWOUND_PATH = np.dtype(
    [
        ("id", "<u4"), ("words", "<u2"), ("checked_registers", "<u2"), ("registers", "<u8", (PATH_REGISTERS,)),
        ("values", "<u8", (PATH_WORDS,)), ("places", "<u2", (PATH_WORDS,)),
    ]
)  # fmt: skip
"""2,664 bytes: the words of a dump that decided how it was unwound."""

RSS_MEMBERS = 4
RSS_PEAKS = np.dtype([("pages", "<u8", (RSS_MEMBERS,))])

# enum mem_op, mem_cause
OP_ALLOC, OP_FREE = 0, 1
CAUSE_CALL, CAUSE_REUSE, CAUSE_CONTEXT, CAUSE_EXIT, CAUSE_EXEC = 0, 1, 2, 3, 4
# enum site_kind
SITE_KMALLOC, SITE_SLAB, SITE_PAGE = 0, 1, 2
# enum call_type
CALL_FUNCTION, CALL_FREE, CALL_MAP, CALL_EXIT, CALL_EXEC, CALL_LAUNCH = range(6)
# enum mark_event
MARK_PUSH, MARK_POP, MARK_START, MARK_END, MARK_INSTANT, MARK_TOO_DEEP = range(6)
# enum call_flag
CALL_NESTED, CALL_IN_HEAP = 1, 2
MAP_IN_HEAP = 0x80000000
# enum map_call
MAP_MMAP, MAP_MUNMAP, MAP_MREMAP, MAP_BRK, MAP_MADVISE = range(5)
# enum space
SPACE_MEMORY, SPACE_HANDLE, SPACE_MAPPED, SPACE_HEAP, SPACE_ARRAY, SPACE_ENDING = range(6)
STACK_DUMP_BIT = 1 << 30
STACK_GENERATION_SHIFT = 16
# enum stack_kind
STACK_KERNEL, STACK_USER, STACK_BESIDE_DUMP = range(3)
STACK_HEADER = struct.Struct("=QQIIII")
"""Of a stack_record: ts_ns, caller, number, pid, kind, depth; its addresses follow as 64-bit words."""

COUNTERS = (
    "mem_dropped", "call_dropped", "live_full", "live_busy", "stack_dropped", "stack_fault", "free_unmatched",
    "page_user", "site_full", "call_map_full", "python_dropped", "python_busy",
    "call_sequence", "stack_busy", "mark_dropped", "mark_too_deep", "mark_threads_full", "launch_dropped",
    "kernel_dropped", "identity_sequence", "identity_full", "small_objects", "small_bytes",
    "unsampled_objects", "unsampled_bytes", "dump_dropped", "dump_skipped", "dump_sequence",
)  # fmt: skip
"""Rows of the `counters` map, in the order of enum counter."""
