"""A chain of caches, fastest first: memory, a Redis-like server, a directory or an object store.

Tiers hold bytes under text keys. What they hold is a record that says when it expires and which version of the key it
is, so that a record that should not be there any more is told as stale, whoever left it. Clients are taken as they
are (redis-py, boto3 and their kind): the kit imports none.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from leakscope.cachekit.cache import Cache
from leakscope.cachekit.generations import Fingerprint
from leakscope.cachekit.latency import LatencyHistogram

_HEADER = struct.Struct(">4sdQ")
MAGIC = b"lsc1"


class Record(NamedTuple):
    """What a tier holds for a key. ``expires_s``: Unix time. ``version``: one lower than asked for is stale."""

    value: bytes
    expires_s: float
    version: int

    def pack(self) -> bytes:
        """20 bytes (magic, expiry, version), then the value."""
        return _HEADER.pack(MAGIC, self.expires_s, self.version) + self.value

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """Raises ValueError for bytes that are no record."""
        if len(data) < _HEADER.size or data[:4] != MAGIC:
            raise ValueError("no record of a cache tier")
        _, expires_s, version = _HEADER.unpack_from(data)
        return cls(bytes(data[_HEADER.size :]), expires_s, version)


class Tier(Protocol):
    """One level of the chain. Methods may raise anything: the chain counts it and goes on to the next tier."""

    name: str

    def get(self, key: str) -> Record | None:
        """The record of ``key``; None where there is none. A stale one may be returned."""

    def put(self, key: str, record: Record, ttl: float) -> None:
        """Keeps ``record`` for ``ttl`` seconds at most."""

    def delete(self, key: str) -> None:
        """Removes ``key`` if it is there."""


class MemoryTier:
    """A :class:`Cache` of records as a tier; size it in bytes with ``getsizeof=MemoryTier.size_bytes``."""

    def __init__(self, cache: Cache[str, Record], name: str = "memory") -> None:
        self.name, self.cache = name, cache

    @staticmethod
    def size_bytes(record: Record) -> int:
        """What a record takes: its value and its header."""
        return len(record.value) + _HEADER.size

    def get(self, key: str) -> Record | None:
        return self.cache.get(key)

    def put(self, key: str, record: Record, ttl: float) -> None:
        self.cache.put(key, record, ttl=ttl)

    def delete(self, key: str) -> None:
        self.cache.pop(key, None)


class RedisLike(Protocol):
    """What is used of a Redis client (redis-py's names)."""

    def get(self, name: str) -> Any: ...
    def set(self, name: str, value: bytes, *, px: int) -> Any: ...
    def unlink(self, *names: str) -> Any: ...


class RedisTier:
    """A server that speaks Redis, through a client that returns bytes (``decode_responses=False``).

    Every key gets an expiry (PX), so the server can hold nothing of ours for ever.
    """

    def __init__(self, client: RedisLike, prefix: str = "cachekit:", name: str = "redis") -> None:
        self.name, self._client, self._prefix = name, client, prefix

    def get(self, key: str) -> Record | None:
        data = self._client.get(self._prefix + key)
        return None if data is None else Record.unpack(data)

    def put(self, key: str, record: Record, ttl: float) -> None:
        self._client.set(self._prefix + key, record.pack(), px=max(1, int(ttl * 1000)))

    def delete(self, key: str) -> None:
        self._client.unlink(self._prefix + key)


class DirectoryTier:
    """A directory, one file a key, written aside and renamed: other processes see whole records only.

    Files are named by the SHA-256 of their key. A read of an expired file returns it as stale; :meth:`sweep` removes
    those that nobody reads.
    """

    def __init__(self, path: Path | str, name: str = "directory", *, clock: Callable[[], float] = time.time) -> None:
        self.name, self.path, self._clock = name, Path(path), clock
        self.path.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Record | None:
        try:
            return Record.unpack(self._file(key).read_bytes())
        except FileNotFoundError:
            return None

    def put(self, key: str, record: Record, ttl: float) -> None:
        file = self._file(key)
        file.parent.mkdir(exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            aside.write_bytes(record.pack())
            aside.replace(file)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def delete(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Removes files past their time, those that are no records, and what writers that died left for an hour; how
        many."""
        now, removed = self._clock(), 0
        for file in self._files():
            try:
                with file.open("rb") as opened:
                    head = opened.read(_HEADER.size)
                    age_s = now - os.fstat(opened.fileno()).st_mtime
                gone = age_s > 3_600 if file.suffix == ".tmp" else _expiry(head) <= now
                if gone:
                    file.unlink()
                    removed += 1
            except FileNotFoundError:  # another process was faster
                continue
        return removed

    def _files(self) -> Iterator[Path]:
        for folder in self.path.iterdir():
            if folder.is_dir() and len(folder.name) == 2:
                yield from (file for file in folder.iterdir() if file.is_file())

    def _file(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.path / digest[:2] / digest[2:]


class ObjectStoreTier:
    """A bucket, through an S3-like client (boto3's names). Let the bucket's life-cycle rules expire the objects too:
    a store does not delete by itself what nobody reads."""

    def __init__(self, client: Any, bucket: str, prefix: str = "cachekit/", name: str = "object store") -> None:
        self.name, self._client, self._bucket, self._prefix = name, client, bucket, prefix

    def get(self, key: str) -> Record | None:
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
        except Exception as error:  # botocore's ClientError, which is known by its response alone here
            code = getattr(error, "response", {}).get("Error", {}).get("Code")
            if code in ("NoSuchKey", "404"):
                return None
            raise
        return Record.unpack(found["Body"].read())

    def put(self, key: str, record: Record, ttl: float) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=record.pack())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)


@dataclass(frozen=True)
class TierStats:
    """One tier of a chain. Each lookup that reaches it is a hit, a miss, stale or an error."""

    name: str
    lookups: int
    hits: int
    misses: int
    stale: int
    errors: int
    write_errors: int
    """Puts, promotions and deletions that failed."""
    mean_ns: float
    p50_ns: float
    p95_ns: float
    last_error: str

    @property
    def hit_ratio(self) -> float:
        """Hits of the lookups that reached this tier; NaN of none."""
        return self.hits / self.lookups if self.lookups else float("nan")

    @property
    def stale_ratio(self) -> float:
        """Stale records of the lookups that reached this tier; NaN of none."""
        return self.stale / self.lookups if self.lookups else float("nan")


class _Counts:
    def __init__(self) -> None:
        self.hits = self.misses = self.stale = self.errors = self.write_errors = 0
        self.latency = LatencyHistogram()
        self.last_error = ""


class TierChain:
    """Looks a key up tier by tier, and puts what a slower tier had into the faster ones.

    Records live ``ttl`` seconds from :meth:`put`, in whichever tier. Keys are in the namespace of ``fingerprint``:
    another fingerprint sees none of them, which invalidates a whole generation in all tiers at once; what it leaves
    goes by its expiry. ``clock``: Unix time, which processes that share tiers must agree on. Thread-safe if the
    tiers are.
    """

    def __init__(
        self,
        *tiers: Tier,
        ttl: float,
        fingerprint: Fingerprint | None = None,
        clock: Callable[[], float] = time.time,
        timer_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if not 0 < ttl < float("inf"):
            raise ValueError(f"every record needs a finite time to live above 0 s, not {ttl}")
        self.tiers, self.ttl, self.fingerprint = tiers, ttl, fingerprint
        self._clock, self._timer_ns = clock, timer_ns
        self._lock = threading.Lock()
        self._counts = [_Counts() for _ in tiers]

    def get(self, key: str, *, version: int = 0) -> bytes | None:
        """The value of ``key``, of at least ``version``; None where no tier has it.

        A record that has expired or is of an earlier version is stale: it is deleted and the next tier asked.
        """
        name = self._name(key)
        for number, tier in enumerate(self.tiers):
            record = self._asked(number, tier, name, version)
            if record is not None:
                left = record.expires_s - self._clock()
                for faster in range(number):
                    self._tried(faster, partial(self.tiers[faster].put, name, record, left))
                return record.value
        return None

    def put(self, key: str, value: bytes, *, version: int = 0, ttl: float | None = None) -> None:
        """Writes to all tiers, the slowest first, so that no tier has what a slower one lacks.

        A tier that fails is counted, and what it had is deleted if that works; the others have the value.
        """
        seconds = self.ttl if ttl is None else min(ttl, self.ttl)
        record = Record(value, self._clock() + seconds, version)
        name = self._name(key)
        for number in reversed(range(len(self.tiers))):
            if not self._tried(number, partial(self.tiers[number].put, name, record, seconds)):
                self._tried(number, partial(self.tiers[number].delete, name))

    def delete(self, key: str) -> None:
        """Removes ``key`` from all tiers."""
        name = self._name(key)
        for number in range(len(self.tiers)):
            self._tried(number, partial(self.tiers[number].delete, name))

    def stats(self) -> list[TierStats]:
        """One row a tier, fastest first."""
        with self._lock:
            return [
                TierStats(
                    tier.name, counts.hits + counts.misses + counts.stale + counts.errors, counts.hits, counts.misses,
                    counts.stale, counts.errors, counts.write_errors,
                    counts.latency.total_ns / counts.latency.count if counts.latency.count else float("nan"),
                    counts.latency.quantile_ns(0.5), counts.latency.quantile_ns(0.95), counts.last_error,
                )
                for tier, counts in zip(self.tiers, self._counts, strict=True)
            ]  # fmt: skip

    def latencies(self) -> list[tuple[str, list[float], list[int], int, float]]:
        """One row a tier, fastest first: (name, upper bounds in ns, lookups below each, all of them, ns they took)."""
        with self._lock:
            return [
                (tier.name, *counts.latency.cumulative(), counts.latency.count, counts.latency.total_ns)
                for tier, counts in zip(self.tiers, self._counts, strict=True)
            ]

    def _name(self, key: str) -> str:
        """Namespace and SHA-256 of the key: a key may be a prompt, and servers show their keys to everybody."""
        namespace = self.fingerprint.namespace if self.fingerprint is not None else ""
        return f"{namespace}:{hashlib.sha256(key.encode()).hexdigest()}"

    def _asked(self, number: int, tier: Tier, name: str, version: int) -> Record | None:
        """The record if it is good; counted, with the latency."""
        counts = self._counts[number]
        started_ns = self._timer_ns()
        record, error = None, ""
        try:
            record = tier.get(name)
        except Exception as raised:  # a tier that is down must not take the service down
            error = f"{type(raised).__name__}: {raised}"
        took_ns = self._timer_ns() - started_ns
        stale = record is not None and (record.expires_s <= self._clock() or record.version < version)
        with self._lock:
            counts.latency.add(took_ns)
            if error:
                counts.errors += 1
                counts.last_error = error
            elif record is None:
                counts.misses += 1
            elif stale:
                counts.stale += 1
            else:
                counts.hits += 1
        if stale:
            self._tried(number, partial(tier.delete, name))
        return None if stale else record

    def _tried(self, number: int, write: Callable[[], None]) -> bool:
        """Whether a write worked; a failure is counted and raises nothing."""
        try:
            write()
        except Exception as raised:
            with self._lock:
                self._counts[number].write_errors += 1
                self._counts[number].last_error = f"{type(raised).__name__}: {raised}"
            return False
        return True


def _expiry(head: bytes) -> float:
    try:
        return Record.unpack(head).expires_s
    except ValueError:
        return 0.0
