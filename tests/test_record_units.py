"""The recorder's decoding, one piece at a time, on records made by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from leakscope.model.tables import MEM_EVENTS
from leakscope.model.words import CAUSES, KINDS, OPS
from leakscope.record import records
from leakscope.record.decode import mappings
from leakscope.record.decode.calls import Calls
from leakscope.record.decode.columns import EventColumns, Words, distinct
from leakscope.record.decode.exits import Exits
from leakscope.record.decode.mappings import Mappings, ProcessEnd
from leakscope.record.decode.ranges import Ranges
from leakscope.record.probes.functions import FUNCTIONS

PAGE = 4096
ANONYMOUS, FIXED, NORESERVE, READ_WRITE = 0x22, 0x10, 0x4000, 3


# --- columns -----------------------------------------------------------------------------------------------


def test_words_number_new_words_in_order_and_keep_the_old() -> None:
    words = Words(("", "mmap"))
    assert [words.code(word) for word in ("brk", "mmap", "", "brk", "größe")] == [2, 1, 0, 2, 3]
    assert words.array(np.array([3, 0, 2], np.int64)).to_pylist() == ["größe", "", "brk"]
    words.code("late")
    assert words.array(np.array([4], np.int64)).to_pylist() == ["late"]


@pytest.mark.parametrize("values", [3, 1 << 40])
def test_distinct_groups_rows_by_all_their_columns(values: int) -> None:
    rng = np.random.default_rng(7)
    columns = [rng.integers(-values, values, 500) for _ in range(2)] + [rng.integers(0, 2, 500).astype(np.uint64) << 63]
    columns = [np.concatenate([column, column[:100]]) for column in columns]
    first, group = distinct(*columns)
    seen: dict[tuple[int, ...], int] = {}
    for row, number in enumerate(group.tolist()):
        key = tuple(int(column[row]) for column in columns)
        assert seen.setdefault(key, number) == number
        assert tuple(int(column[first[number]]) for column in columns) == key
    assert len(seen) == len(first) == len(set(group.tolist()))


def test_distinct_survives_a_collision_of_its_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a mix that maps every row to the same number
    unique = np.unique
    monkeypatch.setattr(np, "unique", lambda a, **more: unique(np.zeros_like(a) if a.ndim == 1 else a, **more))
    first, group = distinct(np.array([1, 2, 1]), np.array([5, 5, 5]))
    assert group.tolist() == [0, 1, 0] and first.tolist() == [0, 1]


def test_a_table_of_events_has_the_schema_and_zeros_for_what_is_not_given() -> None:
    columns = EventColumns(3)
    slab = np.array([columns.slab_caches.code("kmalloc-64"), 0])
    addresses = np.array([1 << 63, 2], np.uint64)
    table = columns.table(2, ts_ns=np.array([5, 6]), pid=7, op=1, slab_cache=slab, addr=addresses)
    assert table.schema.equals(MEM_EVENTS) and table.num_rows == 2
    first, second = table.to_pylist()
    assert (first["source_id"], first["op"], first["slab_cache"], first["addr"]) == (3, "free", "kmalloc-64", 1 << 63)
    assert (second["slab_cache"], second["cause"], second["pid"], second["alloc_ts_ns"]) == ("", "call", 7, 0)
    assert columns.table(0).schema.equals(MEM_EVENTS)


def test_totals_of_live_bytes_follow_the_rules_of_frees() -> None:
    columns = EventColumns(0)
    alloc, free, advise = (OPS.index(op) for op in ("alloc", "free", "advise"))
    call, exit_ = CAUSES.index("call"), CAUSES.index("exit")
    slab, backing = KINDS.index("slab"), KINDS.index("page_slab")
    rows = [  # op, cause, kind, size, time of the allocation
        (alloc, call, slab, 1000, 0),
        (free, call, slab, 10, 5),
        (free, call, slab, 200, 0),  # older than the recording: never subtracted
        (free, exit_, slab, 300, 5),  # not given back
        (alloc, call, backing, 4096, 0),  # counted by the objects in it
        (advise, call, slab, 7777, 0),
    ]
    op, cause, kind, size, made_ns = (np.array(column) for column in zip(*rows, strict=True))
    columns.table(len(rows), pid=9, op=op, cause=cause, kind=kind, size_bytes=size, alloc_ts_ns=made_ns)
    assert dict(columns.totals.live_bytes)["kernel"] == 990
    assert (columns.totals.exit_freed_bytes, columns.totals.pids) == (300, {9})


# --- ranges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_ranges_agree_with_a_page_by_page_model(seed: int) -> None:
    rng, ranges, model = random.Random(seed), Ranges(), dict[int, int]()  # page: mapping
    made_ns = np.zeros(400, np.int64)
    for now in range(1, 400):
        start = rng.randrange(60)
        end = start + rng.randrange(1, 12)
        before = rng.choice([now, now, rng.randrange(now)])
        cuts = ranges.cut(start, end, before, made_ns)
        expected = {page: model[page] for page in range(start, end) if page in model and made_ns[model[page]] < before}
        for page in expected:
            del model[page]
        found = {page: cut.mapping for cut in cuts for page in range(cut.addr, cut.addr + cut.size_bytes)}
        assert found == expected and [cut.addr for cut in cuts] == sorted(cut.addr for cut in cuts)
        living = set(model.values())
        for index, cut in enumerate(cuts):
            assert cut.rest == (cut.mapping in living or cut.mapping in {later.mapping for later in cuts[index + 1 :]})
        assert set(ranges.mappings) == living >= ranges.left_bytes.keys()
        if before == now and rng.random() < 0.7:
            made_ns[now] = now
            ranges.add(start, end, now)
            model |= dict.fromkeys(range(start, end), now)
    left = ranges.cut(0, 1 << 64, 1 << 62, made_ns)
    assert {page: cut.mapping for cut in left for page in range(cut.addr, cut.addr + cut.size_bytes)} == model
    assert not ranges.starts and not ranges.stops and not ranges.mappings and not ranges.left_bytes


# --- maps --------------------------------------------------------------------------------------------------


def call(**values: int) -> np.ndarray:
    record = np.zeros(1, records.CALL_RECORD)
    record["type"], record["pid"], record["tid"], record["user_stack"] = records.CALL_MAP, 100, 101, -1
    for name, value in values.items():
        record[name] = value
    return record


def mapped(now: int, addr: int, pages: int, flags: int = ANONYMOUS, **more: int) -> np.ndarray:
    return call(
        function=records.MAP_MMAP, enter_ns=now - 1, exit_ns=now, addr=addr * PAGE, size_bytes=pages * PAGE,
        requested_bytes=pages * PAGE, arg0=flags, arg1=READ_WRITE, **more,
    )  # fmt: skip


def unmapped(now: int, addr: int, pages: int, **more: int) -> np.ndarray:
    values = {"enter_ns": now - 1, **more}
    return call(function=records.MAP_MUNMAP, exit_ns=now, addr=addr * PAGE, size_bytes=pages * PAGE, **values)


def rows_of(maps: Mappings, batch: np.ndarray, ends: Sequence[ProcessEnd] = ()) -> np.ndarray:
    """Rows of a batch whose stacks have the ids that the records name."""
    return maps.rows(batch, np.maximum(batch["user_stack"], 0), batch["python_stack"].astype(np.int32), ends)


def told(rows: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """(time, op, cause, first page, pages, result, time of the allocation) of each row."""
    for row in rows:
        yield (
            int(row["ts_ns"]), OPS[row["op"]], CAUSES[row["cause"]], int(row["addr"]) // PAGE,
            int(row["size_bytes"]) // PAGE, int(row["result"]), int(row["alloc_ts_ns"]),
        )  # fmt: skip


def decoded(*batches: list[np.ndarray], ends: list[ProcessEnd] | None = None) -> list[tuple[Any, ...]]:
    maps = Mappings(EventColumns(0))
    found: list[tuple[Any, ...]] = []
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        found += told(rows_of(maps, np.concatenate(batch), (ends or []) if last else []))
    return found


def test_a_whole_mapping_ends_with_its_identity() -> None:
    made = mapped(10, 5, 3, user_stack=77, python_stack=8, mark=9, parent_id=6)
    end = unmapped(20, 5, 3, tid=500, cpu=3, user_stack=66)
    for batches in ([made, end],), ([made], [end]):
        assert decoded(*batches) == [(10, "alloc", "call", 5, 3, 0, 0), (20, "free", "call", 5, 3, 0, 10)]
    (_, row) = rows_of(Mappings(EventColumns(0)), np.concatenate([made, end]))
    names = ("pid", "tid", "cpu", "user_stack", "python_stack", "mark", "call_id", "requested_bytes")
    assert [int(row[name]) for name in names] == [100, 500, 3, 77, 8, 9, 0, 3 * PAGE]


def test_parts_count_bytes_and_the_last_of_them_the_object() -> None:
    # given a mapping of ten pages of which a hole and then all the rest is unmapped, with what lies beside it
    rows = decoded([mapped(10, 5, 10), mapped(11, 15, 2), unmapped(20, 7, 3), unmapped(30, 0, 16)])
    assert rows[2:] == [
        (20, "free", "call", 7, 3, 1, 10),
        (30, "free", "call", 5, 2, 1, 10),
        (30, "free", "call", 10, 5, 0, 10),
        (30, "free", "call", 15, 1, 1, 11),
    ]


def test_a_fixed_mapping_replaces_what_it_covers() -> None:
    overlay = [mapped(10, 5, 10), mapped(20, 5, 4, ANONYMOUS | FIXED)]
    assert sorted(decoded(overlay, [unmapped(30, 5, 10)])) == [
        (10, "alloc", "call", 5, 10, 0, 0),
        (20, "alloc", "call", 5, 4, 0, 0),
        (20, "free", "call", 5, 4, 1, 10),
        (30, "free", "call", 5, 4, 0, 20),
        (30, "free", "call", 9, 6, 0, 10),
    ]


def test_an_address_that_is_given_out_again_was_freed_unseen() -> None:
    rows = decoded([mapped(10, 5, 4), mapped(20, 5, 2)])
    assert sorted(rows)[1:] == [(20, "alloc", "call", 5, 2, 0, 0), (20, "free", "reuse", 5, 2, 1, 10)]


def test_a_slow_munmap_spares_what_another_thread_mapped_there_meanwhile() -> None:
    # given a munmap that entered at 20 and returned at 40, and the same address mapped anew at 30
    rows = decoded([mapped(10, 5, 4), mapped(30, 5, 4), unmapped(40, 5, 4, enter_ns=20), unmapped(60, 5, 4)])
    assert sorted(rows) == [
        (10, "alloc", "call", 5, 4, 0, 0),
        (30, "alloc", "call", 5, 4, 0, 0),
        (30, "free", "reuse", 5, 4, 0, 10),
        (60, "free", "call", 5, 4, 0, 30),
    ]


def test_a_moved_part_takes_its_kind_along() -> None:
    reserve = mapped(10, 5, 10, ANONYMOUS | NORESERVE)
    moved = call(
        function=records.MAP_MREMAP, enter_ns=19, exit_ns=20, addr=50 * PAGE, size_bytes=6 * PAGE, arg0=7 * PAGE,
        arg1=2 * PAGE,
    )  # fmt: skip
    rows = rows_of(Mappings(EventColumns(0)), np.concatenate([reserve, moved]))
    assert sorted(told(rows)) == [
        (10, "alloc", "call", 5, 10, 0, 0),
        (20, "alloc", "call", 50, 6, 0, 0),
        (20, "free", "call", 7, 2, 1, 10),
    ]
    assert {KINDS[row["kind"]] for row in rows} == {"mmap_reserve"}


def test_the_break_shrinks_by_its_newest_growth() -> None:
    def moved(now: int, before: int, after: int) -> np.ndarray:
        return call(function=records.MAP_BRK, exit_ns=now, addr=before * PAGE, arg0=after * PAGE)

    rows = decoded([moved(10, 100, 104), moved(20, 104, 106)], [moved(30, 106, 101), moved(40, 101, 99)])
    assert rows == [
        (10, "alloc", "call", 100, 4, 0, 0),
        (20, "alloc", "call", 104, 2, 0, 0),
        (30, "free", "call", 101, 3, 1, 10),
        (30, "free", "call", 104, 2, 0, 20),
        (40, "free", "call", 100, 1, 0, 10),
    ]


def test_a_remapping_that_keeps_its_old_range_frees_nothing() -> None:
    moved = call(
        function=records.MAP_MREMAP, enter_ns=19, exit_ns=20, addr=50 * PAGE, size_bytes=4 * PAGE, arg0=5 * PAGE,
        arg1=4 * PAGE, context=5,
    )  # fmt: skip
    rows = decoded([mapped(10, 5, 4), moved])
    assert rows == [(10, "alloc", "call", 5, 4, 0, 0), (20, "alloc", "call", 50, 4, 0, 0)]


def test_a_slow_remapping_spares_what_another_thread_mapped_at_its_old_place_meanwhile() -> None:
    moved = call(
        function=records.MAP_MREMAP, enter_ns=20, exit_ns=40, addr=50 * PAGE, size_bytes=4 * PAGE, arg0=5 * PAGE,
        arg1=4 * PAGE,
    )  # fmt: skip
    rows = decoded([mapped(10, 5, 4), mapped(30, 5, 4), moved, unmapped(60, 5, 4)])
    assert (60, "free", "call", 5, 4, 0, 30) in rows and (30, "free", "reuse", 5, 4, 0, 10) in rows
    assert len(rows) == 5


def test_what_ended_is_forgotten_and_what_lives_keeps_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    # given room for the rows of 8 mappings that ended, a mapping with a hole, and many that come and go
    monkeypatch.setattr(mappings, "_MIN_KEPT", 8)
    maps = Mappings(EventColumns(0))
    rows_of(maps, np.concatenate([mapped(10, 500, 10, user_stack=77), mapped(11, 600, 2), unmapped(12, 504, 2)]))
    for turn in range(50):
        batch = [mapped(20 + turn, 5, 3), unmapped(20 + turn, 5, 3, enter_ns=21 + turn)]
        assert len(rows_of(maps, np.concatenate(batch))) == 2
    assert len(maps._made) < 20
    rows = rows_of(maps, np.concatenate([unmapped(90, 600, 2), unmapped(91, 500, 10)]))
    assert list(told(rows)) == [
        (90, "free", "call", 600, 2, 0, 11),
        (91, "free", "call", 500, 4, 1, 10),
        (91, "free", "call", 506, 4, 0, 10),
    ]
    assert rows["user_stack"].tolist() == [0, 77, 77]


@pytest.mark.parametrize("cause", ["exit", "exec"])
def test_the_end_of_a_process_ends_what_it_had_then(cause: str) -> None:
    # given a process that ends between two mappings of the same batch, and another that lives on
    batch = [mapped(10, 5, 4), mapped(11, 5, 2, pid=200), mapped(30, 5, 4)]
    rows = decoded(batch, ends=[ProcessEnd(20, 100, cause)])
    assert rows == [
        (10, "alloc", "call", 5, 4, 0, 0),
        (11, "alloc", "call", 5, 2, 0, 0),
        (20, "free", cause, 5, 4, 0, 10),
        (30, "alloc", "call", 5, 4, 0, 0),
    ]
    # and one with a hole, of which a part was made when it had ended already
    rows = decoded(
        [mapped(10, 5, 4), unmapped(12, 6, 1), mapped(30, 9, 1)], [mapped(31, 20, 1)], ends=[ProcessEnd(25, 100, cause)]
    )
    assert [row for row in rows if row[0] == 25] == [(25, "free", cause, 5, 1, 1, 10), (25, "free", cause, 7, 2, 0, 10)]


def test_failed_calls_and_unknown_ranges_give_no_rows() -> None:
    maps = Mappings(EventColumns(0))
    batch = [mapped(10, 5, 4, result=-12), unmapped(20, 5, 4), unmapped(21, 9, 1, result=-22)]
    assert len(rows_of(maps, np.concatenate(batch))) == 0
    assert maps.unmatched_frees == 1


@pytest.mark.parametrize(
    ("flags", "protection", "kind"),
    [
        (0x22, 3, "mmap_anon"),
        (0x22, 0, "mmap_reserve"),
        (0x4022, 3, "mmap_reserve"),
        (0x2, 5, "mmap_file"),
        (0x2, 0, "mmap_file"),
        (0x22 | records.MAP_IN_HEAP, 3, "heap_backing"),
    ],
)
def test_kinds_of_mappings(flags: int, protection: int, kind: str) -> None:
    assert KINDS[mappings.kinds(np.array([flags]), np.array([protection]))[0]] == kind


# --- calls -------------------------------------------------------------------------------------------------


class NoStacks:
    """Stands for the numbers of stacks where no record has one."""

    def stacks(self, numbers: np.ndarray) -> np.ndarray:
        return np.zeros(len(numbers), np.int32)

    python_stacks = stacks

    def count_calls(self, batch: np.ndarray, change: int) -> None:
        pass


class Empty:
    """Stands for the map of live ranges after all of them ended in the kernel."""

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield np.zeros((0, records.RANGE_KEY.itemsize), np.uint8), np.zeros((0, records.LIVE_RANGE.itemsize), np.uint8)


class DeviceRanges:
    """Stands for the map of live ranges with one device object of each of these (PID, allocation time) in it."""

    def __init__(self, objects: list[tuple[int, int]]) -> None:
        keys, values = np.zeros(len(objects), records.RANGE_KEY), np.zeros(len(objects), records.LIVE_RANGE)
        keys["addr"], values["size_bytes"] = np.arange(len(objects)) + 1, 10
        keys["pid"], values["ts_ns"] = np.array(objects).T
        self._keys, self._values = keys, values
        self.deleted: list[int] = []

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for at in range(0, len(self._keys), 2):  # whatever is asked for
            assert not self.deleted  # or the cursor of the kernel may go back
            keys, values = self._keys[at : at + 2], self._values[at : at + 2]
            yield keys.view(np.uint8).reshape(len(keys), -1), values.view(np.uint8).reshape(len(values), -1)

    def delete(self, key: bytes) -> bool:
        self.deleted.append(int(np.frombuffer(key, records.RANGE_KEY)["addr"][0]))
        return True


def test_the_end_of_processes_ends_what_is_live_of_them_and_older_batch_by_batch() -> None:
    # given device objects of two processes that end at 100 and 200, one of another; a PID that was given out anew
    ranges = DeviceRanges([(5, 1), (9, 2), (7, 3), (5, 4), (5, 150), (9, 199)])
    calls = Calls(EventColumns(0), NoStacks(), ranges, Exits())  # type: ignore[arg-type]
    ends = np.zeros(2, records.CALL_RECORD)
    ends["type"], ends["pid"], ends["exit_ns"] = records.CALL_EXIT, (5, 9), (100, 200)
    (freed,) = calls.decode(ends).mem_events
    assert sorted(ranges.deleted) == [1, 2, 4, 6]
    rows = [(row["pid"], row["addr"], row["ts_ns"], row["cause"]) for row in freed.to_pylist()]
    assert sorted(rows) == [(5, 1, 100, "exit"), (5, 4, 100, "exit"), (9, 2, 200, "exit"), (9, 6, 200, "exit")]


def test_what_a_context_took_with_it_was_not_freed_by_the_reuse_of_its_address() -> None:
    index = {probe.api: number for number, probe in enumerate(FUNCTIONS)}
    calls = Calls(EventColumns(0), NoStacks(), Empty(), Exits())  # type: ignore[arg-type]
    destroyed = call(type=records.CALL_FUNCTION, function=index["cuCtxDestroy_v2"], arg0=0xC0, enter_ns=50, exit_ns=51)

    def reused(now: int, made_ns: int, context: int) -> np.ndarray:
        return call(
            type=records.CALL_FREE, function=index["cuMemAlloc_v2"], exit_ns=now, enter_ns=now, alloc_ts_ns=made_ns,
            cause=records.CAUSE_REUSE, context=context, addr=4096, size_bytes=100,
        )  # fmt: skip

    # given addresses handed out again: of the destroyed context, of another one, and of a younger object
    batch = np.concatenate([destroyed, reused(60, 40, 0xC0), reused(61, 40, 0xD0), reused(62, 55, 0xC0)])
    frees = pa.concat_tables(calls.decode(batch).mem_events).to_pylist()
    assert [(row["ts_ns"], row["cause"], row["alloc_ts_ns"]) for row in frees] == [
        (50, "context", 40),
        (61, "reuse", 40),
        (62, "reuse", 55),
    ]
    # and in a later batch, too
    (late,) = pa.concat_tables(calls.decode(reused(90, 30, 0xC0)).mem_events).to_pylist()
    assert (late["ts_ns"], late["cause"]) == (50, "context")
