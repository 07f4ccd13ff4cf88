"""Demangled names, and that what tells plumbing from application still knows them."""

from __future__ import annotations

import random
import subprocess

import pytest

from leakscope.correlate.stacks import Frame
from leakscope.correlate.wrappers import ALLOCATOR, culprit, is_plumbing
from leakscope.symbols.demangle import MAX_MANGLED, MAX_NAME, demangle

PAIRS = [
    # C++: return types go, arguments stay, as they tell overloads apart
    ("_ZN3app4PoolIiE4takeEi", "app::Pool<int>::take(int)"),
    ("_ZN3app4PoolIiE4takeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", "app::Pool<int>::take(std::string const&)"),  # noqa: E501
    ("_Z3addIiET_S0_S0_", "add<int>(int, int)"),
    ("_ZN12_GLOBAL__N_16middleEm", "(anonymous namespace)::middle(unsigned long)"),
    ("_ZZ4mainENKUlvE_clEv", "main::{lambda()#1}::operator()() const"),
    ("_Znwm", "operator new(unsigned long)"),
    ("_ZN9__gnu_cxx13new_allocatorIiE8allocateEmPKv", "__gnu_cxx::new_allocator<int>::allocate(unsigned long, void const*)"),  # noqa: E501
    ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<int, std::allocator<int>>::push_back(int const&)"),
    # Rust, the legacy mangling: its hash goes
    ("_ZN4core3fmt9Formatter3pad17h9b2b3a0e5b4d1b31E", "core::fmt::Formatter::pad"),
    ("_ZN71_$LT$Test$u20$$u2b$$u20$$u27$static$u20$as$u20$foo..Bar$LT$Test$GT$$GT$3bar17h930b740aa94f1d3aE", "<Test + 'static as foo::Bar<Test>>::bar"),  # noqa: E501
    ("_ZN5alloc7raw_vec19RawVec$LT$T$C$A$GT$8grow_one17h0123456789abcdefE.llvm.123", "alloc::raw_vec::RawVec<T,A>::grow_one"),  # noqa: E501
    # Rust, v0 (examples of RFC 2603)
    ("_RNvC6_123foo3bar", "123foo::bar"),
    ("_RNCNCNgCs6DXkGYLi8lr_2cc5spawn00B5_", "cc::spawn::{closure#0}::{closure#0}"),
    ("_RINvNtC3std3mem8align_ofNtNtC3foo3bar3BazE", "std::mem::align_of::<foo::bar::Baz>"),
    # copies and parts that the compiler makes of a function, of C as well
    ("_Z1fv.constprop.0.cold", "f()"),
    ("parse.isra.0", "parse"),
    # what is no mangled name, or none that can be read
    ("malloc", "malloc"),
    ("_Z", "_Z"),
    ("_Rust_panic", "_Rust_panic"),
    ("_ZQQ", "_ZQQ"),
    ("", ""),
]  # fmt: skip


@pytest.mark.parametrize(("mangled", "readable"), PAIRS)
def test_names_are_readable(mangled: str, readable: str) -> None:
    assert demangle(mangled) == readable


def test_names_of_the_standard_library_agree_with_binutils() -> None:
    # given the names of a large C++ library
    paths = subprocess.run(["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
    listed = subprocess.run(["nm", "-D", "--defined-only", paths.stdout.strip()], capture_output=True, text=True)
    names = sorted({line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if " T _Z" in line})
    assert len(names) > 1000
    # when both demangle them, then they agree but for spaces and the short forms of std::string
    filt = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)

    def plain(name: str) -> str:
        name = name.replace(" ", "").replace("std::__cxx11::", "std::")
        for short, long in (("std::string", "std::basic_string"), ("std::string_view", "std::basic_string_view")):
            name = name.replace(f"{long}<char,std::char_traits<char>,std::allocator<char>>", short)
            name = name.replace(f"{long}<char,std::char_traits<char>>", short)
        return name

    # c++filt puts the return type of a template function in front, which we leave out; the rest is the spelling of
    # literals (`(long)1` for `1l`) and the place of a & before a nested name
    differing = [
        n for n, f in zip(names, filt.stdout.splitlines(), strict=True) if not plain(f).endswith(plain(demangle(n)))
    ]
    assert len(differing) <= len(names) // 50, differing[:5]


def test_hostile_names_stay_or_are_cut_and_nothing_else_happens() -> None:
    deep = [
        "_Z1f" + "P" * (MAX_MANGLED - 5) + "i",
        "_Z" + "N" * (MAX_MANGLED - 2),
        "_R" + "Y" * (MAX_MANGLED - 2),
        "_Z1f" + "P" * 200_000 + "i",
        "_Z3fo\0i",
        "_ZN" + "1a" * 1500 + "E",
    ]
    # each argument of this one is twice as long as the one before
    doubling = "_RINvC1a1bl" + "".join(f"TB{i}_B{i}_E" for i in range(10)) + "E"
    for name in [*deep, doubling]:
        assert 0 < len(demangle(name)) <= max(len(name), MAX_NAME)
    assert demangle(deep[3]) == deep[3]
    rng = random.Random(5)
    known = [mangled for mangled, _ in PAIRS if len(mangled) > 4]
    for _ in range(20_000):
        one, other = rng.choice(known), rng.choice(known)
        assert demangle(one[: rng.randrange(2, len(one))] + other[rng.randrange(len(other)) :])


@pytest.mark.parametrize(
    ("mangled", "plumbing"),
    [
        ("_Znwm", True),
        ("_ZnwmSt11align_val_tRKSt9nothrow_t", True),
        ("_ZNSt6vectorIiSaIiEE9push_backERKi", True),
        ("_ZN9__gnu_cxx13new_allocatorIiE8allocateEmPKv", True),
        ("_ZNSt16allocator_traitsISaIiEE8allocateERS0_m", True),
        ("_ZN5alloc7raw_vec19RawVec$LT$T$C$A$GT$8grow_one17h0123456789abcdefE", True),
        ("_ZN53_$LT$alloc..vec..Vec$LT$T$GT$$u20$as$u20$foo..Bar$GT$3bar17h930b740aa94f1d3aE", True),
        ("_RNvCsaYZPVPqGzU7_7___rustc12___rust_alloc", True),
        ("__rust_alloc", True),
        ("_PyEval_EvalFrameDefault.cold", True),
        ("_ZN3app4PoolIiE4takeEi", False),
        ("_ZN3app4loadESt6vectorIiSaIiEE", False),  # app::load(std::vector<…>): the library's only in its arguments
        ("_ZN7stdlike4keepEv", False),
        ("_ZN10corelation4keepEv", False),
    ],
)
def test_plumbing_is_known_by_its_demangled_name(mangled: str, plumbing: bool) -> None:
    assert is_plumbing(Frame(demangle(mangled), module="/opt/app")) is plumbing


def test_the_culprit_is_behind_templates_inlined_into_the_application() -> None:
    app, library = "/opt/app", "/lib/libstdc++.so.6"
    stack = [
        Frame("main", "app.cpp", 9, app, 1),
        Frame(demangle("_ZN3app6appendEi"), "app.cpp", 3, app, 2),
        Frame(demangle("_ZNSt6vectorIiSaIiEE9push_backERKi"), "stl_vector.h", 1287, app, 0, "inlined"),
        Frame(demangle("_ZNSt16allocator_traitsISaIiEE8allocateERS0_m"), "alloc_traits.h", 464, app, 0, "inlined"),
        Frame(demangle("_Znwm"), module=library, offset=3),
    ]
    found = culprit(stack, [], [])
    assert found is not None and found.text == "app::append(int) (app.cpp:3)"
    assert ALLOCATOR.fullmatch(stack[-1].function)
    # and where all is plumbing, it is a function with code of its own
    assert culprit(stack[2:4] + [Frame("mmap", "mmap64.c", 46, "/lib/libc.so.6", 4)], [], []) is not None
    inside = [
        Frame("mmap", "mmap64.c", 46, "/lib/libc.so.6", 4),
        Frame("inner", "x.h", 1, "/lib/libc.so.6", 0, "inlined"),
    ]
    found = culprit(inside, [], [])
    assert found is not None and found.function == "mmap"
