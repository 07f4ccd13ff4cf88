"""Replays of traces: policies against brute force and libCacheSim, bounds that hold, staleness and prefixes exact."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import ROOT

from leakscope.cache.simulate import Options, after_a_miss, next_references, policy_of, replay
from leakscope.cache.traces import Trace, read_trace
from leakscope.cli.main import main
from leakscope.errors import BadInputError

POLICIES = ("lru", "lru-1", "lru-2", "lru-3-history", "decayed", "lrfu", "s3fifo")
OBJECTS = st.lists(st.integers(0, 5), min_size=1, max_size=25)


def trace_of(objects: list[int], times: list[float] | None = None, **more: Any) -> Trace:
    codes = {key: code for code, key in enumerate(dict.fromkeys(objects))}
    sizes = np.array(more.pop("sizes", [1] * len(objects)), np.int64)
    seconds = np.array(times or range(len(objects)), np.float64)
    return Trace("test", seconds, np.array([codes[key] for key in objects], np.int64), sizes, **more)


def fewest_misses(objects: list[int], capacity: int) -> int:
    """Over all choices of what to evict."""

    @cache
    def fewest(at: int, there: frozenset[int]) -> int:
        if at == len(objects):
            return 0
        key = objects[at]
        if key in there:
            return fewest(at + 1, there)
        if len(there) < capacity:
            return 1 + fewest(at + 1, there | {key})
        return 1 + min(fewest(at + 1, there - {victim} | {key}) for victim in there)

    return fewest(0, frozenset())


@given(OBJECTS, st.integers(1, 4))
def test_beladys_bound_is_the_least_possible(objects: list[int], capacity: int) -> None:
    trace = trace_of(objects)
    bound = replay(trace, "belady", capacity)
    assert bound.misses == fewest_misses(objects, capacity) and bound.bound
    for name in POLICIES:
        found = replay(trace, name, capacity)
        assert found.misses >= bound.misses and not found.bound
        assert found.evictions == max(0, found.misses - capacity)
    assert replay(trace, "infinite", 1).misses == len(set(objects))


def test_lru_one_is_lru() -> None:
    objects = np.random.default_rng(3).zipf(1.3, 3_000).clip(max=60).tolist()
    trace = trace_of(objects)
    assert replay(trace, "lru", 10).misses == replay(trace, "lru-1", 10).misses
    assert replay(trace, "lru-2", 10).misses != replay(trace, "lru-2-history", 10).misses


def test_bytes_are_counted_as_referenced() -> None:
    trace = trace_of([1, 2, 1, 3, 1], sizes=[60, 30, 60, 50, 60])
    found = replay(trace, "lru", 100, Options(by_bytes=True))
    assert (found.misses, found.bytes, found.missed_bytes, found.evictions) == (4, 260, 200, 3)
    # 3 (50) evicts 2 (30) and, as that is not enough, 1 (60), which then misses and evicts 3
    too_large = replay(trace, "lru", 55, Options(by_bytes=True))
    assert (too_large.misses, too_large.missed_bytes, too_large.evictions) == (5, 260, 1)
    assert not replay(trace, "belady", 100, Options(by_bytes=True)).bound  # sizes differ


def test_what_is_past_its_time_is_stale_and_inserted_anew() -> None:
    trace = trace_of([1, 1, 1, 1, 2], times=[0, 9, 10, 19, 100])
    found = replay(trace, "lru", 5, Options(ttl_s=10))
    assert (found.misses, found.stale, found.stale_ratio) == (3, 1, 0.2)
    assert replay(trace_of([1, 1, 1], times=[0, 10, 20]), "lru", 5, Options(ttl_s=10)).stale == 2  # the end is past it
    own = trace_of([1, 1, 1, 1, 2], times=[0, 9, 10, 19, 100], ttls_s=np.array([5, 50, 5, 5, np.nan]))
    found = replay(own, "infinite", 5, Options(ttl_s=20))  # at 9 it is 9 s old, at 10 and 19 of the life from 9 on
    assert (found.misses, found.stale) == (3, 1)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=30), st.integers(1, 6))
def test_a_block_after_a_miss_in_its_request_is_of_no_use(requests: list[tuple[int, int]], capacity: int) -> None:
    objects = [100 * first + block for length, first in requests for block in range(length)]
    groups = np.array([number for number, (length, _) in enumerate(requests) for _ in range(length)])
    missed = np.random.default_rng(capacity).random(len(objects)) < 0.3
    naive = [any(missed[i] for i in range(at + 1) if groups[i] == groups[at]) for at in range(len(objects))]
    assert after_a_miss(missed, groups).tolist() == naive
    found = replay(trace_of(objects, groups=groups), "lru", capacity)
    assert found.usable_misses is not None and found.usable_misses >= found.misses


@given(OBJECTS)
def test_next_references(objects: list[int]) -> None:
    codes = trace_of(objects).objects
    for at, following in enumerate(next_references(codes).tolist()):
        later = [i for i in range(at + 1, len(codes)) if codes[i] == codes[at]]
        assert following == (later[0] if later else len(codes) + at)


def test_s3_fifo_by_hand() -> None:
    sizes = dict.fromkeys(range(100), 1)
    policy = policy_of("s3fifo", Options(), 10, sizes)
    for key in range(10):
        policy.admit(key, 0)
    policy.touch(0, 0)
    policy.touch(1, 0)
    policy.touch(1, 0)
    assert policy.victim(0) == 0  # one hit is not enough
    policy.forget(0, 0)
    policy.admit(10, 0)
    assert policy.victim(0) == 2  # 1 was hit twice and has moved to the main queue
    policy.forget(2, 0)
    policy.admit(2, 0)  # comes back from the ghost queue, which holds one key as the main queue does: into main
    assert (list(policy._main), list(policy._small)) == ([1, 2], [3, 4, 5, 6, 7, 8, 9, 10])  # type: ignore[attr-defined]
    for key in range(3, 11):
        assert policy.victim(0) == key
        policy.forget(key, 0)
    policy.touch(1, 0)
    assert policy.victim(0) == 2  # 1 gets another round for its hit
    assert list(policy._main) == [2, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["mru", "lru-", "lru-0", "lru-17", "lru-2-histories", "lru-²", ""])
def test_unknown_policies_are_named(wrong: str) -> None:
    with pytest.raises(BadInputError, match="no such policy; there are lru, lru-K"):
        replay(trace_of([1]), wrong, 1)


def mooncake() -> str:
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3_000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


FORMS = {
    "Mooncake": (mooncake(), [0, 0, 3, 3], [0, 1, 0, 2], [1, 1, 1, 1]),
    "Bailian": (
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 16, "output_length": 1, '
        '"type": "text", "turn": 1, "hash_ids": [4, 5]}\n',
        [2.5, 2.5], [0, 1], [1, 1],
    ),
    "requests": (
        '{"t_s": 1, "key": "a", "size": 9}\n{"t_s": 1.5, "key": "b"}\nnoise\n{"t_s": "x", "key": "c"}\n',
        [1, 1.5], [0, 1], [9, 1],
    ),
    "CSV": ("time,object,size\n1,a,10\n2,b,20\n1,a,10\n,c,1\n", [1, 2, 2], [0, 1, 0], [10, 20, 10]),
    "Twitter": (
        "0,k1,10,100,7,get,0\n0,k1,10,100,7,set,60\n1,k2,10,5,7,gets,30\n2,k1,10,100,7,get,60\n",
        [0, 1, 2], [0, 1, 0], [110, 15, 110],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_forms_of_traces(tmp_path: Path, form: str, packed: bool) -> None:
    text, times, objects, sizes = FORMS[form]
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())

    trace = read_trace(path)

    assert trace.form == form
    assert (trace.times_s.tolist(), trace.objects.tolist(), trace.sizes.tolist()) == (times, objects, sizes)
    if form == "Twitter":
        assert trace.ttls_s is not None
        np.testing.assert_array_equal(trace.ttls_s, [np.nan, 30, 60])
    if form == "Mooncake":
        assert trace.groups is not None and trace.groups.tolist() == [0, 0, 1, 1]
    assert trace.left_out == {"requests": 2, "CSV": 1}.get(form, 0)
    assert trace.unordered == (1 if form == "CSV" else 0)


def test_oracle_general(tmp_path: Path) -> None:
    record = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    rows = np.array([(1, 2**63 + 5, 512, 2), (1, 9, 4096, -1), (3, 2**63 + 5, 512, -1)], record)
    path = tmp_path / "t.bin"
    path.write_bytes(rows.tobytes())

    trace = read_trace(path)

    assert (trace.form, trace.objects.tolist(), trace.sizes.tolist()) == ("oracleGeneral", [0, 1, 0], [512, 4096, 512])
    assert (trace.distinct, trace.distinct_bytes) == (2, 4608)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\x00" * 25, "not of records of 24 bytes"),
        (b"\x00" * 2400, "next accesses lie in the past"),
        (b"a,b\n1,2\n", "name no time and object"),
        (b"{}\n[]\n{\n", "no line has a time"),
        (b'{"timestamp": 1e999, "hash_ids": [1]}\n', "no finite number"),
        (b'{"timestamp": 1, "hash_ids": []}\n', "no line has a time"),
        (b"{" * 100_000, "no line has a time"),
        (b"time,object\n", "no reference to an object"),
        (b"\x1f\x8bjunk", "damaged gzip"),
        (gzip.compress(b"time,object\n1,a\n", mtime=0)[:-9], "damaged gzip"),
        (b'time,object\n"', "no finite|no CSV|no reference"),
        (b"0,k,1,2,3,set,0\n", "without a get"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=says):
        read_trace(path)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random-trace"
    path.write_bytes(content)
    with contextlib.suppress(BadInputError):
        assert len(read_trace(path).objects)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["cache", "simulate", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    rows = [f"{number},o{number % 7},100" for number in range(70)]
    path.write_text("\n".join(["time,object,size", *rows]))

    code, out, err = run(capsys, str(path), "--capacity", "5,100%", "--policy", "lru,belady,infinite", "--json")

    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["trace"] | {"path": ""} == {
        "path": "", "form": "CSV", "references": 70, "objects": 7, "bytes": 7_000, "left_out": 0,
    }  # fmt: skip
    assert [(r["policy"], r["capacity"], r["misses"], r["bound"]) for r in found["replays"]] == [
        ("lru", 5, 70, False), ("belady", 5, 27, True), ("lru", 7, 7, False), ("belady", 7, 7, True),
        ("infinite", None, 7, True),
    ]  # fmt: skip

    code, out, _ = run(capsys, str(path), "--capacity", "500B,50%", "--ttl", "20s", "--policy", "lru,lru-2,infinite")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "500 B lru 1.0000 1.0000 0.0000 65" in lines
    assert "∞ infinite (bound) 0.4000 0.4000 0.3000 0" in lines  # each of 7 objects at 0, 21, 42, 63 s
    assert any("350 B lru" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--capacity", "1,2MiB"], "objects and sizes do not mix"),
        (["--capacity", "0"], "must be above 0"),
        (["--capacity", "x%"], "needs objects"),
        (["--policy", "lru,none"], "none: no such policy"),
        (["--ttl", "never"], "--ttl never: needs a time"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("time,object\n1,a\n")
    code, out, err = run(capsys, str(path), *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def saved(name: str) -> Path:
    folder = os.environ.get("LEAKSCOPE_TEST_DATA")
    path = Path(folder or "") / "cache" / name
    if folder is None or not path.exists():
        pytest.skip(f"NOT TESTED: set LEAKSCOPE_TEST_DATA to the folder with cache/{name}")
    return path


SYNTHETIC = "mooncake-fast25-synthetic_trace.jsonl.gz"
CLOUDPHYSICS = "cloudphysics-sample.oracleGeneral.bin.gz"
CONVERSATION = "mooncake-fast25-conversation_trace.jsonl.gz"


def test_a_saved_trace_is_measured_to_the_reference() -> None:
    trace = read_trace(saved(SYNTHETIC))
    assert (len(trace.objects), trace.distinct) == (121_877, 43_924)
    misses = {name: replay(trace, name, 5_000).misses for name in ("decayed", "belady")}
    assert misses == {"decayed": 95_874, "belady": 57_742}  # the decay: 6.6 points worse than LRU's 87,859
    assert replay(trace, "infinite", 1).misses == 43_924


@pytest.mark.parametrize(
    ("name", "misses"),
    [(SYNTHETIC, {"lru": 87_859, "lru-2": 97_828}), (CLOUDPHYSICS, {"lru": 91_527, "lru-2": 89_798})],
)
def test_whole_traces_miss_as_often_as_in_libcachesim(name: str, misses: dict[str, int]) -> None:
    """Its counts (0.3.5, 5,000 objects), written down: the next test asks itself, where it is."""
    trace = read_trace(saved(name))
    assert {policy: replay(trace, policy, 5_000).misses for policy in misses} == misses


@pytest.mark.parametrize("name", [SYNTHETIC, CLOUDPHYSICS, CONVERSATION])
def test_lru_and_lru_k_are_libcachesims_to_the_last_digit(tmp_path: Path, name: str) -> None:
    """The first 20,000 references; all of them with LEAKSCOPE_WHOLE_TRACES=1."""
    python = os.environ.get("LEAKSCOPE_LIBCACHESIM", str(ROOT / "build" / "libcachesim" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(
            "NOT TESTED: no libcachesim (GPL, so no dependency): python -m venv build/libcachesim && "
            "build/libcachesim/bin/pip install libcachesim, or set LEAKSCOPE_LIBCACHESIM to a Python that has it"
        )
    whole = read_trace(saved(name))
    count = len(whole.objects) if os.environ.get("LEAKSCOPE_WHOLE_TRACES") else 20_000
    trace = Trace(whole.form, whole.times_s[:count], whole.objects[:count], whole.sizes[:count])
    for by_bytes in (False, True) if name == CLOUDPHYSICS else (False,):
        capacities = (64 << 20,) if by_bytes else (1_000, 5_000)
        specifications = [f"{policy}:{at}" for policy, at in itertools.product(("lru", "lru-2"), capacities)]
        path = tmp_path / "trace"
        sizes = trace.sizes if by_bytes else np.ones_like(trace.sizes)
        path.write_bytes(np.concatenate([trace.objects, sizes]).tobytes())
        done = subprocess.run(
            [python, str(ROOT / "tests" / "libcachesim_oracle.py"), str(path), *specifications],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        options = Options(by_bytes=by_bytes)
        ours = [replay(trace, s.partition(":")[0], int(s.partition(":")[2]), options).misses for s in specifications]
        assert ours == json.loads(done.stdout)
