"""The demo: record a service that leaks in three layers, attribute it, compare with what was planted to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAKSCOPE = str(Path(sys.executable).parent / "leakscope")
CAPTURE = ROOT / "build" / "demo.lscope"
SERVICE = ROOT / "samples" / "bin" / "demo_service"


def run(*command: str) -> str:
    """Run a command with its stderr passed through; its stdout is returned, a failure ends the demo."""
    print(f"$ {' '.join(command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def found_in(report: dict[str, Any], function: str, kind: str, slab_cache: str | None) -> tuple[int, int]:
    """(objects, bytes) that the report keeps at a function, in sites of one kind and slab cache."""
    sites = [
        site
        for site in report["sites"]
        if site["kind"] == kind
        and any(frame.split(" ")[0] == function for frame in site["stack"])
        and (slab_cache is None or site.get("slab_cache") == slab_cache)
    ]
    return sum(site["live_objects"] for site in sites), sum(site["live_bytes"] for site in sites)


def main() -> int:
    """0 when every planted leak was found with its exact bytes and nothing healthy was called a leak."""
    CAPTURE.parent.mkdir(exist_ok=True)
    capture = str(CAPTURE.relative_to(ROOT))
    service = [str(SERVICE.relative_to(ROOT)), "--count", "1000", "--pause-us", "8000"]
    truth = json.loads(run(LEAKSCOPE, "record", "--force", "-o", capture, "--", *service))
    print(run(LEAKSCOPE, "attribute", capture))
    report = json.loads(run(LEAKSCOPE, "attribute", "--json", capture))

    print(f"{'planted in':34}{'layer':8}{'objects':>9}{'bytes':>14}   found: objects         bytes")
    exact = True
    for site in truth["sites"]:
        # A socket with 3,000 unread bytes holds them in one 4 KiB kmalloc object: that is what the kernel takes.
        kernel = site["layer"] == "kernel"
        kind, cache = ("kmalloc", "kmalloc-cg-4k") if kernel else (site["kind"], None)
        planted = site["objects"] * 4096 if kernel else site["bytes"]
        objects, found = found_in(report, site["function"], kind, cache)
        exact &= (objects, found) == (site["objects"], planted)
        mark = "exact" if (objects, found) == (site["objects"], planted) else "DIFFERS"
        planted_text = f"{site['function']:34}{site['layer']:8}{site['objects']:>9,}{planted:>14,}"
        print(f"{planted_text}   {objects:>14,}{found:>14,}  {mark}")
    leaks = [v for v in (report["verdict"], *report["findings"]) if v["verdict"] == "leak"]
    named = {str(leak["culprit"]["frame"]).split(" ")[0] for leak in leaks}
    wanted = {site["function"] for site in truth["sites"]}
    if named != wanted:
        print(f"culprits named: {sorted(named)}, planted: {sorted(wanted)}")
        exact = False
    print(
        "The three culprits are named with their exact bytes." if exact else "The report differs from what was planted."
    )
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
