"""What the kernel or libbpf refuse is told in one line, with the verifier's last words; loading in the background."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from recording import ROOT

import bpf_programs
from leakscope.errors import BadInputError, ExitCode, NotCapableError
from leakscope.record.loader import Loading, ProgramConfig
from leakscope.record.loader.base import LIVE_WAYS
from leakscope.record.loader.core import CorePrograms
from leakscope.record.loader.libbpf import map_refusal, refusal, verifier_reason

SMALL = {
    "live_entries": 1024, "range_entries": 1024, "mem_ring_bytes": 4096, "call_ring_bytes": 4096,
    "stack_ring_bytes": 4096, "known_stacks": 64, "site_entries": 64,
}  # fmt: skip
UNINITIALISED = bytes.fromhex("bf90000000000000")  # r0 = r9, which nothing was put into


def refused(config: ProgramConfig, path: Path = bpf_programs.OBJECT) -> str:
    """The one line with which loading fails."""
    with pytest.raises(NotCapableError) as error:
        CorePrograms(config, path).close()
    assert error.value.exit_code == ExitCode.NOT_CAPABLE
    assert str(error.value).isprintable()
    return str(error.value)


# --- forced -------------------------------------------------------------------------------------------------


@pytest.mark.bpf
def test_the_verifiers_last_words_are_told(can_record: None, core: None, tmp_path: Path) -> None:
    # given an object in which the program on kfree begins with the use of an uninitialised register
    damaged = bytearray(bpf_programs.OBJECT.read_bytes())
    with bpf_programs.OBJECT.open("rb") as file:
        section = ELFFile(file).get_section_by_name("raw_tp/kfree")
        assert section is not None
        damaged[section["sh_offset"] : section["sh_offset"] + 8] = UNINITIALISED
    path = tmp_path / "leakscope.bpf.o"
    path.write_bytes(bpf_programs.sealed(bytes(damaged)))
    # then the program is named, and the reason is the verifier's
    message = refused(ProgramConfig(**SMALL), path)
    assert message.startswith("the kernel's verifier refused program on_kfree: Permission denied: ")
    assert "R9 !read_ok" in message
    assert "processed" not in message


@pytest.mark.bpf
def test_a_map_that_cannot_be_made_is_named(can_record: None, core: None) -> None:
    message = refused(ProgramConfig(**{**SMALL, "live_entries": 1 << 31}))
    assert message.startswith("the kernel refused map live: ")
    assert "--live-entries" in message or "doctor" in message


@pytest.mark.bpf
def test_without_privileges_the_remedy_is_told(
    can_record: None, core: None, run_as_nobody: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    script = """
import sys
from leakscope.errors import NotCapableError
from leakscope.record.loader import ProgramConfig, load
try:
    load(ProgramConfig(), "core")
except NotCapableError as error:
    print(error)
"""
    told = run_as_nobody(["-c", script], "-all,+dac_read_search")  # it may read tracefs, and no more
    assert told.stderr == ""
    (line,) = told.stdout.splitlines()
    assert line.startswith("the kernel refused ") and "Operation not permitted" in line
    assert "CAP_BPF" in line and "leakscope doctor" in line


@pytest.mark.bpf
def test_nothing_stays_loaded_after_a_refusal(can_record: None, core: None) -> None:
    script = f"""
import os
from leakscope.errors import NotCapableError
from leakscope.record.loader import ProgramConfig
from leakscope.record.loader.base import LIVE_WAYS
from leakscope.record.loader.core import CorePrograms
def links():
    return sorted(os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd") if fd != "3")
try:
    CorePrograms(ProgramConfig(**{{**{SMALL!r}, "live_entries": 1 << 31}}))
except NotCapableError:
    print([link for link in links() if "bpf" in link])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- the words ----------------------------------------------------------------------------------------------


def test_of_a_verifiers_log_the_last_lines_that_say_something_are_kept() -> None:
    log = "0: R1=ctx\n0: (bf) r0 = r9\n\nR9 !read_ok\nprocessed 1 insns (limit 1000000)\nverification time 9 usec\n"
    assert verifier_reason(log) == ["0: R1=ctx", "0: (bf) r0 = r9", "R9 !read_ok"]
    assert verifier_reason("") == []


@pytest.mark.parametrize(
    ("error", "said", "told"),
    [
        (
            errno.EACCES,
            ["libbpf: prog 'on_kfree': BPF program load failed: Permission denied\n",
             "libbpf: prog 'on_kfree': -- BEGIN PROG LOAD LOG --\n5: (85) call 3\nR1 type=x expected=y\n"
             "processed 9 insns\n-- END PROG LOAD LOG --\n"],
            "the kernel's verifier refused program on_kfree: Permission denied: 5: (85) call 3 | R1 type=x expected=y",
        ),
        (
            errno.EPERM,
            ["libbpf: Error in bpf_object__probe_loading():Operation not permitted(1).\n"],
            "the kernel refused the programs: Operation not permitted: this needs CAP_BPF and CAP_PERFMON, or root; "
            "leakscope doctor shows which is missing and how to get it",
        ),
        (
            errno.ENOMEM,
            ["libbpf: map 'stacks': failed to create: Cannot allocate memory(-12)\n"],
            "the kernel refused map stacks: Cannot allocate memory; there is not enough memory: ask for less with "
            "--ring or --live-entries",
        ),
        (
            errno.EINVAL,
            ["libbpf: prog 'on_kmalloc': failed to load: -22\n"],
            "the kernel refused program on_kmalloc: Invalid argument: libbpf: prog 'on_kmalloc': failed to load: -22",
        ),
        (errno.ESRCH, ["libbpf: no\n", "such thing\n"],
         "the kernel refused the programs: No such process: libbpf: no | such thing"),
    ],
    ids=["verifier", "permission", "map", "program", "other"],
)  # fmt: skip
def test_each_kind_of_refusal_reads_as_one_line(error: int, said: list[str], told: str) -> None:
    assert str(refusal(error, said)) == told


def test_a_map_type_that_the_kernel_does_not_know_says_so() -> None:
    told = "the kernel refused map mem_ring: Invalid argument; this kernel does not know maps of its type or size: "
    assert str(map_refusal("mem_ring", errno.EINVAL)) == told + "leakscope doctor shows what it knows"


# --- loading beside other work ------------------------------------------------------------------------------


@pytest.mark.bpf
def test_programs_load_in_the_background_and_are_taken_once(can_record: None, core: None) -> None:
    loading = Loading(ProgramConfig(**SMALL), "core")
    programs = loading.result()
    assert programs.name == "core" and loading.milliseconds > 0
    with pytest.raises(RuntimeError):
        loading.result()
    loading.close()  # closes nothing that was taken
    assert programs.map("live").entries == SMALL["live_entries"] // LIVE_WAYS
    programs.close()


def test_what_loading_raises_is_raised_where_the_result_is_asked_for() -> None:
    loading = Loading(ProgramConfig(), "other")
    with pytest.raises(BadInputError, match="--loader other: choose auto, bcc, core"):
        loading.result()
    loading.close()


@pytest.mark.bpf
def test_the_list_of_programs_is_that_of_the_object(can_record: None, core: None) -> None:
    programs = CorePrograms(ProgramConfig(**SMALL))
    try:
        loaded = {name for name, kind in bpf_programs.programs() if programs.program(name, kind) >= 0}
    finally:
        programs.close()
    with bpf_programs.OBJECT.open("rb") as file:
        elf = ELFFile(file)
        text = elf.get_section_index(".text")  # what several programs call
        functions = {
            symbol.name
            for symbol in elf.get_section_by_name(".symtab").iter_symbols()
            if symbol["st_info"]["type"] == "STT_FUNC"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and symbol["st_shndx"] != text
        }
    assert loaded == functions and len(loaded) >= 14


@pytest.mark.parametrize("possible", [True, False])
def test_the_working_directory_stays_while_programs_load(
    possible: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a loader that leaves the working directory as libbcc does, and comes back only when it is done
    before, seen = Path.cwd(), threading.Event()

    def load(config: ProgramConfig, loader: str) -> None:
        os.chdir(tmp_path)
        seen.wait(10 if possible else 0)
        os.chdir(before)
        raise NotCapableError("that is all")

    monkeypatch.setattr("leakscope.record.loader.load", load)
    if not possible:  # where no thread can have a directory of its own, nothing goes on beside loading
        monkeypatch.setattr("leakscope.record.loader.own_working_directory", lambda: False)
    loading = Loading(ProgramConfig())
    # then a relative name means what it meant all the time
    assert Path.cwd() == before
    assert loading._thread.is_alive() == possible
    seen.set()
    with pytest.raises(NotCapableError, match="that is all"):
        loading.result()
    assert Path.cwd() == before
