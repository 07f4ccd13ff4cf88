"""Readable names of C++ (Itanium ABI) and Rust (legacy and v0) functions.

Demangled by multi-demangle, a fork of Sentry's symbolic-demangle: both Rust manglings and C++, memory-safe and bounded
in its output. (libstdc++'s ``__cxa_demangle`` and LLVM's demangler know no legacy Rust names and overflow the C stack
on hostile ones, and names come from whatever file a target maps.)

Arguments stay, as they tell overloads apart; return types, which fold nothing, do not.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

MAX_MANGLED = 4096
"""Longer names stay as they are. Real ones of heavily templated code reach some 2,000 characters."""
MAX_NAME = 1024
"""Longer results are cut: they no longer fit any rendering, and each is kept in every capture."""

MANGLED = re.compile(r"_?_(Z|R[A-Z])|_{3,4}Z")
"""Prefixes of the Itanium and Rust manglings, of clang's blocks (``___Z``) too. No name in C begins so."""

CLONE = re.compile(r"(\.(constprop|isra|part|cold|lto_priv|llvm)(\.\d+)*)+$")
"""Suffixes of copies and parts that compilers make of one function of the source."""

_ALIASES = (
    (re.compile(r"\bstd::(__cxx11|__1|__ndk1|__debug)::"), "std::"),  # inline namespaces of the standard libraries
    (re.compile(r"\bstd::basic_string<char, std::char_traits<char>, std::allocator<char> ?>"), "std::string"),
    (re.compile(r"\bstd::basic_string_view<char, std::char_traits<char> ?>"), "std::string_view"),
    (re.compile(r"(?<=[\w>*&\])]) (?=>)"), ""),
)


@cache
def _demangler() -> Any:
    import multi_demangle

    return multi_demangle.demangle_symbol, multi_demangle.DemangleOptions(return_type=False, parameters=True)


@lru_cache(maxsize=1 << 16)
def demangle(name: str) -> str:
    """The readable form of a symbol; the symbol itself where it is not mangled or cannot be demangled.

    ``app::Pool<int>::take(int)`` for ``_ZN3app4PoolIiE4takeEi``. Suffixes of compiler-made copies (``.constprop.0``)
    are dropped, also from names of C.
    """
    name = CLONE.sub("", name)
    if len(name) > MAX_MANGLED or not MANGLED.match(name):
        return name
    function, options = _demangler()
    readable = str(function(name, options))
    for pattern, short in _ALIASES:
        readable = pattern.sub(short, readable)
    return readable if len(readable) <= MAX_NAME else readable[: MAX_NAME - 1] + "…"
