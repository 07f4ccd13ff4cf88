"""The demo: record a service that leaks in three layers, attribute it, compare with what was planted to the byte.

The service is Python with NVTX ranges: a chain reads from range over Python line and CUDA call to the bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAKSCOPE = str(Path(sys.executable).parent / "leakscope")
PYTHON = Path(sys.executable)
CAPTURE = "build/demo.lscope"
PAGE = "build/demo.html"
SERVICE = ["samples/service.py", "--count", "1000", "--pause-us", "8000"]
LIBRARIES = [word for name in ("libcuda.so.1", "libcudart.so.12") for word in ("--library", f"samples/bin/{name}")]
"""Named because the service loads them late and what it allocates until they are found, some 30 ms, counts too."""
RANGES = {
    "session_open_without_close": "session_open",
    "response_buffer_map": "response_buffer",
    "kv_block_alloc": "kv_block",
}


def run(*command: str) -> str:
    """Run a command with its stderr passed through; its stdout is returned, a failure ends the demo."""
    shown = " ".join(Path(word).name if Path(word).is_absolute() else word for word in command)
    print(f"$ {shown}", flush=True)
    wide = os.environ | {"COLUMNS": str(shutil.get_terminal_size().columns)}  # a pipe has no width
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=wide)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def function_of(frame: str) -> str:
    """The function in a frame's text, without its class: `Service.f (…/service.py:75)` → `f`."""
    return frame.split(" ")[0].rpartition(".")[2]


def sites_of(report: dict[str, Any], function: str, kind: str, slab_cache: str | None) -> list[dict[str, Any]]:
    """The sites of one kind and slab cache that have a function in their stack."""
    return [
        site
        for site in report["sites"]
        if site["kind"] == kind
        and any(function_of(frame) == function for frame in site["stack"])
        and (slab_cache is None or site.get("slab_cache") == slab_cache)
    ]


def main() -> int:
    """0 when every planted leak was found with its exact bytes and range, and nothing healthy was called a leak."""
    (ROOT / "build").mkdir(exist_ok=True)
    truth = json.loads(run(LEAKSCOPE, "record", "--force", *LIBRARIES, "-o", CAPTURE, "--", str(PYTHON), *SERVICE))
    print(run(LEAKSCOPE, "attribute", CAPTURE, "--report", PAGE).replace(f"{ROOT}/", ""))
    report = json.loads(run(LEAKSCOPE, "attribute", "--json", CAPTURE))

    print(f"{'planted in':28}{'range':17}{'layer':8}{'objects':>8}{'bytes':>12}   found: objects       bytes")
    exact = True
    for site in truth["sites"]:
        # A socket with 3,000 unread bytes holds them in one 4 KiB kmalloc object: that is what the kernel takes.
        kernel = site["layer"] == "kernel"
        kind, cache = ("kmalloc", "kmalloc-cg-4k") if kernel else (site["kind"], None)
        planted = site["objects"] * 4096 if kernel else site["bytes"]
        found = sites_of(report, site["function"], kind, cache)
        objects, size = sum(s["live_objects"] for s in found), sum(s["live_bytes"] for s in found)
        ranges = ["request", RANGES[site["function"]]]
        same = (objects, size) == (site["objects"], planted) and all(s["ranges"] == ranges for s in found)
        exact &= same
        planted_text = f"{site['function']:28}{ranges[-1]:17}{site['layer']:8}{site['objects']:>8,}{planted:>12,}"
        print(f"{planted_text}   {objects:>14,}{size:>12,}  {'exact' if same else 'DIFFERS'}")
    leaks = [v for v in (report["verdict"], *report["findings"]) if v["verdict"] == "leak"]
    named = {function_of(str(leak["culprit"]["frame"])) for leak in leaks}
    wanted = {site["function"] for site in truth["sites"]}
    if named != wanted:
        print(f"culprits named: {sorted(named)}, planted: {sorted(wanted)}")
        exact = False
    print(
        "The three culprits are named with their ranges and exact bytes."
        if exact
        else "The report differs from what was planted."
    )
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
