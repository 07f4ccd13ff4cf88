"""Lifetimes of cache objects: what has no TTL and is kept, what is past its TTL and still there, what to clean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.detect.key_store import STALE_S, STORES, audit_of
from leakscope.liveness.lives import CacheLives, cache_lives
from leakscope.liveness.rows import read_rows
from leakscope.model.manifest import Manifest, Source
from leakscope.model.stores import Figure, KeyGroup
from leakscope.model.words import NEVER

if TYPE_CHECKING:
    import duckdb

FIGURES = ("keys", "bytes", "without_ttl", "without_ttl_bytes", "stale", "stale_bytes")


@dataclass(frozen=True)
class Lifetimes:
    """The objects of one source at its end.

    ``groups``: by pattern of their key or by owner, those that keep most without a TTL first. ``unknown``: objects
    whose TTL nobody told; ``past``: at most so many were past their TTL and still there, None where that cannot be
    told. ``store``: `redis`, `memcached`, or '' for an event log.
    """

    source: str
    store: str
    all_keys: KeyGroup
    groups: tuple[KeyGroup, ...]
    unknown: int
    past: int | None
    past_bytes: int = 0

    @property
    def missing_share(self) -> float:
        """Share of the bytes that has no TTL."""
        return self.all_keys.without_ttl_bytes.value / max(1.0, self.all_keys.bytes.value)

    @property
    def past_share(self) -> float | None:
        """Share of the objects that is past its TTL."""
        return None if self.past is None else self.past / max(1.0, self.all_keys.keys.value)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "source": self.source,
            "store": self.store or None,
            "unknown_ttl": self.unknown,
            "past_ttl": self.past,
            "past_ttl_bytes": self.past_bytes,
            "past_ttl_share": self.past_share,
            "without_ttl_share": self.missing_share,
            "all": self.all_keys.to_json(),
            "groups": [group.to_json() for group in self.groups],
        }


def lifetimes(captures: Sequence[tuple[duckdb.DuckDBPyConnection, Manifest]]) -> list[Lifetimes]:
    """One for each source with cache objects."""
    found = []
    for con, manifest in captures:
        for source in manifest.sources:
            one = _of_audit(con, source) if source.kind in STORES else _of_events(con, source)
            if one is not None:
                found.append(one)
    return found


def _of_audit(con: duckdb.DuckDBPyConnection, source: Source) -> Lifetimes | None:
    audit = audit_of(con, source)
    if audit is None:
        return None
    return Lifetimes(audit.source, source.kind, audit.all_keys, audit.groups, 0, audit.zombies)


def _of_events(con: duckdb.DuckDBPyConnection, source: Source) -> Lifetimes | None:
    rows = read_rows(con, source.id)
    if not len(rows):
        return None
    of = cache_lives(rows)
    end_ns = int(of.ts_ns[-1])
    live = of.alive(end_ns)
    expires = of.lives.expires_ns[live]
    sizes = of.lives.size_bytes[live].astype(np.float64)
    forever = expires == NEVER
    idle_s = (end_ns - _last_use_ns(of, live)) / 1e9
    past = (expires > 0) & (expires <= end_ns)
    owners = np.append(np.array(of.owners.to_pylist(), object), "")[of.lives.owner[live]]
    table = pd.DataFrame({"owner": owners, "keys": 1.0, "bytes": sizes, "idle_s": idle_s})
    for name, mask in (("without_ttl", forever), ("stale", forever & (idle_s >= STALE_S))):
        table[name], table[f"{name}_bytes"] = mask.astype(np.float64), sizes * mask
    sums = table.groupby("owner").agg(dict.fromkeys(FIGURES, "sum") | {"idle_s": "max"}).reset_index()
    sums = sums.sort_values(["without_ttl_bytes", "bytes", "owner"], ascending=[False, False, True])
    whole = sums[list(FIGURES)].sum()
    whole["idle_s"] = table["idle_s"].max() if len(table) else 0.0
    return Lifetimes(
        source.name or source.kind,
        "",
        _group("", whole),
        tuple(_group(str(row["owner"]), row) for _, row in sums.iterrows()),
        int((expires == 0).sum()),
        int(past.sum()),
        int(sizes[past].sum()),
    )


def _last_use_ns(of: CacheLives, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """When each life was last used or said to be, at least its birth. int64[n]."""
    row = len(of.ts_ns) - 1
    used, _ = of.uses.find(live, row)
    _, told = of.last_access.find(live, row)
    seen = of.ts_ns[np.where(used >= 0, used, of.lives.born_row[live])]
    return np.maximum(seen, told.astype(np.int64))


def _group(name: str, row: pd.Series) -> KeyGroup:
    figures = {figure: Figure(float(row[figure])) for figure in FIGURES}
    return KeyGroup(name, **figures, idle_s=float(row["idle_s"]))


def cleaning(of: Lifetimes) -> list[str]:
    """The cleaning that is prescribed for objects without a TTL that nobody used for seven days, as lines to read.

    Nothing of it is ever executed here. For Redis they are commands that neither block the server nor disturb idle
    clocks: SCAN, OBJECT IDLETIME and UNLINK, never KEYS or DEL.
    """
    days = STALE_S // 86_400
    lines = []
    for group in of.groups:
        if not group.stale.value:
            continue
        head = f"{group.pattern or '(no owner)'}: {group.stale} objects, {group.stale_bytes} B"
        lines.append(f"# {head} without a TTL and idle for {days} days or more")
        if of.store == "redis":
            glob = _glob(group.pattern)
            lines.append(
                f"redis-cli --scan --pattern '{glob}' | while IFS= read -r key; do "
                f'[ "$(redis-cli TTL "$key")" = -1 ] && [ "$(redis-cli OBJECT IDLETIME "$key")" -ge {STALE_S} ] '
                '&& redis-cli UNLINK "$key"; done'
            )
        elif of.store == "memcached":
            lines.append(
                "# memcached: set them again with an expiry, or let them be evicted; there is no safe bulk delete"
            )
        else:
            lines.append("# evict them through their owner, and give its inserts a TTL")
    return lines


def _glob(pattern: str) -> str:
    """A pattern of keys as Redis' own: placeholders become `*`, its own special characters are escaped, and what a
    shell would read inside single quotes is a `?`."""
    import re

    parts = re.split(r"\{[a-z]+\}|…", pattern)
    escaped = (re.sub(r"[\\*?\[\]]", lambda m: "\\" + m[0], part) for part in parts)
    return re.sub(r"[^ -&(-~]", "?", re.sub(r"\*+", "*", "*".join(escaped)))
