"""What is being freed while a recording ends does not look kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recording import Recorder

CHURN = """
import socket
print("ready", flush=True)
while True:
    for end in socket.socketpair():
        end.close()
"""


@pytest.mark.bpf
def test_objects_that_rcu_is_about_to_free_are_not_kept(bpf: str, tmp_path: Path) -> None:
    # given a process that does nothing but make and close pairs of sockets, whose inodes are freed by RCU
    churn = subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE, text=True)
    try:
        assert churn.stdout and churn.stdout.readline() == "ready\n"
        # when the recording of it ends in the midst of that
        with Recorder(tmp_path / "churn.lscope", "--stacks", "none", "--duration", "1", "-p", churn.pid) as recorder:
            recording = recorder.result()
    finally:
        churn.kill()
        churn.wait()
    assert recording.code == 0, recording.stderr
    allocated, live = recording.rows(
        """SELECT count(*) FILTER (sign > 0), sum(sign)::BIGINT FROM events
           WHERE pid = ? AND slab_cache = 'sock_inode_cache'""",
        churn.pid,
    )[0]
    # then of thousands of inodes that pair alone is live which was open, and those whose free was not seen
    assert allocated > 1000
    assert 0 <= live <= 2 + recording.losses("recursion_miss") + recording.losses("ring_drop"), allocated
