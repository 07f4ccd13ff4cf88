"""A read-only audit of memcached: ``lru_crawler metadump all`` lists every item without touching it, values stay there.

A line is ``key=NAME exp=UNIX la=UNIX cas=N fetch=yes|no cls=N size=BYTES``, ``exp=-1`` for no TTL, the name
percent-encoded (memcached, doc/protocol.txt, "LRU Crawler"); the end is ``END``. Needs 1.4.31 or later.
"""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from leakscope.errors import BadInputError
from leakscope.model.words import NEVER
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline, utc_ns
from leakscope.streams.key_patterns import KeyPatterns, patterns
from nsight_parsers import ParsedReport
from nsight_parsers.arrow import build_table

if TYPE_CHECKING:
    from leakscope.streams.collection import Collecting

DEFAULT_PORT = 11211
TIMEOUT_S = 5.0
MAX_LINE = 4096
MAX_STATS = 1000
LINE = re.compile(rb"key=(\S+) exp=(-?\d+) la=(\d+) .*?size=(\d+)")
LIMITS = [
    "memcached tells no references: who still needs an item is not known",
    "names of keys are not stored: parts that differ from key to key are placeholders, single keys a digest",
]


class MemcachedAudit:
    """One server, its text protocol without authentication."""

    def __init__(self, address: Address, how: Collecting) -> None:
        self.address = address
        self.how = how
        self.commands = 0

    def check(self) -> None:
        """Raises BadInputError where the server cannot be asked."""
        self.stats()

    def stats(self) -> dict[str, str]:
        """The answer to ``stats``. Raises BadInputError where the server cannot be asked."""
        with self._connected() as link:
            return self._stats(link)

    def collect(self, deadline: Deadline) -> ParsedReport:
        """One audit."""
        began = time.monotonic()
        with self._connected() as link:
            before = self._stats(link)
            now_ns = utc_ns()
            items, whole = self._items(link, deadline)
        with self._connected() as link:  # the dump may have been cut short
            after = self._stats(link)
        named = KeyPatterns()
        of_key = patterns([named.segments(name) for name, *_ in items])
        tables = {}
        if items:
            tables["cache_events"] = build_table(
                "cache_events",
                len(items),
                ts_ns=now_ns,
                op="state",
                object=[f"{p}#{named.digest(i[0])}" if "{" in p else p for i, p in zip(items, of_key, strict=True)],
                size_bytes=[size for *_, size in items],
                owner=of_key,
                medium="memcached",
                expires_ns=[NEVER if exp < 0 else exp * 1_000_000_000 for _, exp, _, _ in items],
                last_access_ns=[la * 1_000_000_000 for _, _, la, _ in items],
            )
        cpu = [float(s.get("rusage_user", 0)) + float(s.get("rusage_system", 0)) for s in (before, after)]
        facts = {
            "keys": int(before.get("curr_items", len(items))),
            "scanned": len(items),
            "complete": whole,
            "sizes": True,
            "maxmemory": int(before.get("limit_maxbytes", 0)),
            "zombies": sum(0 <= exp * 1_000_000_000 <= now_ns for _, exp, _, _ in items) if whole else None,
            "evictions": int(after.get("evictions", 0)),
            "expired_unfetched": int(after.get("expired_unfetched", 0)),
            "evicted_unfetched": int(after.get("evicted_unfetched", 0)),
            "cost": {
                "commands": self.commands,
                "seconds": round(time.monotonic() - began, 3),
                "server_cpu_s": round(cpu[1] - cpu[0], 3),
            },
        }
        version = str(before.get("version", ""))[:40]
        return ParsedReport(tables, [], "memcached", version, "memcached", facts, list(LIMITS), "utc")

    def _items(self, link: _Link, deadline: Deadline) -> tuple[list[tuple[bytes, int, int, int]], bool]:
        """((name, expiry, last access, bytes) of each item, whether these are all)."""
        self.commands += 1
        link.send(b"lru_crawler metadump all\r\n")
        items: list[tuple[bytes, int, int, int]] = []
        while (line := link.line()) != b"END":
            found = LINE.match(line)
            if found is None:
                raise BadInputError(
                    f"{self.address.shown}: does not list its items: {line[:60].decode('ascii', 'replace')!r}"
                )
            name, exp, access, size = found.groups()
            items.append((unquote_to_bytes(name), int(exp), int(access), int(size)))
            if len(items) >= self.how.max_keys or deadline.left_s() <= 0:
                return items, False
        return items, True

    def _stats(self, link: _Link) -> dict[str, str]:
        self.commands += 1
        link.send(b"stats\r\n")
        found: dict[str, str] = {}
        for _ in range(MAX_STATS):
            line = link.line()
            if line == b"END":
                return found
            words = line.decode("ascii", "replace").split(" ", 2)
            if words[0] != "STAT" or len(words) != 3:
                raise BadInputError(f"{self.address.shown}: is no memcached server that answers without a password")
            found[words[1]] = words[2]
        raise BadInputError(f"{self.address.shown}: is no memcached server: more than {MAX_STATS:,} statistics")

    def _connected(self) -> _Link:
        return _Link(self.address)


class _Link:
    """Lines over one connection. Raises BadInputError where it breaks."""

    def __init__(self, address: Address) -> None:
        self.address = address
        try:
            self._socket = socket.create_connection((address.host, address.port(DEFAULT_PORT)), TIMEOUT_S)
        except OSError as error:
            raise BadInputError(f"{address.shown}: cannot be reached: {error.strerror or error}") from None
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, command: bytes) -> None:
        """Send one command."""
        try:
            self._socket.sendall(command)
        except OSError as error:
            raise BadInputError(f"{self.address.shown}: hung up: {error.strerror or error}") from None

    def line(self) -> bytes:
        """The next line without its end."""
        try:
            line = self._file.readline(MAX_LINE)
        except OSError as error:
            raise BadInputError(f"{self.address.shown}: does not answer: {error.strerror or error}") from None
        if not line.endswith(b"\n"):
            raise BadInputError(f"{self.address.shown}: is no memcached server, or it hung up")
        return line.rstrip(b"\r\n")
