"""From the tables of captures to one liveness graph, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.liveness import answers
from leakscope.liveness.answers import Place
from leakscope.liveness.caches import add_cache
from leakscope.liveness.classes import HELD_STALE, IMMORTAL, UNKNOWN_REF, ZOMBIE, document_rules
from leakscope.liveness.graph import Graph, GraphBuilder, degree_by_kind
from leakscope.liveness.lives import HOLDS, CacheLives, Lives, cache_lives, with_inferred
from leakscope.liveness.moments import DEFAULT_STALE_NS, MIN_GIVEN_UP, Moment, moment, usual_holds
from leakscope.liveness.recording import BY_AGE, Recorded, add_recordings
from leakscope.liveness.rows import give_back_memory, read_rows
from leakscope.liveness.snapshot import add_snapshot, snapshot_sources
from leakscope.model.liveness import CLASSES, ClassTotal, Liveness, SourceLiveness, Stale, Window
from leakscope.model.manifest import Manifest, Source

if TYPE_CHECKING:
    import duckdb

MANY_OBJECTS = 200_000
"""Lives beyond which only a few times are looked at."""

Inferred = Callable[["duckdb.DuckDBPyConnection", Source], tuple[str, Sequence[str]] | None]
"""(connection to its capture, a source) → (what to call who holds, objects that are known to be held), or None."""


@dataclass(frozen=True)
class Options:
    """``stale_after_s``: held or untouched for longer is stale; None: what holds that were given up took, else 30 s.
    ``ttl_s``: TTL of objects whose source tells none, counted from their birth; None: not known. ``windows``: times at
    which the classes are told. ``top``: keepers and stale objects. ``why``: names to explain."""

    stale_after_s: float | None = None
    ttl_s: float | None = None
    windows: int = 8
    top: int = 20
    why: tuple[str, ...] = ()
    inferred: Sequence[Inferred] = field(default_factory=tuple)


def analyse(
    captures: Sequence[tuple[duckdb.DuckDBPyConnection, Manifest]], options: Options | None = None
) -> tuple[Liveness, Graph]:
    """The liveness of everything in ``captures``: what it says, and the graph.

    Each connection has a view for each table of its capture (``Capture.connect``). Raises duckdb.Error for data that
    cannot be computed with, BadInputError for a name in ``why`` that nothing has.
    """
    options = options or Options()
    builder = GraphBuilder()
    places: list[Place] = []
    found = Liveness()
    for con, manifest in captures:
        first = len(places)
        places += [Place(con, source.name or source.kind, 0) for source in manifest.sources]
        numbers = {source.id: first + index for index, source in enumerate(manifest.sources)}
        for source in manifest.sources:
            _cache(builder, con, source, numbers[source.id], places, options, found)
        of_snapshots = snapshot_sources(con)
        for source in manifest.sources:
            if source.id in of_snapshots:
                _snapshot(builder, con, source, numbers[source.id], places, options, found)
        recorded = {number: place for number, place in numbers.items() if number not in of_snapshots}
        _recordings(builder, con, manifest.sources, recorded, places, options, found)
    graph = builder.build()
    found.nodes, found.edges = degree_by_kind(graph)
    found.keepers = answers.keepers(graph, places, options.top)
    found.stale = answers.with_holders(graph, sorted(found.stale, key=lambda s: -s.byte_seconds)[: options.top])
    found.whys = [why for name in options.why for why in answers.why(graph, places, name)]
    found.suspects = answers.suspects(graph, places, found.stale)
    found.ends_ns = tuple(place.at_ns for place in places)
    return found, graph


def _cache(
    builder: GraphBuilder,
    con: duckdb.DuckDBPyConnection,
    source: Source,
    number: int,
    places: list[Place],
    options: Options,
    found: Liveness,
) -> None:
    """Objects of one source, if it has some."""
    rows = read_rows(con, source.id)
    if not len(rows):
        return
    of = cache_lives(rows)
    del rows
    give_back_memory()
    if options.ttl_s is not None:
        of = replace(of, lives=_with_ttl(of, round(options.ttl_s * 1e9)))
    for infer in options.inferred:
        if (holds := infer(con, source)) is not None:
            of = with_inferred(of, *holds)
    at_ns = int(of.ts_ns[-1])
    limits, because = _limits(of, options)
    default_ns = DEFAULT_STALE_NS if options.stale_after_s is None else options.stale_after_s * 1e9
    times = options.windows if len(of.lives.object) <= MANY_OBJECTS else min(options.windows, 4)
    windows = _windows(of, limits, default_ns, times)
    now = moment(of, at_ns, limits, default_ns)
    nodes = add_cache(builder, number, places[number].name, of, now)
    places[number] = replace(places[number], at_ns=at_ns)
    sizes = of.lives.size_bytes[now.rows]
    found.sources.append(
        SourceLiveness(
            source=places[number].name,
            kind="cache objects",
            at_ns=at_ns,
            stale_after_s=max(limits[kind] for kind in limits if kind != "inferred") / 1e9,
            stale_because=because,
            classes=totals(now.classes, np.ones(len(now.rows), np.int64), sizes),
            rules=document_rules(now.facts, sizes),
            windows=windows,
            notes=tuple(_notes(of, now)),
        )
    )
    found.stale += _stale_objects(of, now, nodes, places[number].name, options.top)


def _with_ttl(of: CacheLives, ttl_ns: int) -> Lives:
    expires = of.lives.expires_ns
    return of.lives._replace(expires_ns=np.where(expires == 0, of.ts_ns[of.lives.born_row] + ttl_ns, expires))


def _limits(of: CacheLives, options: Options) -> tuple[dict[str, float], str]:
    """(ns beyond which a hold of each kind is stale, why)."""
    kinds = (*HOLDS, "view")
    if options.stale_after_s is not None:
        return {**dict.fromkeys(kinds, options.stale_after_s * 1e9), "inferred": 0.0}, "as asked for"
    usual = {kind: usual_holds(of, kind, DEFAULT_STALE_NS) for kind in kinds}
    told = [f"{usual[kind].given_up:,} {kind}s" for kind in kinds if usual[kind].given_up >= MIN_GIVEN_UP]
    because = (
        f"twice what 99 % of {' and '.join(told)} took" if told else "the default: nothing says how long holds last"
    )
    limits = {kind: limit.limit_ns for kind, limit in usual.items()}
    if told:  # kinds of which nothing is known take the others' measure
        known = max(limit.limit_ns for limit in usual.values() if limit.given_up >= MIN_GIVEN_UP)
        limits = {kind: limits[kind] if usual[kind].given_up >= MIN_GIVEN_UP else known for kind in kinds}
    return {**limits, "inferred": 0.0}, because


def totals(
    classes: npt.NDArray[np.int8], objects: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[ClassTotal, ...]:
    """One a class, in the order of CLASSES; exact sums."""
    counts, sums = (np.zeros(len(CLASSES), np.int64) for _ in range(2))
    np.add.at(counts, classes, objects)
    np.add.at(sums, classes, sizes)
    every = max(1, int(counts.sum()))
    return tuple(
        ClassTotal(name, int(count), int(size), int(count) / every)
        for name, count, size in zip(CLASSES, counts, sums, strict=True)
    )


def _windows(of: CacheLives, limits: dict[str, float], default_ns: float, windows: int) -> tuple[Window, ...]:
    start, end = int(of.ts_ns[0]), int(of.ts_ns[-1])
    sizes = of.lives.size_bytes
    found = []
    for step in range(1, windows + 1):
        at = start + (end - start) * step // windows
        then = moment(of, at, limits, default_ns)
        of_class = totals(then.classes, np.ones(len(then.rows), np.int64), sizes[then.rows])
        found.append(Window((at - start) / 1e9, tuple(c.bytes for c in of_class), tuple(c.objects for c in of_class)))
    return tuple(found)


def _notes(of: CacheLives, now: Moment) -> list[str]:
    notes = []
    if len(of.gap_rows):
        unknown = int((now.facts.refcount != now.facts.refcount).sum())
        notes.append(
            f"events were lost {len(of.gap_rows):,} times: who holds the {unknown:,} objects from before is not known, "
            "and some of them may be gone"
        )
    if not of.counts_holds and not len(of.counts):
        notes.append("the source tells neither references nor pins: what is not known is not guessed")
    if of.failed_inserts:
        notes.append(f"{of.failed_inserts:,} inserts failed")
    if not of.lives.size_bytes.any():
        notes.append("the source tells no sizes: bytes are 0, objects are ranked by age")
    return notes


def _stale_objects(of: CacheLives, now: Moment, nodes: npt.NDArray[np.int32], source: str, top: int) -> list[Stale]:
    """The objects with most bytes × age among those that somebody should have let go."""
    lives = of.lives
    size = lives.size_bytes[now.rows]
    since = now.facts.age_ns.copy()  # of what is immortal, and of what is only counted
    held = now.holds.take(now.holds.stale)
    waited = np.full(len(now.rows), -1.0)
    np.maximum.at(waited, held.position, (now.ts_ns - held.used_ns).astype(np.float64))
    since = np.where(waited >= 0, waited, since)
    expires = lives.expires_ns[now.rows]
    ended = np.minimum(np.where(expires > 0, expires, now.ts_ns), lives.invalid_ns[now.rows])
    since = np.where(now.classes == ZOMBIE, (now.ts_ns - ended).astype(np.float64), since)
    evidence = {
        HELD_STALE: "not used by its holder",
        ZOMBIE: "end of its TTL or generation",
        IMMORTAL: "no TTL, nobody holds it",
    }
    chosen = np.flatnonzero(np.isin(now.classes, list(evidence)) & ~np.isnan(since))
    score = np.maximum(size[chosen], 1) * since[chosen] / 1e9
    chosen = chosen[np.argsort(-score, kind="stable")[:top]]
    return [
        Stale(
            node=int(nodes[i]),
            kind="object",
            name=str(of.names[int(lives.object[now.rows[i]])]),
            source=source,
            cls=CLASSES[now.classes[i]],
            layer="",
            objects=1,
            bytes=int(size[i]),
            age_s=float(since[i]) / 1e9,
            byte_seconds=float(max(size[i], 1) * since[i] / 1e9),
            evidence=evidence[int(now.classes[i])],
            approximate=False,
        )
        for i in chosen.tolist()
    ]


def _snapshot(
    builder: GraphBuilder,
    con: duckdb.DuckDBPyConnection,
    source: Source,
    number: int,
    places: list[Place],
    options: Options,
    found: Liveness,
) -> None:
    """Segments and blocks of one source."""
    limit_s = DEFAULT_STALE_NS / 1e9 if options.stale_after_s is None else options.stale_after_s
    made = add_snapshot(builder, con, source, number)
    places[number] = replace(places[number], at_ns=made.at_ns)
    notes = ["a snapshot has no course: only a second one shows growth; who references a tensor is not in it"]
    if not made.born_ns.any():
        notes.append("no allocation history in it: the age of blocks is not known")
    found.sources.append(
        SourceLiveness(
            source=places[number].name,
            kind="allocator snapshot",
            at_ns=made.at_ns,
            stale_after_s=limit_s,
            stale_because="the default" if options.stale_after_s is None else "as asked for",
            classes=totals(made.classes, np.ones(len(made.nodes), np.int64), made.sizes),
            pools=made.pools,
            notes=tuple(notes),
        )
    )
    age_s = (made.at_ns - made.born_ns) / 1e9
    old = np.flatnonzero((made.born_ns > 0) & (age_s > limit_s) & (made.classes == UNKNOWN_REF))
    old = old[np.argsort(-(made.sizes[old] * age_s[old]), kind="stable")[: options.top]]
    found.stale += [
        Stale(
            node=int(made.nodes[i]), kind="block", name=made.names[i], source=places[number].name,
            cls=CLASSES[made.classes[i]], layer="gpu", objects=1, bytes=int(made.sizes[i]), age_s=float(age_s[i]),
            byte_seconds=float(made.sizes[i] * age_s[i]), evidence=BY_AGE, approximate=True,
        )
        for i in old.tolist()
    ]  # fmt: skip


def _recordings(
    builder: GraphBuilder,
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[Source],
    numbers: dict[int, int],
    places: list[Place],
    options: Options,
    found: Liveness,
) -> None:
    """What the memory events of one capture keep."""
    limit_s = DEFAULT_STALE_NS / 1e9 if options.stale_after_s is None else options.stale_after_s
    recorded = add_recordings(builder, con, sources, numbers, limit_s, options.windows, options.top)
    if recorded is None:
        return
    for _, rows in recorded.groups.groupby("source_id", sort=True):
        source = int(rows["source_id"].iloc[0])
        number = numbers[source]
        places[number] = replace(places[number], at_ns=recorded.ends[source])
        found.sources.append(
            SourceLiveness(
                source=places[number].name,
                kind="allocations",
                at_ns=recorded.ends[source],
                stale_after_s=limit_s,
                stale_because="the default" if options.stale_after_s is None else "as asked for",
                classes=totals(
                    rows["cls"].to_numpy(np.int8), rows["objects"].to_numpy(np.int64), rows["bytes"].to_numpy(np.int64)
                ),
                windows=recorded.windows.get(source, ()),
                notes=tuple(_recorded_notes(recorded, source, rows)),
            )
        )
    found.stale += [replace(stale, source=places[int(stale.source)].name) for stale in recorded.stale]


def _recorded_notes(recorded: Recorded, source: int, rows: pd.DataFrame) -> list[str]:
    notes = list(recorded.notes.get(source, ()))
    launched = rows["evidence"] != BY_AGE
    if not launched.any():
        notes.append("no launch arguments: uses of memory are not seen, its age is that of its allocation")
    guessed = int(rows.loc[launched & rows["approximate"], "bytes"].sum())
    if guessed:
        notes.append(
            f"{guessed:,} bytes of device memory are unknown-ref: of their last touch, or of a later launch, "
            "not all arguments are known"
        )
    return notes
