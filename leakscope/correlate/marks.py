"""Rule 5 of the joins: the NVTX range that was open on the thread when it allocated.

Each allocation carries its innermost range, and its free carries the same, so nothing is matched by time. Ranges are
*folded*: all instances of `request` inside `serve` are one path (`serve`, `request`), and a range directly inside one
of its own name is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from leakscope.correlate.aggregate import ALLOC, EXIT, IDENTITY
from leakscope.correlate.lives import FOLDED_PID
from leakscope.model.results import ChainLink, Site

if TYPE_CHECKING:
    import duckdb

RULE = "recorded on the thread"
MIN_SHARE = 0.5
"""A range becomes a link of a site that was in it with at least this share of what it keeps."""
MAX_DEPTH = 64
MAX_PATHS = 200
"""Paths looked at for a site, those with most kept bytes first."""
NUMBERED_ABOVE = 1_000
"""With more distinct names than this, numbers in them are folded (`step 17` → `step #`)."""


class RangePath(NamedTuple):
    """A path of ranges, outermost first, and what a site allocated in it and kept of that."""

    names: tuple[str, ...]
    allocations: int
    kept_objects: int
    kept_bytes: int


_SITE = ("layer", "kind", "api", "slab_cache", "kernel_stack", "user_stack", "python_stack")


def site_ranges(
    con: duckdb.DuckDBPyConnection, sites: pd.DataFrame, lives: pd.DataFrame, unit: int = 1
) -> dict[int, list[RangePath]]:
    """The paths of ranges in which each site allocated, by number of site.

    ``sites`` has site and the columns of a site's identity (slab caches folded). Needs the view ``events`` that
    :func:`leakscope.correlate.aggregate.aggregate` leaves behind, in which an object counts ``unit``. Paths with most
    kept bytes come first. The start of a range that was not recorded ends a path there.
    """
    if not len(sites) or not con.execute("SELECT 1 FROM marks LIMIT 1").fetchall():
        return {}
    make_paths(con)
    folded = lives.loc[lives["pid"] == FOLDED_PID, ["life"]]
    con.register("wanted_sites", sites[["site", *_SITE]])
    con.register("folded_lives", folded)
    identity = ", ".join(f"e.{column}" for column in IDENTITY if column != "slab_cache")
    rows = con.execute(
        f"""
        WITH marked AS (
            SELECT {identity}, regexp_replace(e.slab_cache, '^kmalloc-rnd-[0-9]+-', 'kmalloc-') AS slab_cache, p.path,
                   count(*) FILTER (e.event = {ALLOC}) AS allocations,
                   sum(CASE WHEN e.event = {ALLOC} THEN e.objects ELSE -e.objects END)::BIGINT // {unit} AS objects,
                   sum(CASE WHEN e.event = {ALLOC} THEN e.bytes ELSE -e.bytes END)::BIGINT AS bytes
            FROM events e JOIN mark_paths p ON p.source_id = e.source_id AND p.id = e.mark_id
            WHERE e.mark_id > 0
                  AND (e.event < {EXIT} OR (e.event = {EXIT} AND e.life IN (SELECT life FROM folded_lives)))
            GROUP BY ALL
        ), summed AS (
            SELECT site, path, sum(allocations)::BIGINT AS allocations, greatest(0, sum(objects))::BIGINT AS objects,
                   greatest(0, sum(bytes))::BIGINT AS bytes
            FROM marked JOIN wanted_sites USING ({", ".join(_SITE)}) GROUP BY site, path
        )
        SELECT site, path, allocations, objects, bytes FROM summed
        QUALIFY row_number() OVER (PARTITION BY site ORDER BY bytes DESC, allocations DESC, path) <= {MAX_PATHS}
        ORDER BY site, bytes DESC, allocations DESC, path
        """
    ).fetchall()
    con.unregister("wanted_sites")
    con.unregister("folded_lives")
    names = path_names(con, {int(row[1]) for row in rows})
    found: dict[int, list[RangePath]] = {}
    for site, path, allocations, objects, size in rows:
        found.setdefault(int(site), []).append(RangePath(names[int(path)], int(allocations), int(objects), int(size)))
    return found


def range_links(site: Site, own_objects: int, paths: Iterable[RangePath]) -> list[ChainLink]:
    """Links of the ranges in which a site allocates what it keeps, outermost first.

    They are those of the path with most kept bytes that hold at least :data:`MIN_SHARE`, inside whatever other
    ranges. ``count`` is the allocations of the site in the range, ``bytes`` what is kept of them, ``confidence`` their
    share of what the site keeps (of its allocations, where stacks were sampled: ``own_objects`` have their own).
    """
    paths = list(paths)
    links = []
    for name in dict.fromkeys(paths[0].names if paths else ()):
        inside = [path for path in paths if name in path.names]
        allocations = sum(path.allocations for path in inside)
        share = allocations / max(1, own_objects)
        if site.live_objects and not site.stack_sampled:
            share = sum(path.kept_objects for path in inside) / site.live_objects
        if share >= MIN_SHARE:
            kept = sum(path.kept_bytes for path in inside)
            links.append(ChainLink("range", name, RULE, min(1.0, share), allocations, kept))
    return links


def make_paths(con: duckdb.DuckDBPyConnection) -> None:
    """The temporary tables `mark_paths` (source_id, id, path) and `path_names` (path, outer, name); paths are hashes.

    Ids are unique; in a damaged capture they need not be. A cycle of parents is never entered: walks begin at roots.
    """
    distinct_names = con.execute("SELECT count(DISTINCT name) FROM marks").fetchall()[0][0]
    name = "regexp_replace(name, '[0-9]+', '#', 'g')" if distinct_names > NUMBERED_ABOVE else "name"
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE named_marks AS
        SELECT source_id, id, any_value(parent_id) AS parent_id,
               any_value(CASE WHEN domain = '' THEN {name} ELSE domain || ':' || {name} END) AS name
        FROM marks GROUP BY source_id, id
        """
    )
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE walked_marks AS
        WITH RECURSIVE walked AS (
            SELECT m.source_id, m.id, hash(m.name) AS path, 0::UBIGINT AS outer_path, m.name, 1 AS depth
            FROM named_marks m LEFT JOIN named_marks p ON p.source_id = m.source_id AND p.id = m.parent_id
            WHERE p.id IS NULL
            UNION ALL
            SELECT m.source_id, m.id, CASE WHEN m.name = w.name THEN w.path ELSE hash(w.path, m.name) END,
                   CASE WHEN m.name = w.name THEN w.outer_path ELSE w.path END, m.name, depth + 1
            FROM walked w JOIN named_marks m ON m.source_id = w.source_id AND m.parent_id = w.id
            WHERE depth < {MAX_DEPTH}
        )
        SELECT source_id, id, path, outer_path, name FROM walked
        """
    )
    con.execute("CREATE OR REPLACE TEMP VIEW mark_paths AS SELECT source_id, id, path FROM walked_marks")
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE path_names AS
        SELECT path, any_value(outer_path) AS outer_path, any_value(name) AS name FROM walked_marks GROUP BY path
        """
    )


def path_names(con: duckdb.DuckDBPyConnection, paths: set[int]) -> dict[int, tuple[str, ...]]:
    """The names along each path, outermost first."""
    known: dict[int, tuple[int, str]] = {}
    missing = set(paths)
    while missing:
        con.register("missing_paths", pd.DataFrame({"path": np.array(sorted(missing), np.uint64)}))
        rows = con.execute("SELECT path, outer_path, name FROM path_names JOIN missing_paths USING (path)").fetchall()
        con.unregister("missing_paths")
        known |= {int(path): (int(outer), str(name)) for path, outer, name in rows}
        missing = {outer for _, (outer, _) in known.items() if outer and outer not in known}
    names: dict[int, tuple[str, ...]] = {}
    for path in paths:
        along: list[str] = []
        at = path
        while at and len(along) < MAX_DEPTH:
            outer, name = known[at]
            along.append(name)
            at = outer
        names[path] = tuple(reversed(along))
    return names
