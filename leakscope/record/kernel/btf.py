"""What the running kernel's type information says: member offsets and the arguments of raw tracepoints.

Read through libbpf.so.1 (its btf__* functions, stable since 1.0).
"""

from __future__ import annotations

import ctypes
import struct
from functools import cached_property
from pathlib import Path

from leakscope.errors import NotCapableError

_KIND_PTR, _KIND_STRUCT, _KIND_UNION, _KIND_ENUM, _KIND_TYPEDEF = 2, 4, 5, 6, 8
_KIND_CONST, _KIND_FUNC, _KIND_FUNC_PROTO = 10, 12, 13


_VMLINUX = Path("/sys/kernel/btf/vmlinux")


_loaded: list[int] = []


def _vmlinux(library: ctypes.PyDLL) -> int | None:
    """The kernel's types as libbpf holds them, read once a process: they do not change."""
    if not _loaded and (btf := library.btf__load_vmlinux_btf()):
        _loaded.append(int(btf))
    return _loaded[0] if _loaded else None


class KernelTypes:
    """The kernel's BTF. Raises NotCapableError when libbpf or /sys/kernel/btf/vmlinux is missing."""

    def __init__(self) -> None:
        try:
            # Keeps Python's lock: its calls are short and many, and other threads may be importing meanwhile.
            self._lib = ctypes.PyDLL("libbpf.so.1")
        except OSError as error:
            raise NotCapableError(
                "libbpf.so.1 is not installed; install it (Debian/Ubuntu: apt-get install libbpf1; "
                "Fedora/RHEL: dnf install libbpf)"
            ) from error
        signatures: list[tuple[str, type, list[type]]] = [
            ("btf__load_vmlinux_btf", ctypes.c_void_p, []),
            ("btf__find_by_name_kind", ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32]),
            ("btf__type_cnt", ctypes.c_uint32, [ctypes.c_void_p]),
            ("btf__type_by_id", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_uint32]),
            ("btf__name_by_offset", ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_uint32]),
        ]
        for name, result, arguments in signatures:
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments

    @cached_property
    def _btf(self) -> int:
        btf = _vmlinux(self._lib)
        if not btf:
            raise NotCapableError(
                "the kernel has no type information (/sys/kernel/btf/vmlinux); it needs CONFIG_DEBUG_INFO_BTF"
            )
        return int(btf)

    def _type(self, type_id: int) -> tuple[str, int, int, int, int]:
        """(name, kind, vlen, size or type, address of what follows) of a type (struct btf_type)."""
        address = self._lib.btf__type_by_id(self._btf, type_id)
        name_offset, info, size_or_type = struct.unpack("=III", ctypes.string_at(address, 12))
        name = self._lib.btf__name_by_offset(self._btf, name_offset) or b""
        return name.decode(), info >> 24 & 0x1F, info & 0xFFFF, size_or_type, address + 12

    def member_offset(self, struct_name: str, member: str) -> int | None:
        """Offset in bytes of a member of a struct, or None where this kernel has no such member.

        Members of nameless structs and unions within it are its own, as in C (most of mm_struct is in one).
        """
        type_id = self._struct(struct_name)
        return None if type_id is None else self._offset_in(type_id, member.encode())

    def struct_bytes(self, struct_name: str) -> int | None:
        """Size of a struct, or None where this kernel has none of that name."""
        type_id = self._struct(struct_name)
        return None if type_id is None else self._type(type_id)[3]

    def _struct(self, name: str) -> int | None:
        type_id = self._lib.btf__find_by_name_kind(self._btf, name.encode(), _KIND_STRUCT)
        return int(type_id) if type_id > 0 else None

    def _offset_in(self, type_id: int, member: bytes) -> int | None:
        _, kind, members, _, address = self._type(type_id)
        if kind not in (_KIND_STRUCT, _KIND_UNION):
            return None
        for index in range(members):
            name_offset, of_type, bit_offset = struct.unpack("=III", ctypes.string_at(address + 12 * index, 12))
            name = self._lib.btf__name_by_offset(self._btf, name_offset)
            within = 0 if name == member else None if name else self._offset_in(of_type, member)
            if within is not None:
                return (bit_offset & 0xFFFFFF) // 8 + within
        return None

    def raw_tracepoint_arguments(self, tracepoint: str) -> list[str] | None:
        """Type names of a raw tracepoint's arguments ('kmem_cache' for a pointer to it), or None if unknown.

        From the typedef btf_trace_<name>, a pointer to a prototype whose first argument is the probe's data.
        """
        type_id = self._lib.btf__find_by_name_kind(self._btf, f"btf_trace_{tracepoint}".encode(), _KIND_TYPEDEF)
        if type_id < 0:
            return None
        _, kind, count, target, address = self._type(type_id)
        while kind in (_KIND_TYPEDEF, _KIND_PTR):
            _, kind, count, target, address = self._type(target)
        if kind != _KIND_FUNC_PROTO:
            return None
        names = []
        for index in range(1, count):
            argument = struct.unpack("=II", ctypes.string_at(address + 8 * index, 8))[1]
            names.append(self._pointee(argument))
        return names

    def _pointee(self, type_id: int) -> str:
        name = ""
        while type_id:
            name, kind, _, target, _ = self._type(type_id)
            if kind not in (_KIND_PTR, _KIND_CONST, _KIND_TYPEDEF) or name:
                break
            type_id = target
        return name

    def function_id(self, name: str) -> int | None:
        """BTF id of a kernel function (kind FUNC), for calling it as a kfunc; None where it does not exist."""
        type_id = self._lib.btf__find_by_name_kind(self._btf, name.encode(), _KIND_FUNC)
        return int(type_id) if type_id > 0 else None

    def enum_bit(self, name: str) -> int:
        """1 << value of an enumerator such as ___GFP_ACCOUNT_BIT (in BTF since v6.9); 0 where it is not known.

        Enumerators are not indexed by name: this walks all types, some 0.3 s, where the name is there at all.
        """
        wanted = name.encode()
        if b"\0" + wanted + b"\0" not in _VMLINUX.read_bytes():
            return 0
        for type_id in range(1, self._lib.btf__type_cnt(self._btf)):
            address = self._lib.btf__type_by_id(self._btf, type_id)
            info = struct.unpack("=I", ctypes.string_at(address + 4, 4))[0]
            if info >> 24 & 0x1F != _KIND_ENUM:
                continue
            for index in range(info & 0xFFFF):
                name_offset, value = struct.unpack("=Ii", ctypes.string_at(address + 12 + 8 * index, 8))
                if self._lib.btf__name_by_offset(self._btf, name_offset) == wanted:
                    return 1 << value
        return 0
