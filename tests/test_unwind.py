"""Stack dumps: unwound once a path, known again by the words that matter, and never by those that do not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path as File

import numpy as np
import pytest
from recording import BIN, LOADER, Recording, record

from leakscope.record import records
from leakscope.record.unwind.known import KnownPaths, leaf_of, mixed
from leakscope.record.unwind.libdw import program_counter, saved_registers, stack_pointer
from leakscope.record.unwind.paths import Path, program_counter_place, restore_returns, stack_pointer_place
from leakscope.symbols.elf import ElfFile, load_segments

PC, SP = program_counter_place(), stack_pointer_place()
CODE, STACK = 0x7F0000001000, 0x7FFC00001000


def is_code(address: int) -> bool:
    return CODE <= address < CODE + 0x10000


def dump(sp: int = STACK, words: dict[int, int] | None = None, size: int = 4096, number: int = 1) -> np.ndarray:
    """One DUMP_RECORD: noise, and the given words by their place above the stack pointer."""
    record = np.zeros(1, records.DUMP_RECORD)
    record["id"], record["pid"], record["user_stack"], record["bytes"] = number, 7, 99, size
    record["registers"][0, PC], record["registers"][0, SP] = CODE, sp
    record["stack"][0] = np.arange(records.DUMP_BYTES // 8) * 3 + 1
    for place, value in (words or {}).items():
        record["stack"][0, place] = value
    return record


def path_of(record: np.ndarray, places: list[int], *, complete: bool = True, cut: bool = False) -> Path:
    """The path of a dump in whose unwinding the words at these places were read."""
    sp = int(record["registers"][0, SP])
    read = {sp + 8 * place: int(record["stack"][0, place]) for place in places}
    return Path.of(record[0], read, is_code, [CODE, CODE + 1], complete=complete, cut=cut)


# What tells paths apart


def test_the_same_way_is_known_again_whatever_else_the_stack_holds() -> None:
    # given a return address, a saved frame pointer, and a saved register that holds data
    path = path_of(dump(words={2: CODE + 8, 5: STACK + 640, 9: 12345}), [2, 5, 9])
    # then data may be another, and so may all that was not read
    again = dump(words={2: CODE + 8, 5: STACK + 640, 9: 54321, 3: CODE + 99})
    # and on another thread the frame pointer is as far from its stack pointer
    elsewhere = dump(STACK + 0x10000, {2: CODE + 8, 5: STACK + 0x10000 + 640})
    assert path.matches(np.concatenate([again, elsewhere])).tolist() == [True, True]


@pytest.mark.parametrize(
    "words",
    [
        {2: CODE + 16, 5: STACK + 640},  # another return address
        {2: CODE + 8, 5: STACK + 648},  # another frame
        {2: CODE + 8, 5: 7},  # none
    ],
)
def test_another_way_is_told_apart(words: dict[int, int]) -> None:
    path = path_of(dump(words={2: CODE + 8, 5: STACK + 640}), [2, 5])
    assert path.matches(dump(words=words)).tolist() == [False]


def test_a_register_that_points_into_the_stack_counts() -> None:
    first, second = dump(words={2: CODE + 8}), dump(words={2: CODE + 8})
    place = saved_registers().start
    first["registers"][0, place] = STACK + 320
    second["registers"][0, place] = STACK + 328
    path = path_of(first, [2])
    assert path.matches(np.concatenate([first, second])).tolist() == [True, False]


def test_where_the_unwinder_gave_up_every_word_counts() -> None:
    given = dump(words={2: CODE + 8, 9: 12345})
    path = path_of(given, [2, 9], complete=False)
    assert path.matches(given).tolist() == [True]
    assert path.matches(dump(words={2: CODE + 8, 9: 54321})).tolist() == [False]
    # and a larger dump may reach further
    assert path.matches(dump(words={2: CODE + 8, 9: 12345}, size=8192)).tolist() == [False]


def test_a_dump_that_ends_before_the_words_is_no_match() -> None:
    path = path_of(dump(words={100: CODE + 8}), [100])
    assert path.matches(dump(words={100: CODE + 8}, size=800)).tolist() == [False]


def test_replaced_return_addresses_are_put_back() -> None:
    trampoline = 0x7FFFFFFFE000
    given = np.concatenate([dump(words={2: trampoline, 7: trampoline}), dump(words={2: CODE + 8})])
    given["open"]["sp"][0, :3] = STACK + 16, STACK + 56, STACK + 4096  # the last one lies beyond the dump
    given["open"]["caller"][0, :3] = CODE + 8, CODE + 24, CODE + 32
    untouched = given["stack"].copy()
    restore_returns(given)
    assert given["stack"][0, [2, 7]].tolist() == [CODE + 8, CODE + 24]
    untouched[0, [2, 7]] = CODE + 8, CODE + 24
    assert (given["stack"] == untouched).all()


class FakeMap:
    """Entries of `unwound_paths` by (pid, sp, ip, tag)."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, ...], np.void] = {}

    def update(self, key: bytes, value: bytes) -> None:
        at = np.frombuffer(key, records.PATH_KEY)[0]
        self.entries[tuple(int(at[name]) for name in ("pid", "sp", "ip", "tag"))] = np.frombuffer(
            value, records.UNWOUND_PATH
        )[0]

    def find(self, given: np.ndarray) -> int:
        """The id that find_path and same_path of the probes would find for a dump, 0 for none."""
        words = given["stack"][0]
        tag = 0
        for _ in range(records.PATH_BRANCHES):
            entry = self.entries.get((7, STACK, CODE, tag))
            if entry is None:
                return 0
            if entry["words"] != records.PATH_BRANCH:
                places, values = entry["places"][: entry["words"]] // 8, entry["values"][: entry["words"]]
                return int(entry["id"]) if (words[places] == values).all() else 0
            tag = mixed(tag, int(words[int(entry["places"][0]) // 8])) & 0xFFFFFFFF
        return 0


def test_what_the_probes_are_told() -> None:
    given = dump(words={2: CODE + 8, 5: STACK + 640, 9: 12345}, number=41)
    given["registers"][0, saved_registers().start + 2] = STACK + 320
    leaf = leaf_of(path_of(given, [2, 5, 9]), given[0])
    assert (int(leaf["id"]), int(leaf["words"]), int(leaf["checked_registers"])) == (41, 2, 4)
    assert leaf["places"][:3].tolist() == [16, 40, 0]
    assert leaf["values"][:3].tolist() == [CODE + 8, STACK + 640, 0]
    assert int(leaf["registers"][2]) == STACK + 320


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (1, {"complete": False}),  # it may be unwound further once a file is known
        (records.PATH_WORDS + 1, {}),
    ],
)
def test_what_the_probes_are_not_told(words: int, options: dict[str, bool]) -> None:
    told, given = FakeMap(), dump(words=dict.fromkeys(range(words), CODE))
    KnownPaths(told).add(path_of(given, list(range(words)), **options), given[0])  # type: ignore[arg-type]
    assert not told.entries


def test_many_paths_from_one_stack_pointer_are_told_apart() -> None:
    # given two callers of one function, one of them with three callers of its own
    told = FakeMap()
    known = KnownPaths(told)  # type: ignore[arg-type]
    paths = [{2: CODE + 8, 9: CODE + 99}, *({2: CODE + 16, 6: STACK + 8 * n, 7: CODE + n} for n in (1, 2, 3))]
    dumps = [dump(words=words, number=10 + n) for n, words in enumerate(paths)]
    for given, words in zip(dumps, paths, strict=True):
        known.add(path_of(given, list(words)), given[0])
    assert [told.find(given) for given in dumps] == [10, 11, 12, 13]
    # whatever stands where another path has its words
    assert told.find(dump(words={2: CODE + 8, 9: CODE + 99, 7: CODE + 3, 6: 0})) == 10
    # and none of them is taken for another's
    assert told.find(dump(words={2: CODE + 16, 6: STACK + 8, 7: CODE + 2})) == 0
    assert told.find(dump(words={2: CODE + 24, 9: CODE + 99})) == 0


def test_words_that_differ_on_one_and_the_same_way_are_found_not_to_matter() -> None:
    # given a saved register that points into the stack, to something else each time or not at all
    one = path_of(dump(words={2: CODE + 8, 5: STACK + 640, 6: STACK + 80}), [2, 5, 6])
    two = path_of(dump(words={2: CODE + 8, 5: STACK + 640, 6: 17}), [2, 5, 6])
    general = one.generalised(two)
    assert general is not None and general.places.tolist() == [2, 5]
    assert general.matches(dump(words={2: CODE + 8, 5: STACK + 640, 6: STACK + 99 * 8})).tolist() == [True]
    # but not where return addresses stand elsewhere, or the end was not reached
    assert one.generalised(path_of(dump(words={3: CODE + 8, 5: STACK + 640}), [3, 5])) is None
    assert one.generalised(path_of(dump(words={2: CODE + 8, 5: STACK + 640}), [2, 5], complete=False)) is None


def test_registers_are_found_where_the_kernel_puts_them() -> None:
    numbers = list(range(records.DUMP_REGISTERS))
    assert (program_counter(numbers), stack_pointer(numbers)) == (PC, SP)
    assert not {PC, SP} & set(numbers[saved_registers()])


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02", b"\x7fELF\x01" + bytes(60), b"\x7fELF\x02" + b"\xff" * 100])
def test_segments_of_what_is_no_elf_file(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|program headers"):
        load_segments(data)


def test_segments_are_those_of_the_library_that_reads_elf_files() -> None:
    data = File(os.path.realpath("/proc/self/exe")).read_bytes()
    assert load_segments(data) == ElfFile(data).segments != []


# Recordings


PROGRAM = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cudaMalloc(void **, size_t);
#define APART __attribute__((noinline, noclone))
static volatile long kept;
APART long keep(long depth)
{
    void *memory;
    char local[120];
    memset(local, (int)kept, sizeof local); /* what the stack holds is another each time */
    __asm__ volatile("" : : "r"(local) : "memory");
    kept += cudaMalloc(&memory, 1000) + depth;
    return local[5];
}
APART long middle(long depth) { return keep(depth) + 1; }
APART long first(long depth) { return middle(depth) + 2; }
APART long second(long depth) { return middle(depth) + 3; }
APART long deep(long depth)
{
    char local[200];
    memset(local, (int)depth, sizeof local);
    __asm__ volatile("" : : "r"(local) : "memory");
    return (depth ? deep(depth - 1) : keep(0)) + local[7];
}
int main(int argc, char **argv)
{
    long count = atol(argv[1]), pause_us = atol(argv[2]), depth = atol(argv[3]);
    for (long i = 0; i < count; i++) {
        kept += i % 3 ? first(i) : second(i);
        if (i == 30) /* enough has been seen to know both paths */
            usleep(pause_us);
    }
    if (depth)
        kept += deep(depth);
    return 0;
}
"""
COUNT = 1201
FIRST = ["main", "first", "middle", "keep", "cudaMalloc"]
SECOND = ["main", "second", "middle", "keep", "cudaMalloc"]


@pytest.fixture(scope="module")
def program(samples: None, tmp_path_factory: pytest.TempPathFactory) -> File:
    """Without frame pointers, without symbols of any kind but its function names."""
    place = tmp_path_factory.mktemp("program") / "keeper"
    links = [f"-L{BIN}", "-l:libcudart.so.12", "-l:libcuda.so.1", f"-Wl,-rpath,{BIN}"]
    options = ["-O1", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-x", "c", "-", "-o", place]
    subprocess.run(["gcc", *options, *links], input=PROGRAM, text=True, check=True)
    return place


def stacks_of_device_memory(recording: Recording) -> dict[tuple[str, ...], int]:
    """Allocations by their frames from main on."""
    rows = recording.rows("SELECT functions, count(*) FROM events WHERE api = 'cudaMalloc' AND op = 'alloc' GROUP BY 1")
    found: dict[tuple[str, ...], int] = {}
    for functions, count in rows:
        own = tuple(functions[functions.index("main") :] if "main" in functions else functions)
        found[own] = found.get(own, 0) + count
    return found


@pytest.mark.bpf
@pytest.mark.parametrize("loader", ["bcc", "core"])
def test_two_paths_are_unwound_once_each_and_then_known_to_the_probes(
    bpf: None, request: pytest.FixtureRequest, program: File, tmp_path: File, loader: str
) -> None:
    if loader == "core":
        request.getfixturevalue("core")
    # given a thousand allocations on two paths through one function, and a pause after the first 31
    recording = record(tmp_path / "two.lscope", [str(program), str(COUNT), "3000000", "0"], "--loader", loader)
    assert recording.code == 0, recording.stderr
    # then each has its own stack
    second = len(range(0, COUNT, 3))
    assert stacks_of_device_memory(recording) == {tuple(FIRST): COUNT - second, tuple(SECOND): second}
    # which was unwound once, and dumped only until it was known
    assert (recording.facts["stacks_unwound"], recording.facts["stacks_dumped"]) == (2, 31)
    assert recording.losses("native_unwind_unavailable") == 0


@pytest.mark.bpf
def test_a_free_and_a_live_range_carry_the_stack_of_their_allocation(bpf: None, program: File, tmp_path: File) -> None:
    recording = record(tmp_path / "free.lscope", [str(program), "7", "0", "0"], "--loader", LOADER)
    frees = recording.rows(
        "SELECT functions[-5:], cause, count(*) FROM events WHERE layer = 'gpu' AND op = 'free' GROUP BY ALL"
    )
    assert sorted(frees) == sorted([(FIRST, "exit", 4), (SECOND, "exit", 3)])


@pytest.mark.bpf
def test_without_unwinding_the_function_and_its_caller_are_known(bpf: None, program: File, tmp_path: File) -> None:
    recording = record(tmp_path / "none.lscope", [str(program), "7", "0", "0"], "--loader", LOADER, "--unwind", "none")
    rows = recording.rows(
        "SELECT DISTINCT functions[-2:], list_contains(functions, 'middle') FROM events WHERE layer = 'gpu'"
    )
    assert rows == [(["keep", "cudaMalloc"], False)]
    assert recording.facts["stacks_dumped"] == 0


@pytest.mark.bpf
def test_a_stack_deeper_than_a_dump_keeps_its_inner_frames_and_says_so(
    bpf: None, program: File, tmp_path: File
) -> None:
    # given some 90 frames of 216 bytes
    recording = record(tmp_path / "deep.lscope", [str(program), "0", "0", "90"], "--loader", LOADER)
    ((functions,),) = recording.rows("SELECT functions FROM events WHERE api = 'cudaMalloc' AND op = 'alloc'")
    inner = functions[-2:]
    assert inner == ["keep", "cudaMalloc"]
    assert set(functions[:-2]) == {"deep"} and 12000 // 216 <= len(functions) - 2 <= 16384 // 216
    reasons = recording.rows("SELECT count, detail FROM losses WHERE what = 'native_unwind_unavailable'")
    assert reasons == [(1, "stack dumps: ended early")]


@pytest.mark.bpf
def test_what_lies_inside_probed_calls_is_unwound_through_them(bpf: None, program: File, tmp_path: File) -> None:
    # given kernel objects that the stand-in makes inside cuMemAlloc inside cudaMalloc: both returns are probed
    options = ("--loader", LOADER, "--unwind", "all", "--stacks", "all")
    recording = record(tmp_path / "inside.lscope", [str(program), "91", "3000000", "0"], *options)
    rows = recording.rows(
        """SELECT functions[coalesce(list_position(functions, 'main'), 1):list_position(functions, 'cuMemAlloc_v2')],
                  count(*) FROM events
           WHERE op = 'alloc' AND list_contains(functions, 'cuMemAlloc_v2') AND slab_cache = 'filp' GROUP BY 1"""
    )
    ways = {tuple(way): count for way, count in rows}
    # then all after the pause are whole (before it there may be more than may be dumped)
    assert ways.pop((*FIRST, "cuMemAlloc_v2")) >= 40
    assert ways.pop((*SECOND, "cuMemAlloc_v2")) >= 20
    assert not [way for way in ways if "main" in way]


@pytest.mark.bpf
def test_without_libdw_stacks_are_those_by_frame_pointers_and_one_note_says_why(
    bpf: None, program: File, tmp_path: File
) -> None:
    # given a libdw that cannot be loaded
    (tmp_path / "libdw.so.1").write_text("no library")
    recording = record(
        tmp_path / "missing.lscope", [str(program), "7", "0", "0"], "--loader", LOADER,
        env={"LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert recording.code == 0, recording.stderr
    assert recording.rows("SELECT DISTINCT functions[-2:] FROM events WHERE layer = 'gpu'") == [
        (["keep", "cudaMalloc"],)
    ]
    (told,) = [note for note in recording.facts["notes"] if "libdw" in note]
    assert told.startswith("native stacks are those of frame pointers alone: ") and told.endswith("(install libdw1)")
    assert recording.losses("native_unwind_unavailable") == 1
