"""The machine that the figures hold for."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

_TOOLS = {
    "bpftrace": ["bpftrace", "--version"],
    "clang": ["clang", "--version"],
    "gcc": ["gcc", "--version"],
    "bcc": ["dpkg-query", "--showformat=${Version}", "--show", "python3-bpfcc"],
    "memleak-bpfcc": ["dpkg-query", "--showformat=${Version}", "--show", "bpfcc-tools"],
}


def machine_facts() -> dict[str, str]:
    """Kernel, processors, memory, load and the versions of the tools that took part; '' where not installed."""
    import duckdb
    import numpy
    import pyarrow

    from leakscope import __version__

    processor = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} x {processor[1] if processor else platform.machine()}",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "load average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "leakscope": __version__,
        "Python": platform.python_version(),
        "numpy": numpy.__version__,
        "pyarrow": pyarrow.__version__,
        "duckdb": duckdb.__version__,
        **{tool: _version(command) for tool, command in _TOOLS.items()},
    }


def _version(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"v?(\d+\.\d[\w.+~-]*)", done.stdout)
    return found[1] if done.returncode == 0 and found else ""
