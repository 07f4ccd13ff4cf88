"""What is kept by culprit, process, NVTX range and slab cache: every byte once, whatever it is broken down by."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from synthetic import SyntheticCapture

from leakscope.capture import Capture
from leakscope.cli.main import main
from leakscope.detect import breakdown as breakdowns
from leakscope.detect.attribution import Options, attribute
from leakscope.model.breakdown import BY, Group
from leakscope.model.results import Report

FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
NODE = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "maple_node"}
MMAP = {"layer": "host", "kind": "mmap_anon", "api": "mmap"}
DEVICE = {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}
SERVER, WORKER, HELPER = 100, 200, 300
MIB = 1 << 20


class Ranged(SyntheticCapture):
    """A synthetic capture whose allocations can be put into NVTX ranges."""

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__(seconds)
        self.marks: dict[tuple[str, ...], int] = {}

    def mark(self, *names: str) -> int:
        """The id of a range inside others, outermost first."""
        for depth in range(1, len(names) + 1):
            path = names[:depth]
            if path not in self.marks:
                self.marks[path] = len(self.marks) + 1
                self.rows["marks"].append(
                    {"id": self.marks[path], "parent_id": self.marks.get(path[:-1], 0), "pid": SERVER, "tid": SERVER,
                     "name": path[-1], "domain": "", "start_ns": self.ns(0), "end_ns": self.ns(self.seconds)}
                )  # fmt: skip
        return self.marks[names]

    def keep(self, count: int, size: int, *names: str, **how: Any) -> None:
        """``count`` allocations that are never freed, in a range."""
        for number in range(count):
            row = self.alloc(self.seconds * (number + 0.5) / count, size, **how)
            row["mark_id"] = self.mark(*names) if names else 0

    def report(self, path: Path, **options: Any) -> Report:
        """The report of what was collected."""
        capture = Capture.open(self.write(path))
        with capture.connect() as con:
            return attribute(con, capture.manifest, Options(**options))


def service() -> Ranged:
    """Two processes and a short-lived one, three layers, four ranges; and what counts in no layer."""
    made = Ranged()
    made.process(SERVER)
    made.process(WORKER, role="child")
    made.process(HELPER, role="child", start_s=1.0, exit_s=1.2)
    made.keep(100, 256, "request", "decode", user=["main", "open_it"], kernel=["k:do_open"], **FILP)
    made.keep(31, 256, user=["main", "open_it"], kernel=["k:do_open"], **FILP)
    made.keep(7, MIB, "load", user=["main", "weights"], pid=WORKER, **DEVICE)
    made.keep(13, 4096, "request", "encode", user=["main", "buffer"], **MMAP)
    made.keep(3, 8192, user=["main", "buffer"], pid=WORKER, **MMAP)
    made.keep(2, 1 << 30, user=["main", "reserve"], layer="host", kind="mmap_reserve", api="mmap")
    for _ in range(50):  # freed, as one sees later, by nobody
        node = made.alloc(2.0, 192, user=["main", "map_it"], kernel=["k:mas_alloc"], **NODE)
        made.free(node, 3.0, cause="reuse")
    made.keep(11, 192, "request", user=["main", "map_it"], kernel=["k:mas_alloc"], **NODE)
    outlives = made.alloc(1.1, 512, user=["main", "shared"], kernel=["k:shm"], pid=HELPER, **FILP)
    made.free(made.alloc(1.1, 333, user=["main", "own"], kernel=["k:own"], pid=HELPER, **FILP), 1.3, cause="exit")
    assert outlives["size_bytes"] == 512
    return made


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    folder = tmp_path_factory.mktemp("breakdown")
    return {by: service().report(folder / f"{by}.lscope", by=by) for by in BY}


def groups(report: Report, **where: Any) -> dict[Any, tuple[int, int]]:
    """(name, layer) → (live bytes, live objects) of the groups for which ``where`` holds."""
    assert report.breakdown is not None
    chosen = [g for g in report.breakdown.groups if all(getattr(g, key) == value for key, value in where.items())]
    return {(g.name, g.layer): (g.live_bytes, g.live_objects) for g in chosen if g.live_bytes}


COUNTED = {"added": True, "frees_visible": True}


def test_by_process(reports: dict[str, Report]) -> None:
    assert groups(reports["pid"], **COUNTED) == {
        ("p100", "kernel"): (131 * 256, 131),
        ("p100", "host"): (13 * 4096, 13),
        ("p200", "host"): (3 * 8192, 3),
        ("p200", "gpu"): (7 * MIB, 7),
        ("short-lived processes (1)", "kernel"): (512, 1),
    }
    assert {g.pid for g in (reports["pid"].breakdown or pytest.fail()).groups} == {SERVER, WORKER, None}


def test_by_range(reports: dict[str, Report]) -> None:
    assert groups(reports["range"], **COUNTED) == {
        ("request / decode", "kernel"): (100 * 256, 100),
        ("outside of all ranges", "kernel"): (31 * 256 + 512, 32),
        ("load", "gpu"): (7 * MIB, 7),
        ("request / encode", "host"): (13 * 4096, 13),
        ("outside of all ranges", "host"): (3 * 8192, 3),
    }
    assert groups(reports["range"], frees_visible=False) == {("request", "kernel"): (11 * 192, 11)}


def test_by_cache(reports: dict[str, Report]) -> None:
    assert groups(reports["cache"], **COUNTED) == {
        ("filp", "kernel"): (131 * 256 + 512, 132),
        ("mmap_anon", "host"): (13 * 4096 + 3 * 8192, 16),
        ("device", "gpu"): (7 * MIB, 7),
    }
    assert groups(reports["cache"], frees_visible=False) == {("maple_node", "kernel"): (11 * 192, 11)}
    kinds = {g.name: g.kind for g in (reports["cache"].breakdown or pytest.fail()).groups}
    assert (kinds["filp"], kinds["device"]) == ("", "device")


def test_by_site(reports: dict[str, Report]) -> None:
    assert groups(reports["site"], **COUNTED) == {
        ("open_it", "kernel"): (131 * 256, 131),
        ("shared", "kernel"): (512, 1),
        ("buffer", "host"): (13 * 4096 + 3 * 8192, 16),
        ("weights", "gpu"): (7 * MIB, 7),
    }


@pytest.mark.parametrize("by", BY)
def test_what_does_not_count_in_a_layer_stands_apart(reports: dict[str, Report], by: str) -> None:
    assert sum(size for size, _ in groups(reports[by], added=False).values()) == 2 << 30
    assert {g.layer_share for g in (reports[by].breakdown or pytest.fail()).groups if not g.added} == {None}


def sums(report: Report) -> dict[tuple[str, str], tuple[int, int]]:
    """(layer, how it counts) → live bytes and objects of all groups."""
    assert report.breakdown is not None
    found: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for group in report.breakdown.groups:
        how = "not added" if not group.added else "counted" if group.frees_visible else "hidden"
        found[group.layer, how].append(group)
    return {key: (sum(g.live_bytes for g in all_), sum(g.live_objects for g in all_)) for key, all_ in found.items()}


def assert_sums_are_those_of_the_layers(report: Report) -> None:
    found = sums(report)
    for layer in report.layers:
        counted = found.get((layer.layer, "counted"), (0, 0))
        assert counted == (layer.live_bytes, layer.live_objects)
        assert found.get((layer.layer, "hidden"), (0, 0))[0] == layer.frees_not_visible_bytes
        assert found.get((layer.layer, "not added"), (0, 0))[0] == layer.not_added_bytes


@pytest.mark.parametrize("by", BY)
def test_groups_sum_to_the_layers(reports: dict[str, Report], by: str) -> None:
    report = reports[by]
    assert_sums_are_those_of_the_layers(report)
    for layer in report.layers:
        shown = [g for g in (report.breakdown or pytest.fail()).groups if g.layer == layer.layer]
        counted = [g for g in shown if g.added and g.frees_visible]
        assert sum(g.layer_share or 0 for g in counted) == pytest.approx(1)
        rates = [g.growth.bytes_per_s for g in counted if g.growth]
        assert layer.growth is not None and sum(rates) == pytest.approx(layer.growth.bytes_per_s)
        assert sum(g.allocated_bytes for g in shown if g.added) == layer.allocated_bytes
    leak = next(g for g in (report.breakdown or pytest.fail()).groups if g.layer == "gpu")
    assert leak.growth is not None
    assert leak.growth.bytes_per_s == pytest.approx(7 * MIB / 10, rel=0.2)
    assert leak.growth.ci_low <= leak.growth.bytes_per_s <= leak.growth.ci_high


def noise(seed: int) -> Ranged:
    """Allocations and frees of many sites, processes and ranges, stacks sampled; some frees by reuse alone."""
    chance = random.Random(seed)
    made = Ranged()
    for pid in (SERVER, WORKER):
        made.process(pid, role="root" if pid == SERVER else "child")
    paths = [(), ("request",), ("request", "decode"), ("load",)]
    for _ in range(700):
        at = chance.uniform(0, 9)
        function = chance.randrange(6)
        if chance.random() < 0.7:  # a kernel function whose frees are seen for some callers and for others not
            row = made.alloc(
                at, chance.choice([64, 192, 1000]), user=["main", f"f{function}"], kernel=["k:shared"],
                weight=chance.choice([0, 0, 0, 1, 4]), pid=chance.choice([SERVER, WORKER]), **NODE,
            )  # fmt: skip
            cause = "reuse" if function < 3 else "call"
        else:
            row = made.alloc(
                at, chance.randrange(1, 9999), user=["main", f"g{function}"], pid=chance.choice([SERVER, WORKER]),
                **chance.choice([MMAP, DEVICE, MMAP | {"kind": "mmap_reserve"}]),
            )  # fmt: skip
            cause = "call"
        path = chance.choice(paths)
        row["mark_id"] = made.mark(*path) if path else 0
        if chance.random() < (0.8 if row["weight"] else 0.02):
            made.free(row, chance.uniform(at, 10), cause=cause)
    return made


def test_sums_hold_whatever_is_sampled_or_hidden(tmp_path: Path) -> None:
    reports = {by: noise(1).report(tmp_path / f"{by}.lscope", by=by) for by in BY}
    assert reports["range"].layers[0].frees_not_visible_bytes > 0
    for report in reports.values():
        assert_sums_are_those_of_the_layers(report)
    assert any(group.stack_sampled for group in (reports["site"].breakdown or pytest.fail()).groups)
    assert any(group.stack_sampled for group in (reports["range"].breakdown or pytest.fail()).groups)
    assert not any(group.stack_sampled for group in (reports["pid"].breakdown or pytest.fail()).groups)


@pytest.mark.parametrize("by", ["range", "site"])
def test_sums_hold_where_allocations_were_lost(tmp_path: Path, by: str) -> None:
    made = noise(3)
    lost = random.Random(3)
    made.rows["mem_events"] = [row for row in made.rows["mem_events"] if row["op"] == "free" or lost.random() < 0.7]
    assert_sums_are_those_of_the_layers(made.report(tmp_path / "c.lscope", by=by))


def test_sites_that_are_not_listed_count_as_well(tmp_path: Path) -> None:
    made = Ranged()
    made.process()
    for number in range(12):  # allocated once: what grows is listed in any case
        made.alloc(0.1, 100 + number, user=["main", f"f{number:02d}"], **FILP)
    report = made.report(tmp_path / "c.lscope", by="site", sites=3)
    assert groups(report) == {
        **{(f"f{number:02d}", "kernel"): (100 + number, 1) for number in (9, 10, 11)},
        ("sites not listed", "kernel"): (sum(100 + number for number in range(9)), 9),
    }
    (rest,) = [g for g in (report.breakdown or pytest.fail()).groups if g.name == "sites not listed"]
    assert rest.sites == 9


def test_the_least_of_very_many_groups_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdowns, "MAX_GROUPS", 2)
    report = service().report(tmp_path / "c.lscope", by="cache")
    assert_sums_are_those_of_the_layers(report)
    named = {g.name for g in (report.breakdown or pytest.fail()).groups}
    assert named == {"mmap_reserve", "device", "the rest"}


def test_by_is_in_json_beside_all_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = service().write(tmp_path / "one.lscope")
    two = service().write(tmp_path / "two.lscope")
    assert main(["attribute", str(one), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "breakdown" not in plain
    assert main(["attribute", str(one), str(two), "--json", "--by", "cache"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [*plain, "breakdown"]
    assert report["breakdown"]["by"] == "cache"
    of_filp = [g for g in report["breakdown"]["groups"] if g["name"] == "filp"]
    assert [(g["source"], g["live_bytes"], g["live_objects"], g["sites"]) for g in of_filp] == [
        (source, 131 * 256 + 512, 132, 3) for source in (0, 1)
    ]
    assert set(of_filp[0]) == {
        "name", "source", "layer", "kind", "pid", "ranges", "sites", "live_bytes", "live_objects", "layer_share",
        "growth_bytes_per_s", "growth_ci_low", "growth_ci_high", "allocated_bytes", "allocated_objects",
        "stack_sampled", "bytes_sampled", "standard_error_bytes", "frees_visible", "added_to_layer",
    }  # fmt: skip


def test_a_layer_is_chosen_before_it_is_broken_down(tmp_path: Path) -> None:
    report = service().report(tmp_path / "c.lscope", by="pid", layer="host")
    assert groups(report, **COUNTED) == {("p100", "host"): (13 * 4096, 13), ("p200", "host"): (3 * 8192, 3)}


def test_an_unknown_breakdown_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(service().write(tmp_path / "c.lscope")), "--by", "thread"]) == 2
    assert capsys.readouterr().err == ("leakscope: --by thread: no such breakdown; there are site, pid, range, cache\n")


def test_a_recorded_command_is_told_whole(tmp_path: Path) -> None:
    made = service()
    path = made.write(tmp_path / "c.lscope")
    capture = Capture.open(path)
    capture.manifest.sources[0].scope["command_pid"] = SERVER
    capture.manifest.sources[0].command = ["/usr/bin/serve", "--name", "a b"]
    with capture.connect() as con:
        report = attribute(con, capture.manifest, Options(by="pid"))
    assert ("/usr/bin/serve --name 'a b'", "host") in groups(report, **COUNTED)
