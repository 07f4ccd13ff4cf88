"""Verdicts from the lives of cache objects: pins and references that nobody gives up, views that keep their base.

Lives and holds are those of the liveness graph (:mod:`leakscope.liveness`). A hold counts as stuck when it is stale
there: older than nearly all that were given up took, and its object not used since by who holds it; younger ones are in
flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from leakscope.correlate.stacks import Stacks
from leakscope.liveness.holds import KINDS
from leakscope.liveness.lives import CacheLives, cache_lives
from leakscope.liveness.moments import MIN_GIVEN_UP, Moment, moment, usual_holds
from leakscope.liveness.rows import CacheRows, read_rows
from leakscope.model.results import Culprit, Growth, Verdict

if TYPE_CHECKING:
    import duckdb

MIN_STUCK = 5
"""Fewer stuck holds may be a long request."""
IN_FLIGHT_SHARE = 0.1
"""A hold younger than this share of the time may be in flight where nothing says how long holds take."""
PARTS = 4
MIN_PARTS = 3
"""Holds get stuck in this many of the four parts of the time: not in one accident alone."""
CLASSES = {"pin": "pinned_never_unpinned", "ref": "refcount", "view": "view_retains_backing_store"}
COUNTERS = {"pin": "pinned_bytes", "ref": "referenced_bytes", "view": "retained_base_bytes"}
WORDS = {"pin": ("pinned", "unpin"), "ref": ("referenced", "unref"), "view": ("kept by views", "evict of the view")}


@dataclass(frozen=True)
class Stuck:
    """Holds of one kind that nobody gave up: a row each of object, owner, ts_ns, size_bytes (of what is kept) and
    stack."""

    kind: str
    rows: pd.DataFrame
    usual_s: float  # how long holds that were given up took at most
    given_up: int


def judge_cache(con: duckdb.DuckDBPyConnection, source_id: int) -> list[Verdict]:
    """Verdicts of one source with ``cache_events``, the leading one first; [] where it has none."""
    rows = read_rows(con, source_id)
    return judge_rows(rows, con) if len(rows) else []


def judge_rows(rows: CacheRows, con: duckdb.DuckDBPyConnection | None = None) -> list[Verdict]:
    """As :func:`judge_cache`, of the rows of one source; ``con`` has the frames of their stacks, None where they have
    none."""
    of = cache_lives(rows)
    start_ns, end_ns = int(of.ts_ns[0]), int(of.ts_ns[-1])
    fallback = IN_FLIGHT_SHARE * (end_ns - start_ns)
    usual = {kind: usual_holds(of, kind, fallback) for kind in CLASSES}
    now = moment(of, end_ns, {kind: limit.limit_ns for kind, limit in usual.items()}, fallback)
    held = int(of.lives.size_bytes[now.rows].sum())
    found = [
        _verdict(Stuck(kind, _stuck(of, now, kind), limit.limit_ns / 1e9, limit.given_up), of, held, con)
        for kind, limit in usual.items()
    ]
    leaks = sorted((v for v in found if v is not None), key=lambda v: -v.kept_bytes)
    if leaks:
        return leaks
    evicted = int(of.evictions["objects"].sum())
    counts = f"{len(now.rows):,} objects are live at the end, {evicted:,} were evicted"
    if of.failed_inserts and not evicted:
        return [
            Verdict(
                "inconclusive",
                "missing_data",
                confidence=0.5,
                reasons=(counts, f"{of.failed_inserts:,} inserts failed although nothing is held"),
                missing=("pins and references of the cache's objects",),
            )
        ]
    return [Verdict("not_leak", "cache_warmup", "host", 0.8, reasons=(counts, "no pin or reference outlives its use"))]


def _stuck(of: CacheLives, now: Moment, kind: str) -> pd.DataFrame:
    """The stale holds of a kind; of a view, what it keeps is its base."""
    chosen = (now.holds.holds.kind == KINDS.index(kind)) & now.holds.stale & (now.holds.holds.view < 0)
    found = now.holds.take(chosen)
    life = found.holds.life
    kept, size = of.lives.object[life], of.lives.size_bytes[life]
    if kind == "view":
        kept = of.lives.base[life]
        sizes = np.zeros(len(of.names) + 1, np.int64)  # the last is for -1, no base
        np.maximum.at(sizes, of.lives.object, of.lives.size_bytes)
        size = sizes[kept]
    owners = np.array([*of.owners.to_pylist(), ""], object)
    rows = pd.DataFrame(
        {
            "object": kept,
            "owner": owners[found.holds.owner],
            "ts_ns": found.from_ns,
            "size_bytes": size,
            "stack": found.holds.stack,
        }
    )
    return rows[rows["object"] >= 0].sort_values("ts_ns", kind="stable")


def _verdict(stuck: Stuck, of: CacheLives, held: int, con: duckdb.DuckDBPyConnection | None) -> Verdict | None:
    start_ns, end_ns = int(of.ts_ns[0]), int(of.ts_ns[-1])
    rows = stuck.rows
    kept = rows.groupby("object").agg(
        ts_ns=("ts_ns", "min"), size_bytes=("size_bytes", "max"), owner=("owner", "first")
    )
    if len(kept) < MIN_STUCK:
        return None
    last_stuck = end_ns - stuck.usual_s * 1e9
    part = np.minimum(((kept["ts_ns"] - start_ns) / max(last_stuck - start_ns, 1) * PARTS).astype(int), PARTS - 1)
    if len(np.unique(part)) < MIN_PARTS:
        return None
    total = int(kept["size_bytes"].sum())
    first_ns = int(kept["ts_ns"].min())
    span_s = max((end_ns - first_ns) / 1e9, 1e-9)
    rate = total / span_s
    owner = str(kept.groupby("owner")["size_bytes"].sum().idxmax())
    taken, release = WORDS[stuck.kind]
    stack = _stack(rows[rows["owner"] == owner], con)
    spread = rate / np.sqrt(len(kept)) * 1.96  # arrivals of holds that get stuck as a Poisson process
    return Verdict(
        verdict="leak",
        kind=CLASSES[stuck.kind],
        layer="host",
        confidence=0.95 if stuck.given_up >= MIN_GIVEN_UP else 0.8,
        culprit=Culprit(
            frame=stack[-1] if stack else "",
            stack=stack,
            counter=COUNTERS[stuck.kind],
            owner=owner,
            object=f"entries {taken} by owner={owner} with no later {release}",
        ),
        growth=Growth(COUNTERS[stuck.kind], rate, max(0.0, rate - spread), rate + spread),
        leak_start_s=since_zero(first_ns, start_ns),
        kept_bytes=total,
        kept_objects=len(kept),
        reasons=(
            f"{len(kept):,} objects ({total:,} bytes of {held:,} live) are {taken} at the end by {owner}, "
            f"with no later {release}",
            f"{stuck.given_up:,} others were given up, nearly all within {stuck.usual_s:,.1f} s",
            *([f"{of.failed_inserts:,} inserts failed"] if of.failed_inserts else []),
        ),
    )


def _stack(holds: pd.DataFrame, con: duckdb.DuckDBPyConnection | None) -> tuple[str, ...]:
    """The stack that took the most bytes of these holds; () where none is known."""
    known = holds[holds["stack"] > 0]
    if con is None or not len(known):
        return ()
    stack = int(known.groupby("stack")["size_bytes"].sum().idxmax())  # type: ignore[call-overload]
    return tuple(frame.text for frame in Stacks(con, [stack])[stack])


TIME_ZERO_NS = 1_000_000_000
"""Time zero of event files; a file that begins earlier begins at its own first event."""
LATEST_START_NS = TIME_ZERO_NS + 3_600 * 10**9
"""A file whose first event comes later has another clock (monotonic, UTC) and begins at that event, too."""


def since_zero(at_ns: int, start_ns: int) -> float:
    """Seconds since time zero of a file whose first event is at ``start_ns``."""
    zero_ns = start_ns if start_ns > LATEST_START_NS else min(TIME_ZERO_NS, start_ns)
    return max(0.0, (at_ns - zero_ns) / 1e9)
