"""leakscope export: every format read back by something that is not ours, with the bytes that were planted."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import networkx as nx
import pyarrow.parquet as pq
import pytest
from planted import BEGIN_NS, SECOND, Planted, planted, write_recording
from pprof_format import read_pprof
from prometheus_client.parser import text_string_to_metric_families
from reports_once import reports_once
from synthetic import SyntheticCapture

from leakscope.cli.main import main
from leakscope.report.export.protobuf import varint

SCHEMAS = Path(__file__).parent / "schemas"
FILP = {"kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}
HOSTILE = "py:<script>\x1b[31m;rm@/tmp/\u202ea.py:3"


@pytest.fixture(scope="module")
def run() -> Planted:
    return planted()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, run: Planted) -> Path:
    """The planted recording: device memory of 900 calls, kernel memory in and beside them."""
    path = tmp_path_factory.mktemp("export") / "run.lscope"
    return write_recording(path, run, marks=True, samples=[(BEGIN_NS + SECOND, "700", "rss", 1e6 + 0.5)])


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with stacks of known bytes: 100 × 256 leak below open_it, 37 × 4096 from a hostile name, 53 × 100
    churn; and 11 × 1000 of heap, which brk already counts."""
    capture = SyntheticCapture(10)
    capture.process()
    capture.leak(100, 256, user=["main", "open_it"], kernel=["k:do_open"], **FILP)
    capture.leak(37, 4096, layer="host", kind="mmap_anon", api="mmap", python=["py:serve@app.py:7", HOSTILE])
    capture.churn(53, 100, layer="host", kind="mmap_anon", api="mmap", user=["main", "work"])
    capture.leak(11, 1000, layer="host", kind="heap", api="malloc", user=["main", "keep"])
    return capture.write(tmp_path_factory.mktemp("export") / "stacks.lscope")


Export = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def each_report_once() -> Iterator[None]:
    with reports_once():
        yield


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Run the verb; the file, or the exit code is not 0. ``said`` has its stderr."""

    def exported(evidence: Path | list[Path], to: str, *args: str, name: str = "out") -> Path:
        paths = evidence if isinstance(evidence, list) else [evidence]
        out = tmp_path / name
        code = main(["export", *map(str, paths), "--to", to, "-o", str(out), *args])
        exported.said = capsys.readouterr().err  # type: ignore[attr-defined]
        assert code == 0, exported.said  # type: ignore[attr-defined]
        return out

    return exported


def folded_of(path: Path) -> dict[str, int]:
    return {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in path.read_text().splitlines()}


SAFE = "<script>\\x1b[31m:rm (/tmp/\\u202ea.py:3)"


def test_folded_stacks_have_every_byte_once(stacks: Path, export: Export) -> None:
    live = {
        "kernel;main;open_it;do_open;[slab filp]": 100 * 256,
        f"host;serve (app.py:7);{SAFE};[mmap_anon mmap]": 37 * 4096,
    }
    assert folded_of(export(stacks, "folded")) == live
    assert "10.7 KiB of kind heap are left out, other kinds count these bytes; --kind heap exports them" in export.said  # type: ignore[attr-defined]

    assert folded_of(export(stacks, "folded", "--of", "allocated")) == live | {
        "host;main;work;[mmap_anon mmap]": 53 * 100
    }
    assert folded_of(export(stacks, "folded", "--layer", "kernel")) == {
        "kernel;main;open_it;do_open;[slab filp]": 100 * 256
    }
    assert folded_of(export(stacks, "folded", "--kind", "heap")) == {"host;main;keep;[heap malloc]": 11 * 1000}


def test_growth_is_in_bytes_an_hour(stacks: Path, export: Export) -> None:
    growth = folded_of(export(stacks, "folded", "--of", "growth", "--layer", "kernel"))
    assert growth == {"kernel;main;open_it;do_open;[slab filp]": pytest.approx(2560 * 3600, rel=0.05)}


def test_what_is_not_listed_stands_in_a_stack_of_its_own(recording: Path, run: Planted, export: Export) -> None:
    device = sum(row["size_bytes"] for row in run.allocations)
    kernel = 64 * len(run.kernel)
    everything = {"gpu;[device cudaMalloc]": device, "kernel;kmalloc_user;[kmalloc kmalloc-64]": kernel}
    assert folded_of(export(recording, "folded")) == everything
    many = SyntheticCapture(10)
    many.process()
    for number in range(12):  # what grows is always listed: these are allocated once
        many.alloc(0.1, 100 + number, user=["main", f"f{number:02d}"], **FILP)
    path = many.write(recording.parent / "many.lscope")
    found = folded_of(export(path, "folded", "--sites", "3"))
    assert found == {
        "kernel;[sites not listed]": sum(100 + number for number in range(9)),
        **{f"kernel;main;f{number:02d};[slab filp]": 100 + number for number in (9, 10, 11)},
    }
    assert "9 sites with the least kept bytes are not listed one by one" in export.said  # type: ignore[attr-defined]


def test_speedscope_has_a_profile_a_layer(stacks: Path, export: Export) -> None:
    file = json.loads(export(stacks, "speedscope").read_bytes())
    jsonschema.validate(file, json.loads((SCHEMAS / "speedscope.json").read_text()))
    host, kernel = file["profiles"]
    assert (host["name"], host["unit"], host["endValue"]) == ("host, live bytes", "bytes", 37 * 4096)
    assert (kernel["name"], kernel["endValue"], kernel["weights"]) == ("kernel, live bytes", 25600, [25600])
    frames = file["shared"]["frames"]
    assert [frames[i] for i in host["samples"][0]] == [
        {"name": "serve", "file": "app.py", "line": 7},
        {"name": "<script>\\x1b[31m;rm", "file": "/tmp/\\u202ea.py", "line": 3},
        {"name": "[mmap_anon mmap]"},
    ]


def test_pprof_reads_back_by_an_independent_decoder(stacks: Path, export: Export) -> None:
    path = export(stacks, "pprof", "--of", "allocated")
    profile, samples = read_pprof(path)
    strings = list(profile.string_table)
    assert strings[0] == ""
    assert [(strings[t.type], strings[t.unit]) for t in profile.sample_type] == [
        ("live_objects", "count"), ("live_space", "bytes"), ("growth_space_per_hour", "bytes"),
        ("alloc_objects", "count"), ("alloc_space", "bytes"),
    ]  # fmt: skip
    assert strings[profile.default_sample_type] == "alloc_space"
    assert profile.duration_nanos == 10 * SECOND
    assert [strings[c][:8] for c in profile.comment] == ["10.7 KiB"]
    by_leaf = {sample["frames"][-1][0]: sample for sample in samples if sample["live_space"]}
    leak = by_leaf["[slab filp]"]
    assert leak["frames"] == [("main", "", 0), ("open_it", "", 0), ("do_open", "", 0), ("[slab filp]", "", 0)]
    assert (leak["live_objects"], leak["live_space"], leak["alloc_objects"], leak["alloc_space"]) == (
        100, 25600, 100, 25600,
    )  # fmt: skip
    assert (leak["layer"], leak["kind"], leak["api"], leak["evidence"]) == (
        "kernel", "slab", "kmem_cache_alloc", str(stacks),
    )  # fmt: skip
    hostile = by_leaf["[mmap_anon mmap]"]
    assert hostile["frames"][1] == ("<script>\\x1b[31m;rm", "/tmp/\\u202ea.py", 3)
    assert sum(sample["alloc_space"] for sample in samples) == 100 * 256 + 37 * 4096 + 53 * 100


def test_go_reads_the_pprof(stacks: Path, export: Export, tmp_path: Path) -> None:
    go = os.environ.get("LEAKSCOPE_GO")
    if not go:
        pytest.skip("NOT TESTED: go tool pprof; LEAKSCOPE_GO=PATH of go runs it")
    path = export(stacks, "pprof")
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOPROXY": "off"}
    command = [go, "tool", "pprof", "-raw", str(path)]
    raw = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert raw.returncode == 0, raw.stderr
    assert "live_objects/count live_space/bytes[dflt] growth_space_per_hour/bytes" in raw.stdout
    assert "100      25600" in raw.stdout


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (-1, "ffffffffffffffffff01"),
        (1 << 63, "80808080808080808001"),
    ],
)
def test_varints(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded


@pytest.mark.parametrize(("table", "count"), [("sites", 2), ("samples", 1), ("events", None)])
def test_tables_read_back(recording: Path, run: Planted, export: Export, table: str, count: int | None) -> None:
    count = count or len(run.allocations) + len(run.kernel)
    columns = pq.read_table(export(recording, "parquet", "--table", table)).to_pydict()
    rows = list(csv.DictReader(export(recording, "csv", "--table", table).open(newline="")))
    assert len(rows) == len(columns["evidence"]) == count
    assert list(rows[0]) == list(columns)
    assert set(columns["evidence"]) == {str(recording)}
    device = sum(row["size_bytes"] for row in run.allocations)
    if table == "sites":
        assert columns["live_bytes"] == [device, 64 * len(run.kernel)]
        assert columns["stack"] == [[], ["kmalloc_user"]]
        assert [row["stack"] for row in rows] == ["", "kmalloc_user"]
    elif table == "samples":
        assert (columns["counter"], columns["value"], rows[0]["value"]) == (["rss"], [1e6 + 0.5], "1000000.5")
    else:
        assert (
            sum(columns["size_bytes"]) == sum(int(row["size_bytes"]) for row in rows) == device + 64 * len(run.kernel)
        )
        assert [int(row["addr"]) for row in rows] == columns["addr"]
        assert columns["addr"][: len(run.allocations)] == [row["addr"] for row in run.allocations]
        assert columns["stack"] == [["kmalloc_user"] if kind == "kmalloc" else [] for kind in columns["kind"]]


FORMULAS = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\tx", "＝1", "'quoted", "''", "plain=1", ""]


def test_no_text_in_csv_is_a_formula_and_the_guard_comes_off(tmp_path: Path, export: Export) -> None:
    capture = SyntheticCapture(10)
    capture.process()
    for number, name in enumerate(FORMULAS):
        capture.leak(20, 100 + number, user=[name or "nameless", "f"], **FILP | {"cache": name})
    capture.sample(1.0, "=cmd|calc", -5.0)
    path = capture.write(tmp_path / "c.lscope")
    rows = list(csv.DictReader(export(path, "csv").open(newline="")))
    plain = pq.read_table(export(path, "parquet")).to_pylist()
    texts = [row[column] for row in rows for column in ("slab_cache", "stack", "culprit_frame")]
    assert not any(text.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝")) for text in texts)
    caches = [row["slab_cache"] for row in rows]
    assert sorted(caches) == sorted(
        ["'=HYPERLINK(1)", "'+1", "'-1", "'@SUM(A1)", "'\tx", "'＝1", "''quoted", "'''", "plain=1", ""]
    )
    assert [text.removeprefix("'") for text in caches] == [row["slab_cache"] or "" for row in plain]
    assert [row["stack"].removeprefix("'").split(";")[0] for row in rows if row["slab_cache"] == "'+1"] == ["+1"]
    assert [float(row["growth_bytes_per_s"]) for row in rows] == [row["growth_bytes_per_s"] for row in plain]
    (sample,) = csv.DictReader(export(path, "csv", "--table", "samples").open(newline=""))
    assert (sample["counter"], float(sample["value"])) == ("'=cmd|calc", -5)


def test_events_carry_the_merged_stack(stacks: Path, export: Export) -> None:
    rows = pq.read_table(export(stacks, "parquet", "--table", "events", "--layer", "host")).to_pylist()
    assert {row["layer"] for row in rows} == {"host"}
    assert len(rows) == 37 + 2 * 53 + 11
    (hostile,) = {tuple(row["stack"]) for row in rows if row["size_bytes"] == 4096}
    assert hostile == ("serve (app.py:7)", "<script>\x1b[31m;rm (/tmp/\u202ea.py:3)")


def test_the_chain_graph(recording: Path, run: Planted, export: Export) -> None:
    graph = nx.read_graphml(export(recording, "graphml"))
    device = [data for _, data in graph.nodes(data=True) if data["what"] == "device"]
    assert [node["bytes"] for node in device] == [sum(row["size_bytes"] for row in run.allocations)]
    dot = export(recording, "dot").read_text()
    assert dot.startswith("digraph chains {")
    assert dot.count(" -> ") == graph.number_of_edges() > 0


def test_prometheus_reads_the_metrics(recording: Path, run: Planted, export: Export) -> None:
    text = export(recording, "prometheus").read_text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    live = {s.labels["layer"]: s.value for s in families["leakscope_layer_live_bytes"].samples}
    assert live == {"gpu": sum(row["size_bytes"] for row in run.allocations), "kernel": 64 * len(run.kernel)}
    assert {s.labels["verdict"]: s.value for s in families["leakscope_verdict"].samples} == {
        "leak": 1, "inconclusive": 0, "not_leak": 0,
    }  # fmt: skip
    (site,) = [s for s in families["leakscope_site_live_bytes"].samples if s.labels["layer"] == "kernel"]
    assert (site.labels["culprit"], site.value) == ("kmalloc_user", 64 * len(run.kernel))
    assert "0x" not in text
    one = export(recording, "prometheus", "--sites", "1").read_text()
    assert one.count("leakscope_site_live_bytes{") == 1
    if shutil.which("promtool"):
        assert subprocess.run(["promtool", "check", "metrics"], input=text, text=True).returncode == 0


def test_otel_reads_the_metrics(recording: Path, run: Planted, export: Export) -> None:
    from google.protobuf.json_format import Parse
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    (line,) = export(recording, "otel").read_text().splitlines()
    metrics = Parse(line, MetricsData()).resource_metrics[0].scope_metrics[0].metrics
    (live,) = [metric for metric in metrics if (metric.name, metric.unit) == ("leakscope.layer.live", "By")]
    values = {p.attributes[1].value.string_value: p.as_double for p in live.gauge.data_points}
    assert values == {"gpu": sum(row["size_bytes"] for row in run.allocations), "kernel": 64 * len(run.kernel)}


def test_without_opentelemetry_one_line_says_what_to_install(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.metrics.v1.metrics_pb2", None)
    code = main(["export", str(recording), "--to", "otel", "-o", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert (code, said) == (4, "leakscope: --to otel needs opentelemetry-proto: pip install 'leakscope[otel]'\n")
    assert list(tmp_path.iterdir()) == []


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["export", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_wrong_use_is_one_line(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(recording), "-o", str(tmp_path / "out")]
    assert "--of: does not apply to --to csv" in refused(capsys, *given, "--to", "csv", "--of", "live")
    assert "--table: does not apply to --to dot" in refused(capsys, *given, "--to", "dot", "--table", "sites")
    assert "--kind ram: no such kind" in refused(capsys, *given, "--to", "folded", "--kind", "ram")
    assert "shows no sites" in refused(capsys, *given, "--to", "perfetto", "--sites", "3")
    assert "shows no sites" in refused(capsys, *given, "--to", "csv", "--table", "events", "--warmup", "1")
    assert "--layer disk: no such layer" in refused(capsys, *given, "--to", "folded", "--layer", "disk")
    assert "there is no folder" in refused(
        capsys, str(recording), "--to", "folded", "-o", str(tmp_path / "no" / "out")
    )  # fmt: skip
    assert "no such file or capture" in refused(capsys, "gone.lscope", "--to", "csv", "-o", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_dash_is_standard_output(stacks: Path, recording: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["export", str(stacks), "--to", "folded", "--layer", "kernel", "-o", "-"]) == 0
    assert capfdbinary.readouterr().out == b"kernel;main;open_it;do_open;[slab filp] 25600\n"
    assert main(["export", str(recording), "--to", "csv", "--table", "samples", "-o", "-"]) == 0
    assert capfdbinary.readouterr().out.splitlines()[1].endswith(b'"rss",1000000.5')


def test_a_failed_export_leaves_the_old_file(
    stacks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from leakscope.report.export import folded

    def fails(*_: Any) -> Any:
        yield b"half"
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folded, "folded", fails)
    old = tmp_path / "out"
    old.write_text("old")
    assert main(["export", str(stacks), "--to", "folded", "-o", str(old)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "old")]


def test_gz_compresses_and_the_same_evidence_gives_the_same_bytes(stacks: Path, export: Export) -> None:
    plain = export(stacks, "folded").read_bytes()
    packed = export(stacks, "folded", name="out.gz").read_bytes()
    assert gzip.decompress(packed) == plain
    assert export(stacks, "folded", name="again.gz").read_bytes() == packed
    assert export(stacks, "pprof", name="1").read_bytes() == export(stacks, "pprof", name="2.pb.gz").read_bytes()
