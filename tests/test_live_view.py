"""The live view of record and soak: what it draws, of what, and where."""

from __future__ import annotations

import io
from dataclasses import replace

import pyarrow as pa
import pytest
from rich.console import Console

from leakscope.cli.live_tracks import Tracks
from leakscope.cli.live_view import shown_as
from leakscope.cli.main import main
from leakscope.model.forecast import Forecast
from leakscope.model.live import GrowingSite, LiveFrame, LiveReading, LiveState, Track
from leakscope.model.recording import Loss
from leakscope.model.soak import CounterState, Happening, SoakState
from leakscope.model.tables import SAMPLES
from leakscope.report.live.names import SiteNames, leaders
from leakscope.report.live.view import live_view, report_line
from leakscope.report.soak import soak_view

GIB, MIB = 1 << 30, 1 << 20


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
        ("auto", True, "xterm", True, "none", "lines"),  # the terminal is the command's
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
def test_wrong_progress_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for progress, said in (
        ("often", "--progress often: choose auto, live, lines or none"),
        ("live", "--progress live: stderr is no terminal that can show it; use --progress lines"),
    ):
        assert main([verb, "--progress", progress]) == 2
        assert capsys.readouterr().err == f"leakscope: {said}\n"
