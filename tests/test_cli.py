"""The command line itself: help without loading anything, one line for an error, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from capture_rows import small_capture

from leakscope import errors
from leakscope.cli import main as cli
from leakscope.report.text import printable

ROOT = Path(__file__).resolve().parent.parent


def leakscope(*args: object, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leakscope", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_help_lists_every_verb_and_every_exit_code() -> None:
    for args in (["--help"], ["-h"]):
        done = leakscope(*args)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        for name, verb in cli.VERBS.items():
            assert [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"  {name} ")] == [verb.help]
        for code in errors.ExitCode:
            assert any(line.split()[:1] == [str(code.value)] for line in lines), code
        assert "\x1b" not in done.stdout


def test_help_loads_nothing_heavy() -> None:
    """Start-up stays under 0.3 s because of what is not loaded; the clock itself is no test."""
    code = """
import sys
from leakscope.cli.main import main
main(["--help"])
heavy = {"pyarrow", "duckdb", "numpy", "pandas", "scipy", "networkx", "rich", "bcc", "pynvml"}
loaded = sorted(heavy & sys.modules.keys())
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_of_a_verb_is_its_own() -> None:
    for verb, option in (("query", "--max-rows"), ("pack", "--output"), ("unpack", "--max-bytes")):
        done = leakscope(verb, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: leakscope {verb} ") and option in done.stdout


def test_version() -> None:
    done = leakscope("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "leakscope 0.1.0\n", "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "Missing command. See 'leakscope --help'."),
        (["quer"], "No such command 'quer'"),
        (["query"], "See 'leakscope query --help'."),
        (
            ["query", "x", "SELECT 1", "--nonsense"],
            "--nonsense",
        ),
        (["query", "x", "SELECT 1", "--max-rows", "many"], "'--max-rows'"),
        (["query", "/nowhere\x1b[2J", "SELECT 1"], "/nowhere\\x1b[2J: no such capture"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args: list[str], says: str) -> None:
    done = leakscope(*args)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("leakscope: ") and says in done.stderr
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


def test_a_reader_that_has_enough_is_no_error_message(tmp_path: Path) -> None:
    # given a query whose output is far larger than a pipe
    path = small_capture(tmp_path / "a.lscope")
    command = [sys.executable, "-m", "leakscope", "query", str(path), "SELECT * FROM range(1000000)"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # when its reader leaves after the first line
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"range\n"
    process.stdout.close()
    # then nothing is said, and the exit code is that of an incomplete output
    assert process.stderr.read() == b""
    assert process.wait() == 5


SAMPLE = ROOT / "samples" / "ci" / "captures" / "refactored.lscope.tar"


@pytest.mark.parametrize("arguments", [("cache", "keys"), ("check", SAMPLE), ("attribute", SAMPLE, "--exit-code")])
def test_no_report_that_nobody_reads_is_taken_for_a_leak(arguments: tuple[object, ...]) -> None:
    # given a reader that has left before anything is printed
    reader, pipe = os.pipe()
    os.close(reader)
    # then the exit code is not 1, which would be a leak
    done = leakscope(*arguments, stdout=pipe)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (5, "")


def test_an_output_that_is_full_is_exit_5(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")
    full = os.open("/dev/full", os.O_WRONLY)

    done = leakscope("query", path, "SELECT 1", stdout=full)

    assert (done.returncode, done.stderr) == (5, "leakscope: output: No space left on device\n")


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (errors.BadInputError("pid 7: no such process"), 2, "pid 7: no such process"),
        (errors.NotCapableError("no BTF"), 4, "no BTF"),
        (errors.OutputIncompleteError("disk full"), 5, "disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/a\nb"), 2, "/a\\nb: Permission denied"),
        (
            ZeroDivisionError("by zero"),
            2,
            "a bug in leakscope, please report it with LEAKSCOPE_DEBUG=1: ZeroDivisionError: by zero",
        ),
    ],
)
def test_what_a_verb_raises_becomes_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    says: str,
) -> None:
    def verb() -> None:
        raise raised

    monkeypatch.setattr(cli, "_load", lambda module, name: verb)
    monkeypatch.delenv("LEAKSCOPE_DEBUG", raising=False)

    assert cli.main(["doctor"]) == code
    assert capsys.readouterr() == ("", f"leakscope: {says}\n")


def test_what_a_verb_returns_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda module, name: lambda: errors.ExitCode.INCONCLUSIVE)

    assert cli.main(["attribute"]) == 3


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def verb() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_load", lambda module, name: verb)
    monkeypatch.setenv("LEAKSCOPE_DEBUG", "1")

    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_printable_leaves_text_alone_and_shows_what_a_terminal_would_obey() -> None:
    assert printable("/tmp/größe 日本.lscope") == "/tmp/größe 日本.lscope"
    assert printable("a\x1b]0;x\x07\n\r\t\x9b\u202e\udcff") == "a\\x1b]0;x\\x07\\n\\r\\t\\x9b\\u202e\\udcff"
