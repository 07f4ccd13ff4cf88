"""``leakscope query``: exact values in every output form, one line for an error, and nothing but reading."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from capture_rows import manifest, rows, small_capture

from leakscope.capture import CaptureWriter
from leakscope.cli.main import main
from tests.synthetic import SyntheticCapture
from tests.test_attribute import MAP

ROOT = Path(__file__).resolve().parent.parent


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def leakscope(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``leakscope`` in this process with its output in a pipe, as far as it can tell."""

    def run(*args: object) -> Done:
        code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("query") / "a.lscope"
    writer = CaptureWriter.create(path, manifest())
    writer.write(
        "mem_events",
        rows(
            "mem_events",
            3,
            ts_ns=[1, 2, 9_223_372_036_854_775_807],
            addr=[0, 18_446_744_073_709_551_615, 4096],
            size_bytes=[64, 64, 9_007_199_254_740_993],
            kind=["kmalloc", "kmalloc", "device"],
        ),
    )
    nan = float("nan")
    writer.write("samples", rows("samples", 3, ts_ns=[1, 2, 3], value=[1.5, nan, float("inf")]))
    writer.write("frames", rows("frames", 2, id=[1, 2], function=["a\tb\\c\n", '\x1b[31mred, "x"']))
    writer.finish()
    return path


def test_json_keeps_integers_exact_and_has_null_for_what_json_lacks(leakscope: Run, capture: Path) -> None:
    sql = """SELECT m.ts_ns, addr, size_bytes, sum(size_bytes) OVER () AS total, value, NULL AS nothing
             FROM mem_events m POSITIONAL JOIN samples ORDER BY m.ts_ns"""

    done = leakscope("query", capture, sql, "--json")

    total = 9_007_199_254_741_121  # a double would say …120
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [
        {"ts_ns": 1, "addr": 0, "size_bytes": 64, "total": total, "value": 1.5, "nothing": None},
        {"ts_ns": 2, "addr": 2**64 - 1, "size_bytes": 64, "total": total, "value": None, "nothing": None},
        {
            "ts_ns": 2**63 - 1,
            "addr": 4096,
            "size_bytes": 9_007_199_254_740_993,
            "total": total,
            "value": None,
            "nothing": None,
        },
    ]


def test_json_of_other_types_and_of_equal_names(leakscope: Run, capture: Path) -> None:
    sql = """SELECT 1 AS a, 2 AS a, 0.25 AS d, true AS b, '\\xDE\\xAD'::BLOB AS raw, [1, 2] AS l,
             {'k': 'v'} AS s, TIMESTAMP '2024-01-02 03:04:05.000006' AS t, DATE '2024-01-02' AS day,
             170141183460469231731687303715884105727 AS huge"""

    done = leakscope("query", capture, sql, "--json")

    assert json.loads(done.stdout) == [
        {
            "a": 1,
            "a_1": 2,
            "d": 0.25,
            "b": True,
            "raw": "dead",
            "l": [1, 2],
            "s": {"k": "v"},
            "t": "2024-01-02T03:04:05.000006",
            "day": "2024-01-02",
            "huge": 2**127 - 1,
        }
    ]


def test_no_rows_are_an_empty_array_or_a_header_alone(leakscope: Run, capture: Path) -> None:
    assert leakscope("query", capture, "SELECT id, api FROM calls", "--json").stdout == "[]\n"
    assert leakscope("query", capture, "SELECT id, api FROM calls", "--csv").stdout == "id,api\n"
    assert leakscope("query", capture, "SELECT id, api FROM calls").stdout == "id\tapi\n"


def test_a_pipe_gets_one_line_a_row_and_tabs_only_between_values(leakscope: Run, capture: Path) -> None:
    done = leakscope("query", capture, "SELECT id, function, NULL AS n FROM frames ORDER BY id")

    assert done.stdout == 'id\tfunction\tn\n1\ta\\tb\\\\c\\n\t\n2\t\\x1b[31mred, "x"\t\n'


def test_csv_reads_back(leakscope: Run, capture: Path) -> None:
    done = leakscope("query", capture, "SELECT id, function FROM frames ORDER BY id", "--csv")

    assert list(csv.reader(io.StringIO(done.stdout))) == [
        ["id", "function"],
        ["1", "a\tb\\c\n"],
        ["2", '\x1b[31mred, "x"'],
    ]


def on_a_terminal(*args: object) -> str:
    """What ``leakscope`` shows on a terminal without colours."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
    command = [sys.executable, "-m", "leakscope", *map(str, args)]
    subprocess.run(command, cwd=ROOT, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # how Linux says that the other side of a terminal is closed
        pass
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_a_table_with_escapes_made_harmless(capture: Path) -> None:
    shown = on_a_terminal("query", capture, "SELECT id, function FROM frames ORDER BY id")

    assert [line.rstrip() for line in shown.splitlines()] == [
        "id  function",
        " 1  a\\tb\\c\\n",
        ' 2  \\x1b[31mred, "x"',
        "2 rows",
    ]


def test_a_terminal_gets_the_first_rows_and_is_told_that_there_are_more(capture: Path) -> None:
    shown = on_a_terminal("query", capture, "SELECT * FROM range(5) t(i)", "--max-rows", 2)

    assert [line.strip() for line in shown.splitlines()] == [
        "i",
        "0",
        "1",
        "2 rows; there are more: --max-rows 0 shows all, --csv and --json print all",
    ]


def test_csv_on_a_terminal_is_made_harmless_too(capture: Path) -> None:
    shown = on_a_terminal("query", capture, "SELECT function FROM frames WHERE id = 2", "--csv")

    assert shown == 'function\n"\\x1b[31mred, ""x"""\n'


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT nonsense FROM calls", 'Referenced column "nonsense" not found'),
        ("SELEC", "syntax error"),
        ("SELECT CAST('a' AS INT)", "Could not convert string 'a' to INT32"),
        ("SELECT error('x' || chr(27) || chr(10) || 'y')", "x\\x1b"),
        ("SELECT * FROM read_csv('/etc/passwd')", "file system operations are disabled"),
        ("", "a query is one SELECT"),
        ("SELECT 1; SELECT 2", "a query is one SELECT"),
        ("COPY (SELECT 1) TO '/tmp/x'", "a query is one SELECT"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/x'", "a query is one SELECT"),
        ("CREATE TABLE t AS SELECT 1", "a query is one SELECT"),
        ("SET threads = 1", "a query is one SELECT"),
        ("ATTACH '/tmp/x.db'", "a query is one SELECT"),
    ],
)
def test_wrong_or_writing_sql_is_one_line_and_exit_2(leakscope: Run, capture: Path, sql: str, says: str) -> None:
    done = leakscope("query", capture, sql)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("leakscope: ") and says in done.stderr
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


def test_an_error_in_the_middle_of_the_rows_is_exit_2(leakscope: Run, capture: Path) -> None:
    sql = "SELECT CASE WHEN i = 99999 THEN error('late') ELSE i END AS i FROM range(100000) t(i)"

    done = leakscope("query", capture, sql)

    assert done.returncode == 2
    assert done.stderr == "leakscope: query: Invalid Input Error: late\n"


def test_json_and_csv_exclude_each_other(leakscope: Run, capture: Path) -> None:
    done = leakscope("query", capture, "SELECT 1", "--json", "--csv")

    assert (done.returncode, done.stderr) == (2, "leakscope: query: --json and --csv exclude each other\n")


def test_what_is_missing_from_a_capture_is_said_on_stderr(leakscope: Run, tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")
    (path / "losses" / "part-000001.parquet").write_bytes(b"PAR1")

    done = leakscope("query", path, "SELECT count(*) AS n FROM losses", "--json")

    assert (done.returncode, json.loads(done.stdout)) == (0, [{"n": 0}])
    damaged = "losses/part-000001.parquet: left out: damaged (its checksum is not the manifest's)"
    assert done.stderr == f"leakscope: warning: {damaged}\n"


AS_NOBODY = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("bcc", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from leakscope.cli.main import main
from tests.synthetic import SyntheticCapture
from tests.test_attribute import MAP
sys.exit(main())
"""


NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}


def interpreter_of_nobody() -> str:
    """A Python of this version that ``nobody`` may start; the one that runs the tests may be root's own."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import json"], capture_output=True, **NOBODY).returncode == 0:
                return python
    pytest.skip("no Python of this version that an ordinary user may start")


def test_reading_needs_neither_root_nor_bcc() -> None:
    """attribute, query, pack and unpack as ``nobody``, where importing bcc or pynvml fails."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    python = interpreter_of_nobody()
    packages = Path(pa.__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        # given a capture of root's, which all may read, and a folder of nobody's own
        Path(folder).chmod(0o755)
        path = small_capture(Path(folder) / "a.lscope")
        own = Path(folder) / "own"
        own.mkdir()
        shutil.chown(own, 65534, 65534)

        def as_nobody(*args: object) -> str:
            done = subprocess.run(
                [python, "-c", AS_NOBODY, *map(str, args)],
                cwd=own,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{packages}", "HOME": "/nonexistent"},
                capture_output=True,
                text=True,
                **NOBODY,
            )
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            return done.stdout

        sql = "SELECT sum(size_bytes) AS bytes FROM mem_events"
        # when nobody queries it, packs it, queries the pack and unpacks it, then all of it works
        assert as_nobody("query", path, sql, "--json") == '[\n{"bytes": 308}\n]\n'
        assert as_nobody("pack", path) == "a.lscope.tar\n"
        assert as_nobody("query", "a.lscope.tar", sql, "--json") == '[\n{"bytes": 308}\n]\n'
        assert as_nobody("unpack", "a.lscope.tar") == "a.lscope\n"
        assert as_nobody("query", "a.lscope", sql, "--json") == '[\n{"bytes": 308}\n]\n'
        # and a leak is attributed to the byte
        leak = SyntheticCapture(10)
        leak.process()
        leak.leak(100, 256, user=("main", "forget"), **MAP)
        report = json.loads(as_nobody("attribute", leak.write(Path(folder) / "leak.lscope"), "--json"))
        assert (report["verdict"]["verdict"], report["verdict"]["culprit"]["frame"]) == ("leak", "forget")
        assert [(site["live_objects"], site["live_bytes"]) for site in report["sites"]] == [(100, 25600)]
        assert (own / "a.lscope").stat().st_uid == 65534
