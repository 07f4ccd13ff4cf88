"""The capability checks behind ``leakscope doctor``, one by one."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bpf_programs
from leakscope.errors import BadInputError, ExitCode, NotCapableError
from leakscope.model.capability import Capability
from leakscope.record import bcc_location, capabilities
from leakscope.record.capabilities import Host, checks, trials
from leakscope.record.capabilities.process import check_process, cuda_libraries


def records_here() -> bool:
    return trials.attempt(trials.load_tracing_program) is None and bcc_location.find_bcc() is not None


needs_bpf = pytest.mark.skipif(
    not records_here() and not os.environ.get("LEAKSCOPE_REQUIRE_BPF"),
    reason="this user may not load BPF programs (LEAKSCOPE_REQUIRE_BPF=1 makes this a failure)",
)


# --- single checks ---------------------------------------------------------------------------------------


def refuse(monkeypatch: pytest.MonkeyPatch, **refusals: int) -> None:
    """Make trials fail with an errno; all others succeed."""

    def attempt(trial: Callable[[], int]) -> OSError | None:
        code = refusals.get(getattr(trial, "__name__", ""))
        return OSError(code, os.strerror(code)) if code else None

    monkeypatch.setattr(trials, "attempt", attempt)


def fake_host(tmp_path: Path, capability_bits: int = 0, **files: str) -> Host:
    for name, text in {"proc/self/status": f"CapEff:\t{capability_bits:016x}\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Host(tmp_path)


BPF_AND_PERFMON = 1 << 39 | 1 << 38


def test_a_refusal_in_spite_of_the_capabilities_points_at_seccomp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, load_tracing_program=errno.EPERM)
    found = checks.check_privilege(fake_host(tmp_path, BPF_AND_PERFMON))
    assert (found.state, found.blocks) == ("missing", True)
    assert found.remedies["container"] == "docker run --security-opt seccomp=unconfined …"


def test_lockdown_confidentiality_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, load_kernel_reader=errno.EINVAL)
    lockdown = {"sys/kernel/security/lockdown": "none integrity [confidentiality]\n"}
    found = checks.check_lockdown(fake_host(tmp_path, BPF_AND_PERFMON, **lockdown))
    assert (found.state, found.blocks) == ("missing", True)
    assert found.detail.startswith("confidentiality; a program that reads kernel memory is refused")
    assert found.remedies["fedora"].startswith("grubby ")


def test_lockdown_integrity_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    found = checks.check_lockdown(fake_host(tmp_path, **{"sys/kernel/security/lockdown": "none [integrity] x"}))
    assert (found.state, found.detail) == ("ok", "integrity")


def test_kernels_without_ring_buffer_or_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, load_task_reader=errno.EINVAL, **{"<lambda>": errno.EINVAL})
    host = fake_host(tmp_path, BPF_AND_PERFMON)
    assert checks.check_ring(host).detail == "not in this kernel (Linux 5.8)"
    assert checks.check_types(host).detail.endswith("sys/kernel/btf/vmlinux is not readable")
    host = fake_host(tmp_path, BPF_AND_PERFMON, **{"sys/kernel/btf/vmlinux": "x" * 1_000_000})
    assert checks.check_types(host).detail.endswith(
        "1.0 MB; a program that uses them is refused (Invalid argument; Linux 5.11)"
    )
    assert checks.check_ring(host).blocks and checks.check_types(host).blocks


def test_uprobes_without_multi_links_are_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, attach_uprobe_multi=errno.EINVAL)
    found = checks.check_uprobes(fake_host(tmp_path, BPF_AND_PERFMON))
    assert (found.state, found.required) == ("degraded", False)
    refuse(monkeypatch, attach_uprobe_multi=errno.EINVAL, open_uprobe=errno.EACCES)
    host = fake_host(tmp_path, BPF_AND_PERFMON, **{"sys/bus/event_source/devices/uprobe/type": "9"})
    assert checks.check_uprobes(host).remedies["container"] == "docker run --cap-add=SYS_ADMIN …"


def test_hidden_kernel_addresses(tmp_path: Path) -> None:
    files = {
        "proc/kallsyms": "0000000000000000 T a\n0000000000000000 t b\n",
        "proc/sys/kernel/kptr_restrict": "2\n",
    }
    found = checks.check_kernel_symbols(fake_host(tmp_path, **files))
    assert (found.state, found.remedies["debian"]) == ("degraded", "sysctl -w kernel.kptr_restrict=1")
    found = checks.check_kernel_symbols(fake_host(tmp_path, **{**files, "proc/sys/kernel/kptr_restrict": "0"}))
    assert found.remedies["container"] == "docker run --cap-add=SYSLOG …"
    shown = {**files, "proc/kallsyms": "0000000000000000 A x\nffffffff81000000 T a\n"}
    assert checks.check_kernel_symbols(fake_host(tmp_path, **shown)).state == "ok"


@pytest.fixture
def without_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution's bcc is not installed."""
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "bcc").is_dir()])
    monkeypatch.setattr(bcc_location, "_PLACES", ())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the programs that were built beforehand are looked for; nothing is there yet."""
    place = tmp_path / "built" / "leakscope.bpf.o"
    place.parent.mkdir()
    monkeypatch.setattr(bpf_programs, "OBJECT", place)
    return place


def test_missing_bcc_and_no_built_programs_leave_no_loader(without_bcc: None, built: Path) -> None:
    found = checks.check_bcc(Host())
    assert found.blocks
    assert found.remedies["debian"] == "apt-get install -y python3-bpfcc"
    assert capabilities.recording_loader() == (
        "",
        "bcc is not installed; install it (Debian/Ubuntu: apt-get install python3-bpfcc; Fedora/RHEL: dnf install "
        f"python3-bcc); nor can the loader core be taken: {built} is not there (make build)",
    )
    assert not capabilities.recording_possible([found])


def test_built_programs_stand_in_for_bcc(without_bcc: None, built: Path) -> None:
    built.write_bytes(bpf_programs.sealed(bpf_programs.sources_id().to_bytes(8, sys.byteorder)))
    found = checks.check_bcc(Host())
    assert (found.state, found.required) == ("missing", False)
    assert found.detail.endswith(f"; not needed: the probes in {built} were built beforehand (loader core)")
    assert capabilities.recording_loader() == ("core", f"{built} is there: nothing needs to be compiled")


def test_bcc_that_does_not_load_is_as_good_as_none(
    without_bcc: None, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a package whose shared library is gone
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "libbcc.py").touch()
    (tmp_path / "bcc" / "__init__.py").write_text("raise OSError('libbcc.so.0: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    reason = f"bcc is installed in {tmp_path / 'bcc'} but cannot be loaded: libbcc.so.0: cannot open shared object file"
    # then it is required while nothing else is there, and passed over once there is
    found = checks.check_bcc(Host())
    assert (found.blocks, found.detail) == (True, reason)
    assert capabilities.recording_loader()[1].startswith(reason)
    built.write_bytes(bpf_programs.sealed(bpf_programs.sources_id().to_bytes(8, sys.byteorder)))
    assert not checks.check_bcc(Host()).blocks
    assert capabilities.recording_loader()[0] == "core"


def test_the_other_project_named_bcc_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text("raise SystemExit('the wrong bcc was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert bcc_location.find_bcc() != tmp_path / "bcc"


def test_require_capable_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Capability("bcc", "missing", "not found", "probes", True, {"debian": "apt-get install -y python3-bpfcc"})
    monkeypatch.setattr(checks, "REQUIRED_CHECKS", (lambda host: missing,))
    with pytest.raises(NotCapableError) as refused:
        capabilities.require_capable()
    assert str(refused.value) == (
        "cannot record: bcc is missing: not found; run: apt-get install -y python3-bpfcc;"
        " leakscope doctor shows everything"
    )
    assert refused.value.exit_code == ExitCode.NOT_CAPABLE


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@needs_bpf
def test_the_checks_leave_nothing_open() -> None:
    capabilities.check_capabilities()  # loads libraries
    before = open_descriptors()
    capabilities.check_capabilities()
    assert open_descriptors() == before


# --- platform --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "platform"),
    [
        ({"etc/os-release": 'ID=debian\nVERSION_ID="12"\n'}, "debian"),
        ({"etc/os-release": "ID=ubuntu\nID_LIKE=debian\n"}, "debian"),
        ({"etc/os-release": 'ID="rocky"\nID_LIKE="rhel centos fedora"\n'}, "fedora"),
        ({"etc/os-release": "ID=fedora\n"}, "fedora"),
        ({}, "debian"),
        ({".dockerenv": "", "proc/self/mounts": "overlay / overlay rw 0 0\n"}, "container"),
        # a virtual machine made of a container image
        ({".dockerenv": "", "proc/self/mounts": "/dev/vda / ext4 rw 0 0\n"}, "debian"),
        ({"proc/self/cgroup": "0::/system.slice/docker-0123.scope\n"}, "container"),
        ({"proc/self/cgroup": "0::/kubepods.slice/kubepods-burstable.slice/x\n"}, "kubernetes"),
    ],
)
def test_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], platform: str) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    assert fake_host(tmp_path, **files).platform() == platform


def test_pods_are_known_by_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert fake_host(tmp_path).platform() == "kubernetes"


def test_the_remedy_of_the_detected_platform_comes_first(
    monkeypatch: pytest.MonkeyPatch, without_bcc: None, built: Path
) -> None:
    monkeypatch.setattr(Host, "platform", lambda self: "fedora")
    bcc = next(found for found in capabilities.check_capabilities() if found.name == "bcc")
    assert list(bcc.remedies) == ["fedora", "debian", "container", "kubernetes"]
    assert bcc.remedies["fedora"] == "dnf install -y python3-bcc"


# --- a process -------------------------------------------------------------------------------------------


def test_cuda_libraries_are_found_in_maps() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n"
        "7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n"
        "7f02-7f03 r--p 00000000 08:01 12 /venv/nvidia/cuda_runtime/lib/libcudart.so.12\n"
        "7f03-7f04 r--p 00000000 08:01 13 /w/torch/lib/libcudart-9d1c8f1a.so.12 (deleted)\n"
        "7f04-7f05 r--p 00000000 08:01 14 /usr/lib/libcudnn.so.9\n"
        "7f05-7f06 r--p 00000000 08:01 15 /usr/lib/libcudadebugger.so.1\n"
        "7f06-7f07 rw-p 00000000 00:00 0\n"
    )
    assert cuda_libraries(maps) == {
        "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06": 11,
        "/venv/nvidia/cuda_runtime/lib/libcudart.so.12": 12,
        "/w/torch/lib/libcudart-9d1c8f1a.so.12 (deleted)": 13,
    }


def test_cuda_of_a_process(tmp_path: Path) -> None:
    host, pid = Host(), os.getpid()
    library = tmp_path / "libcuda.so.1"
    assert check_process(host, pid)[1].state == "missing"
    library.write_bytes(bytes(4096))
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        found = check_process(host, pid)
        assert [capability.state for capability in found[:2]] == ["ok", "ok"]
        assert found[1].detail == f"{library} (no libcudart: linked statically or unused; its driver calls are seen)"
        # when an upgrade replaces the file under the running process
        library.unlink()
        library.write_bytes(bytes(4096))
        found = check_process(host, pid)
        assert found[1].state == "degraded"
        assert "not the mapped file any more" in found[1].detail


def test_kernel_threads_and_vanished_processes(tmp_path: Path) -> None:
    host = fake_host(tmp_path, **{"proc/2/comm": "kthreadd\n", "proc/2/maps": ""})
    assert check_process(host, 2) == [
        Capability(
            "process 2", "degraded", "kthreadd: a kernel thread or a zombie, without memory maps",
            "libraries and symbols of the process",
        )
    ]  # fmt: skip
    with pytest.raises(BadInputError, match="no process with PID 3 "):
        check_process(host, 3)
