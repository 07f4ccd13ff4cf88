"""Where probes are attached: exact counts and stacks whatever a function begins with, and the price of a dear entry."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from recording import Recorder, Recording, record

from leakscope.errors import ExitCode
from leakscope.record.probes.entry_points import EntryPoint, entry_point
from leakscope.record.probes.uprobe_price import STUBS, Price, hit_ns, is_stepped, price_of_stepping

SOURCE = Path(__file__).with_name("entry_stubs.c")
COUNTS = {name: int(count) for name, count in re.findall(r"F\((\w+), (\d+)\)", SOURCE.read_text())}
STEPPED = {"cuMemAllocHost_v2", "cuMemAllocFromPoolAsync"}
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="NOT TESTED: the stubs are x86-64 code")

# --- instructions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "skipped", "instruction", "emulated"),
    [
        ("55 4889e5", 0, "push", True),
        ("4154 55", 0, "push", True),
        ("f30f1efa 55", 4, "push", True),
        ("f30f1efa 4157", 4, "push", True),
        ("f30f1efa e900000000", 4, "jmp", True),
        ("f30f1efa eb10", 4, "jmp", True),
        ("f30f1efa 0f8400000000", 4, "jcc", True),
        ("f30f1efa 4883ec28", 0, "endbr64", False),  # both are stepped: nothing is gained behind it
        ("f30f1efa ff2500000000", 0, "endbr64", False),  # an indirect jump
        ("f30f1efa", 0, "endbr64", False),  # cut short
        ("f30f1efb 55", 0, "other", False),  # endbr32
        ("90", 0, "nop", True),
        ("6690", 0, "nop", True),
        ("0f1f4000", 0, "long nop", False),
        ("e800000000", 0, "call", True),
        ("7405", 0, "jcc", True),
        ("4883ec08", 0, "sub", False),
        ("4889d8", 0, "mov", False),
        ("31c0", 0, "xor", False),
        ("4150", 0, "push", True),
        ("4850", 0, "other", False),  # push with another REX prefix: not emulated
        ("66e80000", 0, "other", False),
        ("", 0, "other", False),
    ],
)
def test_entries_of_x86(code: str, skipped: int, instruction: str, emulated: bool) -> None:
    assert entry_point(bytes.fromhex(code), "x86_64") == EntryPoint(skipped, instruction, emulated)


@pytest.mark.parametrize(
    ("words", "skipped", "instruction"),
    [
        ((0xD503245F, 0x14000010), 4, "branch"),  # bti c; b
        ((0xD503245F, 0xA9BF7BFD), 0, "endbr64"),  # bti c; stp x29,x30,[sp,#-16]!
        ((0x90000000,), 0, "adr"),  # adrp
        ((0xB4000040,), 0, "branch"),  # cbz
        ((0x54000040,), 0, "branch"),  # b.eq
        ((0xA9BF7BFD,), 0, "other"),
        ((0xD503201F,), 0, "other"),  # nop: stepped before v6.13
    ],
)
def test_entries_of_arm64(words: tuple[int, ...], skipped: int, instruction: str) -> None:
    code = b"".join(word.to_bytes(4, "little") for word in words)
    found = entry_point(code, "aarch64")
    assert (found.skipped_bytes, found.emulated) == (skipped, instruction in ("branch", "adr"))


def test_on_other_machines_the_first_byte_is_taken() -> None:
    assert entry_point(bytes.fromhex("f30f1efa55"), "riscv64") == EntryPoint(0, "other", False)


# --- the price ----------------------------------------------------------------------------------------------


def test_what_cannot_be_measured_has_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    hit_ns.cache_clear()
    assert hit_ns("push") is None and price_of_stepping("sub") is None
    assert is_stepped(None)
    hit_ns.cache_clear()


def test_a_price_reads_in_microseconds() -> None:
    assert Price(9_812.0, 703.0).text() == "9.8 µs a call instead of 0.7 µs"
    assert is_stepped(Price(9_812.0, 703.0)) and not is_stepped(Price(810.0, 703.0))


@on_x86
@pytest.mark.bpf
@pytest.mark.usefixtures("can_record")
@pytest.mark.parametrize("instruction", STUBS)
def test_every_stub_runs_and_returns_with_a_probe_on_it(instruction: str) -> None:
    hit_ns.cache_clear()
    measured = hit_ns(instruction)
    assert measured is not None and measured >= 0


# --- recorded -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library and of the program that calls it."""
    place = tmp_path_factory.mktemp("stubs")
    if not shutil.which("gcc"):
        pytest.skip("NOT TESTED: no gcc")
    library, program = str(place / "libstubs.so"), str(place / "calls")
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-fcf-protection=none"]
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", library, str(SOURCE)], check=True)
    subprocess.run(["gcc", "-DPROGRAM", *flags, "-o", program, str(SOURCE), library, f"-Wl,-rpath,{place}"], check=True)
    return place


@pytest.fixture(scope="module", params=["multi", "perf"])
def recorded(
    request: pytest.FixtureRequest, bpf: str, stubs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recording]:
    """The program recorded, with one link for all probes and with an event each."""
    path = tmp_path_factory.mktemp("entries") / "x.lscope"
    environment = {"LEAKSCOPE_UPROBES": "perf"} if request.param == "perf" else {}
    with Recorder(path, "--library", stubs / "libstubs.so", "--", stubs / "calls", env=environment) as recorder:
        yield recorder.result()


@on_x86
@pytest.mark.bpf
def test_counts_are_exact_whatever_a_function_begins_with(recorded: Recording) -> None:
    assert recorded.code == ExitCode.DONE, recorded.stderr
    calls = dict(recorded.rows("SELECT api, count(*) FROM calls WHERE result = 0 GROUP BY 1"))
    assert calls == COUNTS
    # sizes are arguments, addresses come through the first one: both stand where they do at the first byte
    sizes = dict(recorded.rows("SELECT api, sum(requested_bytes)::BIGINT FROM events WHERE op = 'alloc' AND api <> '' "
                               "AND list_contains(?, api) GROUP BY 1", list(COUNTS)))  # fmt: skip
    assert sizes == {api: sum(range(1000, 1000 + count)) for api, count in COUNTS.items()}
    assert recorded.rows("SELECT count(DISTINCT addr) FROM events WHERE op = 'alloc' AND list_contains(?, api)",
                         list(COUNTS)) == [(sum(COUNTS.values()),)]  # fmt: skip


@on_x86
@pytest.mark.bpf
def test_the_caller_is_in_every_stack_once(recorded: Recording) -> None:
    rows = recorded.rows("SELECT DISTINCT api, functions[-3:] FROM events WHERE op = 'alloc' AND list_contains(?, api)",
                         list(COUNTS))  # fmt: skip
    assert dict(rows) == {api: ["main", f"call_{api}", api] for api in COUNTS} and len(rows) == len(COUNTS)


@on_x86
@pytest.mark.bpf
def test_dear_entries_are_told_once_with_their_price(recorded: Recording, stubs: Path) -> None:
    library = str(stubs / "libstubs.so")
    # (what other programs of this host map meanwhile is attached to as well)
    assert set(recorded.facts["functions_single_stepped"][library]) == STEPPED
    told = [line for line in recorded.stderr.splitlines() if "single-stepped" in line and library in line]
    (line,) = told
    assert re.fullmatch(
        rf"leakscope: warning: cuMem\w+ and 1 more in {re.escape(library)}: the probe is single-stepped: "
        r"\d+\.\d µs a call instead of \d+\.\d µs",
        line,
    )


@on_x86
@pytest.mark.bpf
def test_a_library_of_cheap_entries_is_not_warned_of(bpf: str, stubs: Path, tmp_path: Path) -> None:
    # given the library without the two functions that are stepped
    source = SOURCE.read_text()
    for api in STEPPED:
        source = re.sub(rf"\n[^\n]*F\({api}, \d+\)[^\n]*", "", source)
        source = re.sub(rf"\n\tBEGIN\({api}\)[^\n]*", "", source)
    (tmp_path / "cheap.c").write_text(source)
    library = tmp_path / "libcheap.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cheap.c")], check=True)
    recording = record(tmp_path / "x.lscope", ["/bin/true"], "--library", library)
    assert recording.code == ExitCode.DONE, recording.stderr
    assert recording.facts["functions_attached"][str(library)] == len(COUNTS) - len(STEPPED)
    assert str(library) not in recording.facts["functions_single_stepped"]
    assert f"in {library}: the probe is single-stepped" not in recording.stderr
