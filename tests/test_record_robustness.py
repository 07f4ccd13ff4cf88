"""What record leaves behind when it is interrupted, killed, out of disk, or asked for the impossible."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording import LEAKSCOPE, LOADER, ROOT, Recorder, Recording, build_programs, record, reports, sample, waiting

from leakscope.capture import Capture
from leakscope.errors import ExitCode

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root (mount, other users)")


@pytest.fixture(scope="module")
def quick(bpf: None) -> tuple[str, ...]:
    """Options for what is the same with both loaders: built programs start sooner, by a compilation."""
    if LOADER != "auto" or not shutil.which("clang"):
        return ()
    build_programs()
    return ("--loader", "core")


PROMPT_S = 2.0
"""How long Ctrl-C may take to give the prompt back."""


def process_state(pid: int) -> str:
    """One letter as in ps(1); empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]


def until(condition: Callable[[], object], patience_s: float = 60) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def stacks_that_do_not_resolve(recording: Recording) -> int:
    """Stacks that events name and the capture does not hold."""
    return int(
        recording.rows(
            """SELECT count(*) FROM (SELECT user_stack AS id FROM mem_events UNION SELECT kernel_stack FROM mem_events)
               WHERE id <> 0 AND id NOT IN (SELECT id FROM stacks)"""
        )[0][0]
    )


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
def pair(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Pair:
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
def test_a_signal_while_probes_are_attached_leaves_nothing(quick: tuple[str, ...], tmp_path: Path, number: int) -> None:
    path, ran = tmp_path / "early.lscope", tmp_path / "ran"
    with Recorder(path, *quick, "--", "/usr/bin/touch", ran) as recorder:
        until(path.exists)
        recorder.signal(number)
        result = recorder.result()
    # then the command was never started, and no empty capture is in the way of the next try
    assert (result.code, result.stderr) == (ExitCode.INTERRUPTED, "leakscope: interrupted\n")
    assert not path.exists() and not ran.exists()


@pytest.mark.bpf
def test_ctrl_c_ends_a_command_that_does_not_want_to_end(quick: tuple[str, ...], tmp_path: Path) -> None:
    # given a command that ignores SIGINT and SIGTERM
    command = ["/bin/sh", "-c", "trap '' INT TERM; echo ready; while :; do /bin/true; done"]
    with Recorder(tmp_path / "x.lscope", *quick, "--", *command) as recorder:
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
def killed(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Killed]:
    """Three recorders of one program that leaks steadily, killed at random moments."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments = sorted(random.Random(seed).uniform(0.0, 2.0) for _ in range(3))
    place = tmp_path_factory.mktemp("killed")
    with waiting("leak_eventfd", "--count", 1_000_000, "--churn", 1, "--pause-us", 1000) as target:
        recorders = [
            Recorder(place / f"{index}.lscope", "-p", target.pid, "--flush", FLUSH_S, *quick)
            for index in range(len(moments))
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
def test_a_running_command_outlives_a_killed_recorder(quick: tuple[str, ...], tmp_path: Path) -> None:
    # given a recorder that is killed while its command runs
    path = tmp_path / "x.lscope"
    command = sample("leak_eventfd", "--count", 701, "--churn", 0, "--pause-us", 1000)
    with Recorder(path, *quick, "--", *command) as recorder:
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
def test_a_command_that_was_not_started_ends_with_a_killed_recorder(quick: tuple[str, ...], tmp_path: Path) -> None:
    path, ran = tmp_path / "x.lscope", tmp_path / "ran"
    with Recorder(path, *quick, "--", "/usr/bin/touch", ran) as recorder:
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


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@root_only
@pytest.mark.bpf
def test_a_full_disk_is_told_in_one_line_and_costs_nothing_before_it(
    quick: tuple[str, ...], small_disk: Path, tmp_path: Path
) -> None:
    path = small_disk / "x.lscope"
    with Recorder(
        path, "--flush", 0.2, *quick, "--", *sample("churn_epoll", "--count", 100_000_000, "--pause-us", 0)
    ) as run:
        # Its streams lie beside the capture; nothing is written to them before the end.
        run.wait_ready()
        pid = Capture.open(path).manifest.sources[0].scope["command_pid"]
        result = run.result()
    assert result.code == ExitCode.OUTPUT_INCOMPLETE
    (line,) = result.stderr.splitlines()
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


# --- targets that end ---------------------------------------------------------------------------------------


@dataclass
class InTurn:
    """Three recordings into the same path, one after another, and what was there after the first and second."""

    first: Recording
    failed: Recording
    last: Recording
    contents: list[dict[str, bytes]]


@pytest.fixture(scope="module")
def in_turn(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> InTurn:
    """A target that dies at once; then, with --force, one that cannot be recorded; then one that talks and fails."""
    path = tmp_path_factory.mktemp("turn") / "x.lscope"

    def contents() -> dict[str, bytes]:
        return {str(part.relative_to(path)): part.read_bytes() for part in path.rglob("*") if part.is_file()}

    first = record(path, ["/bin/true"], *quick)
    rows = "SELECT role, name, exit_ns > start_ns FROM processes"
    assert first.rows(rows) == [("root", "true", True)], first.stderr  # read before it is replaced
    left = [contents()]
    failed = record(path, ["/bin/true"], *quick, "--force", "--library", "/bin/true")
    left.append(contents())
    last = record(path, ["/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 7"], *quick, "--force")
    return InTurn(first, failed, last, left)


@pytest.mark.bpf
def test_a_target_that_dies_at_once_is_a_recording_like_any_other(in_turn: InTurn) -> None:
    first = in_turn.first
    assert (first.code, first.stdout) == (ExitCode.DONE, "")
    assert first.capture.problems == []
    lines = [line for line in first.stderr.splitlines() if "warning: another recorder" not in line]
    assert lines[0].startswith("leakscope: recorded ") and lines[0].endswith(f"(the target ended) into {first.path}")
    assert lines[1] == "leakscope: the command ended with exit status 0"
    assert lines[-1] == f"leakscope: next: leakscope attribute {first.path}"


@pytest.mark.bpf
def test_streams_and_status_are_the_commands_own(in_turn: InTurn) -> None:
    # given a command that writes on both streams and fails
    result = in_turn.last
    # then record itself succeeds, its own text is on stderr alone, and the status is kept
    assert (result.code, result.stdout) == (ExitCode.DONE, "to stdout\n")
    foreign = [line for line in result.stderr.splitlines() if not line.startswith("leakscope: ")]
    assert foreign == ["to stderr"]
    assert "leakscope: the command ended with exit status 7\n" in result.stderr
    assert result.capture.manifest.sources[0].exit_status == 7


@pytest.mark.bpf
def test_force_replaces_a_capture_only_once_the_new_one_begins(in_turn: InTurn) -> None:
    # given a capture, and a recording in its place that could not begin
    assert in_turn.failed.code == ExitCode.BAD_INPUT
    # then the old one is still there, to the byte
    assert in_turn.contents[0] == in_turn.contents[1]
    # and one that did begin has taken its place
    assert in_turn.last.capture.problems == []
    assert [entry.name for entry in in_turn.last.path.parent.iterdir() if entry.is_dir()] == ["x.lscope"]


@pytest.mark.bpf
def test_a_process_that_is_killed_ends_its_recording(quick: tuple[str, ...], tmp_path: Path) -> None:
    with waiting("leak_eventfd") as target, Recorder(tmp_path / "x.lscope", *quick, "-p", target.pid) as recorder:
        recorder.wait_ready()
        target.end()
        result = recorder.result()
    assert result.code == ExitCode.DONE, result.stderr
    assert "(the target ended) into" in result.stderr
    assert result.rows("SELECT pid, role, exit_ns > 0 FROM processes") == [(target.pid, "root", True)]


# --- requests that cannot be met ----------------------------------------------------------------------------

NO_SUCH_PID = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
REFUSED = {
    "pid": (["-p", NO_SUCH_PID], f"no process {NO_SUCH_PID}; list the candidates with: pgrep -a PROGRAM"),
    "command": (
        ["--", "no-such-program"],
        "no-such-program: no such program to record; check the name and PATH",
    ),
    "no_interpreter": (["--", "{place}/not-a-program"], "{place}/not-a-program: cannot be executed: Exec format error"),
    "cgroup": (
        ["--cgroup", "/no/such"],
        "/no/such: no such cgroup; give its directory, e.g. /sys/fs/cgroup/system.slice/vllm.service",
    ),
    "ring": (["--ring", "5000", "--", "true"], "--ring 5000: needs a power of two from 4KiB to 2GiB, such as 64MiB"),
    "stacks": (["--stacks", "some", "--", "true"], "--stacks some: choose none, sampled or all"),
    "loader": (["--loader", "other", "--", "true"], "--loader other: choose auto, bcc, core"),
    "library": (
        ["--library", "{place}/not-a-program", "--", "true"],
        "{place}/not-a-program: no CUDA function to probe in this file",
    ),
    "exists": (["--", "true"], "{output}: exists already; choose another name, or --force to replace it"),
    "foreign": (
        ["--force", "--", "true"],
        "{output}: holds thesis.txt, which leakscope did not write; --force does not delete it",
    ),
    "file": (["--force", "--", "true"], "{output}: exists and is not a leakscope capture; --force does not replace it"),
    "no_folder": (["--", "true"], "{output}: cannot make the capture: No such file or directory"),
}  # fmt: skip
LEAVES_THINGS = {"exists", "foreign", "file"}
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from leakscope.cli.main import main
told = {}
for name, arguments in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    told[name] = int(code), out.getvalue(), err.getvalue()
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def refused(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Recording]]:
    """What every request of REFUSED gets for an answer."""
    place = tmp_path_factory.mktemp("refused")
    (place / "not-a-program").write_text("no program")
    (place / "not-a-program").chmod(0o755)
    for name in ("exists", "foreign"):
        (place / f"{name}.lscope").mkdir()
    (place / "foreign.lscope" / "thesis.txt").write_text("all of it")
    (place / "file.lscope").write_text("all of it")
    outputs = {name: place / f"{name}.lscope" for name in REFUSED}
    outputs["no_folder"] = place / "no" / "such.lscope"
    asked = {
        name: ["record", "-o", str(outputs[name]), *quick, *(str(word).format(place=place) for word in arguments)]
        for name, (arguments, _) in REFUSED.items()
    }
    # one after another in one process, which saves its start-up
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER], cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: (outputs[name], Recording(outputs[name], *told)) for name, told in json.loads(done.stdout).items()}


@pytest.mark.bpf
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_told_in_one_line(refused: dict[str, tuple[Path, Recording]], name: str) -> None:
    output, result = refused[name]
    message = REFUSED[name][1].format(place=output.parent, output=output)
    assert (result.code, result.stdout, result.stderr) == (ExitCode.BAD_INPUT, "", f"leakscope: {message}\n")
    # nothing is made, and nothing is touched
    if name not in LEAVES_THINGS:
        assert not output.exists()
    left = sorted(path.name for path in output.parent.glob(f".{output.name}*"))
    assert left == []
    if name == "foreign":
        assert (output / "thesis.txt").read_text() == "all of it"
    if name == "file":
        assert output.read_text() == "all of it"


@root_only
def test_without_the_privilege_nothing_is_made_and_the_remedy_is_told(
    run_as_nobody: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    open_to_all = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    open_to_all.chmod(0o777)
    try:
        told = run_as_nobody(["-m", "leakscope", "record", "-o", str(open_to_all / "x.lscope"), "--", "true"])
        assert (told.returncode, told.stdout) == (ExitCode.NOT_CAPABLE, "")
        (line,) = told.stderr.splitlines()
        assert line.startswith("leakscope: cannot record: BPF privilege is missing: no CAP_BPF and no CAP_PERFMON; ")
        assert line.endswith(
            '; run: sudo "$(command -v leakscope)" record …; leakscope doctor shows everything'
        )  # fmt: skip
        assert list(open_to_all.iterdir()) == []
    finally:
        open_to_all.rmdir()
