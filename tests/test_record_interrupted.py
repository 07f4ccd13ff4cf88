"""What record leaves behind when it is interrupted, killed, or out of disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording import (
    LEAKSCOPE,
    ROOT,
    Recorder,
    Recording,
    process_state,
    reports,
    sample,
    stacks_that_do_not_resolve,
    until,
    waiting,
)  # fmt: skip
from small_disk import small_disk

from leakscope.capture import Capture
from leakscope.errors import ExitCode

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root (mount, other users)")

PROMPT_S = 2.0
"""How long Ctrl-C may take to give the prompt back."""


# --- signals, and two recorders at a time ------------------------------------------------------------------


@dataclass
class Interrupted:
    """A recording that was ended by a signal, and how long that took."""

    number: int
    recording: Recording
    seconds: float


@dataclass
class Pair:
    """Two recordings of one CUDA program at the same time, the later one first to end."""

    report: dict
    pid: int
    pids: list[int]
    ended: list[Interrupted]


@pytest.fixture(scope="module")
def pair(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two recorders attached to one program with CUDA; one gets Ctrl-C, the other SIGTERM."""
    place = tmp_path_factory.mktemp("pair")
    with waiting("cuda_leak", "--count", 13, "--churn", 1, "--failing", 0, "--pause-us", 0) as target:
        with (
            Recorder(place / "first.lscope", "-p", target.pid) as first,
            Recorder(place / "second.lscope", "-p", target.pid) as second,
        ):
            first.wait_ready()
            second.wait_ready()
            report = target.go()
            ended = []
            for recorder, number in ((second, signal.SIGINT), (first, signal.SIGTERM)):
                sent = time.monotonic()
                recorder.signal(number)
                result = recorder.result()
                ended.append(Interrupted(number, result, time.monotonic() - sent))
            assert process_state(target.pid) in "SR"
        return Pair(report, target.pid, [first.process.pid, second.process.pid], ended)


both = pytest.mark.parametrize("which", [0, 1], ids=["SIGINT", "SIGTERM"])


@pytest.mark.bpf
@both
def test_a_signal_ends_it_promptly_with_all_cuda_probes_attached(pair: Pair, which: int) -> None:
    ended = pair.ended[which]
    attached = {Path(path).name: count for path, count in ended.recording.facts["functions_attached"].items()}
    assert attached.keys() == {"libcuda.so.1", "libcudart.so.12"} and min(attached.values()) > 20
    assert ended.recording.code == ExitCode.INTERRUPTED, ended.recording.stderr
    assert ended.seconds <= PROMPT_S
    assert "(interrupted) into" in ended.recording.stderr


@pytest.mark.bpf
@both
def test_what_was_recorded_before_a_signal_is_whole(pair: Pair, which: int) -> None:
    recording = pair.ended[which].recording
    assert recording.capture.problems == [] and recording.capture.manifest.complete
    assert stacks_that_do_not_resolve(recording) == 0
    # the last thing that the target did before the signal is there, and each of two recorders saw all
    live = recording.live("layer", "pid = ? AND layer = 'gpu' AND kind NOT IN ('ipc')", pair.pid)
    leaked = pair.report["leaked"]["gpu"]
    assert live == {"gpu": (leaked["objects"], leaked["bytes"])}
    assert recording.rows("SELECT pid, role, exit_ns FROM processes") == [(pair.pid, "root", 0)]


@pytest.mark.bpf
def test_the_second_recorder_of_a_host_warns(pair: Pair) -> None:
    # given two that ran at the same time (others of this host may have run, too)
    warnings = [
        line for ended in pair.ended for line in ended.recording.stderr.splitlines() if "another recorder" in line
    ]
    assert warnings
    for warning in warnings:
        assert warning.startswith("leakscope: warning: another recorder (PID ")
        assert warning.endswith(
            ") runs on this host; both see each other's cost, and their slow-downs add up"
        )  # fmt: skip


@pytest.mark.bpf
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_probes_are_attached_leaves_nothing(bpf: str, tmp_path: Path, number: int) -> None:
    path, ran = tmp_path / "early.lscope", tmp_path / "ran"
    with Recorder(path, "--", "/usr/bin/touch", ran) as recorder:
        until(path.exists)
        recorder.signal(number)
        result = recorder.result()
    # then the command was never started, and no empty capture is in the way of the next try
    assert (result.code, result.stderr) == (ExitCode.INTERRUPTED, "leakscope: interrupted\n")
    assert not path.exists() and not ran.exists()


@pytest.mark.bpf
def test_ctrl_c_ends_a_command_that_does_not_want_to_end(bpf: str, tmp_path: Path) -> None:
    # given a command that ignores SIGINT and SIGTERM
    command = ["/bin/sh", "-c", "trap '' INT TERM; echo ready; while :; do /bin/true; done"]
    with Recorder(tmp_path / "x.lscope", "--", *command) as recorder:
        until(lambda: Path(f"{tmp_path}/x.lscope.stdout").read_text() == "ready\n")
        result = recorder.stop()
    assert result.code == ExitCode.INTERRUPTED, result.stderr
    assert "leakscope: the command ended with signal 9\n" in result.stderr
    assert result.capture.problems == []
    assert result.capture.manifest.sources[0].exit_status == -signal.SIGKILL
    # its children were followed to the last
    assert result.rows(
        "SELECT count(*) > 10 FROM processes WHERE role = 'child' AND name = 'true' AND exit_ns > 0"
    ) == [(True,)]


# --- kill -9 -----------------------------------------------------------------------------------------------

FLUSH_S = 0.5
SLACK_S = 1.5
"""For a busy host: draining, decoding and writing of the last part that was due."""


@dataclass
class Killed:
    """A recorder that was killed: when (CLOCK_MONOTONIC), and what it left."""

    at_ns: int
    recording: Recording


@pytest.fixture(scope="module")
def killed(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> list[Killed]:
    """Three recorders of one program that leaks steadily, killed at random moments."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments = sorted(random.Random(seed).uniform(0.0, 2.0) for _ in range(3))
    place = tmp_path_factory.mktemp("killed")
    with waiting("leak_eventfd", "--count", 1_000_000, "--churn", 1, "--pause-us", 1000) as target:
        recorders = [
            Recorder(place / f"{index}.lscope", "-p", target.pid, "--flush", FLUSH_S) for index in range(len(moments))
        ]
        try:
            for recorder in recorders:
                recorder.wait_ready()
            assert target.process.stdin
            target.process.stdin.write("\n")
            target.process.stdin.flush()
            found, began = [], time.monotonic()
            for recorder, moment in zip(recorders, moments, strict=True):
                time.sleep(max(0.0, began + 2 * FLUSH_S + moment - time.monotonic()))
                recorder.signal(signal.SIGKILL)
                found.append(Killed(time.monotonic_ns(), recorder.result()))
        finally:
            for recorder in recorders:
                recorder.__exit__()
    return found


@pytest.mark.bpf
@pytest.mark.parametrize("which", range(3))
def test_kill_9_costs_no_more_than_the_last_interval(killed: list[Killed], which: int) -> None:
    at_ns, recording = killed[which].at_ns, killed[which].recording
    assert recording.code == -signal.SIGKILL
    # then the capture reads, says what it is, and every part in it is whole
    assert recording.capture.problems == [
        "the capture is incomplete: its writer was stopped before it could finish"
    ]  # fmt: skip
    assert not recording.capture.manifest.complete
    # and holds everything up to the last interval, with the stacks that it names
    last_ns = recording.rows("SELECT max(ts_ns) FROM mem_events WHERE layer = 'kernel'")[0][0]
    assert 0 < (at_ns - last_ns) / 1e9 <= FLUSH_S + SLACK_S
    assert stacks_that_do_not_resolve(recording) == 0
    # without holes: the leaker takes one file a millisecond, and never as long as half a second for one
    files = "SELECT ts_ns FROM mem_events WHERE slab_cache = 'filp' AND op = 'alloc'"
    widest = recording.rows(
        f"SELECT max(gap) FROM (SELECT ts_ns - lag(ts_ns) OVER (ORDER BY ts_ns) gap FROM ({files}))"
    )
    assert widest[0][0] < 0.5e9


@pytest.mark.bpf
def test_what_kill_9_leaves_is_attributed_with_a_warning(killed: list[Killed]) -> None:
    path = killed[-1].recording.path
    done = subprocess.run([*LEAKSCOPE, "attribute", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "subscribe_and_forget" in done.stdout
    assert "incomplete" in done.stdout + done.stderr


@pytest.mark.bpf
def test_a_running_command_outlives_a_killed_recorder(bpf: str, tmp_path: Path) -> None:
    # given a recorder that is killed while its command runs
    path = tmp_path / "x.lscope"
    command = sample("leak_eventfd", "--count", 701, "--churn", 0, "--pause-us", 1000)
    with Recorder(path, "--", *command) as recorder:
        recorder.wait_ready()
        pid = Capture.open(path).manifest.sources[0].scope["command_pid"]
        until(lambda: Path(f"/proc/{pid}/comm").read_text() == "leak_eventfd\n")
        recorder.signal(signal.SIGKILL)
        assert reports(Path(f"{path}.stdout").read_text()) == {}
        # then the command goes on undisturbed, ends by itself, and leaves no process
        until(lambda: process_state(pid) in ("", "Z"))
    report = reports(Path(f"{path}.stdout").read_text())["leak_eventfd"]
    assert report["leaked"]["kernel"]["objects"] == 701


@pytest.mark.bpf
def test_a_command_that_was_not_started_ends_with_a_killed_recorder(bpf: str, tmp_path: Path) -> None:
    path, ran = tmp_path / "x.lscope", tmp_path / "ran"
    with Recorder(path, "--", "/usr/bin/touch", ran) as recorder:
        until(path.exists)
        pid = Capture.open(path).manifest.sources[0].scope["command_pid"]
        recorder.signal(signal.SIGKILL)
        recorder.process.wait()
    until(lambda: process_state(pid) in ("", "Z"))
    assert not ran.exists()
    # what is there reads as what it is
    assert Capture.open(path).problems == ["the capture is incomplete: its writer was stopped before it could finish"]
    assert Capture.open(path).rows("mem_events") == 0


# --- disk full ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path / "disk", "2m") as place:
        yield place


@root_only
@pytest.mark.bpf
def test_a_full_disk_is_told_in_one_line_and_costs_nothing_before_it(bpf: str, disk: Path, tmp_path: Path) -> None:
    path = disk / "x.lscope"
    command = sample("churn_epoll", "--count", 100_000_000, "--pause-us", 0)
    with Recorder(path, "--flush", 0.2, "--", *command, streams=tmp_path) as run:
        run.wait_ready()
        pid = Capture.open(path).manifest.sources[0].scope["command_pid"]
        result = run.result()
    assert result.code == ExitCode.OUTPUT_INCOMPLETE
    price, line = result.stderr.splitlines()
    assert price.startswith("leakscope: price: ")
    assert line.startswith(f"leakscope: {path}/")
    assert line.endswith(
        "could not be written: No space left on device; the capture reads up to here and says that it is incomplete"
    )
    (problem,) = result.capture.problems
    assert problem.startswith("the capture is incomplete: ")
    assert problem.endswith("could not be written: No space left on device")
    assert result.capture.rows("mem_events") > 50_000
    assert stacks_that_do_not_resolve(result) == 0
    # and the command does not run on unseen
    until(lambda: process_state(pid) in ("", "Z"))
