"""The live view of record and soak: its sums, what it draws, and what it does to a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import recording
from recording import LEAKSCOPE, ROOT, waiting
from rich.console import Console
from terminal import Terminal

from leakscope.capture import Capture
from leakscope.cli.keyboard import Keyboard
from leakscope.cli.live_tracks import Tracks
from leakscope.cli.live_view import LiveView, shown_as
from leakscope.errors import BadInputError
from leakscope.model.forecast import Forecast
from leakscope.model.live import GrowingSite, LiveFrame, LiveReading, LiveState, Track
from leakscope.model.recording import Loss
from leakscope.model.soak import CounterState, Happening, SoakState
from leakscope.model.tables import SAMPLES
from leakscope.model.words import CAUSES, KINDS, KINDS_NOT_ADDED, LAYERS, OPS
from leakscope.quantities import size
from leakscope.record.live.sites import IDENTITY, CensusSums, SiteTable, scale_of_sample
from leakscope.record.live.window import GrowthWindow
from leakscope.report.live.course import ASCII_BARS, MOST_POINTS, Course, sparkline
from leakscope.report.live.names import SiteNames, leaders
from leakscope.report.live.view import live_view, report_line
from leakscope.report.soak import soak_view

READER = ROOT / "tests/live_reader.py"
GIB, MIB = 1 << 30, 1 << 20
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


# --- the screen ----------------------------------------------------------------------------------------------


def frame(function: str, module: str = "/srv/app", file: str = "", line: int = 0) -> LiveFrame:
    return LiveFrame(function, file, line, module, 0, "python" if file else "native")


def site(key: int, layer: str, kind: str, function: str, kept: int, growth: int, **more: object) -> GrowingSite:
    given: dict = {"api": "", "slab_cache": "", "python": (), "kernel": (), "window_s": 64.0, **more}
    user = (frame("main"), frame(function), frame("mmap", "/usr/lib/libc.so.6")) if function else ()
    return GrowingSite(key=key, layer=layer, kind=kind, user=user, kept_bytes=kept, growth_bytes=growth, **given)


def state(**more: object) -> LiveState:
    python = (frame("handle", file="/srv/app/server.py", line=12),)
    sites = SiteNames().named(
        [
            site(1, "host", "mmap_anon", "response_buffer_map", 64 * MIB, 32 * MIB, range="serve request"),
            site(2, "kernel", "slab", "", 9000, 5000, slab_cache="filp", python=python, sampled=True),
            site(3, "kernel", "slab", "", 6000, 4000, slab_cache="dentry", python=python, sampled=True),
        ]
    )
    reading = LiveReading(3683.0, 1_234_567, {}, sites, (Loss("sites", "address_only_free", 4),), 0.031, 12_345_678)
    tracks = (Track("kernel", 15_000, 9000, 60, tuple(range(8))), Track("cgroup", 1.5 * GIB, -MIB, 60, (2, 1, 3)))
    forecast = Forecast("cgroup", 1.5 * GIB, 2 * GIB, 720, 600, None)
    given: dict = {"tracks": tracks, "forecast": forecast, "duration_s": 7200.0, "keys": True, **more}
    return LiveState("serve (PID 42)", "run.lscope", reading, 12_345.6, **given)


def drawn(shown: object, width: int) -> list[str]:
    """What rich makes of it in a pipe of so many columns."""
    console = Console(file=io.StringIO(), width=width, height=50)
    console.print(shown)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def words(line: str) -> str:
    return " ".join(line.split())


def test_the_screen_at_80_columns() -> None:
    assert drawn(live_view(state(), 80, 24), 80) == [
        "leakscope record  01:01:23 of 02:00:00  serve (PID 42)",
        "1,234,567 events, 12,346/s  ring 3%  disk 11.8 MiB",
        "lost: nothing",
        "cgroup 1.5 GiB reaches 2.0 GiB in 12 min if growth goes on (10 min … never)",
        "             now  last 60 s  so far",
        "kernel  14.6 KiB   +8.8 KiB  ▁▂▃▄▅▆▇█",
        "cgroup   1.5 GiB   -1.0 MiB  ▅▁█",
        "layer   growing, last 64 s                        gained         rate       kept",
        "host    response_buffer_map                    +32.0 MiB  512.0 KiB/s   64.0 MiB",
        "kernel  handle (server.py:12)                  ~+8.8 KiB     ~141 B/s  ~14.6 KiB",
        "q ends it, p pauses the view; run.lscope",
    ]


def test_the_screen_at_140_columns_has_kinds_and_ranges() -> None:
    lines = drawn(live_view(state(paused=True, keys=False), 140, 24), 140)
    assert lines[0] == "leakscope record  01:01:23 of 02:00:00  PAUSED, the recording goes on  serve (PID 42)"
    heads, host, kernel, last = lines[-4:]
    assert words(heads) == "layer growing, last 64 s kind range gained rate kept"
    assert words(host) == "host response_buffer_map mmap_anon serve request +32.0 MiB 512.0 KiB/s 64.0 MiB"
    assert words(kernel) == "kernel handle (server.py:12) filp +1 ~+8.8 KiB ~141 B/s ~14.6 KiB"
    assert max(map(len, lines)) <= 140 and last == "Ctrl-C ends it; run.lscope"


@pytest.mark.parametrize("width", [20, 40, 59, 60, 99, 100, 140])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 7, 9, 11, 24])
def test_the_screen_fits_whatever_the_terminal(width: int, height: int) -> None:
    for shown in (live_view(state(), width, height), soak_view(soaking(), width, height)):
        lines = drawn(shown, width)
        assert len(lines) <= height and max(map(len, lines)) <= width
        assert lines[0].startswith("leakscope ") and not any("no site grows" in line for line in lines)
    narrow = drawn(live_view(state(), 40, 24), 40)
    assert any(line.startswith("response_buf") and line.endswith("+32.0 MiB  512.0 KiB/s") for line in narrow)


def test_what_is_lost_is_told_in_red_and_by_its_word() -> None:
    lost = (
        Loss("mem_ring", "ring_drop", 1200),
        Loss("on_kfree", "recursion_miss", 3),
        Loss("on_x", "recursion_miss", 4),
    )
    full = state()
    for losses, said, colour in ((lost, "LOST: 1,200 ring_drop, 7 recursion_miss", "\x1b[1;31m"),
                                 (lost[1:], "lost: 7 recursion_miss", "\x1b[33m")):  # fmt: skip
        shown = live_view(replace(full, reading=replace(full.reading, losses=losses)), 80, 24)
        console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False)
        console.print(shown)
        assert f"{colour}{said}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "LOST 1,207" in report_line(replace(full, reading=replace(full.reading, losses=lost)))


def test_texts_of_targets_cannot_act_on_the_terminal() -> None:
    evil = "evil\x1b[2J\x07\nname"
    sites = SiteNames().named([site(1, "host", "mmap_anon", evil, 8, 8, range=evil, slab_cache=evil)])
    reading = replace(state().reading, sites=sites)
    shown = live_view(replace(state(), reading=reading, target=evil, output=evil), 140, 24)
    for text in ("\n".join(drawn(shown, 140)), report_line(replace(state(), reading=reading))):
        assert "\x1b" not in text and "\x07" not in text and "evil\\x1b[2J\\x07\\nname" in text


def test_a_terminal_without_blocks_gets_bars_of_ascii() -> None:
    assert "kernel  14.6 KiB   +8.8 KiB   .:-=+*#" in drawn(live_view(state(), 80, 24, ascii_only=True), 80)


def test_a_line_for_a_log() -> None:
    assert report_line(state(tracks=state().tracks[:1])) == (
        "recording 01:01:23  12,346 events/s  kernel 14.6 KiB  lost nothing  host response_buffer_map +32.0 MiB in 64 s"
        "  cgroup 1.5 GiB reaches 2.0 GiB in 12 min if growth goes on (10 min … never)"
    )


def test_names_are_found_once_and_within_their_time() -> None:
    one = [site(7, "host", "mmap_anon", "first", 8, 8)]
    assert SiteNames(budget_s=0.0).named(one)[0].frame == ""
    names = SiteNames()
    assert names.named(one)[0].frame == "first"
    assert names.named([replace(one[0], user=())])[0].frame == "first"
    assert SiteNames().named([replace(one[0], user=())])[0].frame == "mmap_anon"


def test_frames_lead_by_what_all_their_sites_gained() -> None:
    sites = [site(n, "kernel", "slab", "f", 10, 3 + n, slab_cache=f"cache-{n}", frame="f") for n in range(3)]
    first, second = leaders([*sites, site(9, "host", "brk", "g", 11, 11, frame="g")])
    assert (first.frame, first.growth_bytes, first.kept_bytes, first.what, first.others) == ("f", 12, 30, "cache-2", 2)
    assert (second.frame, second.layer, second.what) == ("g", "host", "brk")
    # and the first of a layer is among them, however little it gained
    many = [site(n, "host", "brk", "h", 100, 100, frame=f"h{n}") for n in range(20, 29)]
    assert [row.frame for row in leaders([*many, *sites])] == ["h20", "h21", "h22", "h23", "f"]


def soaking() -> SoakState:
    counters = (
        CounterState("rss_bytes", 2.0 * GIB, True, 30.0 * MIB, (1.0, 2.0, 4.0)),
        CounterState("fds", 1200, False, None, (1.0, 1.0)),
    )
    happenings = tuple(Happening(60.0 * n, "note", f"happening {n}") for n in range(4))
    return SoakState(
        "serve", "run.lscope", 3600.0, 72 * 3600.0, counters, 2, next_look_s=7200.0, happenings=happenings,
        live=state().reading, keys=True,
    )  # fmt: skip


def test_the_screen_of_a_soak_has_sites_and_losses_too() -> None:
    lines = drawn(soak_view(soaking(), 80, 24), 80)
    assert lines[0] == "leakscope soak  01:00:00 of 72:00:00  serve"
    assert lines[1:4] == ["2 processes  alive, disk 11.8 MiB", "lost: nothing", "first look at 02:00:00"]
    assert [words(line) for line in lines[4:7]] == [
        "now last 60 min so far", "rss_bytes 2.0 GiB +30.0 MiB ▁▃█", "fds 1,200 ▁▁",
    ]  # fmt: skip
    assert lines[8].startswith("host    response_buffer_map") and lines[-1].startswith("q ends it")
    # where there is little room, happenings go first, the oldest of them at that
    assert [line for line in drawn(soak_view(soaking(), 80, 13), 80) if "happening" in line] == [
        "00:02:00  happening 2", "00:03:00  happening 3",
    ]  # fmt: skip


# --- counters ------------------------------------------------------------------------------------------------


def samples(*rows: tuple[str, str, str, float]) -> pa.Table:
    """One reading of the samplers."""
    of = [{"source_id": 0, "ts_ns": 1, "scope": s, "scope_id": i, "counter": c, "value": v} for s, i, c, v in rows]
    return pa.Table.from_pylist(of, schema=SAMPLES)


def test_counters_are_those_of_the_processes_the_group_and_the_devices() -> None:
    tracks = Tracks(everyone=False)
    pids = [("process", str(pid), "rss", 100.0 * pid) for pid in (1, 2)]
    total, free = ("host", "", "meminfo_MemTotal", 9.0), ("host", "", "meminfo_MemAvailable", 4.0)
    tracks.take(samples(*pids, ("cgroup", "/a", "cgroup", 7.0), ("process", "1", "fds", 3.0), total, free))
    tracks.take(samples(pids[1], ("device", "0", "gpu_used", 5.0), ("device", "1", "gpu_used", 6.0)))
    found = {track.name: track.value for track in tracks.add(LiveReading(10.0, 0, {"host": 4}, (), (), 0, 0))}
    # then a process that is not read any more does not count, and a layer begins at 0
    assert found == {"host": 4.0, "rss": 200.0, "cgroup": 7.0, "gpu used": 11.0}
    host = tracks.add(LiveReading(11.0, 0, {"host": 4}, (), (), 0, 0))[0]
    assert (host.course, host.change, host.window_s) == ((0.0, 4.0, 4.0), 4.0, 11.0)
    # and of a whole host it is its memory in use, of several groups none
    everyone = Tracks(everyone=True)
    everyone.take(samples(*pids, ("cgroup", "/a", "cgroup", 7.0), ("cgroup", "/b", "cgroup", 7.0), total, free))
    assert [(t.name, t.value) for t in everyone.add(LiveReading(1.0, 0, {}, (), (), 0, 0))] == [("host used", 5.0)]


def test_a_group_that_grows_towards_its_limit_has_a_forecast() -> None:
    def after(seconds: int, rate: float) -> Forecast | None:
        tracks = Tracks(everyone=False)
        limit = ("cgroup", "/a", "cgroup_limit", 256.0 * MIB)
        for t in range(seconds):
            tracks.take(samples(("cgroup", "/a", "cgroup", 64.0 * MIB + rate * t), limit))
            tracks.add(LiveReading(float(t), 0, {}, (), (), 0, 0))
        return tracks.forecast()

    found = after(121, rate=MIB)
    assert found is not None and found.level_bytes == 184 * MIB and found.limit_bytes == 256 * MIB
    assert found.expected_s == pytest.approx(72, rel=0.02)
    # but not of what does not grow, nor after a few readings
    assert after(121, rate=0) is None and after(20, rate=MIB) is None


# --- what is shown where -------------------------------------------------------------------------------------


class Stream(io.StringIO):
    """A stream that is a terminal, or is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("progress", "terminal", "term", "command", "record", "soak"),
    [
        ("auto", True, "xterm", False, "live", "live"),
        ("auto", True, "xterm", True, "line", "lines"),  # the command has the terminal
        ("auto", True, "dumb", False, "lines", "lines"),
        ("auto", False, "xterm", False, "none", "lines"),
        ("live", True, "xterm", True, "live", "live"),
        ("lines", False, "xterm", False, "lines", "lines"),
        ("none", True, "xterm", False, "none", "none"),
    ],
)
def test_what_is_shown_where(
    monkeypatch: pytest.MonkeyPatch, progress: str, terminal: bool, term: str, command: bool, record: str, soak: str
) -> None:
    monkeypatch.setenv("TERM", term)
    stream = Stream(terminal)
    assert shown_as(progress, stream, command=command) == record
    assert shown_as(progress, stream, command=command, quiet="lines") == soak


@pytest.mark.parametrize("verb", ["record", "soak"])
def test_wrong_progress_is_one_line(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match=r"--progress often: choose auto, live, lines or none"):
        shown_as("often", Stream(True), command=False)
    with pytest.raises(BadInputError, match="--progress live: stderr is no terminal that can show it"):
        shown_as("live", Stream(False), command=False)


# --- a terminal is left as it was, whatever happens ----------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


KEYBOARD = """
import os, sys
from leakscope.cli.keyboard import Keyboard
keyboard = Keyboard(os.open("/dev/tty", os.O_RDONLY))
keyboard.open()
print("listening", keyboard.listening, flush=True)
while (key := keyboard.wait(60)) != "q":
    print("key", key, flush=True)
keyboard.close()
keyboard.close()
print("closed", keyboard.listening, flush=True)
"""


def test_keys_are_read_singly_and_the_modes_are_given_back(terminal: Terminal) -> None:
    before = terminal.modes
    # given a shell, as Ctrl-Z stops nothing that has none
    shell = ["bash", "-m", "-c", '"$@"; read -r -p "in the shell "; fg', "sh", sys.executable, "-c", KEYBOARD]
    program = terminal.start(shell)
    terminal.wait_text("listening True")
    assert terminal.reads_keys
    terminal.press("P")
    terminal.wait_text("key p")
    # then the shell finds the terminal as it was, and keys are read again in the foreground
    terminal.press("\x1a")
    terminal.wait_text("in the shell")
    assert terminal.modes == before
    terminal.press("go\n")
    terminal.wait(lambda lines: terminal.reads_keys)
    terminal.press("P")
    terminal.wait(lambda lines: "\n".join(lines).count("key p") == 2)
    terminal.press("q")
    terminal.wait_text("closed False")
    assert terminal.ended(program) == 0 and terminal.modes == before


def test_in_the_background_the_terminal_is_left_alone(terminal: Terminal) -> None:
    before = terminal.modes
    said = 'print("background", keyboard.in_background, keyboard.listening, flush=True)'
    script = KEYBOARD.replace('print("listening", keyboard.listening, flush=True)', said)
    shell = ["bash", "-m", "-c", '"$@" & read -r -p "in the shell "; kill %1', "sh", sys.executable, "-c", script]
    program = terminal.start(shell)
    terminal.wait_text("background True False")
    assert terminal.modes == before
    terminal.press("\n")
    terminal.ended(program)


def test_without_a_terminal_there_are_no_keys() -> None:
    keyboard = Keyboard(None)
    keyboard.open()
    waiting_thread = threading.Timer(0.1, keyboard.close)
    waiting_thread.start()
    began = time.monotonic()
    assert keyboard.wait(30) == "" and time.monotonic() - began < 20  # closing ends a wait
    assert not keyboard.listening


class Readings:
    """Stands for those of a recording."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.read_in: set[int] = set()

    def read(self, most_sites: int) -> LiveReading:
        self.read_in.add(threading.get_native_id())
        if self.error is not None:
            raise self.error
        return state().reading


def test_a_view_that_fails_ends_alone(terminal: Terminal) -> None:
    before = terminal.modes
    stream = os.fdopen(os.dup(terminal.follower), "w")
    with LiveView("live", stream, "x", Path("x.lscope"), None, everyone=False, command=False) as view:
        view.begin(Readings(ValueError("broken")))  # type: ignore[arg-type]
        recording.until(lambda: view.error is not None)
        view.end()
    assert str(view.error) == "broken" and terminal.modes == before


def whole(lines: list[str], wide: bool) -> bool:
    """Whether the view stands there once, from its first line to its last, and as much of it as fits."""
    there = [sum(text in line for line in lines) for text in ("leakscope record", "response_buf", "ends it; x.lscope")]
    return there == [1, 1, 1] and any("kept" in line for line in lines) == wide


def test_a_window_that_changes_its_size_is_drawn_anew(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.cli.live_view.REFRESH_S", 0.1)
    stream = os.fdopen(os.dup(terminal.follower), "w")
    with LiveView("live", stream, "serve", Path("x.lscope"), None, everyone=False, command=False) as view:
        view.begin(Readings())  # type: ignore[arg-type]
        terminal.wait_text("response_buffer_map")
        for columns, lines, wide in ((44, 9, False), (130, 30, True)):
            terminal.resize(columns, lines)
            terminal.wait(partial(whole, wide=wide), patience_s=20)
    assert not any("leakscope record" in line for line in terminal.look())


def test_the_recorder_does_not_wait_for_a_terminal_that_stands_still(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a terminal whose output was stopped (Ctrl-S): every write to it waits
    monkeypatch.setattr("leakscope.cli.live_view.PATIENCE_S", 0.2)
    before = terminal.modes
    termios.tcflow(terminal.follower, termios.TCOOFF)
    stream = os.fdopen(os.dup(terminal.follower), "w")
    readings = Readings()
    view = LiveView("live", stream, "x", Path("x.lscope"), None, everyone=False, command=False)
    view.begin(readings)  # type: ignore[arg-type]
    recording.until(lambda: readings.read_in)
    time.sleep(0.3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(30)
    view.end()
    signal.alarm(0)
    assert terminal.modes == before and threading.get_native_id() not in readings.read_in
    termios.tcflow(terminal.follower, termios.TCOON)
    terminal.look(0.3)


# --- recordings ----------------------------------------------------------------------------------------------

COUNT = 32
"""Rounds of leak_mmap: 2.0, 1.5 and 2.5 MiB, so that sizes of one decimal are exact."""


class Shown:
    """A recording in a terminal; :meth:`end` ends it by a key or a signal."""

    def __init__(self, path: Path, pid: int, *options: str, verb: str = "record") -> None:
        self.path = path
        self.terminal = Terminal(100, 30)
        self.before = self.terminal.modes
        command = [*LEAKSCOPE, verb, "--loader", recording.LOADER, "-o", str(path), *options, "-p", str(pid)]
        self.process = self.terminal.start(command, {"NO_COLOR": "1"})

    def wait_until_it_shows(self, leaked: dict[str, int]) -> None:
        """Bytes that functions have leaked."""
        self.leaked = leaked
        self.lines = self.terminal.wait(lambda lines: all(self._row(lines, function) for function in leaked))

    def _row(self, lines: list[str], function: str) -> str:
        """The row of a function that has gained all it leaked."""
        gained = f"+{size(self.leaked[function])}"
        return next((row for row in lines if row.startswith(f"host    {function} ") and gained in row), "")

    def row(self, function: str) -> list[str]:
        return self._row(self.lines, function).split()

    def end(self, how: str) -> None:
        """By `q` (after `p`), Ctrl-C or SIGTERM."""
        terminal = self.terminal
        self.keys_were_read = terminal.reads_keys
        if how == "q":
            terminal.press("p")
            terminal.wait_text("PAUSED, the recording goes on")
        if how == "SIGTERM":
            self.process.send_signal(signal.SIGTERM)
        else:
            terminal.press({"Ctrl-C": "\x03"}.get(how, how))
        self.code = terminal.ended(self.process)
        self.after, self.cursor_shown = terminal.modes, terminal.cursor_shown
        self.last = "".join(terminal.look())
        self.written = terminal.written.decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.terminal.close()


HOW = ("q", "Ctrl-C", "SIGTERM")


@pytest.fixture(scope="module")
def runs(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
    """Three recordings of leak_mmap and a soak of it at the same time, each ended in another way."""
    place = tmp_path_factory.mktemp("shown")
    with waiting("leak_mmap", "--count", COUNT) as target, ExitStack() as stack:
        found = {how: Shown(place / f"{how}.lscope", target.pid) for how in HOW}
        found["soak"] = Shown(place / "soak.lscope", target.pid, "--interval", "500ms", verb="soak")
        for run in found.values():
            stack.callback(run.close)
        for run in found.values():
            run.terminal.wait_text("q ends it, p pauses the view")
        leaked = {site["function"]: site["bytes"] for site in target.go()["sites"]}
        for run in found.values():
            run.wait_until_it_shows(leaked)
        for how, run in found.items():
            run.end("q" if how == "soak" else how)
    return found


@pytest.mark.bpf
@pytest.mark.parametrize("how", HOW)
def test_a_recording_shows_who_leaks_and_leaves_the_terminal_as_it_was(runs: dict[str, Shown], how: str) -> None:
    run = runs[how]
    # then the screen had every leaking function, with the bytes that it keeps
    for function, leaked in run.leaked.items():
        layer, name, *_, kept, unit = run.row(function)
        assert (layer, name, f"{kept} {unit}") == ("host", function, size(leaked))
    assert run.keys_were_read and "\x1b[31" not in run.written and "\x1b[1;31" not in run.written  # NO_COLOR
    # and the terminal is what it was, whatever ended it; the view is gone and the summary stands there
    assert run.after == run.before and run.cursor_shown
    assert "p pauses the view" not in run.last and "leakscope attribute" in run.last
    # and a recording that `q` ended is one whose time was up
    assert run.code == (0 if how == "q" else 130)
    assert ("(you ended it)" if how == "q" else "(interrupted)") in run.last
    capture = Capture.open(run.path)
    assert capture.problems == [] and capture.manifest.complete
    with capture.connect() as con:
        kept = con.execute(
            """SELECT sum(CASE WHEN op = 'alloc' THEN size_bytes WHEN alloc_ts_ns > 0 THEN -size_bytes ELSE 0 END)
               FROM mem_events WHERE layer = 'host' AND kind = 'mmap_anon' AND op <> 'advise'"""
        ).fetchone()
    assert kept is not None and kept[0] == sum(run.leaked.values())


@pytest.mark.bpf
def test_a_soak_shows_who_leaks_and_q_ends_it_with_its_report(runs: dict[str, Shown]) -> None:
    run = runs["soak"]
    for function, leaked in run.leaked.items():
        assert " ".join(run.row(function)[-2:]) == size(leaked)
    assert (run.code, run.after) == (0, run.before) and run.cursor_shown
    assert "(you ended it)" in run.last and "p pauses the view" not in run.last
    assert Capture.open(run.path).manifest.complete


@pytest.mark.parametrize("mode", ["stream", "census"])
def test_sites_are_exact_while_the_recording_runs(bpf: str, mode: str, tmp_path: Path) -> None:
    with waiting("leak_mmap", "--count", COUNT + 1) as target:
        reader = subprocess.Popen(
            [sys.executable, str(READER), mode, bpf, str(tmp_path / "run.lscope"), str(target.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        assert reader.stdin and reader.stdout
        try:
            assert json.loads(reader.stdout.readline())["sites"] is not None
            leaked = {site["function"]: site["bytes"] for site in target.go()["sites"]}
            patience = time.monotonic() + 60
            while True:
                reading = json.loads(reader.stdout.readline())
                found = Counter[str]()
                for layer, _, function, _, kept, growth in reading["sites"]:
                    assert 0 < growth <= kept
                    found[function] += kept if layer == "host" else 0
                written = reading["disk"] > 0 or mode == "census"  # which writes more rarely
                if {name: found[name] for name in leaked} == leaked and written:
                    break
                assert time.monotonic() < patience, reading
            # then the layer holds that and no more, beside what the program maps for itself
            assert reading["live_bytes"]["host"] >= sum(leaked.values()) and reading["live_bytes"]["gpu"] == 0
            out, _ = reader.communicate("\n", timeout=60)
        finally:
            if reader.poll() is None:
                reader.kill()
                reader.wait()
    assert json.loads(out.splitlines()[-1]) == {"ended_by": "quit"}


def test_a_command_keeps_its_terminal(bpf: str, terminal: Terminal, tmp_path: Path) -> None:
    # given a command that reads a line from the terminal that both share
    before = terminal.modes
    asking = [sys.executable, "-c", "print('got ' + input('name? '), flush=True)"]
    command = [*LEAKSCOPE, "record", "--loader", bpf, "-o", str(tmp_path / "run.lscope"), "--", *asking]
    process = terminal.start(command)
    terminal.wait_text("name?")
    # then lines are still lines, and q is a letter
    assert terminal.modes == before
    terminal.press("quentin\n")
    terminal.wait_text("got quentin")
    assert terminal.ended(process) == 0 and terminal.modes == before
