"""The audit of a real Redis server (and memcached) with planted keys: exact, read-only, without secrets."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from leakscope.capture import Capture
from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering
from leakscope.cli.main import main
from leakscope.detect.attribution import Options as AttributeOptions
from leakscope.detect.evidence import attribute_evidence
from leakscope.detect.key_store import audit_of, judge_store
from leakscope.ingest import Imported
from leakscope.ingest.files import enter
from leakscope.model.stores import StoreAudit
from leakscope.streams import Collecting, address_of, collect
from leakscope.streams.key_patterns import KeyPatterns, patterns
from leakscope.streams.redis_info import byte_counters, counters_of, samples_of
from nsight_parsers import ParsedReport

SECRET = "hunter2"
FAST = Collecting(busy_share=1.0)
WEEK_S = 7 * 86_400


class Server:
    """A redis-server of this test alone, on a socket file."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.socket = directory / "s"
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--save",
            "",
            "--dir",
            str(directory),
        ]
        more = ["--enable-debug-command", "yes", *options]
        self._process = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL)
        self.url = f"unix://{self.socket}"
        for _ in range(500):
            if self.socket.exists():
                break
            time.sleep(0.02)

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not shutil.which("redis-server"):
        pytest.skip("NOT TESTED: no redis-server on this host")
    running = Server(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


@pytest.fixture
def planted(server: Server) -> redis.Redis:
    """300 sessions without a TTL, 100 of them idle for ten days; 200 profiles with one; a list; 40 dead keys."""
    client = server.client()
    client.flushall()
    client.execute_command("DEBUG", "SET-ACTIVE-EXPIRE", "1")
    for number in range(300):
        client.set(f"session:{uuid.UUID(int=number << 64)}", "x" * 100)
    for number in range(200):
        client.set(f"user:{number}:profile", "y" * 50, ex=3600)
    client.rpush("queue:jobs", *["z" * 100] * 15_000)
    for number in range(100):
        name = f"session:{uuid.UUID(int=number << 64)}"
        client.restore(name, 0, client.dump(name), replace=True, idletime=10 * 86_400)
    client.execute_command("DEBUG", "SET-ACTIVE-EXPIRE", "0")
    for number in range(40):
        client.set(f"dead:{number}", "d", px=1)
    time.sleep(0.01)
    client.config_resetstat()
    return client


def audited(server: Server, capture: Path, how: Collecting = FAST, more: str = "") -> tuple[Imported, StoreAudit]:
    address = address_of(server.url + more)
    assert address is not None
    source, *_ = collect([address], capture, how)
    opened = Capture.open(capture)
    with opened.connect() as con:
        audit = audit_of(con, opened.manifest.sources[0])
    assert audit is not None
    return source, audit


def test_exact_census_of_planted_keys(server: Server, planted: redis.Redis, tmp_path: Path) -> None:
    _, audit = audited(server, tmp_path / "c.lscope")
    sizes = {
        "session:{uuid}": sum(planted.memory_usage(key) for key in planted.scan_iter("session:*", 1000)),
        "user:{number}:profile": sum(planted.memory_usage(key) for key in planted.scan_iter("user:*", 1000)),
        "queue:jobs": planted.memory_usage("queue:jobs"),
    }
    found = {g.pattern: (g.keys.value, g.bytes.value, g.without_ttl.value, g.stale.value) for g in audit.groups}
    assert found == {
        "session:{uuid}": (300, sizes["session:{uuid}"], 300, 100),
        "user:{number}:profile": (200, sizes["user:{number}:profile"], 0, 0),
        "queue:jobs": (1, sizes["queue:jobs"], 1, 0),
    }
    assert (audit.complete, audit.scanned, audit.all_keys.without_ttl.value) == (True, 501, 301)
    assert all(figure.error == 0 for g in audit.groups for figure in (g.keys, g.bytes, g.without_ttl))
    assert audit.zombies == 40
    assert audit.largest[0] == ("queue:jobs", sizes["queue:jobs"], "list")
    assert audit.groups[0].pattern == "queue:jobs"  # most bytes without a TTL
    assert max(g.idle_s for g in audit.groups) >= 10 * 86_400


def test_nothing_is_touched_and_only_reading_commands_are_sent(
    server: Server, planted: redis.Redis, tmp_path: Path
) -> None:
    # given every living key idle for 1,000 s at least
    for key in list(planted.scan_iter("*", 1000)):
        rest = max(0, planted.pttl(key))
        planted.restore(key, rest, planted.dump(key), replace=True, idletime=1000)
    planted.config_resetstat()
    audited(server, tmp_path / "c.lscope")
    sent = {name.removeprefix("cmdstat_") for name in planted.info("commandstats")}
    assert sent - {"config|resetstat", "client|setinfo", "hello"} == {
        *("info", "scan", "pttl", "object|idletime", "memory|usage", "type"),
    }
    assert min(planted.object("idletime", key) for key in planted.scan_iter("*", 1000)) >= 1000


def test_memory_is_split_exactly(server: Server, planted: redis.Redis, tmp_path: Path) -> None:
    _, audit = audited(server, tmp_path / "c.lscope")
    samples = Capture.open(tmp_path / "c.lscope").table("samples").to_pandas()
    last = samples.sort_values("ts_ns").drop_duplicates("counter", keep="last").set_index("counter")["value"]
    assert len(audit.memory) == 6
    assert sum(size for _, size in audit.memory) == audit.resident_bytes == last["redis_used_memory_rss"]
    assert audit.memory[0] == ("keys and values", last["redis_used_memory_dataset"])
    assert (last["redis_keys"], last["redis_keys_nottl"]) == (501, 301)
    assert last["redis_biggest_key"] == planted.memory_usage("queue:jobs")


def test_a_part_of_the_keys_gives_estimates_that_hold(server: Server, tmp_path: Path) -> None:
    # given 20,000 keys, a quarter of them with a TTL
    client = server.client()
    client.flushall()
    pipeline = client.pipeline(transaction=False)
    for number in range(20_000):
        pipeline.set(
            f"a:{number}" if number % 4 else f"b:{number}", "x" * (number % 97), ex=None if number % 4 else 900
        )
    pipeline.execute()
    source, audit = audited(server, tmp_path / "c.lscope", Collecting(busy_share=1.0, max_keys=2000))
    assert 2000 <= audit.scanned < 4000 and not audit.complete and source.source.facts["keys_without_ttl"] == 15_000
    groups = {g.pattern: g for g in audit.groups}
    for figure, truth in (
        (groups["a:{number}"].keys, 15_000),
        (groups["b:{number}"].keys, 5_000),
        (audit.all_keys.without_ttl, 15_000),
    ):
        assert 0 < figure.error < 1500
        assert abs(figure.value - truth) < 2.3 * figure.error  # 4.5 standard errors
    assert audit.all_keys.keys.value == 20_000 and audit.all_keys.keys.error == 0
    client.flushall()


def test_attribute_reports_the_audit(
    server: Server, planted: redis.Redis, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["attribute", server.url, "--json", "--exit-code"]) == 3
    report = json.loads(capsys.readouterr().out)
    verdict = report["verdict"]
    assert (verdict["verdict"], verdict["class"]) == ("inconclusive", "keys_without_ttl")
    assert verdict["culprit"]["owner"] == "queue:jobs" and verdict["reasons"][0].startswith("301 of 501 keys")
    assert {f["class"] for f in report["findings"]} >= {"undrained_container", "pending_free"}
    (store,) = report["stores"]
    assert store["all"]["stale"] == {"value": 100, "error": 0} and store["cost"]["commands"] > 3 * 501
    assert main(["attribute", server.url]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "501 of 501 keys read (all)" in text and "session:{uuid}" in text and "made of:" in text


def test_names_and_secrets_stay_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which("redis-server"):
        pytest.skip("NOT TESTED: no redis-server on this host")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guarded = Server(tmp_path, "--requirepass", SECRET, "--port", str(port))
    try:
        client = guarded.client(password=SECRET)
        client.set("token:sk-live-4242aaaa:x", "value-of-it")
        client.set("mail:bob@example.org", "value-of-it")
        client.execute_command("ACL", "SETUSER", "blind", "on", f">{SECRET}", "~*", "-@all", "+ping", "+info")
        capture = tmp_path / "c.lscope"
        url = guarded.url.replace("unix://", "unix://:hunter2@")
        # then a missing password, a wrong one and a missing right are a line each
        for wrong, said in (
            (guarded.url, "refuses the user or password"),
            (url.replace(SECRET, SECRET + "x"), "refuses the user or password"),
            (url.replace(f":{SECRET}", f"blind:{SECRET}"), "does not allow"),
        ):
            assert main(["import", wrong, "-o", str(capture)]) == 2
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1 and SECRET not in error
            assert not capture.exists()
        # and one with no more rights than are documented does
        rights = "+ping +info +scan +pttl +type +object|idletime +memory|usage"
        client.execute_command("ACL", "SETUSER", "auditor", "on", f">{SECRET}", "~*", "-@all", *rights.split())
        able = f"redis://auditor:{SECRET}@127.0.0.1:{port}/0"
        assert main(["import", able, "-o", str(tmp_path / "able.lscope")]) == 0
        assert SECRET not in capsys.readouterr().out
        # and the right password is stored nowhere, nor is a name
        assert main(["import", url, "-o", str(capture), "--json"]) == 0
        shown = capsys.readouterr().out + (capture / "manifest.json").read_text()
        events = Capture.open(capture).table("cache_events").to_pylist()
        for text in (SECRET, "bob", "4242", "value-of-it"):
            assert text not in shown and text not in json.dumps(events)
        assert {row["owner"] for row in events} == {"token:{id}:x", "mail:{email}"}
    finally:
        guarded.stop()


def test_info_over_time_is_a_series(server: Server, planted: redis.Redis, tmp_path: Path) -> None:
    address = address_of(server.url)
    assert address is not None
    _, series = collect([address], tmp_path / "c.lscope", Collecting(seconds=1.0, interval_s=0.02, busy_share=1.0))
    assert series.source.kind == "samples" and "redis_used_memory" in series.source.facts["byte_counters"]
    samples = Capture.open(tmp_path / "c.lscope").table("samples").to_pandas()
    mine = samples[samples["source_id"] == series.source.id]
    assert mine["ts_ns"].nunique() >= 20
    assert {"rss", "redis_keys", "redis_keys_nottl", "redis_used_memory", "redis_expired_total"} <= set(mine["counter"])


def test_events_only_where_they_are_on_already(server: Server, planted: redis.Redis, tmp_path: Path) -> None:
    how = Collecting(seconds=0.3, interval_s=0.1, busy_share=1.0)
    source, _ = audited(server, tmp_path / "off.lscope", how, "?events=1")
    assert any("keyspace events are off" in finding for finding in source.findings)
    assert planted.config_get("notify-keyspace-events")["notify-keyspace-events"] == ""
    planted.config_set("notify-keyspace-events", "Ex")
    try:
        for number in range(7):
            planted.set(f"dead-too:{number}", "d", px=1)
        source, _ = audited(server, tmp_path / "on.lscope", how, "?events=1")
    finally:
        planted.config_set("notify-keyspace-events", "")
    samples = Capture.open(tmp_path / "on.lscope").table("samples").to_pandas()
    counted = samples[samples["counter"] == "redis_event_expired_total"]["value"]
    assert list(counted) == [7.0] and not source.findings


def test_an_lfu_policy_has_no_idle_times(server: Server, planted: redis.Redis, tmp_path: Path) -> None:
    planted.config_set("maxmemory-policy", "allkeys-lfu")
    planted.config_set("maxmemory", "1gb")
    try:
        _, audit = audited(server, tmp_path / "c.lscope")
        opened = Capture.open(tmp_path / "c.lscope")
        verdicts = judge_store(audit, opened.manifest.sources[0])
    finally:
        planted.config_set("maxmemory-policy", "noeviction")
        planted.config_set("maxmemory", "0")
    assert audit.all_keys.without_ttl.value == 301 and audit.all_keys.idle_s == 0
    kept = next(v for v in verdicts if v.kind == "cache_warmup")
    assert any("evicts them when it is full (allkeys-lfu" in reason for reason in kept.reasons)


def test_nobody_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    for url in (f"redis://127.0.0.1:{port}", f"unix://{tmp_path}/none", f"memcached://127.0.0.1:{port}"):
        assert main(["attribute", url]) == 2
        error = capsys.readouterr().err
        assert "cannot be reached" in error and url in error and error.count("\n") == 1


def test_patterns() -> None:
    named = KeyPatterns()
    keys = [
        "sess:00000012",
        "sess:0000001f",
        "sess:abc123zz",
        "user:{17}:cart",
        "v2/models/llama",
        "Grüße",
        "",
        "app.user.12",
    ]
    found = patterns([named.segments(key.encode()) for key in keys])
    assert found == [*["sess:{id}"] * 3, "user:{number}:cart", "v2/models/llama", "{text}", "", "app.user.{number}"]
    words = [f"user:{'abcdefghij'[n % 10]}{'klmnopqrst'[n // 10]}:cart" for n in range(40)]
    assert set(patterns([named.segments(word.encode()) for word in words])) == {"user:{word}:cart"}
    assert len(named.segments(b":".join([b"a"] * 100))) == 16
    assert KeyPatterns().digest(b"k") != named.digest(b"k")  # of no use for guessing names


def test_memcached_exactly(tmp_path: Path) -> None:
    if not shutil.which("memcached"):
        pytest.skip("NOT TESTED: no memcached on this host")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(["memcached", "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-u", "nobody"])
    try:
        link = None
        for _ in range(500):
            try:
                link = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                time.sleep(0.02)
        assert link is not None
        with link:
            for number in range(30):
                link.sendall(f"set page:{number} 0 {0 if number % 3 else 900} 3\r\nabc\r\n".encode())
                assert link.recv(100) == b"STORED\r\n"
        address = address_of(f"memcached://127.0.0.1:{port}")
        assert address is not None
        (source,) = collect([address], tmp_path / "c.lscope", FAST)
        opened = Capture.open(tmp_path / "c.lscope")
        with opened.connect() as con:
            audit = audit_of(con, opened.manifest.sources[0])
        assert audit is not None and audit.complete
        (group,) = audit.groups
        assert (group.pattern, group.keys.value, group.without_ttl.value) == ("page:{number}", 30, 20)
        assert source.source.facts["zombies"] == 0
    finally:
        process.terminate()
        process.wait()


def test_liveness_of_the_audit(server: Server, planted: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["liveness", server.url, "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    classes = {name: c["objects"] for name, c in source["classes"].items() if c["objects"]}
    assert classes == {"immortal": 301, "unknown-ref": 200}


def test_readings_of_a_store_that_grows_by_keys_without_ttl_are_a_leak(tmp_path: Path) -> None:
    # given INFO of three days: keys with a TTL level off after 8 h, those without gain 120 an hour of 20 KiB each
    rng = random.Random(5)
    readings = []
    for hour in range(72 * 4):
        hours = hour / 4
        kept, passing = 5000 + 120 * hours, 4000 * min(hours, 8) / 8 + rng.gauss(0, 30)
        used = 50e6 + 20_480 * (kept + passing) + rng.gauss(0, 1e5)
        memory = {"used_memory": used, "used_memory_rss": used * 1.05 + 4e6, "used_memory_dataset": used - 5e6}
        memory |= {
            "used_memory_overhead": 5e6,
            "used_memory_startup": 1e6,
            "maxmemory": 0,
            "allocator_active": used * 1.02,
        }
        memory |= {"allocator_allocated": used * 1.001, "allocator_resident": used * 1.04, "mem_clients_normal": 2e4}
        counts = {"expired_keys": max(0.0, hours - 8) * 500, "evicted_keys": 0, "connected_clients": 12}
        info = memory | counts | {"db0": {"keys": round(kept + passing), "expires": round(passing)}}
        counters = counters_of(info)
        readings.append((10**18 + round(hours * 3600e9), counters | {"rss": counters["redis_used_memory_rss"]}))
    facts = {"byte_counters": byte_counters(readings)}
    report = ParsedReport({"samples": samples_of(readings, "r")}, kind="samples", facts=facts, clock="utc")
    with adding_to(tmp_path / "c.lscope") as (writer, existing):
        enter(writer, Numbering(existing), report, "r", "r")
    opened = Capture.open(tmp_path / "c.lscope")
    with opened.connect() as con:
        verdict = attribute_evidence(con, opened.manifest, AttributeOptions()).verdict
    assert (verdict.verdict, verdict.kind) == ("leak", "keys_without_ttl")
    assert verdict.culprit is not None and verdict.culprit.counter == "redis_keys_nottl"
    assert verdict.growth is not None and verdict.growth.counter == "redis_used_memory_bytes"
    assert verdict.growth.bytes_per_s == pytest.approx(120 * 20_480 / 3600, rel=0.1)
