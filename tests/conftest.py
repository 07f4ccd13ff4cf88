"""Fixtures that several test modules share."""

from __future__ import annotations

import os

import pytest
from recording import build_samples

REQUIRE_BPF = "LEAKSCOPE_REQUIRE_BPF"


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
