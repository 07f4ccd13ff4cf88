"""Where CPython keeps its interpreters, threads, frames and code objects, by version.

Everything is taken from the file of the interpreter (the executable or libpython), never from a running process: the
version from the symbol ``Py_Version`` (since 3.11), offsets from the table below, or since 3.13 from what the
interpreter says of itself at the start of ``_PyRuntime`` (``_Py_DebugOffsets`` in pycore_runtime.h of 3.13 and
pycore_debug_offsets.h of 3.14), which is constant data of the file.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from leakscope.symbols.elf import ElfFile

_MAX_FRAME_BYTES = 120  # the kernel side masks to below 128
NO_OFFSET = 0xFFFF
"""PYTHON_NO_OFFSET of bpf_programs/maps.h."""

_FILE_NAME = re.compile(r"(lib)?python(\d+(\.\d+)?[a-z]*)?(\.so(\.[\d.]+)?)?$")
_COOKIE = b"xdebugpy"
_PYTHON_PROCESS = struct.Struct("=Q12H")


class UnknownLayoutError(Exception):
    """An interpreter whose frames cannot be read; the text says why."""


@dataclass(frozen=True)
class Offsets:
    """Byte offsets of members in CPython's structures, 64-bit builds with a GIL.

    The first group is what the kernel side walks (struct python_process), the second what names a frame.
    """

    interpreters: int  # _PyRuntimeState.interpreters.head
    interpreter_next: int  # PyInterpreterState
    threads: int  # PyInterpreterState.threads.head
    thread_next: int  # PyThreadState
    thread_native_id: int
    thread_frame: int  # PyThreadState.cframe (3.11, 3.12) or .current_frame
    cframe_frame: int  # _PyCFrame.current_frame, NO_OFFSET from 3.13 on
    frame_code: int  # _PyInterpreterFrame
    frame_instruction: int  # prev_instr (3.11, 3.12), instr_ptr
    frame_previous: int
    frame_owner: int

    code_filename: int  # PyCodeObject
    code_qualname: int
    code_firstlineno: int
    code_linetable: int
    code_adaptive: int  # the first instruction
    ascii_size: int  # sizeof(PyASCIIObject)

    @property
    def frame_bytes(self) -> int:
        """What has to be read of a frame, whole words: beyond it another page may begin."""
        last = max(self.frame_code, self.frame_instruction, self.frame_previous, self.frame_owner)
        return (last | 7) + 1


# From the headers of 3.11.7 and 3.12.1 (pycore_runtime.h, pycore_interp.h, cpython/pystate.h, pycore_frame.h,
# cpython/code.h, cpython/unicodeobject.h), as the compiler lays them out; patch releases keep them.
_OFFSETS = {
    (3, 11): Offsets(40, 0, 16, 8, 160, 56, 8, 32, 56, 48, 69, 112, 128, 72, 136, 184, 48),
    (3, 12): Offsets(40, 0, 72, 8, 144, 56, 0, 0, 56, 8, 70, 112, 128, 68, 136, 192, 40),
}
_ASCII_SIZE = 40

# Places in _Py_DebugOffsets, in 64-bit words: version 1, free_threaded 2, then one group of words a structure, each
# led by the structure's size. 3.14 put `threads_main` before `gc` and two more words behind that group.
_DEBUG_RUNTIME = 3
_DEBUG_INTERPRETER = 6
_DEBUG_THREAD = {(3, 13): 19, (3, 14): 22}
_DEBUG_FRAME = {(3, 13): 28, (3, 14): 31}
_DEBUG_CODE = {(3, 13): 34, (3, 14): 39}
_DEBUG_WORDS = 50


def is_interpreter_name(path: str) -> bool:
    """Whether a file is named like an interpreter: python3.12, libpython3.13.so.1.0."""
    return _FILE_NAME.match(path.rpartition("/")[2]) is not None


@dataclass(frozen=True)
class Interpreter:
    """One interpreter file. `runtime` and `code_type` are the addresses of _PyRuntime and PyCode_Type in it."""

    path: str
    version: tuple[int, int]
    offsets: Offsets
    runtime: int
    code_type: int
    biases: tuple[tuple[int, int], ...]  # executable segments: file offset, address minus file offset

    @classmethod
    def read(cls, file: Path, path: str) -> Interpreter | None:
        """What the file (as named `path` by the process) holds; None for one without an interpreter in it.

        An executable that takes it from libpython has none. Raises UnknownLayoutError where there is one whose frames
        cannot be read, OSError and ValueError for files that cannot be read.
        """
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return cls._of(ElfFile(data), path)

    @classmethod
    def _of(cls, elf: ElfFile, path: str) -> Interpreter | None:
        symbols = elf.data_symbols(("_PyRuntime", "PyCode_Type", "Py_Version"))
        if "_PyRuntime" not in symbols:
            if path.rpartition("/")[2].startswith("lib") or not elf.needs("libpython"):
                raise UnknownLayoutError("it has no symbol _PyRuntime")
            return None
        if "Py_Version" not in symbols or "PyCode_Type" not in symbols:
            raise UnknownLayoutError("it is older than 3.11")
        runtime = symbols["_PyRuntime"]
        number = struct.unpack("=Q", elf.read(symbols["Py_Version"], 8))[0]
        version = (number >> 24 & 0xFF, number >> 16 & 0xFF)
        if version in _OFFSETS:
            offsets = _OFFSETS[version]
        else:
            offsets = _published_offsets(version, elf.read(runtime, 8 * _DEBUG_WORDS))
        biases = tuple((s.offset, s.address - s.offset) for s in elf.segments if s.executable)
        return cls(path, version, offsets, runtime, symbols["PyCode_Type"], biases)

    def load_bias(self, start: int, file_offset: int) -> int | None:
        """What to add to addresses of the file in a process that maps `file_offset` executable at `start`."""
        for offset, distance in self.biases:
            if offset & ~0xFFF == file_offset & ~0xFFF:
                return start - (file_offset + distance)
        return None

    def process_value(self, bias: int) -> bytes:
        """The value of the map `python_processes` for a process that loaded this file at `bias`."""
        o = self.offsets
        return _PYTHON_PROCESS.pack(
            self.runtime + bias,
            *(o.interpreters, o.interpreter_next, o.threads, o.thread_next, o.thread_native_id, o.thread_frame),
            *(o.cframe_frame, o.frame_code, o.frame_instruction, o.frame_previous, o.frame_owner, o.frame_bytes),
        )


def _published_offsets(version: tuple[int, int], data: bytes) -> Offsets:
    """The offsets that an interpreter since 3.13 publishes; raises UnknownLayoutError for a layout not known here."""
    name = f"{version[0]}.{version[1]}"
    if version not in _DEBUG_THREAD or not data.startswith(_COOKIE):
        raise UnknownLayoutError(f"the layout of CPython {name} is not known")
    words = struct.unpack(f"={_DEBUG_WORDS}Q", data)
    if words[2]:
        raise UnknownLayoutError(f"free-threaded builds (CPython {name}t) are not supported")
    if (words[1] >> 24, words[1] >> 16 & 0xFF) != version:
        raise UnknownLayoutError(f"its debug offsets are not those of CPython {name}")
    thread, frame, code = _DEBUG_THREAD[version], _DEBUG_FRAME[version], _DEBUG_CODE[version]

    def member(group: int, index: int) -> int:
        offset, size = words[group + index], words[group]
        if not offset < min(size, _MAX_FRAME_BYTES if group == frame else NO_OFFSET):
            raise UnknownLayoutError(f"the debug offsets of CPython {name} do not fit its structures")
        return offset

    return Offsets(
        interpreters=member(_DEBUG_RUNTIME, 2),
        interpreter_next=member(_DEBUG_INTERPRETER, 2),
        threads=member(_DEBUG_INTERPRETER, 3),
        thread_next=member(thread, 2),
        thread_native_id=member(thread, 6),
        thread_frame=member(thread, 4),
        cframe_frame=NO_OFFSET,
        frame_code=member(frame, 2),
        frame_instruction=member(frame, 3),
        frame_previous=member(frame, 1),
        frame_owner=member(frame, 5),
        code_filename=member(code, 1),
        code_qualname=member(code, 3),
        code_firstlineno=member(code, 5),
        code_linetable=member(code, 4),
        code_adaptive=member(code, 9),
        ascii_size=_ASCII_SIZE,
    )
