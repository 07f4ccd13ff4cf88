"""``libdw.so.1`` of elfutils (Debian: libdw1) by ctypes: the few functions that lines and inlined frames need.

Signatures are those of ``elfutils/libdw.h`` 0.171 and later. libdw is C that reads files of others: load it only in a
process that may die (:mod:`leakscope.symbols.dwarf_worker`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ssize_t, c_uint, c_uint8, c_uint64, c_void_p
from functools import cache
from typing import Any

SONAME = "libdw.so.1"

DW_TAG_CLASS, DW_TAG_STRUCTURE, DW_TAG_UNION = 0x02, 0x13, 0x17
DW_TAG_LEXICAL_BLOCK, DW_TAG_INLINED_SUBROUTINE, DW_TAG_MODULE = 0x0B, 0x1D, 0x1E
DW_TAG_SUBPROGRAM, DW_TAG_TRY_BLOCK, DW_TAG_CATCH_BLOCK, DW_TAG_NAMESPACE = 0x2E, 0x32, 0x25, 0x39
DW_AT_COMP_DIR, DW_AT_ABSTRACT_ORIGIN, DW_AT_ARTIFICIAL, DW_AT_SPECIFICATION = 0x1B, 0x31, 0x34, 0x47
DW_AT_CALL_FILE, DW_AT_CALL_LINE, DW_AT_LINKAGE_NAME, DW_AT_MIPS_LINKAGE_NAME = 0x58, 0x59, 0x6E, 0x2007


class Die(Structure):
    """``Dwarf_Die``: a debugging information entry. `addr` is None for none."""

    _fields_ = [("addr", c_void_p), ("cu", c_void_p), ("abbrev", c_void_p), ("padding", ctypes.c_long)]


class Attribute(Structure):
    """``Dwarf_Attribute``."""

    _fields_ = [("code", c_uint), ("form", c_uint), ("value", c_void_p), ("cu", c_void_p)]


_DIE, _ATTRIBUTE = POINTER(Die), POINTER(Attribute)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "dwarf_begin": (c_void_p, [c_int, c_int]),
    "dwarf_end": (c_int, [c_void_p]),
    "dwarf_errno": (c_int, []),
    "dwarf_errmsg": (c_char_p, [c_int]),
    "dwarf_get_units": (
        c_int,
        [c_void_p, c_void_p, POINTER(c_void_p), POINTER(ctypes.c_uint16), POINTER(c_uint8), _DIE, _DIE],
    ),
    "dwarf_ranges": (c_ssize_t, [_DIE, c_ssize_t, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64)]),
    "dwarf_child": (c_int, [_DIE, _DIE]),
    "dwarf_siblingof": (c_int, [_DIE, _DIE]),
    "dwarf_getscopes_die": (c_int, [_DIE, POINTER(_DIE)]),
    "dwarf_tag": (c_int, [_DIE]),
    "dwarf_diename": (c_char_p, [_DIE]),
    "dwarf_attr": (c_void_p, [_DIE, c_uint, _ATTRIBUTE]),
    "dwarf_attr_integrate": (c_void_p, [_DIE, c_uint, _ATTRIBUTE]),
    "dwarf_hasattr_integrate": (c_int, [_DIE, c_uint]),
    "dwarf_formstring": (c_char_p, [_ATTRIBUTE]),
    "dwarf_formudata": (c_int, [_ATTRIBUTE, POINTER(c_uint64)]),
    "dwarf_formref_die": (c_void_p, [_ATTRIBUTE, _DIE]),
    "dwarf_getsrc_die": (c_void_p, [_DIE, c_uint64]),
    "dwarf_lineno": (c_int, [c_void_p, POINTER(c_int)]),
    "dwarf_linesrc": (c_char_p, [c_void_p, c_void_p, c_void_p]),
    "dwarf_getsrcfiles": (c_int, [_DIE, POINTER(c_void_p), POINTER(c_size_t)]),
    "dwarf_filesrc": (c_char_p, [c_void_p, c_size_t, c_void_p, c_void_p]),
}


@cache
def library() -> Any:
    """libdw with the types of its functions; raises OSError where it is not installed, or is too old."""
    loaded = ctypes.CDLL(SONAME)
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise OSError(f"{SONAME} has no {name}: elfutils before 0.171") from None
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def _free() -> Any:
    free = ctypes.CDLL(None).free
    free.restype, free.argtypes = None, [c_void_p]
    return free


def last_error() -> str:
    """What libdw says of the last call that failed in this thread."""
    message = library().dwarf_errmsg(-1)
    return message.decode(errors="replace") if message else "unknown error of libdw"


def children(die: Die) -> Iterator[tuple[int, Die]]:
    """(tag, entry) of what lies directly inside an entry."""
    dw, child = library(), Die()
    more = dw.dwarf_child(byref(die), byref(child))
    while more == 0:
        yield dw.dwarf_tag(byref(child)), child
        following = Die()
        more = dw.dwarf_siblingof(byref(child), byref(following))
        child = following


def ranges(die: Die) -> list[tuple[int, int]]:
    """[start, end) of the code of an entry."""
    dw, found, place = library(), [], 0
    base, start, end = c_uint64(), c_uint64(), c_uint64()
    while (place := dw.dwarf_ranges(byref(die), place, byref(base), byref(start), byref(end))) > 0:
        if start.value < end.value:
            found.append((start.value, end.value))
    return found


def units(handle: int) -> Iterator[tuple[Die, Die]]:
    """Each unit's entry twice: of the file, and where its functions are (in a split file, if that is to be had)."""
    dw, unit, following = library(), c_void_p(), c_void_p()
    version, kind = ctypes.c_uint16(), c_uint8()
    while True:
        die, split = Die(), Die()
        if dw.dwarf_get_units(
            handle, unit, byref(following), byref(version), byref(kind), byref(die), byref(split)
        ):  # fmt: skip
            return
        unit = c_void_p(following.value)
        yield die, split if split.addr else die


def scopes_of(die: Die) -> list[Die]:
    """An entry and those around it in the tree, innermost first."""
    found = _DIE()
    count = library().dwarf_getscopes_die(byref(die), byref(found))
    if count <= 0:
        return []
    try:
        return [Die.from_buffer_copy(found[i]) for i in range(count)]
    finally:
        _free()(found)


def text(die: Die, *attributes: int) -> str:
    """The first of the string attributes that an entry (or what it is an instance of) has, '' without."""
    attribute = Attribute()
    for code in attributes:
        if library().dwarf_attr_integrate(byref(die), code, byref(attribute)):
            value = library().dwarf_formstring(byref(attribute))
            if value:
                return value.decode("utf-8", "replace")
    return ""


def number(die: Die, code: int) -> int:
    """An unsigned attribute of an entry itself, 0 without."""
    attribute, value = Attribute(), c_uint64()
    if not library().dwarf_attr(byref(die), code, byref(attribute)):
        return 0
    return value.value if library().dwarf_formudata(byref(attribute), byref(value)) == 0 else 0


def origin(die: Die) -> Die:
    """The entry that declares a function: behind abstract origins and specifications."""
    for _ in range(8):  # a chain has two links; a hostile file may have a ring
        attribute, target = Attribute(), Die()
        for code in (DW_AT_ABSTRACT_ORIGIN, DW_AT_SPECIFICATION):
            if library().dwarf_attr(byref(die), code, byref(attribute)):
                break
        else:
            return die
        if not library().dwarf_formref_die(byref(attribute), byref(target)):
            return die
        die = target
    return die
