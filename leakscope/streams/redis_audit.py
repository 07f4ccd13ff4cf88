"""A read-only audit of a Redis server: which keys have no TTL, lie idle or are large, and what its memory is made of.

Sent are SCAN, PTTL, OBJECT IDLETIME (or FREQ), MEMORY USAGE, TYPE, INFO and PING, none of which moves a key's idle
clock (measured on 7.0), and never KEYS, CONFIG SET or MONITOR. SCAN goes through the hash table in an order that
has nothing to do with the keys, so the part of it that fits the budget is a random sample. One effect it has: a master
deletes the expired keys that a SCAN comes across, as it does on any access.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from leakscope.errors import BadInputError
from leakscope.model.words import NEVER
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline, utc_ns
from leakscope.streams.key_patterns import KeyPatterns, patterns
from leakscope.streams.redis_info import ENOUGH_READINGS, byte_counters, counters_of, keyspace, samples_of
from nsight_parsers import ParsedReport
from nsight_parsers.arrow import build_table
from nsight_parsers.kv_decode import EXTRA

if TYPE_CHECKING:
    from leakscope.streams.collection import Collecting

BATCH = 500
TIMEOUT_S = 5.0
MAX_EVENT_KINDS = 64
TYPED = 20
"""Of so many of the largest keys the type is asked."""
IDLE_BEYOND_NS = 1_000_000_000  # the idle clock ticks in seconds
LIMITS = [
    "Redis counts no references: who still needs a key is not known",
    "sizes of lists, sets, hashes and streams are estimated by the server from five of their elements",
    "names of keys are not stored: parts that differ from key to key are placeholders, single keys a digest",
]


class RedisAudit:
    """One server; of a cluster one node."""

    def __init__(self, address: Address, how: Collecting) -> None:
        """Raises BadInputError when redis-py is missing or the number of the database is none."""
        try:
            import redis
        except ImportError:
            raise BadInputError(f"{address.shown}: Redis needs redis: {EXTRA}") from None
        self.address = address
        self.how = how
        self._errors = redis.exceptions
        self.commands = 0
        self._only = _database(address)
        self._clients: dict[int, Any] = {}
        self._readings: list[tuple[int, dict[str, float]]] = []
        self._findings: list[str] = []
        self._missing: dict[str, str] = {}  # command → why it has no answers

    def check(self) -> None:
        """Raises BadInputError, one line without any secret, where the server cannot be asked."""
        self._info()
        self._readings.clear()

    def collect(self, deadline: Deadline) -> list[ParsedReport]:
        """The audit, and INFO each interval: to the deadline where the user gave one, else as long as the audit."""
        try:
            return self._collect(deadline)
        finally:
            for client in self._clients.values():
                client.close()

    def _collect(self, deadline: Deadline) -> list[ParsedReport]:
        before, began = self._info(), time.monotonic()
        events = self._events()
        keys, _ = keyspace(before)
        wanted = [self._only] if self._only is not None else sorted(keys)
        lfu = "lfu" in str(before.get("maxmemory_policy", ""))
        scans = [self._scan(db, self._share(keys, db, wanted), lfu, deadline) for db in wanted]
        after, took = self._info(), time.monotonic() - began
        rows = [row for scanned, _ in scans for row in scanned]
        complete = all(whole for _, whole in scans)
        total = sum(keys.get(db, 0) for db in wanted)
        facts = self._facts(before, after, rows, total, complete, took, wanted)
        tables = {"cache_events": self._table(rows, utc_ns())} if rows else {}
        if self.how.seconds is not None:
            failed = 0
            while not deadline.wait(self.how.interval_s):
                try:
                    self._info()
                except BadInputError:
                    failed += 1
                if events is not None:
                    events.read()
            if failed:
                self._findings.append(f"{failed:,} readings of INFO failed")
        if events is not None:
            events.read()
            self._readings[-1][1].update(events.counters())
            events.close()
        biggest = max((row.size for row in rows), default=0)
        self._readings[-1][1]["redis_biggest_key"] = float(biggest)
        return self._reports(tables, facts)

    def _events(self) -> KeyEvents | None:
        """The server's own notices of what happens to keys, where the user asks for them and they are on already."""
        if self.address.options.get("events") != "1":
            return None
        client = self._client(0)
        try:
            setting = self._asked(client.config_get, "notify-keyspace-events").get("notify-keyspace-events", "")
        except BadInputError:
            setting = ""
        if "E" not in setting:
            self._findings.append("keyspace events are off at the server and stay off: no setting is changed here")
            return None
        return KeyEvents(client)

    def _reports(self, tables: dict[str, Any], facts: dict[str, Any]) -> list[ParsedReport]:
        shown = self.address.shown
        findings = self._findings + [f"{command} has no answers ({why})" for command, why in self._missing.items()]
        if len(self._readings) >= ENOUGH_READINGS:
            series = [(ts, c | {"rss": c.get("redis_used_memory_rss", 0.0)}) for ts, c in self._readings]
            samples = samples_of(series, shown)
            more = {"byte_counters": byte_counters(series)}
            extra = [ParsedReport({"samples": samples}, [], "Redis INFO", kind="samples", facts=more, clock="utc")]
        else:
            extra = []
        tables["samples"] = samples_of(self._readings[:1] + self._readings[-1:], shown)
        version = str(facts.pop("version"))
        report = ParsedReport(tables, findings, "Redis", version, "redis", facts, list(LIMITS), "utc")
        return [report, *extra]

    def _scan(self, db: int, budget: int, lfu: bool, deadline: Deadline) -> tuple[list[_Key], bool]:
        """(keys of one database, whether these are all of them)."""
        client, cursor = self._client(db), 0
        keys: dict[bytes, _Key] = {}
        while True:
            began = time.monotonic()
            cursor, found = self._asked(client.scan, cursor=cursor, count=BATCH)
            new = [key for key in found if key not in keys]
            keys |= {key.name: key for key in self._described(client, db, new, lfu)}
            if cursor == 0:
                return list(keys.values()), True
            pause = (time.monotonic() - began) * (1 / self.how.busy_share - 1)
            if len(keys) >= budget or deadline.wait(pause):
                return list(keys.values()), False
            if utc_ns() - self._readings[-1][0] >= self.how.interval_s * 1e9:
                self._info()

    def _described(self, client: Any, db: int, names: Sequence[bytes], lfu: bool) -> Iterator[_Key]:
        use = ("OBJECT", "FREQ") if lfu else ("OBJECT", "IDLETIME")
        asked = [c for c in (("PTTL",), use, ("MEMORY", "USAGE")) if " ".join(c) not in self._missing]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            for command in asked:
                pipeline.execute_command(*command, name)
        now_ns = utc_ns()
        answers = self._asked(pipeline.execute, raise_on_error=False, commands=len(names) * len(asked))
        for number, name in enumerate(names):
            of_key = dict(zip(asked, answers[number * len(asked) :], strict=False))
            for command, answer in of_key.items():
                if isinstance(answer, Exception):
                    self._missing.setdefault(" ".join(command), type(answer).__name__)
            ttl = _number(of_key.get(("PTTL",)))
            if ttl == -2:  # gone since the scan
                continue
            idle = -1 if lfu else _number(of_key.get(use))
            yield _Key(name, db, now_ns, ttl, idle, max(0, _number(of_key.get(("MEMORY", "USAGE")))))

    def _table(self, rows: list[_Key], at_ns: int) -> Any:
        named = KeyPatterns()
        of_key = patterns([named.segments(row.name) for row in rows])
        databases = {row.db for row in rows}
        objects = [
            (f"db{row.db}/" if len(databases) > 1 else "")
            + (f"{pattern}#{named.digest(row.name)}" if "{" in pattern else pattern)
            for row, pattern in zip(rows, of_key, strict=True)
        ]
        return build_table(
            "cache_events",
            len(rows),
            ts_ns=at_ns,  # all of it is one look
            op="state",
            object=objects,
            size_bytes=[row.size for row in rows],
            owner=of_key,
            medium="redis",
            expires_ns=[NEVER if row.ttl_ms == -1 else row.at_ns + row.ttl_ms * 1_000_000 if row.ttl_ms >= 0 else 0
                        for row in rows],
            last_access_ns=[row.at_ns - row.idle_s * IDLE_BEYOND_NS if row.idle_s >= 0 else 0 for row in rows],
        )  # fmt: skip

    def _facts(
        self, before: Any, after: Any, rows: list[_Key], total: int, complete: bool, took: float, wanted: Sequence[int]
    ) -> dict[str, Any]:
        keys, expires = keyspace(before)
        largest = sorted(rows, key=lambda row: -row.size)[:TYPED]
        kinds = [self._asked(self._client(row.db).type, row.name).decode("ascii", "replace") for row in largest]
        expired = int(after.get("expired_keys", 0)) - int(before.get("expired_keys", 0))
        replica = str(before.get("role", "")) in ("slave", "replica")
        unseen = max(0, total - len(rows)) if complete else None
        zombies = None if unseen is None else unseen if replica else min(unseen, max(0, expired))
        return {
            "version": before.get("redis_version", ""),
            "policy": str(before.get("maxmemory_policy", "")),
            "maxmemory": int(before.get("maxmemory", 0)),
            "role": str(before.get("role", "")),
            "databases": list(wanted),
            "keys": total,
            "keys_without_ttl": sum(keys.get(db, 0) - expires.get(db, 0) for db in wanted),
            "scanned": len(rows),
            "complete": complete,
            "sizes": "MEMORY USAGE" not in self._missing,
            "zombies": zombies,
            "expired_meanwhile": expired,
            "expired_stale_percent": float(before.get("expired_stale_perc", 0.0)),
            "largest_types": kinds,
            "cost": {
                "commands": self.commands,
                "seconds": round(took, 3),
                "server_cpu_s": round(_cpu(after) - _cpu(before), 3),
            },
        }

    def _share(self, keys: dict[int, int], db: int, wanted: Sequence[int]) -> int:
        total = sum(keys.get(one, 0) for one in wanted)
        return max(BATCH, round(self.how.max_keys * keys.get(db, 0) / total)) if total else BATCH

    def _info(self) -> Any:
        info = self._asked(self._client(self._only or 0).info)
        self._readings.append((utc_ns(), counters_of(info)))
        return info

    def _client(self, db: int) -> Any:
        if db not in self._clients:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            url = self.address.url
            path = f"{url.path}?db={db}" if url.scheme == "unix" else f"/{db}"
            self._clients[db] = redis.Redis.from_url(
                f"{url.scheme}://{url.netloc}{path}",
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        return self._clients[db]

    def _asked(self, ask: Any, *args: Any, commands: int = 1, **options: Any) -> Any:
        """The server's answer. Raises BadInputError without any secret where there is none."""
        self.commands += commands
        errors = self._errors
        try:
            return ask(*args, **options)
        except errors.AuthenticationError:
            raise BadInputError(
                f"{self.address.shown}: refuses the user or password; give them as {self.address.url.scheme}://USER:PASSWORD@…"
            ) from None
        except errors.NoPermissionError as error:
            raise BadInputError(
                f"{self.address.shown}: its ACL does not allow {_command_of(str(error))}; the audit needs +ping +info "
                "+scan +pttl +type +object|idletime +memory|usage and access to the keys"
            ) from None
        except errors.TimeoutError:
            raise BadInputError(f"{self.address.shown}: does not answer for {TIMEOUT_S:g} s") from None
        except errors.ConnectionError as error:
            cause = error.__cause__ or error.__context__
            why = getattr(cause, "strerror", None) or "no connection"
            raise BadInputError(f"{self.address.shown}: cannot be reached: {why}") from None
        except (errors.RedisError, UnicodeError, ValueError) as error:
            raise BadInputError(f"{self.address.shown}: is no Redis server: {type(error).__name__}") from None


class KeyEvents:
    """Notices of what happens to keys, counted by kind; which keys is not kept. Redis drops them for slow readers."""

    def __init__(self, client: Any) -> None:
        self._counts: dict[str, int] = {}
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.psubscribe("__keyevent@*__:*")

    def read(self) -> None:
        """Count what has come so far."""
        while (message := self._pubsub.get_message(timeout=0.05)) is not None:
            kind = re.sub(r"[^a-z_]", "", message["channel"].decode("ascii", "replace").rpartition(":")[2])[:32]
            if kind in self._counts or len(self._counts) < MAX_EVENT_KINDS:
                self._counts[kind] = self._counts.get(kind, 0) + 1

    def counters(self) -> dict[str, float]:
        """``redis_event_<kind>_total``."""
        return {f"redis_event_{kind}_total": float(count) for kind, count in self._counts.items()}

    def close(self) -> None:
        """Subscribe to nothing any more."""
        self._pubsub.close()


class _Key:
    """What was asked of one key. ``ttl_ms`` -1: none, -3: not known; ``idle_s`` -1: not known."""

    __slots__ = ("at_ns", "db", "idle_s", "name", "size", "ttl_ms")

    def __init__(self, name: bytes, db: int, at_ns: int, ttl_ms: int, idle_s: int, size: int) -> None:
        self.name, self.db, self.at_ns, self.ttl_ms, self.idle_s, self.size = name, db, at_ns, ttl_ms, idle_s, size


def _number(answer: Any) -> int:
    return answer if isinstance(answer, int) else -3


def _cpu(info: Any) -> float:
    return sum(float(info.get(name, 0.0)) for name in ("used_cpu_user", "used_cpu_sys"))


def _command_of(text: str) -> str:
    """The command that a NOPERM error names."""
    return next((word.strip("'") for word in text.split() if word.startswith("'")), "a command")


def _database(address: Address) -> int | None:
    """The number of the database in the address, None for all."""
    text = address.options.get("db", "") if address.url.scheme == "unix" else address.url.path.strip("/")
    text = text or address.options.get("db", "")
    if not text:
        return None
    if not text.isdecimal() or int(text) > 1 << 14:
        raise BadInputError(f"{address.shown}: no number of a database: {text[:20]}")
    return int(text)
