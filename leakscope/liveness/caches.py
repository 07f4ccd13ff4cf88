"""The part of the graph that cache events tell: objects, who holds them, what keeps what."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from leakscope.liveness.graph import GraphBuilder, Int32, reachable
from leakscope.liveness.lives import CacheLives
from leakscope.liveness.moments import Moment, OpenHolds

UNKNOWN_HOLDER = "unknown holder"


def add_cache(builder: GraphBuilder, source: int, name: str, of: CacheLives, at: Moment) -> Int32:
    """Add the live objects of one source; returns their nodes, in the order of ``at.rows``.

    An object that no holder reaches (by holds, views, children in its prefix) is kept by its cache alone: that is all
    the cache's node retains.
    """
    lives = of.lives
    objects = lives.object[at.rows]
    nodes = builder.add_nodes(
        "object",
        of.names.take(pa.array(objects)),
        source=source,
        cls=at.classes,
        objects=1,
        bytes=lives.size_bytes[at.rows],
        since_ns=of.ts_ns[lives.born_row[at.rows]],
        last_use_ns=at.last_use_ns,
        rank=_ranks(at),
        stack=lives.stack[at.rows],
    )
    tails, heads = [], []

    def edges(kind: str, tail: Int32, head: Int32, **columns: object) -> None:
        builder.add_edges(kind, tail, head, **columns)
        tails.append(tail)
        heads.append(head)

    own = at.holds.take(at.holds.holds.view < 0)
    if len(own.position):
        holders = _holders(builder, source, of, own.holds.owner)
        owner, position, columns = _grouped(own)
        edges("holds", holders[owner], nodes[position], **columns)
    through = at.holds.take(at.holds.holds.view >= 0)
    position = np.full(len(lives.object), -1, np.int64)
    position[at.rows] = np.arange(len(at.rows))
    through = through.take(position[through.holds.view] >= 0)
    if len(through.position):
        views = nodes[position[through.holds.view]]
        edges("view-of", views, nodes[through.position], since_ns=through.from_ns, stale=through.stale)
    place = np.full(len(of.names) + 1, -1, np.int64)  # the last is for -1, no parent
    place[objects] = np.arange(len(objects))
    parent = place[lives.parent[at.rows]]
    child = np.flatnonzero(parent >= 0)
    if len(child):
        edges("parent-block", nodes[child], nodes[parent[child]])
    only_counted = np.flatnonzero((np.nan_to_num(at.facts.refcount) > 0) & ~_is_held(at))
    if len(only_counted):
        unknown = builder.add_nodes("holder", [UNKNOWN_HOLDER], source=source)
        counts = at.facts.refcount[only_counted].astype(np.int64)
        edges("holds", np.repeat(unknown, len(only_counted)), nodes[only_counted], count=counts)

    first = int(nodes[0]) if len(nodes) else builder.count
    tail, head = (np.concatenate(ends) - first if ends else np.zeros(0, np.int32) for ends in (tails, heads))
    inside = (tail >= 0) & (tail < len(nodes))
    start = np.zeros(len(nodes), bool)
    start[head[~inside]] = True
    alone = ~reachable(len(nodes), tail[inside], head[inside], start)
    _add_caches(builder, source, name, of, at, nodes, alone)
    return nodes


def _ranks(at: Moment) -> np.ndarray:
    """1 for the object that was used last."""
    order = np.argsort(-at.last_use_ns, kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return np.where(at.last_use_ns > 0, ranks, 0)


def _is_held(at: Moment) -> np.ndarray:
    held = np.zeros(len(at.rows), bool)
    held[at.holds.position] = True
    return held


def _holders(builder: GraphBuilder, source: int, of: CacheLives, owner: np.ndarray) -> Int32:
    """Nodes of the holders, by owner; the last is that of -1, who holds is not said."""
    names = pa.concat_arrays([of.owners, pa.array([UNKNOWN_HOLDER], of.owners.type)])
    used = np.unique(np.where(owner < 0, len(of.owners), owner))
    nodes = np.full(len(names), -1, np.int32)
    nodes[used] = builder.add_nodes("holder", names.take(pa.array(used)), source=source)
    return nodes


def _grouped(own: OpenHolds) -> tuple[Int32, np.ndarray, dict[str, np.ndarray]]:
    """One row an owner and object: (owners, -1 = not said; positions; columns of the edges: count, since_ns and stack
    of the oldest hold, whether one is stale)."""
    key = own.holds.owner.astype(np.int64) * (int(own.position.max()) + 1) + own.position
    order = np.lexsort((own.from_ns, key))
    first = np.flatnonzero(np.diff(key[order], prepend=key[order[0]] - 1))
    oldest = order[first]
    columns = {
        "count": np.diff(np.append(first, len(order))),
        "since_ns": own.from_ns[oldest],
        "stack": own.holds.stack[oldest],
        "stale": np.logical_or.reduceat(own.stale[order], first),
    }
    return own.holds.owner[oldest], own.position[oldest], columns


def _add_caches(
    builder: GraphBuilder, source: int, name: str, of: CacheLives, at: Moment, nodes: Int32, alone: np.ndarray
) -> None:
    """A node for each medium, with edges to what it alone keeps, and who evicted what was there."""
    media = of.lives.medium[at.rows]
    words = of.media.to_pylist()
    caches = []
    for code in np.unique(media[alone]).tolist():
        here = np.flatnonzero(alone & (media == code))
        medium = f", {words[code]}" if code >= 0 else ""
        caches.append(builder.add_nodes("cache", [f"cache {name}{medium}"], source=source))
        builder.add_edges("caches", np.repeat(caches[-1], len(here)), nodes[here])
    by = of.evictions[of.evictions["owner"] >= 0]
    if len(by) and len(nodes):
        cache = caches[0] if caches else builder.add_nodes("cache", [f"cache {name}"], source=source)
        evictors = builder.add_nodes("holder", of.owners.take(pa.array(by["owner"].to_numpy(np.int64))), source=source)
        builder.add_edges("evicted-by", np.repeat(cache, len(by)), evictors, count=by["objects"].to_numpy(np.int64))
