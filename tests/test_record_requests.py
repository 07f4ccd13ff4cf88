"""Commands that end, and requests that cannot be met: what record says, and what it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording import ROOT, Recorder, Recording, record, waiting

from leakscope.errors import ExitCode

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root (mount, other users)")


# --- targets that end ---------------------------------------------------------------------------------------


@dataclass
class InTurn:
    """Three recordings into the same path, one after another, and what was there after the first and second."""

    first: Recording
    failed: Recording
    last: Recording
    contents: list[dict[str, bytes]]


@pytest.fixture(scope="module")
def in_turn(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> InTurn:
    """A target that dies at once; then, with --force, one that cannot be recorded; then one that talks and fails."""
    path = tmp_path_factory.mktemp("turn") / "x.lscope"

    def contents() -> dict[str, bytes]:
        return {str(part.relative_to(path)): part.read_bytes() for part in path.rglob("*") if part.is_file()}

    first = record(path, ["/bin/true"])
    rows = "SELECT role, name, exit_ns > start_ns FROM processes"
    assert first.rows(rows) == [("root", "true", True)], first.stderr  # read before it is replaced
    left = [contents()]
    failed = record(path, ["/bin/true"], "--force", "--library", "/bin/true")
    left.append(contents())
    last = record(path, ["/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 7"], "--force")
    return InTurn(first, failed, last, left)


@pytest.mark.bpf
def test_a_target_that_dies_at_once_is_a_recording_like_any_other(in_turn: InTurn) -> None:
    first = in_turn.first
    assert (first.code, first.stdout) == (ExitCode.DONE, "")
    assert first.capture.problems == []
    price, *lines = [line for line in first.stderr.splitlines() if "warning: another recorder" not in line]
    assert price.startswith("leakscope: price: about ")
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
def test_a_process_that_is_killed_ends_its_recording(bpf: str, tmp_path: Path) -> None:
    with waiting("leak_eventfd") as target, Recorder(tmp_path / "x.lscope", "-p", target.pid) as recorder:
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
def refused(bpf: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Recording]]:
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
        name: ["record", "-o", str(outputs[name]), *(str(word).format(place=place) for word in arguments)]
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
    # (that a command cannot be executed is known only once all is attached, and the price was told)
    told = [line for line in result.stderr.splitlines() if not line.startswith("leakscope: price: ")]
    assert (result.code, result.stdout, told) == (ExitCode.BAD_INPUT, "", [f"leakscope: {message}"])
    assert len(result.stderr.splitlines()) == (2 if name == "no_interpreter" else 1)
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
