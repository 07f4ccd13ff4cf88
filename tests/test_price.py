"""The price of a recording, in one line before it begins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recording import record

from leakscope.errors import ExitCode
from leakscope.record.options import RecordOptions
from leakscope.record.price import price
from leakscope.record.probes import uprobe_price

KERNEL = "price: about 0.3 µs a kernel allocation or free"
MAPS = "3 µs an mmap, munmap, mremap or change of brk"


def options(**more: object) -> RecordOptions:
    return RecordOptions(Path("x.lscope"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stacks", "told"),
    [
        ("none", "no stacks"),
        ("sampled", "3 µs more where a stack is taken (at most 954/s a call site and CPU, 1 in 64 above)"),
        ("all", "3 µs more for the stack of each allocation"),
    ],
)
def test_each_stack_policy_has_its_price(stacks: str, told: str) -> None:
    told_of_cuda = "3 µs a CUDA allocation or free (no CUDA library found so far) (docs/performance.md)"
    assert price(options(stacks=stacks), 0) == f"{KERNEL}, {told}, {MAPS}, {told_of_cuda}"


def test_launches_are_in_the_price_where_they_are_recorded() -> None:
    assert "3 µs a CUDA allocation or free (docs" in price(options(), 41)
    assert "3 µs a CUDA allocation, free or kernel launch (docs" in price(options(launches=True), 41)


def test_malloc_has_a_price_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a host where a hit takes 0.9 µs, and 12 µs single-stepped
    monkeypatch.setattr(uprobe_price, "hit_ns", {"push": 900.0, "xor": 12_000.0}.get)
    told = ", 3.2 µs a call of malloc's family, 14.3 µs where its entry is single-stepped (measured here)"
    assert told in price(options(malloc=True), 41)
    assert "malloc" not in price(options(), 41)
    # by its file, others pay as well
    others = ", 1.2 µs a call for every other process of the host that maps the same libc"
    assert others in price(options(malloc=True), 41)
    assert others not in price(options(malloc=True), 41, heap_by_process=True)
    # and one where it cannot be measured
    monkeypatch.setattr(uprobe_price, "hit_ns", lambda instruction: None)
    assert ", 3-20 µs a call of malloc's family, " in price(options(malloc=True), 41)


@pytest.mark.bpf
def test_record_tells_it_before_the_command_starts_and_not_in_json(bpf: str, tmp_path: Path) -> None:
    told = record(tmp_path / "a.lscope", ["/bin/sh", "-c", "echo begins >&2"], "--malloc")
    assert told.code == ExitCode.DONE, told.stderr
    lines = told.stderr.splitlines()
    assert "every other process" in lines[0]  # of a command: by file
    assert lines[0].startswith(f"leakscope: {KERNEL}, ") and lines[1] == "begins"
    assert re.search(r", \d+\.\d µs a call of malloc's family, \d+\.\d µs where its entry is single-stepped", lines[0])
    silent = record(tmp_path / "b.lscope", ["/bin/true"], "--json")
    assert silent.code == ExitCode.DONE and "price" not in silent.stderr
    assert json.loads(silent.stdout)["ended_by"] == "target"
