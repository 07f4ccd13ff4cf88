"""Both ways of loading the probes give the same counts, and a missing loader says what to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recording import BIN, LEAKSCOPE, ROOT, Recording, hiding, record, sample, shell

import bpf_programs
from leakscope.capture import Capture
from leakscope.errors import BadInputError, ExitCode, NotCapableError
from leakscope.record import bcc_location
from leakscope.record.loader import LOADERS, ProgramConfig, choose, choose_why, load
from leakscope.record.loader import core as core_loader
from leakscope.record.loader.core import CorePrograms, config_fields
from leakscope.record.records import COUNTERS

OBJECTS, CHURN, FAILING, EVENTFDS = 11, 2, 3, 1009
LIBRARIES = [BIN / "libcuda.so.1", BIN / "libcudart.so.12"]
INSTALL_BCC = (
    "bcc is not installed; install it (Debian/Ubuntu: apt-get install python3-bpfcc; "
    "Fedora/RHEL: dnf install python3-bcc)"
)


# --- the same program under both ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(can_record: None, core: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """The recording of the same two leakers with a loader."""
    place = tmp_path_factory.mktemp("loader")
    made: dict[str, Recording] = {}

    def recording(loader: str) -> Recording:
        if loader not in made:
            command = shell(
                sample("cuda_leak", "--count", OBJECTS, "--churn", CHURN, "--failing", FAILING, "--pause-us", 0),
                sample("leak_eventfd", "--count", EVENTFDS, "--churn", 1, "--pause-us", 0),
            )
            libraries = [word for library in LIBRARIES for word in ("--library", library)]
            options = ("--loader", loader, "--stacks", "all", *libraries)
            made[loader] = record(place / f"{loader}.lscope", command, *options)
            assert made[loader].code == ExitCode.DONE, made[loader].stderr
        return made[loader]

    return recording


both = pytest.mark.parametrize("loader", ["bcc", "core"])


@pytest.mark.bpf
@both
def test_the_manifest_names_the_loader(recorded: Callable[[str], Recording], loader: str) -> None:
    assert recorded(loader).capture.manifest.sources[0].loader == loader


@pytest.mark.bpf
@both
def test_a_relative_name_is_of_the_folder_where_record_was_called(
    can_record: None, core: None, loader: str, tmp_path: Path
) -> None:
    command = [*LEAKSCOPE, "record", "--loader", loader, "-o", "here.lscope", "--", "pwd"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here.lscope"]
    assert Capture.open(tmp_path / "here.lscope").manifest.complete


@pytest.mark.bpf
@both
def test_device_memory_is_exact_by_site(recorded: Callable[[str], Recording], loader: str) -> None:
    recording = recorded(loader)
    report = recording.reports["cuda_leak"]
    # given the report of the program: by function, the API, objects and bytes
    told = {
        site["function"]: (site["api"], site["objects"], site["bytes"])
        for site in report["sites"]
        if site["function"] != "leak_ipc"  # another's memory, whose size is not in the call
    }
    # then the recording says the same. Without a pause there are more calls than a CPU may dump stacks for, so where
    # a stack begins (frame pointers end below libc's start) differs within a function; the function does not
    rows = recording.rows(
        """SELECT [f FOR f IN functions IF starts_with(f, 'leak_')] AS leaks, api,
             sum(sign)::BIGINT, sum(sign * size_bytes)::BIGINT
           FROM events WHERE pid = ? AND kind IN ('device', 'managed', 'async', 'vmm', 'array', 'pinned', 'registered')
           GROUP BY ALL HAVING sum(sign) <> 0""",
        report["pid"],
    )
    assert {leaks[0]: tuple(counts) for leaks, *counts in rows} == told
    assert all(len(leaks) == 1 for leaks, *_ in rows) and len(rows) == len(told)


@pytest.mark.bpf
@both
def test_kernel_objects_are_exact(recorded: Callable[[str], Recording], loader: str) -> None:
    recording = recorded(loader)
    # given so many files that were opened and kept, and as many that were closed again
    pid = recording.reports["leak_eventfd"]["pid"]
    rows = recording.rows(
        """SELECT functions[-2], count(*) FILTER (op = 'alloc'), sum(sign)::BIGINT FROM events
           WHERE pid = ? AND functions[-1] = 'eventfd' AND list_contains(kernel_functions, 'alloc_empty_file')
           AND slab_cache LIKE '%filp' GROUP BY 1""",
        pid,
    )
    assert sorted(rows) == [("subscribe_and_close", EVENTFDS, 0), ("subscribe_and_forget", EVENTFDS, EVENTFDS)]


@pytest.mark.bpf
def test_both_loaders_see_the_same_calls(recorded: Callable[[str], Recording]) -> None:
    # outermost and nested ones, failed ones, and the context that each ran in
    calls = """SELECT c.api, p.api, c.result, c.context <> 0, count(*)
               FROM calls c LEFT JOIN calls p ON p.id = c.parent_id GROUP BY ALL ORDER BY ALL"""
    seen = [recorded(loader).rows(calls) for loader in ("bcc", "core")]
    assert seen[0] == seen[1]
    assert sum(row[-1] for row in seen[0] if row[2] == 2 and row[1] is None) == 4 * FAILING


@pytest.mark.bpf
def test_both_loaders_see_the_same_events(recorded: Callable[[str], Recording]) -> None:
    # device memory and mappings of the program, allocated and freed, by cause and size
    events = """SELECT layer, kind, api, op, cause, size_bytes, count(*) FROM events
                WHERE pid = ? AND layer <> 'kernel' GROUP BY ALL ORDER BY ALL"""
    seen = [recorded(loader).rows(events, recorded(loader).reports["cuda_leak"]["pid"]) for loader in ("bcc", "core")]
    assert len(seen[0]) > 40
    assert seen[0] == seen[1]


# --- the list of constants ----------------------------------------------------------------------------------


def own_sources() -> str:
    """The C sources of the programs but for config.h."""
    return "".join(path.read_text() for path in bpf_programs.DIRECTORY.glob("*.[ch]") if path.name != "config.h")


def test_every_constant_of_the_sources_is_in_config_h() -> None:
    text = (bpf_programs.DIRECTORY / "config.h").read_text()
    defined = dict(re.findall(r"#define CONFIG_(\w+) (\S+)", text))
    used = set(re.findall(r"\bCONFIG_(\w+)", own_sources()))
    assert len(used) > 20
    assert used - defined.keys() == set()
    # one that is read-only data reads the field of its own name
    fields = {name: value for name, value in defined.items() if value.startswith("config.")}
    assert fields == {name: f"config.{name.lower()}" for name in fields}
    assert {name.upper() for name in config_fields()} >= fields.keys()


@pytest.mark.bpf
def test_every_constant_reaches_the_object_as_a_field_or_a_size(can_record: None) -> None:
    constants = ProgramConfig().constants()
    fields = config_fields()
    assert len(fields) == len(set(fields)) > 20
    sizes = set(core_loader._MAP_SIZES.values())
    switches = {name for name in constants if name.startswith("WITH_")}  # the object has all
    assert {*constants, "SOURCES"} == {*fields, *sizes, *switches}
    assert set(fields) & (sizes | switches) == set()


# --- objects that cannot be used ------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """The message with which an object is refused."""
    with pytest.raises(NotCapableError) as refused:
        CorePrograms(ProgramConfig(), path).close()
    assert refused.value.exit_code == ExitCode.NOT_CAPABLE
    return str(refused.value)


@pytest.mark.bpf
@pytest.mark.parametrize(
    ("header", "change"),
    [
        ("config.h", ("\tu64 task_mm;\n", "")),  # a constant less: the others would be shifted
        ("records.h", ("\tu64 parent_id;\n", "\tu64 parent_id;\n\tu64 more;\n")),  # records of another layout
        ("kmem.bpf.h", ("#pragma once\n", "#pragma once\nstatic const int newer;\n")),  # nothing but other text
    ],
)
def test_an_object_of_other_sources_is_refused(
    can_record: None, core: None, tmp_path: Path, header: str, change: tuple[str, str]
) -> None:
    # given an object that was built when a header was another
    place = tmp_path / bpf_programs.__name__
    shutil.copytree(bpf_programs.DIRECTORY, place, ignore=shutil.ignore_patterns("*.o", "__pycache__"))
    before = (place / header).read_text()
    after = before.replace(*change).replace("config.task_mm", "24" if header == "config.h" else "config.task_mm")
    assert before != after
    (place / header).write_text(after)
    subprocess.run(["make", "-s", "-C", str(place)], check=True, capture_output=True)
    path = place / bpf_programs.OBJECT.name
    # then it is not used, and the message says what to do
    assert refusal(path) == f"{path} was built from other sources: run make build again"


@pytest.mark.bpf
def test_an_object_of_these_sources_is_accepted_wherever_it_lies(can_record: None, core: None, tmp_path: Path) -> None:
    path = shutil.copy(bpf_programs.OBJECT, tmp_path / "copied.o")
    programs = CorePrograms(ProgramConfig(), Path(path))
    assert programs.map("counters").entries == len(COUNTERS)
    programs.close()


@pytest.mark.bpf
@pytest.mark.parametrize("sealed", [False, True], ids=["damaged", "built_so"])
@pytest.mark.parametrize("damage", ["empty", "text", "cut", "half", "zeros"])
def test_a_damaged_object_is_refused_in_one_line(
    can_record: None, core: None, tmp_path: Path, damage: str, sealed: bool
) -> None:
    whole, path = bpf_programs.OBJECT.read_bytes(), tmp_path / "leakscope.bpf.o"
    content = {
        "empty": b"",
        "text": b"version https://example.org/pointer\n",
        "cut": whole[:-200],
        "half": whole[: len(whole) // 2],
        "zeros": whole[:64] + bytes(len(whole) - 64),
    }[damage]
    path.write_bytes(bpf_programs.sealed(content) if sealed else content)
    message = refusal(path)
    if sealed and content:
        assert message.startswith(f"{path} cannot be opened: libbpf: ")
        assert message.endswith("; it is damaged: run make build again")
    else:
        assert message == f"{path} is damaged: its checksum differs; run make build again"
    assert message.isprintable()


@pytest.mark.bpf
def test_flipped_bytes_never_bring_the_loader_down(can_record: None, core: None, tmp_path: Path) -> None:
    # in a process of its own: libbpf parses the object in C
    script = """
import random, sys
from pathlib import Path
import bpf_programs
from leakscope.errors import NotCapableError
from leakscope.record.loader import ProgramConfig
from leakscope.record.loader.core import CorePrograms
whole, path, pattern = bpf_programs.OBJECT.read_bytes(), Path(sys.argv[1]), random.Random(3)
for _ in range(25):
    damaged = bytearray(whole)
    for _ in range(20):
        damaged[pattern.randrange(len(damaged))] ^= 1 << pattern.randrange(8)
    path.write_bytes(damaged)
    try:
        CorePrograms(ProgramConfig(live_entries=1024, range_entries=1024, mem_ring_bytes=4096, call_ring_bytes=4096,
                                   stack_ring_bytes=4096, known_stacks=64, site_entries=64), path).close()
    except NotCapableError as error:
        assert "\\n" not in str(error), error
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.o")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- choosing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def without_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution's bcc is not installed."""
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "bcc").is_dir()])
    monkeypatch.setattr(bcc_location, "_PLACES", ())


def test_auto_takes_core_without_bcc(without_bcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "leakscope.bpf.o"
    monkeypatch.setattr(bpf_programs, "OBJECT", place)
    place.write_bytes(bpf_programs.sealed(bpf_programs.sources_id().to_bytes(8, sys.byteorder)))
    assert choose("auto") == choose("core") == "core"
    assert choose("bcc") == "bcc"
    with pytest.raises(NotCapableError) as refused:
        load(ProgramConfig(), "bcc")
    assert str(refused.value) == INSTALL_BCC


def test_auto_with_neither_names_the_remedy(without_bcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "leakscope.bpf.o"
    monkeypatch.setattr(bpf_programs, "OBJECT", place)
    with pytest.raises(NotCapableError) as refused:
        choose("auto")
    missing = f"{place} is not there (make build)"
    assert str(refused.value) == f"{INSTALL_BCC}; nor can the loader core be taken: {missing}"


def test_auto_takes_core_unless_it_is_of_other_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "leakscope.bpf.o"
    monkeypatch.setattr(bpf_programs, "OBJECT", place)
    monkeypatch.setattr("leakscope.record.loader.import_bcc", lambda: None)
    place.write_bytes(bpf_programs.sealed(bpf_programs.sources_id().to_bytes(8, sys.byteorder)))
    assert choose_why() == ("core", f"{place} is there: nothing needs to be compiled")
    place.write_bytes(place.read_bytes()[:-1])
    assert choose_why() == ("bcc", f"bcc is installed; not core: {place} is damaged (make build)")
    place.write_bytes(bytes(8))
    assert choose_why() == ("bcc", f"bcc is installed; not core: {place} was built from other sources (make build)")
    place.unlink()
    assert choose_why() == ("bcc", f"bcc is installed; not core: {place} is not there (make build)")


def test_other_names_are_refused() -> None:
    assert LOADERS == ("auto", "bcc", "core")
    with pytest.raises(BadInputError, match="--loader BCC: choose auto, bcc, core"):
        choose("BCC")


@pytest.mark.bpf
def test_a_host_without_bcc_records_with_the_built_programs(can_record: None, core: None, tmp_path: Path) -> None:
    bcc = bcc_location.find_bcc()
    if bcc is None:
        pytest.skip("NOT TESTED: there is no bcc here to hide (every other recording is made without it)")
    path = tmp_path / "x.lscope"
    command = [*hiding(bcc), *LEAKSCOPE, "record", "-o", str(path), "--", *sample("leak_eventfd", "--count", 31)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ExitCode.DONE, done.stderr
    recording = Recording(path, done.returncode)
    assert recording.capture.manifest.sources[0].loader == "core"
    live = recording.live("slab_cache", "list_contains(functions, 'subscribe_and_forget') AND slab_cache LIKE '%filp'")
    assert [objects for objects, _ in live.values()] == [31]


@pytest.mark.bpf
def test_a_host_with_neither_is_told_so(can_record: None, tmp_path: Path) -> None:
    # given a copy of the sources in which nothing was built
    for name in ("leakscope", "bpf_programs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.o", "__pycache__"))
    bcc = bcc_location.find_bcc()
    command = [*(hiding(bcc) if bcc else []), *LEAKSCOPE, "record", "-o", str(tmp_path / "x.lscope"), "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_CAPABLE, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("leakscope: cannot record: bcc is missing: ")
    assert "install -y python3-bpfcc" in line or "install -y python3-bcc" in line
    assert not (tmp_path / "x.lscope").exists()
