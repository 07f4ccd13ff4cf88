"""Live caches behind `leakscope serve`: real servers with known traffic, and the objectives that follow from it."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from kv_publisher import Publisher, batch, removed, stored
from serving import series, value, values
from test_redis_audit import Server

from leakscope.cli.main import main
from leakscope.errors import BadInputError
from leakscope.serve.caches import MemcachedSource, RedisSource
from leakscope.serve.engines import EngineSource
from leakscope.serve.kv_events import KvEvents
from leakscope.serve.sources import infinite_hit_ratio
from leakscope.streams import Address, address_of
from leakscope.streams.latency_histograms import histogram_of
from leakscope.streams.redis_counters import BOUNDS_S, buckets_of

MIB = 1 << 20


def address(text: str) -> Address:
    found = address_of(text)
    assert found is not None
    return found


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Server]:
    if not shutil.which("redis-server"):
        pytest.skip("NOT TESTED: no redis-server on this host")
    running = Server(tmp_path)
    for _ in range(500):  # its socket is there a moment before it listens
        try:
            running.client().ping()
            break
        except redis.ConnectionError:
            time.sleep(0.02)
    yield running
    running.stop()


def test_a_redis_server_of_known_traffic(redis_server: Server) -> None:
    client = redis_server.client()
    source = RedisSource(address(redis_server.url), 10.0, bound=0.8)
    source.read(0.0)
    # given 50 keys without and 20 with a time to live, 120 lookups that hit and 80 that miss
    for number in range(50):
        client.set(f"secret-{number}", "x" * 1000)
    for number in range(20):
        client.set(f"mortal-{number}", "x", ex=1000)
    for number in range(200):
        client.get("secret-1" if number < 120 else "nothing")
    found = values(source.read(300.0))
    assert found["leakscope_cache_keys"][()] == 70
    assert found["leakscope_cache_keys_without_ttl"][()] == 50
    assert (found["leakscope_cache_hits_total"][()], found["leakscope_cache_lookups_total"][()]) == (120, 200)
    assert found["leakscope_slo_value"]["hit_ratio",] == 0.6
    assert found["leakscope_slo_state"]["hit_ratio", "suspected"] == 1
    assert found["leakscope_slo_met"]["hit_ratio",] == 0
    # no cache could have hit more than 80 %: of these it hits three quarters, which is what is asked for
    assert found["leakscope_slo_value"]["hit_ratio_relative",] == pytest.approx(0.75)
    assert found["leakscope_slo_value"]["stale_ratio",] == 0
    # the server's own histogram counts 270 commands of services, none of ours
    assert found["leakscope_slo_value"]["latency_p95",] > 0
    assert found["leakscope_slo_state"]["p99_jitter", "unknown"] == 1  # one slot of ten seconds
    info = client.info()
    assert found["leakscope_cache_used_bytes"][()] == pytest.approx(info["used_memory"], rel=0.2)
    assert found["leakscope_cache_rss_bytes"][()] == pytest.approx(info["used_memory_rss"], rel=0.2)
    # each reading sends two commands and touches no key
    sent = client.info("commandstats")
    source.read(310.0)
    after = client.info("commandstats")
    calls = {name: after[name]["calls"] - sent.get(name, {"calls": 0})["calls"] for name in after}
    assert {name: n for name, n in calls.items() if n} == {"cmdstat_info": 2, "cmdstat_latency|histogram": 1}
    source.close()


def test_a_server_that_refuses_its_latencies_tells_the_rest(redis_server: Server) -> None:
    client = redis_server.client()
    client.execute_command("ACL", "SETUSER", "watcher", "on", ">secret", "+ping", "+info")
    source = RedisSource(address(redis_server.url.replace("unix://", "unix://watcher:secret@")), 10.0)
    for step in range(6):
        found = values(source.read(10.0 * step))
    assert found["leakscope_slo_state"]["latency_p95", "unknown"] == 1
    assert found["leakscope_slo_state"]["stale_ratio", "normal"] == 1
    refused = client.info("errorstats")["errorstat_NOPERM"]["count"]
    assert int(refused) == 3  # it is not asked for ever
    source.close()


def test_latencies_of_redis_are_counted_by_powers_of_two_without_our_own_commands() -> None:
    answer = [
        b"get", [b"calls", 100, b"histogram_usec", [8, 60, 16, 90, 33, 100]],
        b"set", [b"calls", 5, b"histogram_usec", [16, 5]],
        b"info", [b"calls", 900, b"histogram_usec", [1024, 900]],
        b"latency|histogram", [b"calls", 9, b"histogram_usec", [1024, 9]],
        b"blpop", [b"calls", 9, b"histogram_usec", [1 << 20, 9]],
        b"hget", [b"calls", b"nonsense", b"histogram_usec", [b"x", 1]],
        b"odd",
    ]  # fmt: skip
    counts = buckets_of(answer)
    assert {round(BOUNDS_S[i] * 1e6): int(n) for i, n in enumerate(counts) if n} == {8: 60, 16: 35, 32: 10}
    assert buckets_of(None).sum() == buckets_of({b"get": 5}).sum() == 0


def test_a_server_that_is_away_is_down_without_a_word_of_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--once", "redis://me:hunter2@127.0.0.1:1/0", "memcached://127.0.0.1:1"]) == 0
    told = capsys.readouterr()
    found = series(told.out)
    assert value(found, "leakscope_source_up", kind="redis") == 0
    assert value(found, "leakscope_source_up", kind="memcached") == 0
    assert value(found, "leakscope_source_failures_total", evidence="redis://127.0.0.1:1/0") == 1
    assert told.err.count("cannot be reached") == 2
    assert "hunter2" not in told.out + told.err


def test_a_memcached_server_of_known_traffic() -> None:
    if not shutil.which("memcached"):
        pytest.skip("NOT TESTED: no memcached on this host")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(["memcached", "-U", "0", "-p", str(port), "-l", "127.0.0.1", "-u", "nobody"])
    try:
        source = MemcachedSource(address(f"memcached://127.0.0.1:{port}"), 10.0)
        for _ in range(500):
            try:
                source.read(0.0)
                break
            except BadInputError:
                time.sleep(0.02)
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"set k 0 0 1\r\nx\r\n" + b"get k\r\n" * 90 + b"get none\r\n" * 10 + b"quit\r\n")
            while link.recv(65_536):
                pass
        found = values(source.read(10.0))
    finally:
        process.terminate()
        process.wait()
    assert found["leakscope_slo_value"] == {("hit_ratio",): 0.9}
    assert found["leakscope_cache_keys"][()] == 1
    assert found["leakscope_cache_rss_bytes"][()] > MIB  # it runs here
    assert found["leakscope_slo_state"]["stale_ratio", "unknown"] == 1  # it does not tell


@contextmanager
def telling(*texts: str) -> Iterator[str]:
    """A metrics endpoint that answers with one text after the other."""
    left = list(texts)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join(10)


def engine(queries: int, hits: int, running: int, usage: float, fast: int, slow: int) -> str:
    """What vLLM tells of two data-parallel ranks; ``fast`` requests took up to 1 s, ``slow`` ones up to 4."""
    lines = ["# TYPE vllm:e2e_request_latency_seconds histogram"]
    for rank in (0, 1):
        labels = f'engine="{rank}",model_name="m"'
        lines += [f'vllm:e2e_request_latency_seconds_bucket{{le="1.0",{labels}}} {fast}']
        lines += [f'vllm:e2e_request_latency_seconds_bucket{{le="4.0",{labels}}} {fast + slow}']
        lines += [f'vllm:e2e_request_latency_seconds_bucket{{le="+Inf",{labels}}} {fast + slow}']
        lines += [f"vllm:e2e_request_latency_seconds_count{{{labels}}} {fast + slow}"]
        lines += [f"vllm:e2e_request_latency_seconds_sum{{{labels}}} {fast + slow}"]
    for rank in (0, 1):
        labels = f'engine="{rank}"'
        lines += [f"vllm:num_requests_running{{{labels}}} {running}", f"vllm:num_requests_waiting{{{labels}}} 0"]
        lines += [f"vllm:kv_cache_usage_perc{{{labels}}} {usage * rank}"]
        lines += [f"vllm:prefix_cache_queries_total{{{labels}}} {queries}"]
        lines += [f"vllm:prefix_cache_hits_total{{{labels}}} {hits}"]
    return "\n".join(lines) + "\n"


def test_an_engine_of_known_requests() -> None:
    with telling(engine(1000, 500, 2, 0.4, 100, 0), engine(2000, 1300, 0, 0.06, 150, 0)) as url:
        source = EngineSource(address(url), 10.0)
        busy = values(source.read(0.0))
        idle = values(source.read(10.0))
    assert busy["leakscope_engine_kv_usage_ratio"][()] == 0.4
    assert "leakscope_engine_kv_idle_usage_ratio" not in busy
    assert idle["leakscope_engine_kv_idle_usage_ratio"][()] == 0.06  # held by nobody that runs
    assert idle["leakscope_slo_value"]["hit_ratio",] == 0.8
    assert idle["leakscope_slo_state"]["hit_ratio_relative", "unknown"] == 1
    assert idle["leakscope_latency_p99_seconds"][()] == pytest.approx(0.99)  # of 100 requests up to 1 s
    assert ("latency_p95", "unknown") not in idle["leakscope_slo_state"]  # whole requests are no cache


def test_the_jitter_of_an_engines_latencies_is_served() -> None:
    texts = [engine(0, 0, 1, 0.1, 100 * ((n + 1) // 2), 100 * (n // 2)) for n in range(31)]
    with telling(*texts) as url:
        source = EngineSource(address(url), 10.0)
        found = [values(source.read(10.0 * n)) for n in range(31)][-1]
    # every other slot of 200 requests has a P99 of 0.99 s, the others of 1 + 3 · 0.99 s
    assert found["leakscope_slo_value"]["p99_jitter",] == pytest.approx((3.97 - 0.99) / (3.97 + 0.99))
    assert found["leakscope_slo_state"]["p99_jitter", "critical"] == 1


def histogram(name: str, *counts: int) -> str:
    """Up to 4 ms, to 12 ms, in all."""
    bounds = zip(("0.004", "0.012", "+Inf"), counts, strict=True)
    return f"# TYPE {name} histogram\n" + "".join(f'{name}_bucket{{le="{le}"}} {n}\n' for le, n in bounds)


def test_a_service_with_cachekit_tells_all_of_its_objectives() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from leakscope.cachekit import Cache, MemoryTier, TierChain
    from leakscope.cachekit.prometheus import CacheCollector

    took = iter(range(0, 10**9, 4_000_000))  # each lookup takes 4 ms
    cache: Cache[str, bytes] = Cache(1000, ttl=60.0, name="answers")
    chain = TierChain(
        MemoryTier(Cache(1 << 20, ttl=10_000.0, name="memory")),
        ttl=100.0, timer_ns=lambda: next(took),
    )  # fmt: skip
    registry = CollectorRegistry()
    registry.register(CacheCollector([cache], {"documents": chain}))
    before = generate_latest(registry).decode()
    # given 60 hits and 39 misses in the one, 80 hits, 20 misses and one stale record in the other
    cache["k"] = b"v"
    for number in range(99):
        cache.get("k" if number < 60 else "none")
    chain.put("k", b"v")
    for number in range(100):
        chain.get("k" if number < 80 else "none")
    chain.get("k", version=1)  # what there is is of an earlier version
    after = generate_latest(registry).decode()
    told = series(after)
    assert value(told, "cachekit_lookups_total", cache="answers") == 99
    assert value(told, "cachekit_lookups_total", cache="documents") == 101
    assert value(told, "cachekit_hits_total", cache="documents") == 80
    assert value(told, "cachekit_stale_total", cache="documents") == 1
    assert value(told, "cachekit_latency_seconds_count", cache="documents", tier="memory") == 101
    assert value(told, "cachekit_latency_seconds_sum", cache="documents") == pytest.approx(0.404)
    with telling(before, after) as url:
        source = EngineSource(address(url), 10.0)
        source.read(0.0)
        found = values(source.read(10.0))
    assert found["leakscope_slo_value"]["hit_ratio",] == pytest.approx(140 / 200)
    assert found["leakscope_slo_value"]["stale_ratio",] == pytest.approx(1 / 200)
    assert found["leakscope_slo_state"]["stale_ratio", "suspected"] == 1
    assert 0.002 < found["leakscope_slo_value"]["latency_p95",] < 0.008  # within its bucket, of twice the width
    assert found["leakscope_slo_state"]["p99_jitter", "unknown"] == 1


def test_a_service_of_another_kind_names_its_histograms() -> None:
    none = "# TYPE up gauge\nup 1\n"
    before = histogram("app_get_seconds", 0, 0, 0) + histogram("app_request_seconds", 0, 0, 0)
    after = histogram("app_get_seconds", 90, 100, 100) + histogram("app_request_seconds", 0, 100, 100)
    with telling(none, before, after) as url:
        source = EngineSource(address(url), 10.0, None, ("app_request_seconds",), ("app_get_seconds",))
        with pytest.raises(BadInputError, match="--latency-histogram"):
            source.read(0.0)
        source.read(10.0)
        found = values(source.read(20.0))
    assert found["leakscope_slo_value"]["latency_p95",] == pytest.approx(0.008)  # halfway from 4 to 12 ms
    assert found["leakscope_slo_state"]["latency_p95", "suspected"] == 1
    assert found["leakscope_latency_p99_seconds"][()] == pytest.approx(0.01192)  # of the requests


@pytest.mark.parametrize(
    "text",
    [
        '# TYPE h histogram\nh_bucket{le="x"} 1\n',
        '# TYPE h histogram\nh_bucket{le="1"} 5\nh_bucket{le="2"} 4\n',
        "# TYPE h histogram\n" + "".join(f'h_bucket{{le="{n}"}} {n}\n' for n in range(1, 1200)),
        "# TYPE h histogram\nh_bucket{le=",
    ],
)
def test_hostile_histograms_are_one_line(text: str) -> None:
    with pytest.raises(BadInputError, match=r"is none|no Prometheus text"):
        histogram_of(text, ("h",), "http://h/metrics")


def test_kv_events_are_followed_and_tell_what_an_infinite_cache_would_have_hit() -> None:
    # given blocks 1…8 of which 1…4 are evicted, and 1 and 2 stored again; then a gap of one batch
    payloads = [
        batch(1.0, [stored(list(range(1, 9)))]),
        batch(2.0, [removed(1, 2, 3, 4)]),
        batch(3.0, [stored([1, 2])]),
    ]
    with Publisher(payloads, replay=False) as publisher:
        events = KvEvents(address(publisher.address), 1.0)
        deadline = time.monotonic() + 30
        found = values(events.read(0.0))
        while found["leakscope_kv_batches_total"][()] < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
            found = values(events.read(0.0))
        assert found["leakscope_kv_batches_total"][()] == 3
        assert found["leakscope_kv_missing_batches_total"][()] == 0
        assert found["leakscope_kv_blocks_cached"]["0",] == 6
        assert found["leakscope_kv_blocks_stored_again_total"][()] == 2
        assert found["leakscope_kv_turnover_ratio"]["0",] == pytest.approx(4 / 599)
        assert found["leakscope_kv_blocks_held"] == {}  # no turnover yet: nothing can be told
        assert events.repeated_tokens() == 2 * 16
        # and beside the engine's own counters: 400 of 1000 tokens hit, 32 were there before
        with telling(engine(0, 0, 1, 0.1, 0, 0), engine(1000, 400, 1, 0.1, 0, 0)) as url:
            source = EngineSource(address(url), 10.0, events=events)
            events._repeated = 0.0
            source.read(0.0)
            events._repeated = 2.0
            served = values(source.read(10.0))
        events.close()
    assert served["leakscope_slo_value"]["hit_ratio_relative",] == pytest.approx(0.4 / (832 / 2000))


def test_held_blocks_are_told_once_the_pool_was_turned_over(leaky: Path, pinned: set[str]) -> None:
    from kv_publisher import frames_of

    payloads = frames_of(leaky)
    with Publisher(payloads) as publisher:
        events = KvEvents(address(publisher.address), 1.0)
        deadline = time.monotonic() + 60
        found = values(events.read(0.0))
        while found["leakscope_kv_batches_total"][()] < len(payloads) and time.monotonic() < deadline:
            time.sleep(0.05)
            found = values(events.read(0.0))
        events.close()
    assert found["leakscope_kv_batches_total"][()] == len(payloads)
    assert found["leakscope_kv_turnover_ratio"]["0",] >= 1
    assert found["leakscope_kv_blocks_held"]["0",] == len(pinned)


def test_the_bound_of_a_trace_is_what_is_referenced_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    # given ten references to four keys: six are repetitions
    trace.write_text("time,key\n" + "".join(f"{n},{key}\n" for n, key in enumerate("abcadabcda")))
    assert infinite_hit_ratio(trace) == pytest.approx(0.6)
