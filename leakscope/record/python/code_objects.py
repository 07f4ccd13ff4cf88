"""Names and lines of Python frames, read from the memory of the process that runs them."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from leakscope.record.python.layout import Interpreter

_MAX_TEXT = 4096  # characters of a name or path
_MAX_LINE_TABLE = 1 << 20  # bytes
_OBJECT_TYPE = 8  # PyObject: ob_type
_BYTES_SIZE, _BYTES_DATA = 16, 32  # PyBytesObject: ob_size, ob_sval
_STR_LENGTH, _STR_STATE = 16, 32  # PyASCIIObject
_GONE, _UNREADABLE = "of a process that was gone", "in memory that could not be read"
_ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}  # by state.kind


class PythonFrame(NamedTuple):
    """A frame by its names; `line` is 0 for an instruction without one; `entered`: C code called it, not Python's."""

    function: str
    file: str
    line: int
    entered: bool = False


class MemoryGoneError(Exception):
    """The memory of a process cannot be read (any more); the text says why."""


class NoCodeObjectError(Exception):
    """What a frame holds is no code object; the text says what is wrong."""


class ProcessMemory:
    """/proc/PID/mem of a process. Use as a context manager."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise MemoryGoneError(_GONE) from error

    def read(self, address: int, size: int) -> bytes:
        """Exactly `size` bytes; raises MemoryGoneError."""
        try:
            data = os.pread(self._fd, size, address)
        except (OSError, OverflowError) as error:
            raise MemoryGoneError(_UNREADABLE) from error
        if len(data) != size:
            raise MemoryGoneError(_UNREADABLE if data else _GONE)
        return data

    def __enter__(self) -> ProcessMemory:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


class CodeIdentity(NamedTuple):
    """What tells a code object from another one that took its place in memory: addresses, and its first line."""

    qualname: int
    filename: int
    line_table: int
    first_line: int


@dataclass
class CodeObject:
    """What a code object says of itself. `line_table` is encoded."""

    identity: CodeIdentity
    function: str
    file: str
    line_table: bytes
    _frames: dict[int, PythonFrame] = field(default_factory=dict)

    def frame(self, offset: int) -> PythonFrame:
        """The frame whose instruction lies `offset` bytes into the code."""
        if offset not in self._frames:
            line = line_of(self.line_table, self.identity.first_line, offset)
            self._frames[offset] = PythonFrame(self.function, self.file, line)
        return self._frames[offset]


def identify(memory: ProcessMemory, address: int, interpreter: Interpreter, bias: int) -> CodeIdentity:
    """The identity of the code object at an address of a process that loaded its interpreter at `bias`.

    Raises NoCodeObjectError unless its type is the interpreter's own PyCode_Type, MemoryGoneError.
    """
    offsets = interpreter.offsets
    data = memory.read(address, offsets.code_linetable + 8)
    if struct.unpack_from("=Q", data, _OBJECT_TYPE)[0] != interpreter.code_type + bias:
        raise NoCodeObjectError("what a frame holds is no code object")
    pointers = (offsets.code_qualname, offsets.code_filename, offsets.code_linetable)
    qualname, filename, table = (struct.unpack_from("=Q", data, offset)[0] for offset in pointers)
    return CodeIdentity(qualname, filename, table, struct.unpack_from("=i", data, offsets.code_firstlineno)[0])


def read_code(memory: ProcessMemory, identity: CodeIdentity, interpreter: Interpreter) -> CodeObject:
    """The names and lines of a code object. Raises NoCodeObjectError, MemoryGoneError."""
    ascii_size = interpreter.offsets.ascii_size
    function = _text(memory, identity.qualname, ascii_size)
    file = _text(memory, identity.filename, ascii_size)
    return CodeObject(identity, function, file, _line_table(memory, identity.line_table))


def _text(memory: ProcessMemory, address: int, ascii_size: int) -> str:
    head = memory.read(address, ascii_size)
    length = struct.unpack_from("=q", head, _STR_LENGTH)[0]
    state = struct.unpack_from("=I", head, _STR_STATE)[0]
    if not state & 0x1C:  # no kind behind 2 bits of `interned`: they are 16, as in later headers of 3.14
        state >>= 14
    kind, compact, ascii_only = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
    if kind not in _ENCODINGS or not compact or not 0 <= length <= _MAX_TEXT:
        raise NoCodeObjectError("the name in a code object is no text")
    # A PyCompactUnicodeObject has the length and address of a UTF-8 copy before the text; up to 3.11 (48 bytes),
    # also the length of a wide one.
    wide = 16 + (8 if ascii_size == 48 else 0)
    data = memory.read(address + ascii_size + (0 if ascii_only else wide), length * kind)
    return data.decode(_ENCODINGS[kind], "replace")


def _line_table(memory: ProcessMemory, address: int) -> bytes:
    size = struct.unpack("=q", memory.read(address + _BYTES_SIZE, 8))[0]
    if not 0 <= size <= _MAX_LINE_TABLE:
        raise NoCodeObjectError("the line table of a code object has no sane size")
    return memory.read(address + _BYTES_DATA, size) if size else b""


def line_of(table: bytes, first_line: int, offset: int) -> int:
    """The line of the instruction `offset` bytes into the code, 0 where it has none.

    Format: Objects/locations.md (3.11, 3.12), InternalDocs/code_objects.md. An entry's first byte has bit 7 set, a
    form in bits 3-6 and its length in code units of 2 bytes, minus 1, in bits 0-2. Forms 0-9 stay on the line; 10-12
    move on by 0-2; 13 and 14 carry a signed delta; 15 has no line. An offset before the first instruction is a frame
    that has not begun: it is on the first line.
    """
    line, end, position = first_line, 0, 0
    if offset < 0:
        return first_line
    while position < len(table):
        first = table[position]
        form = first >> 3 & 15
        end += 2 * ((first & 7) + 1)
        if 10 <= form <= 12:
            line += form - 10
        elif form in (13, 14):
            line += _signed_varint(table, position + 1)
        if offset < end:
            return 0 if form == 15 else line
        position += 1
        while position < len(table) and not table[position] & 0x80:
            position += 1
    return 0


def _signed_varint(table: bytes, position: int) -> int:
    """A number in groups of 6 bits, least significant first, bit 6 set in all but the last; bit 0 is the sign."""
    value = shift = 0
    while position < len(table):
        byte = table[position]
        value |= (byte & 0x3F) << shift
        shift += 6
        position += 1
        if not byte & 0x40:
            break
    return -(value >> 1) if value & 1 else value >> 1
