"""The pytest plugin: what leaks fails with its chain and its bytes an iteration, to the byte; what does not passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recording import ROOT

from leakscope.errors import BadInputError
from leakscope.model.words import LAYERS
from leakscope.testing.counters import DESCRIPTORS, MAPPED, PYTHON_BLOCKS, THREADS
from leakscope.testing.run import LeakTest
from leakscope.testing.settings import Settings, settings

pytest_plugins = "pytester"

REPEAT, WARM_UP = 8, 2
PLUGIN = ("-p", "leakscope.pytest_plugin")
TESTS = f"""
import mmap, select, socket, pytest
pytestmark = pytest.mark.leakscope(repeat={REPEAT}, warmup={WARM_UP})
kept, cache = [], {{}}

def open_session():
    kept.append(socket.socketpair())

def test_sessions_kept():
    open_session()

def test_maps_and_lists_kept():
    memory = mmap.mmap(-1, 3 * 65536, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[0] = 1
    kept.append(memory)
    kept.append([None] * 4099)

def test_clean(tmp_path):
    a, b = socket.socketpair()
    a.close(), b.close()
    select.epoll().close()
    (tmp_path / "file").write_text("text" * 1000)
    bytearray(1 << 20)
    if len(cache) < 100:
        cache.update({{i: bytearray(1000) for i in range(100)}})

def test_grows_once_beyond_its_budget():
    cache["large"] = cache.get("large") or (bytearray(1 << 21) if len(cache) > 103 else cache.setdefault(len(cache), 0))
test_grows_once_beyond_its_budget = pytest.mark.leakscope(max_growth="1MiB")(test_grows_once_beyond_its_budget)
"""


RUNS = """
import pytest
runs = []
@pytest.mark.leakscope
def test_it():
    runs.append(1)
    assert len(runs) {}
"""


@pytest.fixture
def here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory for tests of pytest that loads this plugin alone, from these sources."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user may write to, and reach: those of tmp_path are pytest's own user's."""
    with tempfile.TemporaryDirectory(prefix="leakscope-open-", dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="module")
def recorded(can_record: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(what pytest printed, judgements by test) of TESTS, each recorded, by two workers of xdist at a time."""
    import os

    place = tmp_path_factory.mktemp("recorded")
    (place / "test_it.py").write_text(TESTS)
    options = ["--leakscope=require", "--leakscope-report=report.json", "-p", "no:cacheprovider", "-p", "xdist", "-n2"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *options], cwd=place, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((place / "report.json").read_text())
    assert report["schema"] == "leakscope-tests/1"
    return done.stdout, {test["test"].split("::")[1]: test for test in report["tests"]}


def of_layer(test: dict[str, Any], layer: str) -> dict[str, Any]:
    """The one finding in a layer."""
    (finding,) = [finding for finding in test["findings"] if finding["layer"] == layer]
    return dict(finding)


@pytest.mark.bpf
class TestRecorded:
    def test_kept_sessions_fail_with_each_kernel_object(self, recorded: tuple[str, dict[str, Any]]) -> None:
        printed, tests = recorded
        test = tests["test_sessions_kept"]
        assert (test["verdict"], test["passed"], test["recorded"]) == ("leak", False, True)
        found = of_layer(test, "kernel")
        # two sockets an iteration, and of each one object in each of its caches
        caches = found["culprit"]["slab_caches"]
        assert "filp" in caches and found["class"] == "descriptor_leak"
        assert found["kept_objects"] == 2 * REPEAT * len(caches)
        assert found["growth"]["per_unit"] == {"unit": "iteration", "bytes": found["kept_bytes"] / REPEAT}
        assert test["counters"]["descriptors"]["per_iteration"] == 2
        assert re.search(
            r"kernel: [\d,]+ bytes in \d+ objects an iteration by open_session \(.*test_it.py:7\)", printed
        )
        assert re.search(r"test_sessions_kept \(.*\) → open_session \(.*\) → socketpair .*→ socketpair → ", printed)

    def test_kept_maps_and_lists_fail_to_the_byte(self, recorded: tuple[str, dict[str, Any]]) -> None:
        printed, tests = recorded
        test = tests["test_maps_and_lists_kept"]
        hosts = [finding for finding in test["findings"] if finding["layer"] == "host"]
        # a list of 4,099 pointers of 8 bytes is a block of malloc of its own; a map has whole pages
        assert sum(finding["growth"]["per_unit"]["bytes"] for finding in hosts) == 3 * 65536 + 8 * 4099
        assert sum(finding["kept_objects"] for finding in hosts) == 2 * REPEAT
        # the objects themselves are small ones of Python: those its own lines tell
        lines = {line["stack"][-1].rpartition(":")[2]: line for line in test["python_lines"]}
        number = 1 + next(i for i, line in enumerate(TESTS.splitlines()) if "[None]" in line)
        assert lines[str(number)]["bytes_per_iteration"] == 8 * 4099 + 56
        assert "kept.append([None] * 4099)" in printed

    def test_what_gives_back_and_fills_a_cache_once_passes(self, recorded: tuple[str, dict[str, Any]]) -> None:
        _, tests = recorded
        assert (tests["test_clean"]["verdict"], tests["test_clean"]["findings"]) == ("not_leak", [])

    def test_growth_that_is_no_leak_fails_beyond_its_budget(self, recorded: tuple[str, dict[str, Any]]) -> None:
        printed, tests = recorded
        test = tests["test_grows_once_beyond_its_budget"]
        assert (test["verdict"], test["over_budget"], test["passed"]) == ("not_leak", True, False)
        assert 1 << 21 <= test["grown_bytes"]["host"] < (1 << 21) + (1 << 20)
        assert "1,048,576 are allowed" in printed
        assert "1 passed" in printed and "3 failed" in printed


def counted(body: Callable[[], object], repeat: int = REPEAT, layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    """The outcome of a body by counters alone."""
    test = LeakTest(Settings(repeat=repeat, warmup=WARM_UP, layers=layers), record=False, reason="not tried")
    for _ in test.iterations():
        body()
    return test.outcome


def test_counters_alone_find_a_map_a_descriptor_and_a_thread_an_iteration_exactly() -> None:
    import mmap
    import os
    import threading

    kept: list[Any] = []
    over = threading.Event()

    def body() -> None:
        kept.append(mmap.mmap(-1, 5 * mmap.PAGESIZE))
        kept.append(os.open("/dev/null", os.O_RDONLY))
        threading.Thread(target=over.wait, daemon=True).start()

    try:
        outcome = counted(body)
    finally:
        over.set()
        for descriptor in kept[1::2]:
            os.close(descriptor)
    assert (outcome["verdict"], outcome["recorded"]) == ("leak", False)
    each = {name: outcome["counters"][name]["per_iteration"] for name in outcome["counters"]}
    assert each[THREADS.name] == 1
    # Python's map of shared memory keeps a duplicate of no descriptor
    assert each[DESCRIPTORS.name] == 1
    assert outcome["counters"][MAPPED.name]["rises"] and each[MAPPED.name] >= 5 * mmap.PAGESIZE
    assert "not recorded, so by counters of this process alone and without chains: not tried" in outcome["text"]


def test_counters_alone_find_one_small_object_an_iteration_and_name_its_line() -> None:
    kept = []
    outcome = counted(lambda: kept.append(object()))
    assert outcome["counters"][PYTHON_BLOCKS.name]["per_iteration"] == 1
    (line,) = outcome["python_lines"]
    assert (line["bytes_per_iteration"], line["blocks_per_iteration"]) == (16, 1)
    assert "kept.append(object())" in outcome["text"]


def test_counters_alone_find_tensors_on_the_device_where_that_layer_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a torch whose device holds 4,096 bytes more after each iteration
    held = [0]
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, memory_allocated=lambda device: held[0])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def body() -> None:
        held[0] += 4096

    outcome = counted(body)
    assert (outcome["verdict"], outcome["counters"]["gpu_torch"]["per_iteration"]) == ("leak", 4096)
    assert "gpu: +4,096 bytes an iteration" in outcome["text"]
    assert counted(body, layers=("host", "kernel"))["verdict"] == "not_leak"


def test_counters_alone_pass_what_gives_back_also_what_waits_for_a_collection(tmp_path: Path) -> None:
    import logging

    def body() -> None:
        cycle: list[Any] = [bytearray(5000)]
        cycle.append(cycle)
        (tmp_path / "file").write_text("text")  # makes names for look-ups, which CPython caches
        logging.getLogger().warning("the runner keeps this record for its report")

    outcome = counted(body, 20)
    assert (outcome["verdict"], outcome["passed"]) == ("not_leak", True), outcome["text"]


def test_a_host_without_the_privilege_says_so_and_judges_by_counters(
    run_as_nobody: Callable[..., subprocess.CompletedProcess[str]], open_to_all: Path
) -> None:
    # given two tests that run as nobody
    (open_to_all / "test_it.py").write_text(
        "import os, pytest\nkept = []\n"
        "@pytest.mark.leakscope(repeat=4, warmup=1)\ndef test_leaks():\n    kept.append(os.open('/dev/null', 0))\n"
        "@pytest.mark.leakscope(repeat=4, warmup=1)\ndef test_clean():\n    pass\n"
    )
    options = [*PLUGIN, "-p", "no:cacheprovider", f"--rootdir={open_to_all}", str(open_to_all)]
    report = open_to_all / "report.json"
    # when they run where nothing may be recorded
    # (the interpreter's own name may lie where nobody can look)
    run = (
        "import os, sys, pytest\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
        "places = (sys.executable, f'/usr/bin/python3.{sys.version_info.minor}')\n"
        "sys.executable = next(place for place in places if os.access(place, os.X_OK))\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = run_as_nobody(["-c", run, *options, f"--leakscope-report={report}"])
    # then the leak is found by its descriptors, and that nothing was recorded is told with the reason
    assert done.returncode == 1, done.stdout + done.stderr
    assert "kernel: +1 descriptors an iteration" in done.stdout, done.stdout
    assert "2 of 2 leak tests were not recorded" in done.stdout and "CAP_BPF" in done.stdout
    tests = {test["test"].split("::")[1]: test for test in json.loads(report.read_text())["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {"test_leaks": "leak", "test_clean": "not_leak"}
    assert not any(test["recorded"] for test in tests.values())
    # and where a recording is required, a clean one fails too
    required = run_as_nobody(["-c", run, *options, "--leakscope=require", "-k", "clean"])
    assert required.returncode == 1 and "no recording, and --leakscope=require" in required.stdout


def test_a_report_that_cannot_be_written_is_said_after_the_summary(here: pytest.Pytester) -> None:
    here.makepyfile("def test_it(): pass")
    result = here.runpytest_inprocess(*PLUGIN, "--leakscope-report=no/such/place.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "1 passed" in result.stdout.str()
    assert "--leakscope-report no/such/place.json: No such file or directory" in result.stderr.str()


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("('1MiB')", "takes no positional arguments, was given '1MiB'"),
        ("(max_grow='1MiB')", "no argument 'max_grow'; there are max_growth, layers, repeat, warmup, malloc"),
        ("(max_growth='lots')", "max_growth='lots': needs a size such as 65536, '64KiB' or '1MiB'"),
        ("(max_growth=-1)", "max_growth=-1: needs a size"),
        ("(layers=['cpu'])", "no layer 'cpu'; the layers are kernel, host, gpu"),
        ("(layers=[])", "layers=[]: needs a list of kernel, host, gpu"),
        ("(repeat=3)", "repeat=3: needs a whole number of at least 4"),
        ("(repeat=True)", "repeat=True: needs a whole number of at least 4"),
        ("(warmup=-1)", "warmup=-1: needs a whole number of at least 0"),
        ("(malloc='yes')", "malloc='yes': needs True or False"),
    ],
)
def test_wrong_marker_arguments_are_said_in_one_line(here: pytest.Pytester, marker: str, said: str) -> None:
    here.makepyfile(f"import pytest\n@pytest.mark.leakscope{marker}\ndef test_it():\n    raise SystemExit\n")
    result = here.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"@pytest.mark.leakscope: *{said.replace('[', '[[]')}*"])


def test_methods_of_unittest_are_refused(here: pytest.Pytester) -> None:
    here.makepyfile(
        "import pytest, unittest\nclass TestIt(unittest.TestCase):\n"
        "    @pytest.mark.leakscope\n    def test_it(self):\n        raise SystemExit\n"
    )
    result = here.runpytest_inprocess(*PLUGIN)
    assert "not for unittest.TestCase" in result.stdout.str()
    assert result.ret == 1


def test_off_runs_the_test_once_and_the_ini_file_is_read(here: pytest.Pytester) -> None:
    here.makepyfile(RUNS.format("== 1"))
    here.runpytest_inprocess(*PLUGIN, "--leakscope=off", "--strict-markers").assert_outcomes(passed=1)
    here.makeini("[pytest]\nleakscope = maybe\n")
    result = here.runpytest_inprocess(*PLUGIN)
    assert "leakscope = maybe: choose off, auto, require" in result.stderr.str()
    here.makeini("[pytest]\nleakscope_repeat = many\n")
    assert "repeat='many': needs a whole number" in here.runpytest_inprocess(*PLUGIN).stdout.str()


def test_markers_of_a_module_hold_where_the_function_says_nothing() -> None:
    assert settings({"repeat": 7, "max_growth": "64KiB", "layers": "host"}) == Settings(7, 5, 65536, ("host",))
    assert not settings({"layers": ["kernel"]}).heap
    with pytest.raises(BadInputError, match="no argument 'budget'"):
        settings({"budget": 1})


def test_a_test_that_fails_says_in_which_iteration(here: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.testing.run.Recording", _refuse)
    here.makepyfile(RUNS.format("< 4"))
    result = here.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 4 < 4*", "*raised in iteration 4*"])


def test_a_coroutine_function_is_awaited_once_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from leakscope.testing.repeat import repeated

    runs: list[int] = []

    async def body(value: int) -> int:
        await asyncio.sleep(0)
        runs.append(value)
        return value

    test = LeakTest(Settings(repeat=4, warmup=1), record=False)
    wrapped = repeated(body, test)
    assert asyncio.iscoroutinefunction(wrapped)
    with ThreadPoolExecutor(1) as apart:  # a thread of its own: a browser's event loop may run in this one
        assert apart.submit(asyncio.run, wrapped(3)).result() == 3
    assert len(runs) >= 5 and set(runs) == {3}


def test_the_plugin_is_registered_and_imports_nothing_that_is_slow() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"leakscope": "leakscope.pytest_plugin"}
    code = (
        "import sys, pytest; known = set(sys.modules); import leakscope.pytest_plugin; print(*set(sys.modules) - known)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"leakscope", "leakscope.pytest_plugin"}


def test_judging_loads_neither_pandas_nor_numpy_into_the_process_under_test() -> None:
    code = (
        "import sys\nfrom leakscope.testing.run import LeakTest\nfrom leakscope.testing.settings import Settings\n"
        "test = LeakTest(Settings(repeat=4, warmup=0), record=False)\nfor _ in test.iterations(): pass\n"
        "print(test.outcome['verdict'], *{'numpy', 'pandas', 'duckdb', 'pyarrow', 'rich', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["not_leak"]


def _refuse(*_: object) -> None:
    from leakscope.testing.recorder import NotRecording

    raise NotRecording("not here")
