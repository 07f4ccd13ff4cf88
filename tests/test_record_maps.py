"""Mappings, the break and the heap, checked against the programs' reports and the kernel's own VSS."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording import PAGE, Recording, record, sample, shell

from leakscope.correlate.joins.nesting import Intervals, nested_in

pytestmark = [pytest.mark.bpf, pytest.mark.usefixtures("bpf")]

ON_MAPS = "kind IN ('mmap_anon', 'mmap_file', 'mmap_reserve', 'brk', 'heap_backing')"

RANGES = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
/* Maps, unmaps, remaps and overlays ranges of an arena at random (a fixed seed), all of them in one function, and
 * prints by how much the process's size grew meanwhile. Nothing else is mapped between the two readings. */
enum { PAGES = 64, ROUNDS = 3000, PAGE = 4096 };
static uint64_t state = 88172645463325252ull;
static unsigned below(unsigned n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}
static long size_pages(void)
{
    char text[128];
    int fd = open("/proc/self/statm", O_RDONLY);
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return strtol(text, 0, 10);
}
static void expect(int ok)
{
    if (!ok)
        abort();
}
__attribute__((noipa)) void shuffle_ranges(char *arena)
{
    const int anonymous = MAP_PRIVATE | MAP_ANONYMOUS;
    for (int i = 0; i < ROUNDS; i++) {
        unsigned at = below(PAGES), length = 1 + below(PAGES - at);
        char *place = arena + (size_t)at * PAGE;
        switch (below(6)) {
        case 0: /* a part, several at once, or nothing */
            expect(!munmap(place, (size_t)length * PAGE));
            break;
        case 1: /* over whatever is there */
        case 2:
            expect(mmap(place, (size_t)length * PAGE, PROT_READ | PROT_WRITE, anonymous | MAP_FIXED, -1, 0) == place);
            break;
        case 3: /* shrinks or grows one page in place or fails; both count as they end */
            mremap(place, PAGE, (size_t)(1 + below(3)) * PAGE, 0);
            break;
        case 4: /* moves a page over another part of the arena, or fails */
            mremap(place, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, arena + (size_t)((at + 7) % PAGES) * PAGE);
            break;
        case 5: /* a protection of its own splits the kernel's area, not the mapping */
            mprotect(place, (size_t)length * PAGE, below(2) ? PROT_READ : PROT_READ | PROT_WRITE);
            madvise(place, (size_t)length * PAGE, MADV_DONTNEED);
            break;
        }
    }
}
int main(void)
{
    char *arena = (char *)(1ull << 40); /* an empty part of the address space, with space around it */
    long before = size_pages();
    shuffle_ranges(arena);
    long after = size_pages();
    printf("{\"sample\":\"ranges\",\"pid\":%d,\"grown_bytes\":%ld}\n", (int)getpid(), (after - before) * PAGE);
    return 0;
}
"""

THREADS = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
/* Four threads map and unmap the same sizes, so that an address that one gives back is at once another's. Each keeps
 * every 100th mapping. */
enum { ROUNDS = 10000, BYTES = 65536 };
static char *map(void)
{
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    return memory;
}
__attribute__((noipa)) void keep(void) { map(); }
__attribute__((noipa)) void give_back(void) { munmap(map(), BYTES); }
static void *work(void *unused)
{
    for (int i = 0; i < ROUNDS; i++)
        i % 100 ? give_back() : keep();
    return unused;
}
int main(void)
{
    pthread_t threads[4];
    for (int t = 0; t < 4; t++)
        pthread_create(&threads[t], 0, work, 0);
    for (int t = 0; t < 4; t++)
        pthread_join(threads[t], 0);
    printf("{\"sample\":\"threads\",\"pid\":%d}\n", (int)getpid());
    return 0;
}
"""


def compiled(source: str, place: Path) -> str:
    subprocess.run(
        ["gcc", "-O1", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread",
         "-x", "c", "-o", place, "-"],
        input=source, text=True, check=True,
    )  # fmt: skip
    return str(place)


@pytest.fixture(scope="module")
def maps(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Programs that map memory, one after another."""
    place = tmp_path_factory.mktemp("maps")
    command = shell(
        sample("leak_mmap", "--count", 151, "--pause-us", 0),
        sample("leak_brk", "--count", 131, "--pause-us", 0),
        sample("leak_mmap.py", "--count", 113, "--pause-us", 0),
        [compiled(RANGES, place / "ranges")],
        [compiled(THREADS, place / "threads")],
    )
    recording = record(place / "maps.lscope", command)
    assert recording.code == 0, recording.stderr
    assert recording.losses("ring_drop") == recording.losses("call_map_full") == 0
    return recording


@pytest.mark.parametrize(
    "function", ["map_whole_and_forget", "map_grow_and_forget", "map_trim_and_forget", "extend_arena"]
)
def test_each_way_of_mapping_is_exact_by_site(maps: Recording, function: str) -> None:
    # given what the program says that it leaked there
    report = next(r for r in maps.reports.values() if any(s["function"] == function for s in r["sites"]))
    site = next(site for site in report["sites"] if site["function"] == function)
    # then that much is live below the function, under its kind and system call
    sql = "pid = ? AND layer = 'host' AND list_contains(functions, ?)"
    found = maps.rows(
        f"SELECT kind, api, sum(sign * size_bytes)::BIGINT FROM events WHERE {sql} GROUP BY ALL HAVING "
        "sum(sign * size_bytes) <> 0",
        report["pid"], function,
    )  # fmt: skip
    assert found == [(site["kind"], site["api"], site["bytes"])]
    # and the function is the innermost frame but for the C library's
    innermost = maps.rows(f"SELECT DISTINCT functions[-2] FROM events WHERE {sql}", report["pid"], function)
    assert innermost == [(function,)]


@pytest.mark.parametrize(
    ("name", "balanced", "rounds"),
    [("leak_mmap", "map_and_unmap", 151 * 2), ("leak_brk", "extend_and_shrink_arena", 131 * 2)],
)
def test_balanced_code_keeps_nothing(maps: Recording, name: str, balanced: str, rounds: int) -> None:
    where = f"pid = ? AND {ON_MAPS} AND list_contains(functions, ?)"
    assert maps.live("kind", where, maps.reports[name]["pid"], balanced) == {}
    allocated = maps.rows(
        f"SELECT count(*) FROM events WHERE op = 'alloc' AND {where}", maps.reports[name]["pid"], balanced
    )
    assert allocated == [(rounds,)]


def test_what_python_maps_is_exact(maps: Recording) -> None:
    report = maps.reports["leak_mmap.py"]
    (site,) = report["sites"]
    size = site["bytes"] // site["objects"]
    live = maps.live("requested_bytes", "pid = ? AND kind = 'mmap_anon' AND requested_bytes = ?", report["pid"], size)
    # the interpreter's own arenas are larger; what it maps in that size besides is given back
    assert live == {size: (site["objects"], site["bytes"])}


def test_ranges_cut_moved_and_overlaid_add_up_to_the_kernels_size(maps: Recording) -> None:
    report = maps.reports["ranges"]
    assert 0 < report["grown_bytes"] < 200 * PAGE
    where = f"pid = ? AND {ON_MAPS} AND addr >= {1 << 40} AND addr < {1 << 41}"
    events = maps.rows(f"SELECT count(*) FROM events WHERE {where}", report["pid"])[0][0]
    assert events > 1000
    live = maps.rows(f"SELECT sum(sign * size_bytes)::BIGINT FROM events WHERE {where}", report["pid"])
    assert live == [(report["grown_bytes"],)]
    # with as many objects left as mappings of which some is left, and its end frees exactly that
    ended = maps.rows(
        f"SELECT count(DISTINCT alloc_ts_ns), sum(size_bytes)::BIGINT FROM events WHERE {where} AND cause = 'exit'",
        report["pid"],
    )
    objects = maps.rows(f"SELECT sum(object)::BIGINT FROM events WHERE {where}", report["pid"])[0][0]
    assert ended == [(objects, report["grown_bytes"])]


def test_threads_that_hand_addresses_on_do_not_free_each_others(maps: Recording) -> None:
    pid = maps.reports["threads"]["pid"]
    where = f"pid = ? AND {ON_MAPS} AND list_contains(functions, ?)"
    live = {function: maps.live("kind", where, pid, function) for function in ("keep", "give_back")}
    assert live == {"keep": {"mmap_anon": (400, 400 * 65536)}, "give_back": {}}


def test_a_replaced_process_image_ends_its_mappings(maps: Recording) -> None:
    # given sh, which forked every program: the child's copies of sh's maps are no allocations of its own
    for report in maps.reports.values():
        before_exec = maps.rows(
            "SELECT count(*) FROM events WHERE pid = ? AND cause = 'exec' AND sign <> 0", report["pid"]
        )
        assert before_exec == [(0,)]


@pytest.fixture(scope="module")
def heap(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("heap") / "heap.lscope"
    recording = record(path, sample("leak_heap", "--count", 1009, "--churn", 2, "--pause-us", 0), "--malloc")
    assert recording.code == 0, recording.stderr
    return recording


@pytest.mark.parametrize("function", ["parse_record_and_forget", "load_document_and_forget"])
def test_malloc_is_exact_by_site(heap: Recording, function: str) -> None:
    site: Any = next(s for s in heap.reports["leak_heap"]["sites"] if s["function"] == function)
    where = "kind = 'heap' AND list_contains(functions, ?)"
    assert heap.live("api", where, function) == {"malloc": (site["objects"], site["bytes"])}
    assert heap.rows(f"SELECT DISTINCT functions[-3:] FROM events WHERE {where}", function) == [
        ([function, "allocate_checked", "malloc"],)
    ]


def test_maps_nest_in_the_malloc_that_they_back(heap: Recording) -> None:
    # given each call of malloc's family as the time since the call before it on its thread
    columns = "SELECT tid, ts_ns, addr::BIGINT FROM mem_events"
    thread, end, address = np.array(heap.rows(f"{columns} WHERE kind = 'heap' ORDER BY tid, ts_ns")).T
    start = np.where(np.diff(thread, prepend=-1) == 0, np.roll(end, 1) + 1, 0)
    # when the maps of documents are searched in them
    size = -(-(300_000 + 16) // PAGE) * PAGE
    where = "op = 'alloc' AND kind = 'heap_backing' AND size_bytes = ?"
    maps = np.array(heap.rows(f"{columns} WHERE {where}", size)).T
    found = nested_in(Intervals(thread, start, end), maps[0], maps[1])
    # then each lies in the call whose block is in it, behind malloc's header
    documents = next(s for s in heap.reports["leak_heap"]["sites"] if s["function"] == "load_document_and_forget")
    assert len(found) == documents["objects"] and (found >= 0).all()
    assert (address[found] == maps[2] + 16).all()


def test_balanced_malloc_keeps_nothing_and_the_heap_is_not_counted_twice(heap: Recording) -> None:
    where = "kind = 'heap' AND list_contains(functions, 'parse_record_and_free')"
    assert heap.live("api", where) == {}
    assert heap.rows(f"SELECT count(*) FROM events WHERE op = 'alloc' AND {where}") == [(1009 * 2,)]
    # what malloc takes from the kernel for them is told apart from the program's own maps: the same bytes twice
    documents = next(s for s in heap.reports["leak_heap"]["sites"] if s["function"] == "load_document_and_forget")
    size = -(-(300_000 + 16) // PAGE) * PAGE
    objects = documents["objects"]
    assert heap.live("kind", "size_bytes = ?", size) == {"heap_backing": (objects, objects * size)}
