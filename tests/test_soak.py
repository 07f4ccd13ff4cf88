"""Soak without probes: replays of 72 hours, the screen, resuming, whom to follow, and what cannot be."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from capture_rows import small_capture
from series import autoregressive
from synthetic import SyntheticCapture

from leakscope.capture import Capture
from leakscope.cli.main import main
from leakscope.detect.recorded import Life
from leakscope.model.forecast import Forecast
from leakscope.model.results import Growth, Verdict
from leakscope.model.soak import CounterState, Happening, Look, SoakState
from leakscope.record.successors import Identity, find_successors
from leakscope.report.live.course import sparkline
from leakscope.report.soak import SoakScreen, clock, duration
from leakscope.soak.watch import Plan, Watch

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
GIB = 1 << 30
HOUR = 3600.0


def write_service(path: Path, rate_mib_h: float, hours: float = 72, seed: int = 11) -> Path:
    """A service of 256 MiB read each 30 s: start-up of minutes, noise of 1 %, its group's figure and limit."""
    rng = np.random.default_rng(seed)
    t = np.arange(0.0, hours * HOUR, 30.0)
    noise = autoregressive(rng, len(t), 0.5, 2.5 * MIB)
    rss = 256 * MIB - 16 * MIB * np.exp(-t / 600) + noise + rate_mib_h * MIB * t / HOUR
    columns = {
        "t_s": t, "rss_bytes": rss, "cgroup_bytes": rss + 50 * MIB, "cgroup_limit_bytes": np.full(len(t), 8.0 * GIB)
    }  # fmt: skip
    rows = np.stack(list(columns.values()), axis=1)
    np.savetxt(path, rows, fmt="%.0f", delimiter=",", header=",".join(columns), comments="")
    return path


def replayed(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict, str]:
    assert main(["soak", "--replay", str(path), "--json", *options]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


# --- replays


def test_a_leak_of_48_6_mib_an_hour_is_found_within_12_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given 8,640 readings of three days, in seconds
    report, err = replayed(write_service(tmp_path / "leak.csv", 48.6), capsys, "--look", "3h")
    soak = report["soak"]
    # then a look within 12 hours alarms, and no look takes it back
    assert soak["first_alarm_s"] <= 12 * HOUR
    assert all(look["alarm"] for look in soak["looks"] if look["elapsed_s"] >= soak["first_alarm_s"])
    assert [look["elapsed_s"] for look in soak["looks"]] == [HOUR * hour for hour in range(3, 72, 3)]
    # and the looks never spend more than 5 % together
    assert sum(look["alpha"] for look in soak["looks"]) <= 0.05
    # and the verdict at the end has the rate, the forecast and the calibration
    assert report["verdict"]["verdict"] == "leak"
    assert report["verdict"]["growth"]["bytes_per_s"] == pytest.approx(48.6 * MIB / HOUR, rel=0.05)
    left = 7.75 * GIB - 50 * MIB - 48.6 * 71 * MIB
    assert soak["forecast"]["counter"] == "cgroup"
    assert soak["forecast"]["expected_s"] == pytest.approx(left / (48.6 * MIB / HOUR), rel=0.1)
    assert [row["dimension"] for row in report["calibration"]] == ["rss"]
    assert err.count("ALARM") >= 1 and "reaches 8.0 GiB in" in err


def test_a_service_that_is_clean_raises_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, err = replayed(write_service(tmp_path / "clean.csv", 0), capsys, "--look", "3h")
    soak = report["soak"]
    assert len(soak["looks"]) == 23 and not any(look["alarm"] for look in soak["looks"])
    assert (soak["first_alarm_s"], soak["forecast"], report["verdict"]["verdict"]) == (None, None, "not_leak")
    assert "ALARM" not in err


def test_a_replay_names_what_it_replayed_and_keeps_it_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_service(tmp_path / "short.csv", 0, hours=1)
    report, _ = replayed(path, capsys, "-o", str(tmp_path / "kept.lscope"))
    assert report["inputs"][0]["path"] == str(path) and report["soak"]["target"] == "short.csv"
    assert Capture.open(tmp_path / "kept.lscope").rows("samples") == 3 * 120
    # and text says how it went in a few lines
    assert main(["soak", "--replay", str(tmp_path / "kept.lscope")]) == 0
    assert capsys.readouterr().out.split("the soak\n")[1] == "  60 min of kept.lscope (the last reading)\n"


def test_time_is_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_service(tmp_path / "short.csv", 0, hours=2)
    scaled, _ = replayed(path, capsys, "--time-scale", "100000", "--look", "30m")
    fast, _ = replayed(path, capsys, "--look", "30m")
    # then the looks are those of a replay as fast as it goes: they belong to the readings, not to the clock
    assert scaled["soak"]["looks"] == fast["soak"]["looks"] and len(fast["soak"]["looks"]) == 3


def test_a_recording_is_replayed_with_its_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # given two hours of a process, and two of one that took its place
    capture = SyntheticCapture(4 * HOUR)
    capture.process(7, exit_s=2 * HOUR)
    capture.process(9, start_s=2 * HOUR + 5)
    for at in range(0, 4 * 3600, 60):
        pid = 7 if at < 2 * HOUR else 9
        capture.sample(at, "rss", 100.0 * MIB + at % 7 * 1000, "process", str(pid))
    report, err = replayed(capture.write(tmp_path / "run.lscope"), capsys, "--limit", "1GiB")
    soak = report["soak"]
    # then the looks are of both, judged as two lives of one service
    assert [look["elapsed_s"] for look in soak["looks"]] == [HOUR, 2 * HOUR, 3 * HOUR]
    assert (soak["sources"], soak["generations"], soak["ended_by"]) == (1, 2, "end")
    assert "[02:00:05] the target was started again: p9 (PID 9)" in err
    assert report["verdict"]["verdict"] == "not_leak"


def test_a_look_sees_nothing_that_came_later() -> None:
    # given readings of ten hours that leak from the fifth on, at once and hour by hour
    t = np.arange(0.0, 10 * HOUR, 30.0)
    value = 1e9 + 1e6 * np.random.default_rng(4).normal(size=len(t)) + 200 * MIB * np.maximum(0, t - 5 * HOUR) / HOUR
    at_once, by_hour = (Watch(Plan("x", "x", 72 * HOUR)) for _ in range(2))
    from leakscope.detect.recorded import Readings

    at_once.load(Readings({("service", "", "rss"): (t, value)}), [])
    at_once.advance(10 * HOUR)
    for hour in range(10):
        part = (t >= hour * HOUR) & (t < (hour + 1) * HOUR)
        by_hour.load(Readings({("service", "", "rss"): (t[part], value[part])}), [])
        by_hour.advance((hour + 1) * HOUR - 1)
    by_hour.advance(10 * HOUR)
    # then they are the same looks: a recorder that was killed and goes on stands where it stood
    assert [look.to_json() for look in at_once.looks] == [look.to_json() for look in by_hour.looks]
    assert len(at_once.looks) == 10 and at_once.first_alarm_s is not None


# --- what is read and who it is of


def test_restarts_are_told_with_name_and_pid() -> None:
    watch = Watch(Plan("PID 7", "x", 100.0))
    watch.load(*_two_lives())
    (restart,) = watch.restarts()
    assert restart == Happening(55.0, "target", "the target was started again: serve (PID 9)")
    assert watch.state(100.0).generations == 2


def _two_lives():  # type: ignore[no-untyped-def]
    from leakscope.detect.recorded import Readings

    first, second = np.arange(0.0, 50.0), np.arange(56.0, 100.0)
    series = {("process", "7", "rss"): (first, first * 1e6), ("process", "9", "rss"): (second, second * 1e6)}
    return Readings(series), [Life(7, "serve", -3.0, 50.0), Life(9, "serve", 55.0)]


def fake_process(proc: Path, pid: int, arguments: str, parent: int = 1, exe: str = "/usr/bin/python3") -> None:
    place = proc / str(pid)
    place.mkdir(parents=True)
    (place / "cmdline").write_bytes(arguments.replace(" ", "\0").encode() + b"\0")
    (place / "comm").write_text(exe.rsplit("/", 1)[1] + "\n")
    (place / "exe").symlink_to(exe)
    (place / "stat").write_text(f"{pid} (a b) c) S {parent} 0 0\n")


def test_who_follows_a_process_that_ended(tmp_path: Path) -> None:
    # given a server, its worker of the same arguments, one with another port, another program, and a known one
    fake_process(tmp_path, 50, "python3 serve.py --port 1", parent=1)
    fake_process(tmp_path, 51, "python3 serve.py --port 1", parent=50)
    fake_process(tmp_path, 52, "python3 serve.py --port 2")
    fake_process(tmp_path, 53, "python3 other.py --port 1")
    fake_process(tmp_path, 54, "python3 serve.py --port 1")
    fake_process(tmp_path, 55, "python3")
    (tmp_path / "self").mkdir()
    ended = Identity("/usr/bin/python3", (b"python3", b"serve.py", b"--port", b"1"), "python3")
    # then the server and the one of the same script follow; no worker, nor what is known to be another
    assert find_successors(ended, lambda pid: pid == 54, tmp_path) == [50, 52]
    assert find_successors(Identity("/usr/bin/python3", (b"python3",), "python3"), lambda pid: False, tmp_path) == [55]


def test_a_program_that_was_upgraded_is_known_again() -> None:
    old = Identity("/opt/v1/serve", (b"/opt/v1/serve", b"--all"), "serve")
    assert Identity("/opt/v2/serve", (b"/opt/v2/serve", b"--all"), "serve").succeeds(old)
    assert not Identity("/opt/v2/serve", (b"/opt/v2/serve", b"--one"), "serve").succeeds(old)


# --- the screen


def state(**more: object) -> SoakState:
    verdict = Verdict("leak", "retained_growth", growth=Growth("rss_bytes", 10.0 * MIB, 5.0 * MIB, 20.0 * MIB))
    given: dict = {
        "counters": (CounterState("rss_bytes", 2.0 * GIB, True, 30.0 * MIB, (1.0, 2.0, 4.0)),),
        "processes": 2, "looks": 5, "look": Look(5 * HOUR, 0.001, verdict, True, 3 * HOUR, 9.0, 3.0),
        "forecast": Forecast("rss", 2 * GIB, 4 * GIB, 3 * HOUR, 2 * HOUR, None),
        "happenings": (Happening(4 * HOUR, "target", "the target started again: \x1b[2Jevil (PID 9)"),),
    }  # fmt: skip
    return SoakState("serve.py", "run.lscope", 5 * HOUR + 60, 72 * HOUR, **{**given, **more})


def test_without_a_terminal_there_are_lines_and_each_is_told_once() -> None:
    stream = io.StringIO()
    with SoakScreen(stream) as screen:
        screen.update(state())
        screen.update(state())
    lines = stream.getvalue().splitlines()
    assert lines == [
        "leakscope: [04:00:00] the target started again: \\x1b[2Jevil (PID 9)",
        "leakscope: [05:00:00] look 5: ALARM  LEAK (retained_growth): rss_bytes 10.0 MiB/s, since the look at 3.0 h",
        "leakscope: [05:00:00] rss 2.0 GiB reaches 4.0 GiB in 3.0 h if growth goes on (2.0 h … never)",
        "leakscope: [05:01:00] 2 processes  rss_bytes 2.0 GiB",
    ]


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_there_is_one_screen(no_color: bool) -> None:
    script = (
        "import sys; sys.path[:0] = ['tests']\n"
        "from test_soak import state; from leakscope.report.soak import SoakScreen\n"
        "with SoakScreen(sys.stdout) as screen: screen.update(state()); screen.update(state())\n"
    )
    import pty

    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **({"NO_COLOR": "1"} if no_color else {})}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=follower, cwd=ROOT, env=environment)
    os.close(follower)
    text = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        text += chunk
    assert process.wait() == 0
    shown = text.decode()
    assert "05:01:00 of 72:00:00" in shown and "▁▃█" in shown and "2 processes  alive" in shown
    assert "\x1b[2Jevil" not in shown and "\\x1b[2Jevil" in shown
    assert ("\x1b[1;31m" in shown) != no_color  # the alarm in red, or in no colour


def test_small_words() -> None:
    assert [duration(s) for s in (59, 600, 36_000, 400_000)] == ["59 s", "10 min", "10.0 h", "4.6 d"]
    assert (clock(259_199), sparkline([1, 1]), sparkline([])) == ("71:59:59", "▁▁", "")


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time-scale", "10"], "--time-scale: time can be scaled with --replay alone"),
        (["--replay", "nowhere.csv"], "--replay nowhere.csv: no such file or capture"),
        (["--replay", "x", "-p", "1"], "--replay: watches what is there; leave -p, --cgroup and -- CMD out"),
        (["--duration", "3 days"], "--duration 3 days: needs a time"),
        (["--restart", "sometimes", "--", "true"], "--restart sometimes: choose no, on-failure or always"),
        (["--limit", "lots"], "--limit lots: needs a size"),
    ],
)
def test_wrong_usage_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", *options]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_capture_without_counters_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_capture(tmp_path / "run.lscope")
    assert main(["soak", "--replay", str(path)]) == 2
    assert f"{path}: no counters over time in it to replay" in capsys.readouterr().err
