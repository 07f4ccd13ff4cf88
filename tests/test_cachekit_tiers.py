"""A chain of tiers: what each is asked, what it hits, how stale it is, and what happens when one is down."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cachekit_tools import Clock
from hypothesis import given
from hypothesis import strategies as st

from leakscope.cachekit import (
    Cache,
    DirectoryTier,
    Fingerprint,
    MemoryTier,
    ObjectStoreTier,
    Record,
    RedisTier,
    Tier,
    TierChain,
)
from leakscope.cachekit.latency import LatencyHistogram


class RedisStandIn:
    """What the tier uses of redis-py, without expiry: that is the server's."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.expiries_ms: dict[str, int] = {}
        self.down = False

    def get(self, name: str) -> bytes | None:
        if self.down:
            raise ConnectionError("Connection refused")
        return self.content.get(name)

    def set(self, name: str, value: bytes, *, px: int) -> bool:
        if self.down:
            raise ConnectionError("Connection refused")
        self.content[name], self.expiries_ms[name] = value, px
        return True

    def unlink(self, *names: str) -> int:
        return sum(self.content.pop(name, None) is not None for name in names)


class NoSuchKey(Exception):
    """As botocore's ClientError: told by its response."""

    response = {"Error": {"Code": "NoSuchKey"}}  # noqa: RUF012


class Bucket:
    """What the tier uses of boto3's S3 client."""

    def __init__(self) -> None:
        self.content: dict[tuple[str, str], bytes] = {}

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        if (Bucket, Key) not in self.content:
            raise NoSuchKey
        return {"Body": io.BytesIO(self.content[Bucket, Key])}

    def put_object(self, *, Bucket: str, Key: str, Body: bytes) -> None:
        self.content[Bucket, Key] = Body

    def delete_object(self, *, Bucket: str, Key: str) -> None:
        self.content.pop((Bucket, Key), None)


class Setting:
    """Three tiers under one clock."""

    def __init__(self, path: Path, fingerprint: Fingerprint | None = None) -> None:
        self.clock = Clock()
        self.cache: Cache[str, Record] = Cache(1_000, ttl=60, getsizeof=MemoryTier.size_bytes, timer=self.clock)
        self.redis, self.bucket = RedisStandIn(), Bucket()
        self.directory = DirectoryTier(path, clock=self.clock)
        self.tiers: list[Tier] = [MemoryTier(self.cache), RedisTier(self.redis), self.directory]
        self.chain = TierChain(*self.tiers, ttl=60, fingerprint=fingerprint, clock=self.clock, timer_ns=self.ticks())

    def ticks(self) -> Any:
        """Each look-up takes 1,000 ns."""
        now = iter(range(0, 10**9, 1_000))
        return lambda: next(now)

    def counts(self) -> list[tuple[int, ...]]:
        return [(t.lookups, t.hits, t.misses, t.stale, t.errors, t.write_errors) for t in self.chain.stats()]


def test_a_value_is_found_in_the_fastest_tier_that_has_it_and_comes_up(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    assert setting.chain.get("k") is None
    setting.chain.put("k", b"value")
    assert setting.chain.get("k") == b"value"
    assert setting.counts() == [(2, 1, 1, 0, 0, 0), (1, 0, 1, 0, 0, 0), (1, 0, 1, 0, 0, 0)]

    setting.cache.clear()
    setting.redis.content.clear()
    setting.clock.now += 20
    assert setting.chain.get("k") == b"value"  # of the directory
    (name,) = setting.redis.content
    assert setting.redis.expiries_ms[name] == 40_000  # what is left of its life, not a new one
    assert setting.chain.get("k") == b"value"
    assert setting.counts() == [(4, 2, 2, 0, 0, 0), (2, 0, 2, 0, 0, 0), (2, 1, 1, 0, 0, 0)]
    memory, redis, _ = setting.chain.stats()
    assert (memory.hit_ratio, redis.hit_ratio, redis.stale_ratio) == (0.5, 0, 0)
    assert (memory.mean_ns, memory.p95_ns) == (1_000, pytest.approx(1_000, rel=0.02))


def test_what_is_past_its_time_is_stale_wherever_it_lies(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain.put("k", b"value", ttl=30)
    setting.chain.put("longer", b"value", ttl=600)  # not beyond the chain's
    setting.clock.now += 30
    assert setting.chain.get("k") is None
    # The memory's own TTL has removed it: a miss. The others had it still.
    assert setting.counts() == [(1, 0, 1, 0, 0, 0), (1, 0, 0, 1, 0, 0), (1, 0, 0, 1, 0, 0)]
    assert setting.chain.get("k") is None
    assert setting.counts() == [(2, 0, 2, 0, 0, 0), (2, 0, 1, 1, 0, 0), (2, 0, 1, 1, 0, 0)]  # deleted
    setting.clock.now += 30
    assert setting.chain.get("longer") is None


def test_an_earlier_version_is_stale(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain.put("k", b"one", version=1)
    setting.cache.clear()
    before = dict(setting.redis.content)
    setting.chain.put("k", b"two", version=2)
    setting.redis.content = before  # a replica that lags
    setting.cache.clear()

    assert setting.chain.get("k", version=2) == b"two"
    assert [row[3] for row in setting.counts()] == [0, 1, 0]
    assert setting.chain.get("k", version=2) == b"two"
    assert [row[1] for row in setting.counts()] == [1, 0, 1]


def test_another_fingerprint_sees_nothing_of_the_first_in_any_tier(tmp_path: Path) -> None:
    setting = Setting(tmp_path, Fingerprint("weights", "docs 1"))
    setting.chain.put("a prompt", b"old answer")
    setting.chain.fingerprint = Fingerprint("weights", "docs 2")
    assert setting.chain.get("a prompt") is None
    setting.chain.put("a prompt", b"new answer")
    setting.chain.fingerprint = Fingerprint("weights", "docs 1")
    assert setting.chain.get("a prompt") == b"old answer"
    assert not any("prompt" in name for name in setting.redis.content)  # keys are hashed


def test_a_tier_that_is_down_costs_its_hits_only(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.redis.down = True
    setting.chain.put("k", b"value")
    setting.cache.clear()
    assert setting.chain.get("k") == b"value"
    assert setting.counts() == [(1, 0, 1, 0, 0, 0), (1, 0, 0, 0, 1, 2), (1, 1, 0, 0, 0, 0)]  # put, promotion
    assert setting.chain.stats()[1].last_error == "ConnectionError: Connection refused"


def test_a_tier_that_cannot_take_a_new_value_gives_up_the_old(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain.put("k", b"old")
    setting.chain.put("k", bytes(2_000))  # more than the memory holds
    assert setting.chain.get("k") == bytes(2_000)
    assert setting.chain.stats()[0].write_errors == 2


def test_bytes_of_others_are_no_records(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain.put("k", b"value")
    (name,) = setting.redis.content
    setting.redis.content[name] = b"something else"
    setting.cache.clear()
    assert setting.chain.get("k") == b"value"
    assert setting.counts()[1] == (1, 0, 0, 0, 1, 0)


@given(st.binary(max_size=50), st.floats(0, 1e12), st.integers(0, 2**64 - 1), st.binary(max_size=30))
def test_records_come_back_and_others_are_refused(value: bytes, expires_s: float, version: int, other: bytes) -> None:
    record = Record(value, expires_s, version)
    assert Record.unpack(record.pack()) == record
    if not other.startswith(b"lsc1") or len(other) < 20:
        with pytest.raises(ValueError, match="no record"):
            Record.unpack(other)


def test_delete_reaches_every_tier(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain.put("k", b"value")
    setting.chain.delete("k")
    assert (setting.chain.get("k"), setting.redis.content, list(setting.directory._files())) == (None, {}, [])


def test_the_directory_is_swept(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    for number in range(10):
        setting.chain.put(f"k{number}", b"value", ttl=10 + number)
    (tmp_path / "ab").mkdir(exist_ok=True)
    (tmp_path / "ab" / "no-record").write_bytes(b"?")
    aside = tmp_path / "ab" / "dead.1-1.tmp"
    aside.write_bytes(b"half")
    os.utime(aside, (0, setting.clock.now - 3_000))
    setting.clock.now += 15
    assert setting.directory.sweep() == 7  # k0 … k5, expired at 115 or before, and no-record
    assert aside.exists()
    setting.clock.now += 1_000
    assert setting.directory.sweep() == 5 and list(setting.directory._files()) == []


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DirectoryTier(tmp_path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        tier.put("k", Record(b"v", 1e12, 0), 60)
    assert list(tier._files()) == []


def test_an_object_store(tmp_path: Path) -> None:
    bucket = Bucket()
    chain = TierChain(ObjectStoreTier(bucket, "b"), ttl=60)
    assert chain.get("k") is None
    chain.put("k", b"value")
    assert chain.get("k") == b"value"
    (name,) = bucket.content
    assert name[0] == "b" and name[1].startswith("cachekit/:")
    chain.delete("k")
    assert chain.get("k") is None
    (stats,) = chain.stats()
    assert (stats.hits, stats.misses, stats.errors) == (1, 2, 0)
    bucket.get_object = lambda **_: 1 / 0  # type: ignore[method-assign]
    assert chain.get("k") is None and chain.stats()[0].errors == 1


@pytest.mark.parametrize("ttl", [0, float("inf"), float("nan")])
def test_no_chain_without_a_time_to_live(ttl: float) -> None:
    with pytest.raises(ValueError, match="finite time to live"):
        TierChain(ttl=ttl)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_quantiles_are_within_two_percent(latencies: list[int], share: float) -> None:
    histogram = LatencyHistogram()
    for latency in latencies:
        histogram.add(latency)
    exact = sorted(latencies)[max(1, -(-int(share * len(latencies) * 10**6) // 10**6)) - 1]
    assert histogram.quantile_ns(share) == pytest.approx(exact, rel=0.021)


def test_threads_share_a_chain(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    setting.chain = TierChain(*setting.tiers, ttl=60, clock=setting.clock)
    wrong: list[object] = []

    def work(number: int) -> None:
        for round_ in range(100):
            key = f"k{round_ % 10}"
            setting.chain.put(key, key.encode())
            value = setting.chain.get(key)
            if value != key.encode():
                wrong.append((number, key, value))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and setting.counts()[0][:2] == (600, 600)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    redis = pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    socket = tmp_path / "r.sock"
    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "ready to accept connections" in line.lower():
            break
    never = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    with redis.Redis(unix_socket_path=str(socket), retry=never) as client:
        yield client
    process.terminate()
    process.communicate()


def test_a_real_redis(server: Any) -> None:
    tier = RedisTier(server, prefix="kit:")
    chain = TierChain(tier, ttl=60)
    chain.put("k", bytes(range(256)))
    assert chain.get("k") == bytes(range(256))
    (name,) = server.keys("*")
    assert name.startswith(b"kit:") and 59_000 < server.pttl(name) <= 60_000
    chain.delete("k")
    assert server.dbsize() == 0 and chain.get("k") is None
    server.shutdown(nosave=True)
    assert chain.get("k") is None
    assert (chain.stats()[0].hits, chain.stats()[0].errors) == (1, 1)
