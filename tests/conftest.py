"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import recording
from browser import browser as browser  # a fixture
from browser import chromium_program as chromium_program
from recording import ROOT, build_programs, build_samples

if TYPE_CHECKING:
    from planted import Planted

for of_a_terminal in ("COLUMNS", "LINES"):  # pytest-xdist gives its processes 80 x 24; there is none
    os.environ.pop(of_a_terminal, None)

REQUIRE_BPF = "LEAKSCOPE_REQUIRE_BPF"
NOBODY = 65534


@pytest.fixture(scope="session")
def samples() -> None:
    """The sample programs are built."""
    build_samples()


def _cannot(what: str) -> NoReturn:
    """Skip, loudly; fail where LEAKSCOPE_REQUIRE_BPF=1 or CI=true."""
    reason = f"NOT TESTED: {what}; {REQUIRE_BPF}=1 makes this a failure"
    if os.environ.get(REQUIRE_BPF) == "1" or os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def can_record(samples: None) -> None:
    """This host can record with real probes; the loader is the test's own affair.

    A test that needs them is skipped where it cannot, and fails instead when LEAKSCOPE_REQUIRE_BPF=1 or CI=true.
    """
    from leakscope.errors import NotCapableError
    from leakscope.record.capabilities import require_capable

    try:
        require_capable()
    except NotCapableError as error:
        _cannot(f"no real probes on this host ({error})")


@pytest.fixture(scope="session")
def core(samples: None) -> None:
    """The object of the loader `core` is built from the sources as they are, which takes clang."""
    if not shutil.which("clang"):
        _cannot("no clang to build bpf_programs with")
    build_programs()


@pytest.fixture(scope="session", params=recording.LOADERS)
def bpf(request: pytest.FixtureRequest, can_record: None) -> str:
    """Record with real probes, once with each loader: a test that asks for this, or whose fixtures do, runs twice.

    Recordings made through recording.py take the loader from here. LEAKSCOPE_TEST_LOADER is core, bcc or both; without
    it bcc records in the modules of BOTH_LOADERS alone. A loader that this host lacks is skipped, and fails instead
    when LEAKSCOPE_REQUIRE_BPF=1 or CI=true.
    """
    from leakscope.errors import NotCapableError
    from leakscope.record.bcc_location import import_bcc

    loader: str = request.param
    if loader == "core":
        request.getfixturevalue("core")
    else:
        try:
            import_bcc()
        except NotCapableError as error:
            _cannot(str(error))
    recording.LOADER = loader
    return loader


def _by_bcc(item: pytest.Item) -> bool:
    return getattr(item, "callspec", None) is not None and item.callspec.params.get("bpf") == "bcc"


@pytest.fixture(scope="module", name="run")
def planted_run() -> Planted:
    """The planted run of planted.py."""
    from planted import planted

    return planted()


@pytest.fixture(scope="module", name="recording")
def planted_recording(run: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its recording."""
    from planted import write_recording

    return write_recording(tmp_path_factory.mktemp("planted") / "run.lscope", run)


@pytest.fixture(scope="module")
def leaky() -> Path:
    """What vLLM published while three requests were never freed (kv_recorded.py)."""
    from kv_recorded import recorded

    return recorded()


@pytest.fixture(scope="module")
def pinned() -> set[str]:
    """The blocks that are pinned in it."""
    from kv_recorded import truly_pinned

    return truly_pinned()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens captures for joins (planted.Opened) until the test ends."""
    from planted import Opened

    with ExitStack() as stack:
        yield lambda *paths: Opened(stack, paths)


BOTH_LOADERS = {"test_loader", "test_record_kernel", "test_record_maps", "test_record_python"}
"""Modules whose recordings are made with bcc too in every run: one for each group of probes. bcc compiles for seconds
at each recording, so the others are left out unless LEAKSCOPE_TEST_LOADER=both (`make test-both`)."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """No test records without saying so: the marker and the fixtures go together. Leaves out most recordings by bcc."""
    if not os.environ.get("LEAKSCOPE_TEST_LOADER"):
        wanted = [item for item in items if not _by_bcc(item) or item.path.stem in BOTH_LOADERS]
        left_out = [item for item in items if item not in set(wanted)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = wanted
    for item in items:
        names = getattr(item, "fixturenames", ())
        if item.get_closest_marker("bpf") and not {"bpf", "can_record"} & set(names):
            raise pytest.UsageError(f"{item.nodeid}: marked bpf, but asks for neither of the fixtures bpf, can_record")
        if "bpf" in names:
            item.add_marker("bpf")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes (`pytest -n`), the modules that record stay in one of them, one after
    another, and each other module in one. (`--dist loadgroup` of pytest-xdist 3.8 groups nothing under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByRecording(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::", 1)[0]
            return "recording" if _records(config.rootpath / module) else module

    return ByRecording(config, log)


@cache
def _records(module: Path) -> bool:
    return bool(re.search(r"\b(bpf|can_record)\b", module.read_text()))


@pytest.fixture(scope="session")
def run_as_nobody() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python as nobody, with capabilities in the words of setpriv(1).

    The interpreter of the tests may live where nobody cannot read; the system's of the same version then
    serves.
    """
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv(1)")
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    same_version = f"/usr/bin/python3.{sys.version_info.minor}"
    for python in (sys.executable, same_version):
        paths = os.pathsep.join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))])

        def run_python(
            arguments: list[str], granted: str = "-all", python: str = python, paths: str = paths
        ) -> subprocess.CompletedProcess[str]:
            grants = [f"--inh-caps={granted}", f"--ambient-caps={granted}"]
            return subprocess.run(
                [*as_nobody, *grants, python, *arguments],
                capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=60,
            )  # fmt: skip

        if run_python(["-c", "import leakscope, typer, rich"]).returncode == 0:
            return run_python
    pytest.skip("no interpreter that nobody can run has the packages of these tests")
