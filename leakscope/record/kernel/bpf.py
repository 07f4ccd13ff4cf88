"""The bpf(2) commands that the recorder needs beyond what a loader offers: links and map access.

Attaching goes through here for every loader alike, so bcc only compiles and loads. Structures follow
``union bpf_attr`` of include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from leakscope.record.kernel.syscalls import syscall

if TYPE_CHECKING:
    import numpy as np

_BPF_MAP_CREATE = 0
_BPF_MAP_LOOKUP_ELEM = 1
_BPF_MAP_UPDATE_ELEM = 2
_BPF_MAP_DELETE_ELEM = 3
_BPF_MAP_GET_NEXT_KEY = 4
_BPF_RAW_TRACEPOINT_OPEN = 17
_BPF_MAP_LOOKUP_BATCH = 24
_BPF_LINK_CREATE = 28

_NAME_BYTES = 16  # BPF_OBJ_NAME_LEN
BPF_PERF_EVENT = 41
BPF_TRACE_UPROBE_MULTI = 48
_BPF_F_UPROBE_MULTI_RETURN = 1


def _bpf(command: int, attr: bytes, *, brief: bool = False) -> int:
    """Call bpf(2); raises OSError with the kernel's errno."""
    buffer = ctypes.create_string_buffer(attr, max(len(attr), 128))
    return syscall("bpf", command, ctypes.addressof(buffer), len(buffer), brief=brief)


def create_map(
    map_type: int,
    key_bytes: int,
    value_bytes: int,
    entries: int,
    *,
    flags: int = 0,
    name: str = "",
    brief: bool = False,
) -> int:
    """Make a map (type as in enum bpf_map_type); its descriptor. Raises OSError with the kernel's errno.

    :param brief: keep Python's lock; for small maps.
    """
    attr = struct.pack(
        "=IIIII II16s", map_type, key_bytes, value_bytes, entries, flags, 0, 0, name.encode()[: _NAME_BYTES - 1]
    )
    return _bpf(_BPF_MAP_CREATE, attr, brief=brief)


def open_raw_tracepoint(program_fd: int, name: str) -> int:
    """Attach a program to a raw tracepoint; the returned descriptor detaches it when closed."""
    text = ctypes.create_string_buffer(name.encode())
    return _bpf(_BPF_RAW_TRACEPOINT_OPEN, struct.pack("=QI4x", ctypes.addressof(text), program_fd))


def link_perf_event(program_fd: int, event_fd: int, cookie: int = 0) -> int:
    """Attach a program to a perf event (tracepoint or uprobe) with a cookie (kernel 5.15, 82e6b1eee6a8)."""
    return _bpf(_BPF_LINK_CREATE, struct.pack("=IIII Q", program_fd, event_fd, BPF_PERF_EVENT, 0, cookie))


def link_uprobe_multi(
    program_fd: int, path: str, offsets: Sequence[int], cookies: Sequence[int], *, at_return: bool, pid: int = 0
) -> int:
    """Attach one program to many places of one file with one link (kernel 6.6, 89ae89f53d20).

    Closing 120 single uprobes takes 13 s, closing this link 64 ms. `offsets` are file offsets. With a `pid` the places
    are probed in that process alone; raises ProcessLookupError where it has ended.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    offset_array, cookie_array = array("Q", offsets), array("Q", cookies)
    attr = struct.pack(
        "=IIII QQQQ III",
        program_fd,
        0,
        BPF_TRACE_UPROBE_MULTI,
        0,
        ctypes.addressof(name),
        offset_array.buffer_info()[0],
        0,
        cookie_array.buffer_info()[0],
        len(offset_array),
        _BPF_F_UPROBE_MULTI_RETURN if at_return else 0,
        pid,
    )
    return _bpf(_BPF_LINK_CREATE, attr)


class Map:
    """A BPF map by descriptor: single elements as bytes, whole maps as numpy arrays."""

    def __init__(self, fd: int, key_bytes: int, value_bytes: int, entries: int, per_cpu: bool = False) -> None:
        self.fd = fd
        self.key_bytes = key_bytes
        self.entries = entries
        self.value_bytes = value_bytes
        self._stored_bytes = (value_bytes + 7) // 8 * 8 * possible_cpus() if per_cpu else value_bytes
        self._key = ctypes.create_string_buffer(key_bytes)
        self._value = ctypes.create_string_buffer(self._stored_bytes)
        key, value = ctypes.addressof(self._key), ctypes.addressof(self._value)
        self._attr = ctypes.create_string_buffer(struct.pack("=I4xQQQ", fd, key, value, 0), 128)
        # The kernel refuses a delete whose unused fields are set.
        self._delete_attr = ctypes.create_string_buffer(struct.pack("=I4xQ", fd, key), 128)

    def lookup(self, key: bytes) -> bytes | None:
        """The value stored under a key, or None. Per-CPU maps give all CPUs' values, 8-byte aligned."""
        self._key.raw = key
        try:
            syscall("bpf", _BPF_MAP_LOOKUP_ELEM, ctypes.addressof(self._attr), 128)
        except FileNotFoundError:
            return None
        return self._value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Store a value; raises OSError (E2BIG when the map is full)."""
        self._key.raw = key
        self._value.raw = value
        syscall("bpf", _BPF_MAP_UPDATE_ELEM, ctypes.addressof(self._attr), 128)

    def delete(self, key: bytes) -> bool:
        """Remove a key; False when it was not there."""
        self._key.raw = key
        try:
            syscall("bpf", _BPF_MAP_DELETE_ELEM, ctypes.addressof(self._delete_attr), 128)
        except FileNotFoundError:
            return False
        return True

    def read_all(self, batch: int = 4096) -> tuple[np.ndarray, np.ndarray]:
        """All keys and values as uint8 arrays of shape (n, key_bytes) and (n, value_bytes), read in batches.

        Hash maps and arrays. Uses BPF_MAP_LOOKUP_BATCH (kernel 5.6, 057996380a42); entries that change meanwhile may
        be seen or not, those of a hash map each at most once a bucket.
        """
        import numpy as np  # here, so that programs load without it

        keys: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for some_keys, some_values in self.batches(batch):
            keys.append(some_keys.copy())
            values.append(some_values.copy())
        return np.concatenate(keys), np.concatenate(values)

    def batches(self, batch: int = 4096) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The arrays of :meth:`read_all` piece by piece, so that a map of millions is never in memory at once.

        A piece lies where the one before it did: take out of it what is to stay.
        """
        import numpy as np

        cursor_in, cursor_out = (
            ctypes.create_string_buffer(max(4, self.key_bytes)),
            ctypes.create_string_buffer(max(4, self.key_bytes)),
        )
        first = True
        key_buffer, value_buffer = np.empty((0, self.key_bytes), np.uint8), np.empty((0, self._stored_bytes), np.uint8)
        while True:
            if len(key_buffer) < batch:
                key_buffer = np.empty((batch, self.key_bytes), np.uint8)
                value_buffer = np.empty((batch, self._stored_bytes), np.uint8)
            attr = ctypes.create_string_buffer(
                struct.pack(
                    "=QQQQ II QQ",
                    0 if first else ctypes.addressof(cursor_in),
                    ctypes.addressof(cursor_out),
                    key_buffer.ctypes.data,
                    value_buffer.ctypes.data,
                    batch,
                    self.fd,
                    0,
                    0,
                ),
                128,
            )
            done = False
            try:
                syscall("bpf", _BPF_MAP_LOOKUP_BATCH, ctypes.addressof(attr), 128)
            except FileNotFoundError:
                done = True
            except OSError as error:
                if error.errno != 28:  # ENOSPC: one bucket holds more than a batch
                    raise
                batch *= 2
                continue
            count = struct.unpack_from("=I", attr.raw, 32)[0]
            yield key_buffer[:count], value_buffer[:count]
            if done:
                return
            cursor_in.raw = cursor_out.raw
            first = False

    def keys(self) -> Iterator[bytes]:
        """All keys of a small map, one by one."""
        found, _ = self.read_all()
        for row in found:
            yield row.tobytes()


def possible_cpus() -> int:
    """CPUs that may ever come online: the length of per-CPU values (/sys/devices/system/cpu/possible)."""
    with open("/sys/devices/system/cpu/possible") as file:
        return int(file.read().strip().split("-")[-1].split(",")[-1]) + 1


def map_facts(fd: int) -> dict[str, int]:
    """key_size, value_size, max_entries and the like of a map, from its fdinfo (bpf_map_show_fdinfo)."""
    facts = {}
    with open(f"/proc/self/fdinfo/{fd}") as file:
        for line in file:
            name, _, value = line.partition(":")
            if value.strip().isdigit():
                facts[name] = int(value)
    return facts


def program_facts(fd: int) -> dict[str, int]:
    """run_cnt, run_time_ns, recursion_misses and the like of a program, from its fdinfo (bpf_prog_show_fdinfo)."""
    return map_facts(fd)
