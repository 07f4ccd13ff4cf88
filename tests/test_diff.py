"""leakscope diff: two runs whose difference is known to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from reports_once import reports_once
from rich.cells import cell_len
from snapshots_on_disk import matches
from synthetic import PID, SyntheticCapture

from leakscope.cli.main import main
from leakscope.detect.difference import difference
from leakscope.model.results import Report, Verdict

FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
MMAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}
ROUNDS = 200


def capture(path: Path, work: float, leaked: int, version: str, hostile: str = "") -> Path:
    """A run of so many times 10 s and 200 requests: each 10 requests keep a label, as they always did; ``leaked``
    descriptors are kept besides; a site of 67 blocks is there in version a alone."""
    run = SyntheticCapture(10 * work)
    run.process()
    requests = round(ROUNDS * work)
    run.churn(requests, 100, **MMAP, user=["main", f"work (/build/{version}/app.c:7)", "mmap"])
    run.leak(requests // 10, 4096, **MMAP, user=["main", f"label (/build/{version}/app.c:{len(version)}9)"])
    if leaked:
        run.leak(leaked, 256, **FILP, user=["main", hostile or "open_it"], kernel=["k:do_open"])
    if version == "a":
        run.leak(67, 1000, **MMAP, user=["main", "old_cache"])
    for reading in range(41):
        at = reading / 40
        run.sample(at * run.seconds, "requests_total", requests * at, "service")
        run.sample(at * run.seconds, "rss", 1e6 + (leaked * 1e5 + reading % 2) * at, "process", str(PID))
    return run.write(path)


@pytest.fixture(scope="module", autouse=True)
def each_report_once() -> Iterator[None]:
    with reports_once():
        yield


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("diff") / "a.lscope", 1, 0, "a")


@pytest.fixture(scope="module")
def b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("diff") / "b.lscope", 1.5, 53, "bb")


def test_json_has_every_site_layer_and_counter_that_changed(
    a: Path, b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["schema"] == "leakscope-diff/1"
    assert (found["verdict"]["verdict"], found["verdict"]["class"]) == ("leak", "regression")
    assert found["verdict"]["kept_bytes"] == 53 * 256
    assert found["work"] == {"unit": "requests_total", "a": 200, "b": 300, "ratio": 1.5, "known": True}
    sites = {(s["change"], s["culprit"]): s for s in found["sites"]}
    assert sites.keys() == {("new", "open_it"), ("vanished", "old_cache")}
    new, gone = sites["new", "open_it"], sites["vanished", "old_cache"]
    assert (new["a"]["live_bytes"], new["b"]["live_bytes"], new["more_bytes"]) == (0, 53 * 256, 53 * 256)
    assert (new["layer"], new["slab_cache"], new["b"]["live_objects"]) == ("kernel", "filp", 53)
    assert new["b"]["growth"]["bytes_per_s"] == pytest.approx(53 * 256 / 15, rel=0.05)
    assert new["stack"] == ["main", "open_it", "do_open"]
    # what A kept is expected 1.5 times, for the work of B
    assert (gone["a"]["live_bytes"], gone["b"]["live_bytes"], gone["more_bytes"]) == (67_000, 0, -1.5 * 67_000)
    assert found["sites_unchanged"] == 2  # work and label, whose files and lines moved
    layers = {layer["layer"]: layer for layer in found["layers"]}
    assert {name: (row["a"]["live_bytes"], row["b"]["live_bytes"]) for name, row in layers.items()} == {
        "kernel": (0, 53 * 256), "host": (20 * 4096 + 67_000, 30 * 4096),
    }  # fmt: skip
    assert layers["host"]["more_bytes"] == 30 * 4096 - 1.5 * (20 * 4096 + 67_000)
    assert layers["kernel"]["b"]["growth"]["bytes_per_s"] == pytest.approx(53 * 256 / 15, rel=0.05)
    (rss,) = found["counters"]
    assert (rss["counter"], rss["rates_apart"], rss["in_bytes"]) == ("rss", True, True)
    assert rss["b"]["rate"] == pytest.approx(53 * 1e5 / 15, rel=0.05)
    assert (rss["a"]["first"], rss["a"]["last"]) == (1e6, 1e6)


def test_the_terminal_says_what_b_keeps_first(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "B keeps 13.2 KiB more than A: open_it (kernel)"
    assert "B did 1.50 times the work of A (requests_total)" in lines
    text = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("kernel 0 B 13.2 KiB +13.2 KiB - ") for line in text)
    assert "sites that changed: 2, as before: 2" in text
    new = next(i for i, line in enumerate(text) if line.startswith("+ new kernel filp 0 B (0) 13.2 KiB (53) +13.2 KiB"))
    assert text[new + 1].startswith("- gone host mmap_anon 65.4 KiB (67) 0 B (0) -98.1 KiB - old_cache")
    assert any(line.startswith("≠ rss") for line in text)

    assert main(["diff", str(a), str(b), "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert "old_cache" in shown and "… and 1 more: --top shows them" in shown


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As b, with a culprit whose path is long and whose name is wide."""
    name = "服务.Handler.open_and_never_close_it (/srv/inference/releases/2026-11-30/service/handlers.py:1234)"
    return capture(tmp_path_factory.mktemp("diff") / "b.lscope", 1.5, 53, "bb", hostile=name)


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_looks_as_pinned(
    a: Path, long_names: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["diff", str(a), str(long_names)]) == 0
    lines = capsys.readouterr().out.splitlines()
    paths = {
        line: line.replace(line.split()[1], Path(line.split()[1]).name)
        for line in lines
        if line.startswith(("A  ", "B  "))
    }
    matches(f"terminal/diff_{width}", [paths.get(line, line) for line in lines])
    assert max(cell_len(line) for line in lines if line not in paths) <= width


def test_the_same_run_twice_differs_in_nothing(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(a), str(a)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("B keeps no more than A for the same work")
    assert "sites that changed: 0, as before: 3" in out


def test_work_can_be_named_and_a_layer_chosen(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(a), str(b), "--per", "seconds", "--layer", "kernel", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["work"]["unit"], found["work"]["ratio"]) == ("seconds", pytest.approx(1.5, rel=0.02))
    assert [layer["layer"] for layer in found["layers"]] == ["kernel"]

    assert main(["diff", str(a), str(b), "--per", "tokens_total"]) == 2
    assert "no such count of work" in capsys.readouterr().err


def test_hostile_names_are_escaped(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "b.lscope", 1, 53, "b", hostile="x\x1b]0;owned\x07\u202e")
    assert main(["diff", str(a), str(path)]) == 0
    out = capsys.readouterr().out
    assert "x\\x1b]0;owned\\x07\\u202e" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


def test_wrong_use_is_one_line(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, said in (
        ([str(a), "gone"], "no such file or capture"),
        ([str(a), str(a), "--layer", "x"], "no such layer"),
    ):
        assert main(["diff", *args]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_evidence_without_memory_is_not_compared() -> None:
    nothing = Report(Verdict("inconclusive", "missing_data"))
    found = difference(nothing, nothing)
    assert (found.verdict.verdict, found.layers, found.sites, found.counters) == ("inconclusive", (), (), ())
