"""The recorder's own memory: what it frees in a census goes back to the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest
from recording import ROOT

SCRIPT = """
import ctypes
from leakscope.record.memory import give_large_blocks_back
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
RAISE, LARGE = 8 << 20, 2 << 20
if {bounded}:
    give_large_blocks_back()
libc.free(libc.malloc(RAISE))  # glibc from now on puts blocks up to this size into the heap
block = libc.malloc(LARGE)
mapped = next(line for line in open("/proc/self/maps") if int(line.split("-")[0], 16) <= block
              < int(line.split("-")[1].split()[0], 16))
print("[heap]" in mapped)
"""


@pytest.mark.parametrize("bounded", [False, True])
def test_large_blocks_lie_in_the_heap_only_where_nothing_was_said(bounded: bool) -> None:
    if not sys.platform.startswith("linux") or not hasattr(__import__("ctypes").CDLL(None), "gnu_get_libc_version"):
        pytest.skip("NOT TESTED: malloc is not glibc's")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(bounded=bounded)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{not bounded}\n"
