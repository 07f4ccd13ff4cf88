"""The Grafana dashboard and the alert rules of samples/observability, on what `leakscope serve` really tells.

Real sources are read for 12 minutes of a clock of their own; Prometheus gets the scrapes as a database and evaluates
every query of the dashboard and of the rules on it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kv_publisher import Publisher, batch, removed, stored
from prometheus_client.parser import text_string_to_metric_families
from recording import ROOT
from synthetic import PID, SyntheticCapture
from test_redis_audit import Server
from test_serve_caches import address, engine, telling

from leakscope.report.export.prometheus import prometheus
from leakscope.serve.caches import RedisSource
from leakscope.serve.captures import CaptureSource
from leakscope.serve.engines import EngineSource
from leakscope.serve.exposition import gathered
from leakscope.serve.kv_events import KvEvents
from leakscope.serve.source import Polled, Source

SAMPLES = ROOT / "samples" / "observability"
STEP_S = 10
STEPS = 72
ITS_OWN = "process_resident_memory_bytes"
"""Of prometheus_client itself, not of a source."""
CALM = {
    *("LeakscopeAbsent", "LeakscopeSourceDown", "LeakscopeRecorderStopped", "LeakscopeSeriesFolded"),
    "LeakscopeGoalMissed",
}
"""Rules that these scrapes give no reason for."""
BY_CHANCE = {"LeakscopeObjectiveSuspected"}
"""How far the latencies of a Redis tremble is its affair."""
Rows = dict[str, tuple[str, list[str]]]


def needed(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"NOT TESTED: no {program} on this host (tools/system-packages.sh test installs it)")
    return found


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SAMPLES / "dashboard.json").read_text())
    return content


def panel_queries() -> list[tuple[str, str]]:
    """(title, query) of all panels, with the variables as Grafana fills them in for all evidence."""
    return [
        (panel["title"], target["expr"].replace("$evidence", ".*"))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def rules() -> dict[str, str]:
    groups = yaml.safe_load((SAMPLES / "leakscope.rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def leaking_capture(path: Path) -> Path:
    """A kernel leak in a control group with a limit, on a host with a GPU, and lost events."""
    made = SyntheticCapture(60)
    made.process()
    made.leak(600, 4096, cache="leaky", user=["main", "handle"], kernel=["k:alloc_thing"])
    for at in range(60):
        for counter, value in (("rss", 2.0e9), ("pss", 1.9e9), ("fds", 12.0), ("threads", 3.0)):
            made.sample(at, counter, value + at, "process", str(PID))
        made.sample(at, "cgroup", 3.0e9, "cgroup", "/llm")
        made.sample(at, "cgroup_limit", 4.0e9, "cgroup", "/llm")
        made.sample(at, "gpu_used", 5.0e9, "device", "GPU-1")
    made.loss("on_kfree", "ring_drop", 7)
    return made.write(path)


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Exposition texts, one each ten seconds: a leaking capture, a Redis that misses, an idle engine that holds blocks,
    and its events."""
    needed("redis-server")
    folder = tmp_path_factory.mktemp("observability")
    server = Server(tmp_path_factory.mktemp("redis"))
    client = server.client()
    # of the pool of four blocks, block 1 stays while eight others come and go
    churn = [batch(1.0, [stored([1]), stored([2])])]
    churn += [batch(2.0 + n, [stored([10 + n]), removed(10 + n)]) for n in range(8)]
    texts = [engine(1000 * n, 900 * n, 0, 0.06, 100 * ((n + 1) // 2), 100 * (n // 2)) for n in range(STEPS)]
    try:
        with Publisher(churn) as publisher, telling(*texts) as url:
            events = KvEvents(address(f"tcp://127.0.0.1:{publisher.port}?pool=4"), 10.0)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                if any(m.name == "kv.blocks.held" and m.samples for m in events.read(0.0)):
                    break
                time.sleep(0.02)
            sources: list[Source] = [
                CaptureSource(leaking_capture(folder / "run.lscope"), 10.0, "512MiB", 4 << 30),
                RedisSource(address(server.url), 10.0, bound=0.9),
                events,
                EngineSource(address(url), 10.0, events=events),
            ]
            yield list(_scraped(sources, client))
            events.close()
    finally:
        server.stop()


def _scraped(sources: list[Source], client: Any) -> Iterator[str]:
    polled = [Polled(source) for source in sources]
    for step in range(STEPS):
        pipeline = client.pipeline(transaction=False)
        for number in range(120):
            pipeline.get("there" if number % 3 == 0 else "not there")
        pipeline.set("there", "x", keepttl=True)
        pipeline.execute()
        for one in polled:
            now = float(STEP_S * step)
            read = one.source.read
            one.source.read = lambda _, read=read, now=now: read(now)  # type: ignore[method-assign]
            one.read()
            one.source.read = read  # type: ignore[method-assign]
        yield prometheus(gathered(polled)).decode()


@pytest.fixture(scope="module")
def database(scrapes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that holds the scrapes."""
    promtool, server = needed("promtool"), needed("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    end = int(time.time()) // 60 * 60
    begin = end - STEP_S * (STEPS - 1)
    (folder / "scrapes.om").write_text(open_metrics(scrapes, begin))
    subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", folder / "scrapes.om", folder / "data"],
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.copy(SAMPLES / "leakscope.rules.yml", folder)
    (folder / "p.yml").write_text("rule_files: [leakscope.rules.yml]\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            server, f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]
    )  # fmt: skip
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", end)
    finally:
        process.terminate()
        process.wait()


class Prometheus:
    """Asks one that runs, at the time of the last scrape."""

    def __init__(self, url: str, at: int) -> None:
        self._url, self._at = url, at
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("Prometheus does not get ready")

    def query(self, text: str) -> list[dict[str, Any]]:
        asked = urllib.parse.urlencode({"query": text, "time": self._at})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{asked}", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found


def open_metrics(scrapes: list[str], begin: int) -> str:
    """The scrapes as one text with times, family by family, as promtool reads it."""
    lines: dict[str, list[str]] = {}
    for step, text in enumerate(scrapes):
        for family in text_string_to_metric_families(text):
            rows = lines.setdefault(family.name, [f"# TYPE {family.name} {family.type}"])
            for sample in family.samples:
                labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
                rows.append(f"{sample.name}{{{labels}}} {sample.value} {begin + STEP_S * step}")
    return "\n".join(row for rows in lines.values() for row in rows) + "\n# EOF\n"


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:leakscope|process)_[a-z0-9_]+", query))


def test_every_metric_that_is_named_is_told(scrapes: list[str]) -> None:
    told = {s.name for text in scrapes for family in text_string_to_metric_families(text) for s in family.samples}
    named = {name for _, query in panel_queries() for name in names_in(query)}
    named |= {name for query in rules().values() for name in names_in(query)}
    assert len(named) > 40
    assert named - told == {ITS_OWN}
    # and so is what the variable offers
    variable = dashboard()["templating"]["list"][1]["query"]["query"]
    assert names_in(variable) <= told


def test_every_panel_has_something_to_show(database: Prometheus) -> None:
    empty = [(title, query) for title, query in panel_queries() if ITS_OWN not in query and not database.query(query)]
    assert empty == []


def test_panels_show_what_is_so(database: Prometheus) -> None:
    queries: dict[str, str] = {}
    for title, query in panel_queries():
        queries.setdefault(title, query)

    def shown(title: str) -> dict[tuple[str, ...], list[float]]:
        found: dict[tuple[str, ...], list[float]] = {}
        for row in database.query(queries[title]):
            key = tuple(v for k, v in sorted(row["metric"].items()) if k not in ("__name__", "evidence"))
            found.setdefault(key, []).append(float(row["value"][1]))
        return {key: sorted(of) for key, of in found.items()}

    assert shown("Verdict") == {(): [1.0, 2.0]}  # Redis: nothing can be said so soon; the capture leaks
    assert shown("Live bytes by layer")["kernel",] == [600 * 4096]
    states = shown("States")  # 2 critical, 1 suspected, 0 normal, -1 unknown
    assert states["hit_ratio",] == [0.0, 2.0]  # the engine hits nine tenths, Redis a third
    assert 2.0 in states["p99_jitter",]  # the engine's
    assert shown("KV blocks")["0",] == [2.0]
    assert shown("Losses")["on_kfree", "ring_drop"] == [7.0]


def test_rules_fire_on_what_is_wrong_and_on_nothing_else(database: Prometheus) -> None:
    fired = {alert for alert, query in rules().items() if database.query(query)}
    assert fired - BY_CHANCE == set(rules()) - CALM - BY_CHANCE
    hits = database.query(rules()["LeakscopeHitRatio"])
    assert [row["metric"]["evidence"].startswith("unix://") for row in hits] == [True]


def test_rules_pass_their_own_tests() -> None:
    promtool = needed("promtool")
    for arguments in (["check", "rules", "leakscope.rules.yml"], ["test", "rules", "leakscope.rules.test.yml"]):
        done = subprocess.run([promtool, *arguments], cwd=SAMPLES, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([promtool, "check", "config", "--syntax-only", "prometheus.yml"], cwd=SAMPLES)
    assert done.returncode == 0
    tested = {
        test["alertname"]
        for group in yaml.safe_load((SAMPLES / "leakscope.rules.test.yml").read_text())["tests"]
        for test in group["alert_rule_test"]
    }
    assert tested == set(rules())


def test_scrapes_pass_the_linter(scrapes: list[str]) -> None:
    promtool = needed("promtool")
    done = subprocess.run([promtool, "check", "metrics"], input=scrapes[-1], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_dashboard_is_of_grafanas_schema() -> None:
    cog = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="NOT TESTED: no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    cog.register_default_plugins()
    content = dashboard()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(content)))
    # what Grafana's own classes do not know would be lost on the way
    assert lost(content, read) == []
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(panel["description"] for panel in panels)
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in content["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Where ``after`` lacks what ``before`` has."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = [f"{path}/{key}" for key in before.keys() - after.keys()]
        return missing + [
            one for key in before.keys() & after.keys() for one in lost(before[key], after[key], f"{path}/{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [one for n, (b, a) in enumerate(zip(before, after, strict=True)) for one in lost(b, a, f"{path}/{n}")]
    return [] if before == after else [path]
