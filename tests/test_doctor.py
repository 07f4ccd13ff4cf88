"""``leakscope doctor`` and the capability checks behind it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leakscope.errors import ExitCode
from leakscope.model.capability import Capability
from leakscope.record import bcc_location
from leakscope.record.capabilities import trials
from leakscope.record.loader import choose_why
from leakscope.report.doctor import doctor_json, print_doctor

DOCTOR = ["-m", "leakscope", "doctor"]
REPOSITORY = Path(__file__).resolve().parents[1]
MINIMAL = "-all,+bpf,+perfmon,+sys_ptrace,+syslog,+dac_read_search"

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def records_here() -> bool:
    return trials.attempt(trials.load_tracing_program) is None and bcc_location.find_bcc() is not None


needs_bpf = pytest.mark.skipif(
    not records_here() and not os.environ.get("LEAKSCOPE_REQUIRE_BPF"),
    reason="this user may not load BPF programs (LEAKSCOPE_REQUIRE_BPF=1 makes this a failure)",
)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, **environment}, timeout=60
    )


def by_name(output: str) -> dict[str, dict]:
    return {capability["name"]: capability for capability in json.loads(output)["capabilities"]}


# --- the verb --------------------------------------------------------------------------------------------


@needs_bpf
def test_json_on_a_host_that_can_record() -> None:
    result = run([sys.executable, *DOCTOR, "--json", "--pid", str(os.getpid())])
    assert (result.returncode, result.stderr) == (ExitCode.DONE, "")
    report = json.loads(result.stdout)
    assert list(report) == ["schema", "recording_possible", "loader", "loader_reason", "platform", "capabilities"]
    assert report["schema"] == "leakscope-doctor/1"
    assert report["recording_possible"] is True
    loader, reason = choose_why()
    assert (report["loader"], report["loader_reason"]) == (loader, reason)
    keys = ["name", "state", "detail", "needed_for", "required", "remedies"]
    assert all(list(capability) == keys for capability in report["capabilities"])
    assert [capability["name"] for capability in report["capabilities"]] == [
        "BPF privilege", "BPF ring buffer", "raw tracepoints", "kernel types (BTF)", "tracefs",
        "kernel lockdown", "libbpf", "bcc", "locked memory", "uprobes", "libdw", "process side-band",
        "other processes", "kernel symbols", "slab statistics", "cgroups", "PID namespace", "NVML",
        "NVTX library", "kernel features", "start-up",
        f"process {os.getpid()}", f"CUDA of {os.getpid()}", f"NVTX of {os.getpid()}",
    ]  # fmt: skip
    assert [c["name"] for c in report["capabilities"] if c["required"] and c["state"] != "ok"] == []
    # the probes were really loaded and attached, with the loader that it names
    start = by_name(result.stdout)["start-up"]
    assert start["state"] == "ok"
    told = rf"loader {loader}: loaded in \d+ ms, attached to 17 tracepoints in \d+ ms"
    assert re.fullmatch(told, start["detail"]), start["detail"]
    features = by_name(result.stdout)["kernel features"]["detail"]
    assert " bpf_loop (Linux 5.17): " in features and " bpf_get_kmem_cache (Linux 6.13): " in features


@root_only
def test_nobody_is_told_what_is_missing(
    run_as_nobody: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    shown = run_as_nobody(DOCTOR)
    assert (shown.returncode, shown.stderr) == (ExitCode.NOT_CAPABLE, "")
    assert "no CAP_BPF and no CAP_PERFMON; user 65534" in shown.stdout
    assert 'sudo "$(command -v leakscope)" record' in shown.stdout
    assert "Recording is not possible here: BPF privilege" in shown.stdout
    # the same as JSON: what could not be tried is unknown, not missing
    told = run_as_nobody([*DOCTOR, "--json"])
    assert (told.returncode, told.stderr) == (ExitCode.NOT_CAPABLE, "")
    found = by_name(told.stdout)
    assert json.loads(told.stdout)["recording_possible"] is False
    assert found["BPF privilege"]["state"] == "missing"
    assert found["raw tracepoints"]["state"] == found["BPF ring buffer"]["state"] == "unknown"
    assert found["other processes"]["state"] == "degraded"


@root_only
def test_one_missing_capability_is_named(
    run_as_nobody: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    found = by_name(run_as_nobody([*DOCTOR, "--json"], "-all,+bpf").stdout)["BPF privilege"]
    assert found["detail"].startswith("no CAP_PERFMON; ")


@root_only
@needs_bpf
def test_the_documented_capabilities_suffice(
    run_as_nobody: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    result = run_as_nobody([*DOCTOR, "--json"], MINIMAL)
    assert (result.returncode, result.stderr) == (ExitCode.DONE, "")
    states = {name: capability["state"] for name, capability in by_name(result.stdout).items()}
    wanted = (
        "BPF privilege",
        "tracefs",
        "uprobes",
        "process side-band",
        "other processes",
        "slab statistics",
    )
    assert {name: states[name] for name in wanted} == dict.fromkeys(wanted, "ok")


@root_only
@needs_bpf
def test_the_remedy_for_tracefs_mends_it() -> None:
    # given a mount namespace without tracefs, when the printed command is run, then it is there
    doctor = f"'{sys.executable}' -m leakscope doctor --json"
    script = (
        "while umount /sys/kernel/tracing 2>/dev/null; do :; done; umount /sys/kernel/debug 2>/dev/null;"
        f"{doctor}; echo '#' $?; mount -t tracefs tracefs /sys/kernel/tracing; {doctor}; echo '#' $?"
    )
    result = run(["unshare", "-m", "bash", "-c", script])
    before, after, _ = result.stdout.split("# ")
    assert by_name(before)["tracefs"]["state"] == "missing"
    assert by_name(before)["tracefs"]["remedies"]["debian"] == "mount -t tracefs tracefs /sys/kernel/tracing"
    assert after.startswith(f"{ExitCode.NOT_CAPABLE}\n")
    assert by_name(after.partition("\n")[2])["tracefs"]["state"] == "ok"
    assert result.stdout.endswith(f"# {ExitCode.DONE}\n")


@root_only
def test_a_pid_namespace_is_reported() -> None:
    result = run(["unshare", "-pf", "--mount-proc", sys.executable, *DOCTOR, "--json"])
    found = by_name(result.stdout)["PID namespace"]
    assert found["state"] == "degraded"
    assert found["remedies"]["container"] == "docker run --pid=host …"


def test_unknown_pid_is_bad_input() -> None:
    result = run([sys.executable, *DOCTOR, "--pid", "4194999"])
    assert result.returncode == ExitCode.BAD_INPUT
    assert (result.stdout, result.stderr) == (
        "",
        "leakscope: no process with PID 4194999 (ps -e lists them)\n",
    )


# --- rendering -------------------------------------------------------------------------------------------

EXAMPLE = [
    Capability("BPF privilege", "ok", "root", "every probe", True),
    Capability(
        "tracefs",
        "missing",
        "not mounted",
        "tracepoints",
        True,
        {"container": "docker run -v T …", "debian": "mount T"},
    ),
    Capability("lock\x1b[31m", "unknown", "mode\nx", "reads", False, {"debian": "mount T"}),
]


def rendered(possible: bool) -> str:
    from rich.console import Console

    out = io.StringIO()
    print_doctor(Console(file=out, width=60), EXAMPLE, "container", ("bcc", "bcc is installed"), possible)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_table_and_commands() -> None:
    assert rendered(False) == "\n".join(
        [
            "state    capability       found",
            "ok       BPF privilege *  root",
            "missing  tracefs *        not mounted",
            "                          needed for tracepoints",
            r"unknown  lock\x1b[31m     mode\nx",
            "                          needed for reads",
            "* without it nothing can be recorded",
            "",
            "container (here)",
            "  docker run -v T …  # tracefs",
            "",
            "Debian, Ubuntu",
            r"  mount T  # tracefs, lock\x1b[31m",
            "",
            "Recording is not possible here: tracefs.",
        ]
    )


def test_conclusion_names_the_loader_and_what_is_lost() -> None:
    assert rendered(True).endswith(
        "\nRecording is possible with the loader bcc (bcc is\ninstalled), without: tracefs, lock\\x1b[31m."
    )


def test_json_of_no_loader_is_null() -> None:
    report = doctor_json(EXAMPLE[:1], "debian", ("", "bcc is not installed"), False)
    assert (report["loader"], report["loader_reason"]) == (None, "bcc is not installed")
    assert (report["recording_possible"], report["platform"]) == (False, "debian")
