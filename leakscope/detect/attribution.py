"""From one capture to its report: correlate, judge, explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate import reconcile
from leakscope.correlate.aggregate import aggregate, unknown_frees
from leakscope.correlate.chains import build_chain
from leakscope.correlate.changes import objects_unit
from leakscope.correlate.divergence import freeing_sites, shared_with_freeing
from leakscope.correlate.joins.driver import JoinOptions
from leakscope.correlate.joins.links import SiteLinks, identity_of, with_kernels, with_links
from leakscope.correlate.kept_courses import kept_courses
from leakscope.correlate.live_series import FINDINGS, HIDDEN, remember
from leakscope.correlate.lives import process_lives, source_bounds
from leakscope.correlate.marks import range_links, site_ranges
from leakscope.correlate.mixed_stacks import unify_stacks
from leakscope.correlate.nesting import nesting
from leakscope.correlate.sites import Holdings, holdings, merge_sites
from leakscope.correlate.stacks import Stacks
from leakscope.correlate.touches import graph_launches, touches_by_site
from leakscope.correlate.visibility import frees_visible
from leakscope.correlate.wrapper_rules import NO_RULES, WrapperRules
from leakscope.detect import growth
from leakscope.detect.findings import find, holdings_of, overall
from leakscope.detect.iterations import (
    Iterations,
    frees_proven,
    in_iterations,
    judge_iterations,
    layers_by_iteration,
    sites_by_iteration,
)
from leakscope.detect.judge import CONFIRMED_SHARE, NOT_JUDGED, State, judge
from leakscope.detect.listed_sites import listed_site, site_ids, site_names, site_rates
from leakscope.detect.losses import Loss, at_risk, hidden_frees, hidden_frees_of_sites
from leakscope.detect.scattered import find_scattered
from leakscope.model.manifest import Manifest
from leakscope.model.results import Chain, Growth, LayerTotal, Report, Row, Verdict
from leakscope.model.words import KINDS_NOT_ADDED, LAYERS

if TYPE_CHECKING:
    import duckdb

MAX_SITES = 1000
"""Sites that a report lists for each capture unless told otherwise, those with most kept bytes first."""

EVENTS_ZERO_NS = 1_000_000_000
"""Time zero of event files of others; recordings begin at their own start."""
ONLY_SHOWN = (
    "all memory in the evidence is of kinds that are shown and not judged (blocks of an allocator's pool, pages)"
)


@dataclass(frozen=True)
class Options:
    """What to look at and how: ``layer`` and ``pid`` restrict the events; ``warm_up_s`` replaces a fifth."""

    layer: str | None = None
    pid: int | None = None
    warm_up_s: float | None = None
    chains: int = 20  # sites that get a chain, besides those of findings
    joins: JoinOptions = field(default_factory=JoinOptions)
    limit_bytes: float | None = None  # of memory, to forecast when leaks reach it; None: what the evidence says
    wrappers: WrapperRules = NO_RULES  # of the user, beside the built-in table
    iterations: Iterations | None = None  # judge what these leave behind, in place of growth over time
    sites: int = MAX_SITES  # listed for each capture, those with most kept bytes first
    timelines: bool = False  # also what memory did over time, to draw it


def attribute(
    con: duckdb.DuckDBPyConnection, manifest: Manifest, options: Options, joined: SiteLinks | None = None
) -> Report:
    """Attribute one capture; ``con`` has a view for each of its tables (``Capture.connect``). ``joined``: what joins
    with other sources found of its sites.

    The same capture and options give the same report. Raises duckdb.Error for data that cannot be computed
    with.
    """
    unify_stacks(con)
    bounds = source_bounds(con, manifest.sources)
    lives = process_lives(con, bounds)
    starts = dict(zip(bounds["source_id"], bounds["start_ns"], strict=True))
    other_zero = {s.id for s in manifest.sources if s.kind == "events"}
    starts = {id_: min(EVENTS_ZERO_NS, start) if id_ in other_zero else start for id_, start in starts.items()}
    lives["source_start_ns"] = lives["source_id"].map(starts)
    held = holdings(con, aggregate(con, lives, options.layer, options.pid), lives)
    sites = merge_sites(held.table)
    ends = reconcile.evidence_ends(lives)
    slabs = reconcile.slab_evidence(con, ends)
    kept, grown, before = _slab_check(held, sites, lives, slabs)
    sites["visible"] = frees_visible(sites, kept, grown, before)
    if options.iterations is not None:
        sites["visible"] &= frees_proven(held, sites, options.iterations)

    losses = _losses(con)
    by_number = np.zeros(int(held.table["site"].max()) + 1 if len(held.table) else 0, bool)
    visible, confirmed = by_number.copy(), by_number.copy()
    visible[sites["site"]] = sites["visible"]
    with np.errstate(invalid="ignore"):
        confirmed[sites["site"]] = (kept > 0) & (grown >= CONFIRMED_SHARE * kept)
    hidden = np.zeros(len(by_number))
    hidden[sites["site"]] = hidden_frees_of_sites(sites, losses, hidden_frees(losses, _repaired(sites)))
    hidden += at_risk(held, lives, manifest.sources, len(hidden))
    ancestors: dict[int, str] = {}
    if options.iterations is not None:
        judged = judge_iterations(con, held, visible, hidden, confirmed, options.iterations)
    else:
        judged = judge(held, lives, visible, hidden, confirmed, options.warm_up_s)
        judged, ancestors = find_scattered(con, held, judged, lives, hidden, options.warm_up_s)

    growing = judged.loc[judged["state"] >= State.UNCLEAR, "site"].unique()
    listed = sites.head(options.sites)
    listed = pd.concat([listed, sites.iloc[len(listed) :][lambda s: s["site"].isin(growing)]])
    callers = listed[(listed["layer"] != "kernel") & (listed["live_bytes"] > 0)].head(options.chains)
    kernel = listed[(listed["layer"] == "kernel") & (listed["live_bytes"] > 0) & (listed["call_site"] > 0)]
    leaking = listed[listed["site"].isin(growing)]
    freeing = freeing_sites(sites, leaking)
    nested = nesting(con, callers[["site", *_CALLER_IDENTITY]], kernel.head(200))
    stacks = Stacks(
        con,
        [
            *listed["kernel_stack"],
            *listed["user_stack"],
            *listed["python_stack"],
            *nested.below["kernel_stack"],
            *freeing["kernel_stack"],
            *freeing["user_stack"],
            *freeing["python_stack"],
        ],
    )
    in_call = set(zip(*(nested.above[c] for c in ("kernel_stack", "user_stack", "python_stack")), strict=True))
    shared = shared_with_freeing(leaking, freeing, stacks)
    names = {
        int(r["site"]): site_names(r, stacks, in_call, shared.get(int(r["site"]), 0)) for _, r in listed.iterrows()
    }
    names |= {
        site: names[site]._replace(culprit=text, function="") for site, text in ancestors.items() if site in names
    }
    ids = site_ids(listed, names)
    findings = find(judged, held.table, names, lives)
    if options.iterations is not None:
        findings = [in_iterations(f, judged, len(options.iterations.windows)) for f in findings]
    findings = [_with_ids(f, ids) for f in findings]
    if options.timelines:
        unseen = held.table[held.table["site"].isin(sites.loc[~sites["visible"], "site"])].set_index("holding")
        remember(con, HIDDEN, held, unseen["layer"].astype(str), lives)
        remember(con, FINDINGS, held, holdings_of(findings, judged, ids), lives)
    rates = site_rates(judged)
    if options.iterations is not None:
        rates = sites_by_iteration(rates, judged)
    courses = judged.groupby("site")["state"].max()
    level = set(courses.index[courses == State.PLATEAU])
    row_of = {int(row["site"]): row for _, row in listed.iterrows()}
    reported = {
        int(row["site"]): listed_site(
            row, ids[int(row["site"])], names[int(row["site"])], rates, int(row["site"]) in level
        )
        for _, row in listed.iterrows()
    }
    paths = site_ranges(con, listed, lives, objects_unit(con))
    ranges = {s: range_links(reported[s], int(row_of[s]["own_objects"]), paths[s]) for s in paths}
    for number, links in ranges.items():
        reported[number].ranges = tuple(link.name for link in links)
    for number, touches in touches_by_site(con, _pointed_at(listed), _evidence_ends(lives, bounds)).items():
        reported[number].touches = touches
    numbers = {site_id: number for number, site_id in ids.items()}
    wanted = [numbers[site] for f in findings for site in f.sites]
    wanted += [int(s) for s in listed[listed["visible"]]["site"].head(options.chains)]
    chains = [build_chain(reported[s], row_of[s], stacks, nested, ranges.get(s, ())) for s in dict.fromkeys(wanted)]
    if options.timelines:
        for number, course in kept_courses(held, lives, reported).items():
            reported[number].course = course
    if joined is not None:
        chains = _joined(chains, {ids[s]: row for s, row in row_of.items()}, joined)
    rows = _reconciliation(con, sites, slabs, lives, ends)
    missing = [row.what for row in rows if row.value is None]
    plateaus = bool((judged["state"] == State.PLATEAU).any())
    layers = _layers(held, sites, lives, options.warm_up_s)
    if options.iterations is not None:
        layers = layers_by_iteration(layers, judged, held.table)
    provable = _provable(layers)
    countable = sites[~sites["kind"].isin(NOT_JUDGED)]
    allocated = int(countable["alloc_objects"].sum()) if len(countable) else 0
    verdict, rest = overall(findings, plateaus, allocated, provable, missing)
    if not allocated and len(sites):
        verdict = replace(verdict, reasons=(ONLY_SHOWN,))
    return Report(
        verdict=verdict,
        findings=rest,
        layers=layers,
        chains=chains,
        sites=list(reported.values()),
        sites_total=len(sites),
        losses=[*_loss_rows(losses, con), *_graph_rows(con)],
        reconciliation=rows,
    )


_CALLER_IDENTITY = ["layer", "kind", "api", "kernel_stack", "user_stack", "python_stack"]


def _pointed_at(listed: pd.DataFrame) -> pd.DataFrame:
    """Sites of memory whose address kernels get."""
    kept = listed[(listed["layer"] != "kernel") & (listed["live_bytes"] > 0)]
    return kept[["site", *_CALLER_IDENTITY]]


def _evidence_ends(lives: pd.DataFrame, bounds: pd.DataFrame) -> pd.DataFrame:
    """source_id, pid, end_ns of the processes that are judged."""
    end_of = dict(zip(bounds["source_id"], bounds["end_ns"], strict=True))
    judged = lives[lives["judged"] & (lives["pid"] >= 0)]
    ends = judged["source_id"].map(end_of).to_numpy(np.int64)
    exits = judged["exit_ns"].to_numpy(np.int64)
    return judged[["source_id", "pid"]].assign(end_ns=np.where(exits > 0, exits, ends))


def _slab_check(
    held: Holdings, sites: pd.DataFrame, lives: pd.DataFrame, slabs: reconcile.SlabEvidence
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """By row of ``sites``: bytes kept between the slab samples, growth of its cache and its bytes before.

    The last two are NaN where the cache was not sampled, or where a process that keeps something there had ended
    before the last sample: its exit gave back what was kept.
    """
    kept = np.zeros(int(held.table["site"].max()) + 1 if len(held.table) else 0)
    windows = lives.drop_duplicates("life").set_index("life")
    source_of: dict[int, int] = {}
    ended: set[int] = set()
    rows = held.table.iloc[held.curve_rows]
    window = windows.loc[rows["life"], ["source_id", "from_ns", "bin_ns", "exit_ns"]].to_numpy()
    for index, (site, (source, from_ns, bin_ns, exit_ns)) in enumerate(zip(rows["site"], window, strict=True)):
        source_of.setdefault(int(site), int(source))
        if int(source) in slabs.spans:
            if 0 < exit_ns < slabs.spans[int(source)][1]:
                ended.add(int(site))
            curve = held.kept_bytes[index]
            first, last = (int((at - from_ns) // bin_ns) - 1 for at in slabs.spans[int(source)])
            at_last = curve[min(last, len(curve) - 1)] if last >= 0 else 0.0
            kept[site] += at_last - (curve[min(first, len(curve) - 1)] if first >= 0 else 0.0)
    caches = [
        (source_of.get(int(site), -1), cache) for site, cache in zip(sites["site"], sites["slab_cache"], strict=True)
    ]
    grown = np.array([slabs.growth.get(cache, np.nan) for cache in caches], dtype=np.float64)
    before = np.array([slabs.before.get(cache, np.nan) for cache in caches], dtype=np.float64)
    grown[sites["site"].isin(ended).to_numpy()] = np.nan
    return kept[sites["site"].to_numpy(np.int64)], grown, before


def _joined(chains: list[Chain], rows: dict[str, pd.Series], joined: SiteLinks) -> list[Chain]:
    """The chains with what other sources know of their sites."""
    links = joined.by_site()
    more = [with_links(chain, links.get(identity_of(rows[chain.site]), ())) for chain in chains]
    return [with_kernels(chain, joined.kernels) for chain in more]


def _losses(con: duckdb.DuckDBPyConnection) -> list[Loss]:
    rows = con.execute(
        "SELECT probe, what, sum(count)::BIGINT, max(detail) FROM losses GROUP BY probe, what ORDER BY probe, what"
    ).fetchall()
    return [Loss(str(probe), str(what), int(count), str(detail or "")) for probe, what, count, detail in rows]


def _loss_rows(losses: Sequence[Loss], con: duckdb.DuckDBPyConnection) -> list[Row]:
    rows = [Row(loss.probe, loss.what, loss.count, "count", loss.detail) for loss in losses if loss.count]
    return rows + [
        Row(layer, "frees of memory allocated before the recording (not subtracted)", count, "count")
        for layer, count in unknown_frees(con)
    ]


def _graph_rows(con: duckdb.DuckDBPyConnection) -> list[Row]:
    launched = graph_launches(con)
    return [Row("gpu", "graph launches, whose kernels and buffers are not seen", launched, "count")] if launched else []


def _repaired(sites: pd.DataFrame) -> dict[str, int]:
    """Implicit frees by layer at sites that otherwise free visibly: each mended a free that was missed."""
    mended = sites[sites["visible"] & (sites["free_seen_share"] >= 0.5)]
    return {str(layer): int(count) for layer, count in mended.groupby("layer")["reuse_objects"].sum().items()}


def _with_ids(finding: Verdict, ids: dict[int, str]) -> Verdict:
    return replace(
        finding,
        sites=tuple(ids[int(s)] for s in finding.sites),
        consequences=tuple(ids[int(s)] for s in finding.consequences),
    )


def _layers(held: Holdings, sites: pd.DataFrame, lives: pd.DataFrame, warm_up_s: float | None) -> list[LayerTotal]:
    """Totals by layer; each byte in one layer, kinds that another kind already counts left out."""
    windows = lives.drop_duplicates("life").set_index("life")
    sites = sites.assign(added=~sites["kind"].isin(KINDS_NOT_ADDED))
    shown = set(sites.loc[sites["added"] & sites["visible"], "site"])
    rows = held.table.iloc[held.curve_rows]
    totals = []
    for layer in LAYERS:
        of_layer = sites[sites["layer"] == layer]
        if not len(of_layer):
            continue
        added = of_layer[of_layer["added"]]
        counted = added[added["visible"]]
        chosen = ((rows["layer"] == layer) & rows["site"].isin(shown)).to_numpy()
        lives_of = rows["life"].to_numpy()[chosen]
        unique, position = np.unique(lives_of, return_inverse=True)
        curves = np.zeros((len(unique), held.kept_bytes.shape[1]))
        np.add.at(curves, position, held.kept_bytes[chosen])
        bin_s = windows.loc[unique, "bin_ns"].to_numpy(np.float64) / 1e9
        warm = growth.warm_up_bins(curves.shape[1], bin_s * curves.shape[1], warm_up_s)
        rates = growth.rates(curves, warm, bin_s)
        mean = float(rates.mean.sum())
        below = float(np.sqrt(((rates.mean - rates.low) ** 2).sum()))
        above = float(np.sqrt(((rates.high - rates.mean) ** 2).sum()))
        totals.append(
            LayerTotal(
                layer,
                int(counted["live_bytes"].sum()),
                int(counted["live_objects"].sum()),
                int(added["alloc_bytes"].sum()),
                Growth(f"{layer}_live", mean, mean - below, mean + above),
                int(added.loc[~added["visible"], "live_bytes"].sum()),
                int(of_layer.loc[~of_layer["added"], "live_bytes"].sum()),
                standard_error_bytes=float(np.sqrt(counted["sampling_variance"].sum())),
            )
        )
    return totals


def _provable(layers: Sequence[LayerTotal]) -> float | None:
    """Half the width of the widest layer interval: a slower leak would hide in the churn."""
    widths = [(t.growth.ci_high - t.growth.ci_low) / 2 for t in layers if t.growth]
    return max(widths) if widths else None


def _reconciliation(
    con: duckdb.DuckDBPyConnection,
    sites: pd.DataFrame,
    slabs: reconcile.SlabEvidence,
    lives: pd.DataFrame,
    ends: dict[int, int],
) -> list[Row]:
    present = set(sites["layer"])
    rows: list[Row] = []
    if "kernel" in present:
        rows += reconcile.kernel_rows(con, slabs, sites.loc[~sites["visible"], ["call_site", "kind"]], ends)
    if "host" in present:
        rows += reconcile.host_rows(con, lives)
    return rows + reconcile.gpu_rows(con, lives, ends)
