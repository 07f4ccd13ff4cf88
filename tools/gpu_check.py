"""What needs a real GPU, in one run of a few minutes without network: a table of what worked and what did not.

Usage: gpu_check.py [--out DIR] [--limit SECONDS]. Each step either passes, fails (exit code 1), or is not possible on
this host with the reason. Steps: host facts, probes load, two CUDA processes recorded to the byte with kernel
arguments, the same program under compute-sanitizer's leak check and under ncu, a PyTorch program recorded with its
snapshot, all joined. GPU_CHECK_DRIVER names the folder of another libcuda.so.1, GPU_CHECK_TORCH_PYTHON an interpreter
with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "samples" / "bin" / "cuda_two_processes"
TORCH_SAMPLE = ROOT / "samples" / "torch_leak.py"
PASS, FAIL, NOT_POSSIBLE = "pass", "FAIL", "not possible"
FILTERS = ["--set", "basic", "--nvtx", "--call-stack"]


class NotPossible(Exception):
    """A step cannot be done on this host; the message says why."""


@dataclass
class Check:
    """What the steps share: where outputs go, the interpreter, what was found so far and what is to be told."""

    out: Path
    ends_at: float
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    driver: str = ""
    torch_python: str = ""
    captures: dict[str, Path] = field(default_factory=dict)
    reports: list[Path] = field(default_factory=list)
    truth: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, *command: object, limit_s: float = 90, env: dict[str, str] | None = None) -> str:
        """Run a command; its stdout. Raises AssertionError with the end of its stderr when it fails."""
        limit_s = min(limit_s, self.ends_at - time.monotonic())
        if limit_s < 2:
            raise NotPossible("no time left")
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{Path(words[0]).name} took more than {limit_s:.0f} s") from None
        if done.returncode:
            tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise AssertionError(f"{Path(words[0]).name} ended with {done.returncode}: {tail[-400:]}")
        return done.stdout

    def leakscope(self, *arguments: object, limit_s: float = 120, env: dict[str, str] | None = None) -> str:
        """Run leakscope under this interpreter."""
        return self.run(sys.executable, "-m", "leakscope", *arguments, limit_s=limit_s, env=env)

    def tool(self, name: str) -> str:
        """Path of a tool of the CUDA toolkit. Raises NotPossible."""
        places = [shutil.which(name), *map(str, sorted(Path("/usr/local").glob(f"cuda*/bin/{name}")))]
        places += map(str, sorted(Path("/opt/nvidia").glob(f"nsight-compute/*/{name}")))
        found = next((place for place in places if place and os.access(place, os.X_OK)), None)
        if not found:
            raise NotPossible(f"no {name} on this host")
        return found

    def need_driver(self) -> dict[str, str]:
        """The environment in which samples find the real driver. Raises NotPossible."""
        if not self.driver:
            raise NotPossible("no driver's libcuda.so.1 on this host")
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [self.driver, os.environ.get("LD_LIBRARY_PATH", "")]))}


def host(check: Check) -> str:
    """The driver, the GPUs, the interpreters."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"libcuda\.so\.1 \(libc6,(?:x86-64|AArch64).*=> (\S+)", listed)
    check.driver = os.environ.get("GPU_CHECK_DRIVER") or (str(Path(match[1]).parent) if match else "")
    for python in dict.fromkeys(filter(None, [os.environ.get("GPU_CHECK_TORCH_PYTHON"), shutil.which("python3")])):
        if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
            check.torch_python = python
    if not check.driver:
        raise NotPossible("no driver's libcuda.so.1 on this host")
    gpus = check.run(check.tool("nvidia-smi"), "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return gpus.strip().replace("\n", "; ")


def probes(check: Check) -> str:
    """Whether eBPF loads here: with the loader that needs no compiler."""
    if os.geteuid():
        raise NotPossible("not root")
    try:
        check.leakscope("record", "--loader", "core", "--force", "-o", check.out / "probes.lscope", "--", "/bin/true")
    except AssertionError as error:
        raise NotPossible(f"probes do not load: {error}") from None
    check.captures["probes"] = check.out / "probes.lscope"
    return "recorded /bin/true with the programs built beforehand"


def two_processes(check: Check) -> str:
    """Bytes of both processes to the byte; each block touched by the launch that filled it."""
    environment = check.need_driver()
    _need_probes(check)
    capture = check.out / "two.lscope"
    told = check.leakscope(
        "record", "--loader", "core", "--launches", "--force", "-o", capture, "--", SAMPLE, env=environment
    )
    check.truth = {line["sites"][0]["function"]: line for line in _reports(told)}
    check.captures["two"] = capture
    rows = _query(
        check, capture,
        "SELECT op, pid, size_bytes, count(*) AS events FROM mem_events WHERE layer = 'gpu' AND kind = 'device' "
        "AND cause NOT IN ('exit', 'exec', 'context') GROUP BY ALL",
    )  # fmt: skip
    live: dict[tuple[int, int], int] = {}
    for row in rows:
        key = (row["pid"], row["size_bytes"])
        live[key] = live.get(key, 0) + (row["events"] if row["op"] == "alloc" else -row["events"])
    for line in check.truth.values():
        site = line["sites"][0]
        found = live.get((line["pid"], site["bytes"] // site["objects"]))
        assert found == site["objects"], f"{line['role']}: {found} blocks live, {site['objects']} planted"
    launched = _query(check, capture, "SELECT count(*) AS n FROM launches WHERE kernel LIKE 'fill_block%'")[0]["n"]
    planned = sum(line["launches"] for line in check.truth.values())
    assert launched == planned, f"{launched} launches of fill_block recorded, {planned} made"
    exact = _query(check, capture, "SELECT count(*) AS n FROM launch_arguments WHERE position = 0 AND approximate = 0")
    return f"{sum(live.values())} blocks of 2 processes exact; {launched} launches, {exact[0]['n']} with exact pointers"


def sanitizer(check: Check) -> str:
    """compute-sanitizer's leak check names as many bytes as the sample says that it leaks."""
    environment = check.need_driver()
    tool = check.tool("compute-sanitizer")
    told = check.run(
        tool, "--tool", "memcheck", "--leak-check", "full", SAMPLE, "--role", "parent", "--count", "5", env=environment
    )
    planted = _reports(told)[0]["sites"][0]["bytes"]
    leaked = sum(int(size) for size in re.findall(r"Leaked ([\d,]+) bytes", told.replace(",", "")))
    assert leaked >= planted, f"compute-sanitizer names {leaked} bytes, {planted} were leaked"
    return f"{leaked:,} bytes named, {planted:,} planted"


def profiler(check: Check) -> str:
    """An ncu report of the sample, read by our parser, joined by launch order."""
    environment = check.need_driver()
    tool = check.tool("ncu")
    report = check.out / "two.ncu-rep"
    command = [tool, *FILTERS, "--target-processes", "all", "-f", "-o", report.with_suffix(""), SAMPLE, "--count", "8"]
    told = check.run(*command, env=environment, limit_s=180)
    if "ERR_NVGPUCTRPERM" in told:
        raise NotPossible("ncu may not read GPU counters here")
    check.reports.append(report)
    capture = check.out / "ncu.lscope"
    check.leakscope("import", "--json", report, "-o", capture)
    kernels = _query(check, capture, "SELECT count(*) AS n FROM kernel_profiles")[0]["n"]
    assert kernels == 16, f"{kernels} kernels read of a report of 16 launches"
    return f"{kernels} kernels of 2 processes read"


def pytorch(check: Check) -> str:
    """A PyTorch program recorded; its snapshot read; segments seen as cudaMalloc."""
    check.need_driver()
    if not check.torch_python:
        raise NotPossible("no torch on this host (GPU_CHECK_TORCH_PYTHON names another interpreter)")
    snapshot = check.out / "torch.pickle"
    program = [check.torch_python, TORCH_SAMPLE, "--snapshot", snapshot]
    capture = check.out / "torch.lscope"
    try:
        _need_probes(check)
    except NotPossible:
        check.run(*program, limit_s=120)
    else:
        told = check.leakscope("record", "--loader", "core", "--force", "-o", capture, "--", *program, limit_s=150)
        check.captures["torch"] = capture
        check.truth["torch"] = _reports(told)[0]
    check.reports.append(snapshot)
    if "torch" not in check.captures:
        return "snapshot saved; not recorded, as probes do not load here"
    rows = _query(
        check, capture,
        "SELECT sum(CASE WHEN op = 'alloc' THEN size_bytes ELSE -size_bytes END)::BIGINT AS n FROM mem_events "
        "WHERE layer = 'gpu' AND api LIKE '%alloc%' AND cause NOT IN ('exit', 'exec', 'context') AND kind = 'device'",
    )  # fmt: skip
    reserved = check.truth["torch"]["reserved_bytes"]
    assert rows[0]["n"] and rows[0]["n"] >= reserved, f"{rows[0]['n']} bytes seen, torch has {reserved} reserved"
    return f"{rows[0]['n']:,} bytes by cudaMalloc, {reserved:,} reserved by torch"


def joined(check: Check) -> str:
    """Recordings and reports in one report."""
    inputs = [check.captures[name] for name in ("two", "torch") if name in check.captures] + check.reports
    if not check.captures.keys() & {"two", "torch"}:
        raise NotPossible("nothing was recorded")
    report = json.loads(check.leakscope("attribute", "--json", *inputs))
    verdict = report["verdict"]
    assert verdict["verdict"] == "leak", f"{verdict['verdict']}: {verdict['reasons']}"
    (check.out / "report.json").write_text(json.dumps(report, indent=1))
    return f"leak of {verdict['layer']} memory at {verdict['culprit']['frame']}, {len(report['inputs'])} inputs"


STEPS: tuple[tuple[str, Callable[[Check], str]], ...] = (
    ("GPU and driver", host),
    ("eBPF loads", probes),
    ("two CUDA processes, to the byte", two_processes),
    ("compute-sanitizer agrees", sanitizer),
    ("ncu report read", profiler),
    ("PyTorch recorded, snapshot read", pytorch),
    ("all joined", joined),
)


def _need_probes(check: Check) -> None:
    if "probes" not in check.captures:
        raise NotPossible("probes do not load here")


def _reports(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"sample"')]


def _query(check: Check, capture: Path, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(check.leakscope("query", capture, sql, "--json"))
    return rows


def main() -> int:
    """0 when nothing failed: steps that are not possible here fail nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--limit", type=float, default=450, help="seconds for all of it")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    check = Check(options.out, time.monotonic() + options.limit)
    for name, step in STEPS:
        began = time.monotonic()
        try:
            row = (name, PASS, step(check))
        except NotPossible as reason:
            row = (name, NOT_POSSIBLE, str(reason))
        except AssertionError as error:
            row = (name, FAIL, str(error))
        except (OSError, ValueError, KeyError, IndexError) as error:
            row = (name, FAIL, f"{type(error).__name__}: {error}")
        check.rows.append(row)
        print(f"{row[1]:13}{name:34}{time.monotonic() - began:6.1f} s  {row[2]}", flush=True)
    (options.out / "table.json").write_text(json.dumps(check.rows, indent=1))
    return int(any(status == FAIL for _, status, _ in check.rows))


if __name__ == "__main__":
    sys.exit(main())
