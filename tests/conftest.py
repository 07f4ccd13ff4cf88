"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from recording import ROOT, build_programs, build_samples

REQUIRE_BPF = "LEAKSCOPE_REQUIRE_BPF"
REQUIRE_CORE = "LEAKSCOPE_REQUIRE_CORE"
NOBODY = 65534


@pytest.fixture(scope="session")
def samples() -> None:
    """The sample programs are built."""
    build_samples()


@pytest.fixture(scope="session")
def bpf(samples: None) -> None:
    """This host can record with real probes.

    A test that needs them is skipped where it cannot, and fails instead when LEAKSCOPE_REQUIRE_BPF=1 or CI=true.
    """
    from leakscope.errors import NotCapableError
    from leakscope.record.capabilities import require_capable

    try:
        require_capable()
    except NotCapableError as error:
        reason = f"NOT TESTED: no real probes on this host ({error}); {REQUIRE_BPF}=1 makes this a failure"
        if os.environ.get(REQUIRE_BPF) == "1" or os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def core() -> None:
    """The object of the loader `core` is built from the sources as they are.

    Skipped where there is no clang; LEAKSCOPE_REQUIRE_CORE=1 or CI=true makes that a failure.
    """
    if not shutil.which("clang"):
        reason = f"NOT TESTED: no clang to build bpf_programs with; {REQUIRE_CORE}=1 makes this a failure"
        if os.environ.get(REQUIRE_CORE) == "1" or os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    build_programs()


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
