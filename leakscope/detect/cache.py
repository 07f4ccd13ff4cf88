"""Verdicts from the lives of cache objects: pins and references that nobody gives up, views that keep their base.

Holds (pins, references, views) are matched by their number where the source gives one, else last in, first out: a hold
that is given up is the youngest of its object, so that one which is never given up stays with who took it. A hold
counts as stuck when it is older than nearly all that were given up took; younger ones are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.stacks import Stacks
from leakscope.model.results import Culprit, Growth, Verdict

if TYPE_CHECKING:
    import duckdb

MIN_STUCK = 5
"""Fewer stuck holds may be a long request."""
IN_FLIGHT_FACTOR = 2.0
IN_FLIGHT_QUANTILE = 0.99
IN_FLIGHT_SHARE = 0.1
"""A hold younger than this share of the time may be in flight where nothing says how long holds take."""
PARTS = 4
MIN_PARTS = 3
"""Holds get stuck in this many of the four parts of the time: not in one accident alone."""
HOLDS = {"pin": "unpin", "ref": "unref"}
CLASSES = {"pin": "pinned_never_unpinned", "ref": "refcount", "view": "view_retains_backing_store"}
COUNTERS = {"pin": "pinned_bytes", "ref": "referenced_bytes", "view": "retained_base_bytes"}
WORDS = {"pin": ("pinned", "unpin"), "ref": ("referenced", "unref"), "view": ("kept by views", "evict of the view")}


@dataclass(frozen=True)
class Stuck:
    """Holds of one kind that nobody gave up: one row each of object, owner, ts_ns, size_bytes (of what is kept)."""

    kind: str
    rows: pd.DataFrame
    usual_s: float  # how long holds that were given up took at most
    given_up: int


def judge_cache(con: duckdb.DuckDBPyConnection, source_id: int) -> list[Verdict]:
    """Verdicts of one source with ``cache_events``, the leading one first; [] where it has none."""
    events = con.execute(
        "SELECT ts_ns, op::VARCHAR AS op, object, size_bytes, owner::VARCHAR AS owner, base, hold, user_stack "
        "FROM cache_events WHERE source_id = ? ORDER BY ts_ns",
        [source_id],
    ).df()
    if not len(events):
        return []
    return judge_events(events, Stacks(con, events["user_stack"].unique()))


def judge_events(events: pd.DataFrame, stacks: Stacks | None = None) -> list[Verdict]:
    """As :func:`judge_cache`, of rows in time order: ts_ns, op, object, size_bytes, owner, base; hold and user_stack,
    whose frames are in ``stacks``, where they are known."""
    events = pd.DataFrame({"hold": 0, "user_stack": 0} | {name: events[name].to_numpy() for name in events.columns})
    events["life"] = events["op"].isin(("insert", "view")).groupby(events["object"]).cumsum()
    start_ns, end_ns = int(events["ts_ns"].iloc[0]), int(events["ts_ns"].iloc[-1])
    live = _live(events)
    found = [_verdict(stuck, events, live, start_ns, end_ns, stacks) for stuck in _stuck(events, live, end_ns)]
    leaks = sorted((v for v in found if v is not None), key=lambda v: -v.kept_bytes)
    if leaks:
        return leaks
    evicted = int((events["op"] == "evict").sum())
    failed = int((events["op"] == "insert_fail").sum())
    counts = f"{len(live):,} objects are live at the end, {evicted:,} were evicted"
    if failed and not evicted:
        return [
            Verdict(
                "inconclusive",
                "missing_data",
                confidence=0.5,
                reasons=(counts, f"{failed:,} inserts failed although nothing is held"),
                missing=("pins and references of the cache's objects",),
            )
        ]
    return [Verdict("not_leak", "cache_warmup", "host", 0.8, reasons=(counts, "no pin or reference outlives its use"))]


def _live(events: pd.DataFrame) -> pd.DataFrame:
    """Objects that are live at the end: object → life, size_bytes, base, ts_ns of their birth."""
    births = events[events["op"].isin(("insert", "view"))]
    last = births.groupby("object").last()
    ended = events[events["op"] == "evict"].groupby("object")["ts_ns"].last()
    gone = ended.reindex(last.index).fillna(-1) >= last["ts_ns"]
    return last[~gone.to_numpy()]


def _stuck(events: pd.DataFrame, live: pd.DataFrame, end_ns: int) -> list[Stuck]:
    span = end_ns - int(events["ts_ns"].iloc[0])
    found = []
    sizes = events.groupby("object")["size_bytes"].max()
    for hold, release in HOLDS.items():
        rows = events[events["op"].isin((hold, release))].copy()
        if not len(rows):
            continue
        rows["sign"] = np.where(rows["op"] == hold, 1, -1)
        group = rows.groupby(["object", "life", "hold"])["sign"]
        depth = group.cumsum()
        rows["level"] = np.where(rows["sign"] > 0, depth, depth + 1)
        keys = [rows["object"], rows["life"], rows["hold"], rows["level"]]
        following = rows.groupby(keys)["sign"].shift(-1)
        until = rows.groupby(keys)["ts_ns"].shift(-1)
        taken = (rows["sign"] > 0) & (rows["level"] > 0)
        given_up = taken & (following == -1)
        took = (until - rows["ts_ns"])[given_up].to_numpy(np.float64)
        open_holds = rows[taken & ~given_up]
        alive = live["life"].reindex(open_holds["object"]).to_numpy() == open_holds["life"].to_numpy()
        open_holds = open_holds[alive].assign(
            size_bytes=lambda r: np.maximum(r["size_bytes"], sizes.reindex(r["object"]).to_numpy())
        )
        usual = _usual(took, span)
        old = open_holds[end_ns - open_holds["ts_ns"] > usual]
        found.append(Stuck(hold, old, usual / 1e9, int(given_up.sum())))
    views = live[live["op"] == "view"] if len(live) else live
    if len(views):
        ended = events[events["op"].isin(("view", "evict"))].copy()
        ended["until"] = ended.groupby("object")["ts_ns"].shift(-1)
        done = ended[(ended["op"] == "view") & ended["until"].notna()]
        usual = _usual((done["until"] - done["ts_ns"]).to_numpy(np.float64), span)
        old = views[end_ns - views["ts_ns"] > usual].reset_index()
        kept = old.assign(size_bytes=sizes.reindex(old["base"]).fillna(0).to_numpy(), object=old["base"])
        found.append(Stuck("view", kept[kept["object"] != ""], usual / 1e9, len(done)))
    return found


def _usual(took: npt.NDArray[np.float64], span: int) -> float:
    if len(took) < MIN_STUCK:
        return IN_FLIGHT_SHARE * span
    return float(min(IN_FLIGHT_FACTOR * np.quantile(took, IN_FLIGHT_QUANTILE), 0.5 * span))


def _verdict(
    stuck: Stuck, events: pd.DataFrame, live: pd.DataFrame, start_ns: int, end_ns: int, stacks: Stacks | None
) -> Verdict | None:
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
    stack = _stack(rows[rows["owner"] == owner], stacks)
    spread = rate / np.sqrt(len(kept)) * 1.96  # arrivals of holds that get stuck as a Poisson process
    failed = int((events["op"] == "insert_fail").sum())
    held = int(live["size_bytes"].sum()) if len(live) else 0
    return Verdict(
        verdict="leak",
        kind=CLASSES[stuck.kind],
        layer="host",
        confidence=0.95 if stuck.given_up >= MIN_STUCK else 0.8,
        culprit=Culprit(
            frame=stack[-1] if stack else "",
            stack=stack,
            counter=COUNTERS[stuck.kind],
            owner=owner,
            object=f"entries {taken} by owner={owner} with no later {release}",
        ),
        growth=Growth(COUNTERS[stuck.kind], rate, max(0.0, rate - spread), rate + spread),
        leak_start_s=_since_zero(first_ns, start_ns),
        kept_bytes=total,
        kept_objects=len(kept),
        reasons=(
            f"{len(kept):,} objects ({total:,} bytes of {held:,} live) are {taken} at the end by {owner}, "
            f"with no later {release}",
            f"{stuck.given_up:,} others were given up, nearly all within {stuck.usual_s:,.1f} s",
            *([f"{failed:,} inserts failed"] if failed else []),
        ),
    )


def _stack(holds: pd.DataFrame, stacks: Stacks | None) -> tuple[str, ...]:
    """The stack that took the most bytes of these holds; () where none is known."""
    known = holds[holds["user_stack"] > 0]
    if stacks is None or not len(known):
        return ()
    most = known.groupby("user_stack", as_index=False)["size_bytes"].sum().nlargest(1, "size_bytes")
    return tuple(frame.text for frame in stacks[int(most["user_stack"].iloc[0])])


TIME_ZERO_NS = 1_000_000_000
"""Time zero of event files; a file that begins earlier begins at its own first event."""


def _since_zero(at_ns: int, start_ns: int) -> float:
    return max(0.0, (at_ns - min(TIME_ZERO_NS, start_ns)) / 1e9)
