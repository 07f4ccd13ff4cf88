"""What a live view adds up: sums by site, growth in a window, courses of counters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from leakscope.model.words import CAUSES, KINDS, KINDS_NOT_ADDED, LAYERS, OPS
from leakscope.record.live.sites import IDENTITY, CensusSums, SiteTable, scale_of_sample
from leakscope.record.live.window import GrowthWindow
from leakscope.report.live.course import ASCII_BARS, MOST_POINTS, Course, sparkline

ALLOC, FREE = OPS.index("alloc"), OPS.index("free")


# --- sums by site --------------------------------------------------------------------------------------------


def events(rows: int, sites: int, seed: int = 7) -> dict[str, np.ndarray]:
    """Decoded columns of random events of so many sites."""
    random = np.random.default_rng(seed)
    of = {name: random.integers(0, 300, sites).astype(np.int32) for name in IDENTITY}
    of["layer"], of["kind"] = random.integers(0, 3, sites), random.integers(0, len(KINDS), sites)
    at = random.integers(0, sites, rows)
    return {name: values[at] for name, values in of.items()} | {
        "op": random.integers(0, len(OPS), rows).astype(np.uint8),
        "cause": random.integers(0, len(CAUSES), rows),
        "size_bytes": random.integers(1, 1 << 20, rows),
        "alloc_ts_ns": random.integers(0, 2, rows),
        "weight": random.choice([0, 1, 64], rows),
    }


def truth(columns: dict[str, np.ndarray], weighted: bool) -> Counter[tuple[int, ...]]:
    """Live bytes by identity, event by event: a free counts whatever its cause, unless its allocation is not known."""
    kept: Counter[tuple[int, ...]] = Counter()
    for i in range(len(columns["op"])):
        key = tuple(int(columns[name][i]) for name in IDENTITY)
        freed = columns["op"][i] == FREE and columns["alloc_ts_ns"][i] > 0
        sign = 1 if columns["op"][i] == ALLOC else -1 if freed else 0
        kept[key] += sign * int(columns["size_bytes"][i]) * (int(columns["weight"][i]) if weighted else 1)
    return kept


def by_identity(sums: SiteTable | CensusSums) -> dict[tuple[int, ...], int]:
    found = sums.sums()
    return dict(zip(map(tuple, found.identities.tolist()), found.kept.tolist(), strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_those_of_counting_event_by_event(weighted: bool) -> None:
    # given events of more sites than the table has room for at first, in batches that meet ever more of them
    columns = events(rows=20_000, sites=3_000)
    table = SiteTable(weighted=weighted)
    for start in range(0, 20_000, 700):
        batch = {name: values[start : start + 700] for name, values in columns.items()}
        table.add(len(batch["op"]), batch)
    expected = truth(columns, weighted)
    assert len(expected) > 2_500 and by_identity(table) == dict(expected)
    # then layers are the sums of what adds up, with weight or without
    added = [kind not in KINDS_NOT_ADDED for kind in KINDS]
    layers = Counter[int]()
    for key, kept in truth(columns, weighted=False).items():
        layers[key[0]] += kept if added[key[1]] else 0
    assert table.sums().by_layer.tolist() == [layers[code] for code in range(len(LAYERS))]


def test_sites_beyond_the_most_count_in_their_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.record.live.sites.MOST_SITES", 11)
    columns = events(rows=5_000, sites=50)
    columns["kind"][:] = KINDS.index("mmap_anon")
    table = SiteTable(weighted=False)
    table.add(5_000, columns)
    table.add(5_000, columns)
    expected, found = truth(columns, weighted=False), by_identity(table)
    assert len(found) == 10 and all(found[key] == 2 * expected[key] for key in found)
    assert table.sums().by_layer.sum() == 2 * sum(expected.values())


def test_a_fault_in_sums_does_not_reach_the_recorder() -> None:
    # given columns that are not as long as they should be
    table, census = SiteTable(weighted=False), CensusSums(weighted=False)
    columns = events(rows=10, sites=3)
    table.add(10, {**columns, "size_bytes": np.ones(7)})
    table.add(10, columns)
    census.publish({name: np.zeros(3, int) for name in IDENTITY}, np.ones(2, int))
    # then who decodes goes on, and who looks is told
    for sums in (table, census):
        with pytest.raises(ValueError, match=r"could not be broadcast|must have the same|length"):
            sums.sums()


def test_a_range_is_that_of_the_latest_allocation() -> None:
    one = {name: np.zeros(3, np.int32) for name in IDENTITY}
    rows = {
        **one,
        "op": np.array([ALLOC, ALLOC, FREE]),
        "size_bytes": np.full(3, 8),
        "alloc_ts_ns": np.array([0, 0, 1]),
    }
    table = SiteTable(weighted=False)
    table.add(3, {**rows, "mark_id": np.array([5, 7, 9])})
    assert table.sums().marks.tolist() == [7] and table.sums().kept.tolist() == [8]


def test_objects_that_were_sampled_by_bytes_are_scaled() -> None:
    # given one in 4,096 bytes taken: an object of 4,096 bytes is taken with probability 1 - 1/e
    assert scale_of_sample(np.array([4096]), 4096)[0] == pytest.approx(1 / (1 - np.exp(-1)))
    kinds = np.array([KINDS.index(kind) for kind in ("kmalloc", "mmap_anon")], np.int32)
    columns = {name: np.zeros(2, np.int32) for name in IDENTITY} | {"kind": kinds}
    rows = {"op": np.full(2, ALLOC), "size_bytes": np.full(2, 4096), "alloc_ts_ns": np.zeros(2, int)}
    stream, census = SiteTable(weighted=False, sample_bytes=4096), CensusSums(weighted=False, sample_bytes=4096)
    stream.add(2, {**columns, **rows})
    sites = {name: values.astype(np.int64) for name, values in columns.items()}
    census.publish({**sites, "size_bytes": np.full(2, 4096), "weight": np.ones(2, int)}, np.full(2, 4096))
    for sums in (stream, census):  # a mapping is recorded whole
        assert sorted(sums.sums().kept.tolist()) == [4096, int(4096 / (1 - np.exp(-1)))]


def test_sites_of_a_census_that_differ_by_process_or_size_alone_are_one() -> None:
    sums = CensusSums(weighted=True)
    identity = {name: np.array([1, 1, 2], np.int64) for name in IDENTITY}
    sums.publish(
        {**identity, "size_bytes": np.array([64, 96, 64]), "weight": np.array([1, 64, 1])}, np.array([10, 2, 5])
    )
    assert by_identity(sums) == {(1,) * 7: 10 + 2 * 64, (2,) * 7: 5}


def test_growth_is_what_was_gained_in_the_window() -> None:
    window = GrowthWindow(60.0)
    keys, more = np.array([9, 3], np.uint64), np.array([4, 9, 3], np.uint64)
    # given a site that is there from the start, and one that comes later, in whatever order
    assert [v.tolist() if hasattr(v, "tolist") else v for v in window.growth(10, keys, np.array([100, 7]))] == [
        [100, 7],
        10,
    ]
    for t in range(15, 90, 5):
        window.growth(t, keys, np.array([100, 7 * t]))
    growth, seconds = window.growth(100, more, np.array([50, 130, 700]))
    # then only the last minute counts, at first the later half; and one that is new gained all it keeps
    assert (growth.tolist(), seconds) == ([50, 30, 700 - 7 * 50], 50)
    window.growth(130, keys, np.array([130, 800]))
    growth, seconds = window.growth(160, keys, np.array([131, 900]))
    assert (growth.tolist(), seconds) == ([1, 200], 60)


# --- courses -------------------------------------------------------------------------------------------------


def test_a_course_keeps_few_points_evenly_and_the_latest() -> None:
    course = Course()
    for t in range(72 * 3600):
        course.add(t, t / 2)
    times, values = course.arrays()
    gaps = np.diff(times)
    assert MOST_POINTS / 4 < len(times) <= MOST_POINTS
    assert times[-1] == 72 * 3600 - 1 and values[-1] == times[-1] / 2 and (values == times / 2).all()
    assert gaps[:-1].max() <= 2.5 * gaps[:-1].min()
    change, seconds = course.change(3600)
    assert change == seconds / 2 and 3600 <= seconds <= 3600 + gaps.max()


def test_sparklines_fit() -> None:
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█" and sparkline(range(8), 4) == "▁▃▆█"
    assert sparkline([5, 5, 5]) == "▁▁▁" and sparkline([]) == "" and sparkline([1, 2], 0) == ""
    assert sparkline(range(8), bars=ASCII_BARS) == " .:-=+*#"
