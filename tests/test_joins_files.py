"""Every real report beside a recording that has nothing to do with it: attributed, nothing joined, all of it said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from synthetic import SyntheticCapture
from test_joins_report import attributed

DATA = os.environ.get("LEAKSCOPE_TEST_DATA")
KINDS = ("ncu_rep", "nsys", "torch_snapshot", "ncu_csv")
FILES = sorted(path for kind in KINDS for path in Path(DATA, kind).iterdir()) if DATA else []
PID, KEPT, BYTES = 4242, 40, 1 << 20

pytestmark = pytest.mark.skipif(
    not FILES, reason="NOT TESTED: real reports; set LEAKSCOPE_TEST_DATA to their folder"
)  # fmt: skip


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds of a process that keeps device memory."""
    capture = SyntheticCapture(seconds=10.0)
    capture.process(PID)
    for i in range(KEPT):
        call = capture.call("cudaMalloc", 0.1 + i * 0.2, 0.1001 + i * 0.2, pid=PID)
        capture.alloc(
            0.1001 + i * 0.2, BYTES, layer="gpu", kind="device", api="cudaMalloc", user=["main", "kv_append"], pid=PID,
            call_id=call,
        )  # fmt: skip
    return capture.write(tmp_path_factory.mktemp("small") / "small.lscope")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_foreign_report_changes_nothing(recording: Path, path: Path) -> None:
    report = attributed(recording, path)
    # the recording is judged as without it
    of_recording = [layer for layer in report["layers"] if layer["source"] == 0]
    assert [(layer["layer"], layer["live_bytes"]) for layer in of_recording] == [("gpu", KEPT * BYTES)]
    # the file was read
    (read,) = (i for i in report["inputs"] if i["path"] == str(path))
    assert read["rows"] or read["findings"]
    # and nothing of it is joined, for a reason
    assert [join for join in report["joins"] if join["matched"]] == []
    told = [join for join in report["joins"] if path.name in join["left"]]
    assert all(join["refused"] and join["reasons"] and not join["ambiguous"] for join in told)
    assert bool(told) == bool(read["rows"].keys() & {"mem_events", "calls", "kernel_profiles", "segments"})
    assert not [link for chain in report["chains"] for link in chain["links"] if path.name in link["name"]]
