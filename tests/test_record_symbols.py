"""Symbols, address spaces, processes and libraries: what turns the recorder's numbers into names."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leakscope.record.mapped import MappedFile, mapped_files
from leakscope.record.probes.functions import FUNCTIONS
from leakscope.record.probes.libraries import libraries_before_start, library_of
from leakscope.record.processes import Processes, process_exists
from leakscope.record.sink import Batch, Sink
from leakscope.record.symbols.address_space import AddressSpace, AddressSpaces, Mapping, Module
from leakscope.record.symbols.interner import Interner
from leakscope.record.symbols.kernel import KernelSymbols
from leakscope.record.symbols.stack_numbers import with_caller
from leakscope.symbols.elf import ElfFile

LIBRARY = """
int shared_value = 7;
static int helper(int x) { return x * 3; }
int first_function(int x) { return helper(x) + 1; }
int second_function(int x) { return first_function(x) * 2 + helper(x); }
__asm__(".globl bare\\n.type bare,@function\\nbare: nop\\nnop\\nret\\n");
int _alias_of_second(int) __attribute__((alias("second_function")));
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elf") / "libexample.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O0", "-Wl,--build-id", "-x", "c", "-o", path, "-"],
        input=LIBRARY, text=True, check=True,
    )  # fmt: skip
    return path


# --- ELF ---------------------------------------------------------------------------------------------------


def test_functions_are_where_nm_and_the_segments_say(library: Path) -> None:
    elf = ElfFile(library.read_bytes())
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines() if not line.startswith(" ")]
    addresses = {name: int(at, 16) for at, kind, name in rows if kind in "Tt"}
    text = next(segment for segment in elf.segments if segment.executable)
    offsets = elf.function_offsets()
    for name in ("first_function", "second_function", "helper", "bare"):
        assert offsets[name] == addresses[name] - text.address + text.offset
    assert "shared_value" not in offsets


def test_an_offset_belongs_to_the_function_that_covers_it(library: Path) -> None:
    elf = ElfFile(library.read_bytes())
    offsets = elf.function_offsets()
    for name in ("first_function", "helper"):
        assert elf.function_at(offsets[name]) == elf.function_at(offsets[name] + 3) == name
    # of several names the public one; assembly without a size reaches to the next symbol
    assert elf.function_at(offsets["second_function"] + 1) == "second_function"
    assert elf.function_at(offsets["bare"] + 1) == "bare"
    assert elf.function_at(1) == ""


def test_the_build_id_is_readelfs(library: Path) -> None:
    notes = subprocess.run(["readelf", "-n", library], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Build ID: ([0-9a-f]+)", notes)
    assert found and ElfFile(library.read_bytes()).build_id == found[1]


def test_damaged_files_are_a_value_error_and_nothing_else(library: Path) -> None:
    data, rng = library.read_bytes(), random.Random(3)
    damaged = [data[: rng.randrange(len(data))] for _ in range(60)]
    for _ in range(600):
        copy = bytearray(data)
        for _ in range(rng.choice([1, 3, 12])):
            place = rng.choice([rng.randrange(64), rng.randrange(len(data)), -rng.randrange(1, 2500)])
            copy[place] = rng.randrange(256)
        damaged.append(bytes(copy))
    refused = 0
    for content in [b"", b"\x7fELF", b"#!/bin/sh\n", *damaged]:
        try:
            elf = ElfFile(content)
            assert isinstance(elf.build_id + elf.function_at(0x1100), str)
            elf.function_offsets()
        except ValueError:
            refused += 1
    assert refused > 100


def test_32_bit_files_are_refused(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[4] = 1  # EI_CLASS: ELFCLASS32
    with pytest.raises(ValueError, match=r"32-bit|not a usable"):
        ElfFile(bytes(data))


def test_a_damaged_module_has_no_names_and_says_why(tmp_path: Path, library: Path) -> None:
    path = tmp_path / "cut.so"
    data = bytearray(library.read_bytes())
    data[0x28:0x30] = struct.pack("<Q", 1 << 60)  # e_shoff: the section headers are beyond the end
    path.write_bytes(data)
    module = Module(str(path), [str(path)])
    assert (module.function_at(0x1100), module.build_id) == ("", "")
    assert module.problem
    gone = Module("/gone", ["/nowhere/gone"])
    assert (gone.function_at(0), gone.build_id) == ("", "") and "No such file" in gone.problem


# --- address spaces ----------------------------------------------------------------------------------------


def test_the_newest_mapping_of_an_address_wins() -> None:
    space = AddressSpace()
    old, new = Module("/old", []), Module("/new", [])
    space.add(Mapping(100, 200, 0, old))
    space.add(Mapping(300, 400, 0, old))
    space.add(Mapping(150, 350, 0, new))
    at = {address: found.module.path if (found := space.find(address)) else None for address in (99, 160, 349, 350)}
    assert at == {99: None, 160: "/new", 349: "/new", 350: None}
    assert space.find(400) is None


def test_a_process_has_the_mappings_of_its_time(tmp_path: Path, library: Path) -> None:
    spaces = AddressSpaces(tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").write_text(
        f"1000-3000 r-xp 00001000 08:01 5 {library}\n3000-4000 rw-p 00003000 08:01 5 {library}\n"
        "5000-6000 r-xp 00000000 00:00 0 [vdso]\n7000-8000 r-xp 00000000 08:01 6 /gone (deleted)\n"
    )
    spaces.seed(7)
    before = spaces.at(7, 50)
    assert before.find(0x1FFF) is not None and before.find(0x3000) is None and before.find(0x5000) is None
    deleted = before.find(0x7000)
    assert deleted is not None and deleted.module.path == "/gone"
    # a child has its parent's, a new image none, and what is mapped later is only in the later one
    spaces.fork(7, 8, 60)
    spaces.start(7, 100)
    spaces.map(7, 110, 0x9000, 0xA000, 0, str(library))
    spaces.map(7, 110, 0xB000, 0xC000, 0, "[anon]")
    assert spaces.at(7, 99).find(0x1000) and not spaces.at(7, 100).find(0x1000)
    assert spaces.at(8, 200).find(0x1000) and spaces.at(7, 120).find(0x9000) and not spaces.at(7, 120).find(0xB000)
    spaces.forget(8)
    assert {pid for pid, _, _ in spaces.rows()} == {7}


# --- frames and stacks -------------------------------------------------------------------------------------


def interner(spaces: AddressSpaces, kernel: Any = None) -> Interner:
    symbols: Any = kernel or SimpleNamespace(lookup=lambda address: ("", "", 0))
    return Interner(symbols, spaces)


@pytest.fixture
def two_processes(tmp_path: Path, library: Path) -> tuple[AddressSpaces, dict[str, int]]:
    """Processes 7 and 8, which map the library's code at different addresses."""
    spaces = AddressSpaces(tmp_path)
    elf = ElfFile(library.read_bytes())
    text = next(segment for segment in elf.segments if segment.executable)
    for pid, base in ((7, 0x100000), (8, 0x900000)):
        spaces.map(pid, 1, base, base + text.size_bytes, text.offset, str(library))
    return spaces, {name: offset - text.offset for name, offset in elf.function_offsets().items()}


def test_the_same_stack_has_one_id_in_two_processes(
    two_processes: tuple[AddressSpaces, dict[str, int]], library: Path
) -> None:
    spaces, at = two_processes
    made = interner(spaces)
    first, second = (
        made.native_stack(pid, spaces.at(pid, 10), [base + at["first_function"] + 2, base + at["second_function"] + 5])
        for pid, base in ((7, 0x100000), (8, 0x900000))
    )
    assert first == second > 0
    assert made.functions(first) == ["second_function", "first_function"]  # outermost first
    frames, rows = made.take_new_rows()
    assert rows.to_pylist() == [{"id": first, "frames": [2, 1]}]
    assert [(f["function"], f["module"], f["kind"]) for f in frames.to_pylist()] == [
        ("first_function", str(library), "native"),
        ("second_function", str(library), "native"),
    ]
    assert frames.column("build_id").to_pylist() == [ElfFile(library.read_bytes()).build_id] * 2
    assert [table.num_rows for table in made.take_new_rows()] == [0, 0]


def test_the_caller_of_a_frameless_function_is_inserted_when_it_is_code(
    two_processes: tuple[AddressSpaces, dict[str, int]],
) -> None:
    spaces, at = two_processes
    base = 0x100000
    inner, outer, caller = (base + at[name] + 4 for name in ("helper", "second_function", "first_function"))
    made, space = interner(spaces), spaces.at(7, 10)

    def functions(word: int) -> list[str]:
        return made.functions(made.native_stack(7, space, with_caller(space, [inner, outer], word)))

    assert functions(caller) == ["second_function", "first_function", "helper"]
    assert functions(0x10) == functions(0) == ["second_function", "helper"]  # a word that is no code
    assert functions(outer) == ["second_function", "helper"]  # the walk has it already


def test_a_return_address_behind_a_functions_end_belongs_to_the_call(
    two_processes: tuple[AddressSpaces, dict[str, int]],
) -> None:
    spaces, at = two_processes
    made = interner(spaces)
    # the innermost address is where the thread is; the outer one is that after a call
    stack = made.native_stack(7, spaces.at(7, 10), [0x100000 + at["helper"], 0x100000 + at["first_function"]])
    assert made.functions(stack) == ["helper", "helper"]


def test_what_is_mapped_anew_is_resolved_anew(two_processes: tuple[AddressSpaces, dict[str, int]]) -> None:
    spaces, at = two_processes
    made, address = interner(spaces), 0x100000 + at["helper"] + 1
    spaces.fork(7, 9, 5)
    before = [made.native_stack(pid, spaces.at(pid, 10), [address]) for pid in (7, 9)]
    spaces.map(7, 20, 0x100000, 0x180000, 0, "/elsewhere")  # in the parent alone
    after = [made.native_stack(pid, spaces.at(pid, 30), [address]) for pid in (7, 9)]
    assert before[0] == before[1] == after[1] != after[0]
    assert (made.functions(after[0]), made.functions(after[1])) == ([""], ["helper"])


def test_a_kernel_stack_is_without_the_probes_own_frames() -> None:
    names = ["bpf_prog_1_on_kmalloc", "bpf_trace_run5", "__traceiter_kmalloc", "__kmalloc", "sk_alloc"]
    kernel = SimpleNamespace(lookup=lambda address: (names[address // 10], "", 0))  # of the byte before the return
    made = interner(AddressSpaces(), kernel)
    assert made.functions(made.kernel_stack([10, 20, 30, 40, 50])) == ["sk_alloc", "__kmalloc"]
    assert made.kernel_stack([10, 20, 30, 40, 50]) == made.kernel_stack([40, 50])
    assert made.functions(made.call_site_stack(made.kernel_frame(50))) == ["sk_alloc"]


def test_kernel_symbols_are_looked_up_by_address(tmp_path: Path) -> None:
    listing = tmp_path / "kallsyms"
    lines = [
        (0x2000, "t later"),
        (0x1000, "T first"),
        (0x1800, "d data"),
        (0x3000, "t own\t[m]"),
        (0xFFFF << 48, "W w"),
    ]
    listing.write_text("".join(f"{address:016x} {rest}\n" for address, rest in lines))
    symbols = KernelSymbols(str(listing))
    assert symbols.available
    assert [symbols.lookup(at) for at in (0xFFF, 0x1000, 0x1FFF, 0x3001)] == [
        ("", "", 0),
        ("first", "", 0x1000),
        ("first", "", 0x1000),
        ("own", "m", 0x3000),
    ]
    assert symbols.lookup(2**64 - 1) == ("w", "", 0xFFFF << 48)
    listing.write_text("0000000000000000 T first\n")
    hidden = KernelSymbols(str(listing))
    assert not hidden.available and hidden.lookup(5) == ("", "", 0)


# --- processes ---------------------------------------------------------------------------------------------


def test_children_of_members_belong_and_take_their_names() -> None:
    processes = Processes(everyone=False)
    processes.seed(1, "root")
    processes.forked(1, 50, 10)
    processes.forked(77, 78, 11)  # strangers
    processes.named(50, "worker")
    processes.forked(50, 51, 12)
    processes.ended(50, 20)
    processes.ended(50, 30)
    assert [processes.belongs(pid) for pid in (1, 50, 51, 78)] == [True, True, True, False]
    assert processes.alive() == [1, 51]
    rows = {row["pid"]: row for row in processes.table(0, []).to_pylist()}
    assert rows.keys() == {1, 50, 51}
    whose = [(rows[pid]["role"], rows[pid]["parent_pid"]) for pid in (1, 50, 51)]
    assert whose == [("root", 0), ("child", 1), ("child", 50)]
    assert (rows[50]["start_ns"], rows[50]["exit_ns"], rows[51]["name"]) == (10, 20, "worker")


def test_a_process_that_only_waits_to_be_reaped_does_not_exist() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.005)
    assert not process_exists(process.pid)
    process.wait()
    assert not process_exists(process.pid)
    assert process_exists(1)


# --- libraries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/usr/lib/libcuda.so.1", "cuda"),
        ("/usr/lib/libcuda.so.535.104.05", "cuda"),
        ("/venv/libcudart-d0da41ae.so.11.0", "cudart"),
        ("/opt/libcudart.so.12", "cudart"),
        ("/lib/x86_64-linux-gnu/libc.so.6", "libc"),
        ("/lib/libc-2.31.so", "libc"),
        ("/lib/libcudadebugger.so.1", None),
        ("/lib/libcrypt.so.1", None),
    ],
)
def test_libraries_are_known_by_their_file_names(path: str, library: str | None) -> None:
    assert library_of(path) == library


def test_functions_of_a_module_that_is_loaded_later_get_their_names(tmp_path: Path) -> None:
    listing, modules = tmp_path / "kallsyms", tmp_path / "modules"
    listing.write_text("ffffffff81000000 T first\nffffffffa0000000 t old_one\t[old]\n")
    modules.write_text("old 4096 0 - Live 0xffffffffa0000000\n")
    symbols = KernelSymbols(str(listing), str(modules))
    assert symbols.lookup(0xFFFFFFFFA0000010)[:2] == ("old_one", "old")
    # given a module that is loaded afterwards, and another use of the old one
    listing.write_text(listing.read_text() + "ffffffffa0100000 t new_one\t[new]\n")
    modules.write_text("old 4096 1 new, Live 0xffffffffa0000000\n")
    assert symbols.lookup(0xFFFFFFFFA0100010)[0] == "old_one"  # nothing says that there is a new one
    modules.write_text(modules.read_text() + "new 8192 0 - Live 0xffffffffa0100000\n")
    assert symbols.lookup(0xFFFFFFFFA0100010) == ("new_one", "new", 0xFFFFFFFFA0100000)
    assert symbols.lookup(0xFFFFFFFF81000004) == ("first", "", 0xFFFFFFFF81000000)


def test_what_a_command_will_load_is_found_before_it_starts(samples: None) -> None:
    from recording import BIN

    found = libraries_before_start([str(BIN / "cuda_leak")], {"PATH": "/usr/bin"})
    assert {str(BIN / "libcuda.so.1"), str(BIN / "libcudart.so.12")} <= set(found)
    assert set(map(library_of, found)) <= {"cuda", "cudart", "libc", None}
    assert libraries_before_start(["no-such-program"], {"PATH": "/usr/bin"}) is not None


def test_files_of_a_running_process_are_found_in_its_maps() -> None:
    # given this process, which has mapped what a line of its maps says
    lines = [line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines()]
    libc = next(fields for fields in lines if "x" in fields[1] and Path(fields[-1]).name.startswith("libc.so"))
    # then it is found with its place
    start, offset = int(libc[0].partition("-")[0], 16), int(libc[2], 16)
    found = mapped_files(os.getpid())
    assert MappedFile(libc[5].strip(), start, offset, True) in found
    assert all(file.path.startswith("/") for file in found)
    assert mapped_files(0) == []


def test_twins_for_per_thread_streams_do_what_the_originals_do() -> None:
    by_name = {probe.api: probe for probe in FUNCTIONS}
    for api in [api for api in by_name if api.endswith("_ptsz")]:
        original, twin = by_name[api.removesuffix("_ptsz")], by_name[api]
        assert original.spec(True) == twin.spec(True) and (original.layer, original.kind) == (twin.layer, twin.kind)


# --- sink --------------------------------------------------------------------------------------------------


def test_whatever_goes_wrong_in_the_sink_ends_the_recording() -> None:
    def broken(batch: np.ndarray) -> None:
        raise TypeError("unforeseen")

    nothing: Any = SimpleNamespace(decode=broken, table=broken, take=lambda stacks: None)
    parts: Any = dict.fromkeys(("spaces", "processes", "interner", "numbers", "calls", "objects", "marks"), nothing)
    sink = Sink(nothing, **parts)
    sink.put(Batch(1, calls=[np.zeros(1, np.uint8)]))
    sink.close()
    assert isinstance(sink.error, TypeError)
    sink.put(Batch(2))  # dropped at once: nobody waits for a sink that failed
