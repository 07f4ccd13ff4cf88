"""Exports read by the programs that people open them with, and by the rules that those are written by."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
import speedscope
from planted import BEGIN_NS, SECOND, Planted, planted, write_recording
from synthetic import SyntheticCapture

from leakscope.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCHEMA = Path(__file__).parent / "schemas/trace_event.json"
HOSTILE = 'a"},{"ph":"X\x1b\x7f</script>\u2028\\'
FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
MMAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}


@pytest.fixture(scope="module")
def run() -> Planted:
    return planted()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, run: Planted) -> Path:
    path = tmp_path_factory.mktemp("consumers") / "run.lscope"
    return write_recording(path, run, marks=True, samples=[(BEGIN_NS + SECOND, "700", "rss", 1e6 + 0.5)])


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture whose every name is hostile: ranges that cross, counters, frames; 100 × 256 and 37 × 4096 leak."""
    capture = SyntheticCapture(10)
    capture.process()
    capture.rows["processes"][0]["name"] = HOSTILE
    for number, (start, end) in enumerate([(1, 3), (2, 4), (5, 0)], 1):
        capture.rows["marks"].append(
            {"id": number, "pid": 100, "tid": 100, "name": HOSTILE, "domain": HOSTILE, "start_ns": capture.ns(start),
             "end_ns": capture.ns(end) if end else 0}
        )  # fmt: skip
    capture.call(HOSTILE, 2.5, 2.6)
    capture.leak(100, 256, user=["main", HOSTILE], kernel=["k:do_open"], **FILP)
    capture.leak(37, 4096, user=["main", "模型服务"], **MMAP)
    capture.sample(1.0, HOSTILE, 7.0)
    capture.sample(1.0, "current", 8.0, "cgroup", f"/{HOSTILE}")
    return capture.write(tmp_path_factory.mktemp("consumers") / "odd.lscope")


def exported(evidence: Path, to: str, out: Path) -> Path:
    assert main(["export", str(evidence), "--to", to, "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("name", ["recording", "odd"])
def test_a_trace_is_what_perfettos_importer_takes(
    name: str, recording: Path, odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = exported({"recording": recording, "odd": odd}[name], "perfetto", tmp_path / "t.json").read_bytes()
    trace = json.loads(raw)
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))
    assert [f"{list(e.path)}: {e.message}" for e in validator.iter_errors(trace)] == []
    phases = Counter(event["ph"] for event in trace["traceEvents"])
    assert set(phases) == ({"M", "C", "X", "i"} if name == "recording" else {"M", "C", "X", "b", "e"})
    # its tokenizer reads strings byte by byte and refuses the file at a control character of C, DEL included
    assert not {byte for line in raw.split(b"\n") for byte in line} & {*range(32), 127}
    # what it pairs by name, category and id has both ends
    ends = Counter((e["id"], e["cat"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "b")
    assert ends == Counter((e["id"], e["cat"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "e")


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "f", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "C", "name": "c", "pid": 1, "ts": 1, "args": {"value": "1"}},
        {"ph": "b", "name": "c", "pid": 1, "ts": 1, "cat": "x"},
        {"ph": "i", "name": "c", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": ""}},
        {"ph": "i", "s": "t", "name": "c", "pid": 1 << 32, "tid": 1, "ts": 1},
        {"ph": "i", "s": "t", "name": "c", "pid": 1, "tid": 1},
    ],
)
def test_the_schema_refuses_what_the_importer_drops(event: dict[str, object]) -> None:
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))
    assert not validator.is_valid({"traceEvents": [event]})


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Iterator[speedscope.Page]:
    speedscope.package()
    page = browser.new_page(viewport={"width": 1600, "height": 4000})
    yield page
    page.close()


def in_ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.2f}ms"


def test_speedscope_shows_every_layer_with_its_bytes(opened: speedscope.Page, odd: Path, tmp_path: Path) -> None:
    host, kernel = speedscope.profiles(opened, exported(odd, "speedscope", tmp_path / "s.json"), tmp_path)
    assert (host.title, kernel.title) == ("host, live bytes (1/2)", "kernel, live bytes (2/2)")
    total = f"{37 * 4096 / 1024:.2f} KB (100%)"
    assert host.frames == {
        "[mmap_anon mmap]": (total, total), "模型服务": (total, "0 B (<0.01%)"), "main": (total, "0 B (<0.01%)"),
    }  # fmt: skip
    assert kernel.frames["[slab filp]"] == ("25.00 KB (100%)", "25.00 KB (100%)")
    assert set(kernel.frames) == {"main", 'a"},{"ph":"X\\x1b\\x7f</script>\\u2028\\', "do_open", "[slab filp]"}


def test_speedscope_reads_the_trace_with_every_call_and_range(
    opened: speedscope.Page, recording: Path, run: Planted, tmp_path: Path
) -> None:
    found = speedscope.profiles(opened, exported(recording, "perfetto", tmp_path / "t.json"), tmp_path)
    threads = {(call["pid"], call["tid"]) for call in run.calls}
    assert len({profile.title for profile in found}) == 2 * len(threads)  # calls, and NVTX ranges
    spent: dict[tuple[str, str], int] = defaultdict(int)
    for call in run.calls:
        title = f"app (pid {call['pid']}), thread {call['tid']} (tid {call['tid']})"
        spent[title, call["api"]] += call["exit_ns"] - call["enter_ns"]
    by_title = {profile.title.rpartition(" (")[0]: profile for profile in found}
    for (title, api), nanoseconds in spent.items():
        totals = [total for name, (total, _) in by_title[title].frames.items() if name.partition(" ")[0] == api]
        assert [total.partition(" ")[0] for total in totals] == [in_ms(nanoseconds)]


def test_speedscope_reads_a_trace_of_hostile_names(opened: speedscope.Page, odd: Path, tmp_path: Path) -> None:
    found = speedscope.profiles(opened, exported(odd, "perfetto", tmp_path / "t.json"), tmp_path)
    assert any(name.startswith(HOSTILE[:12]) for profile in found for name in profile.frames)
