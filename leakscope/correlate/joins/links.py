"""What joins found, by site: links that chains get besides those of the site's own events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from leakscope.correlate.joins.evidence import SITE_IDENTITY
from leakscope.correlate.joins.order import bare_name
from leakscope.correlate.sites import folded_cache
from leakscope.model.results import Chain, ChainLink

MIN_SHARE = 0.5
"""A site gets a link when at least this share of its allocations has it."""
PLACES = ("range", "frame", "call", "seen")
"""Where a link stands: ranges and frames of other sources begin a chain, a call comes before what the kernel allocated,
what else saw the bytes ends it."""


@dataclass
class SiteLinks:
    """``rows``: the columns of a site's identity, place, what, name, rule, confidence, count, bytes. ``kernels``: what
    profilers say of kernels, by bare name."""

    rows: list[pd.DataFrame] = field(default_factory=list)
    kernels: dict[str, ChainLink] = field(default_factory=dict)

    def add(self, rows: pd.DataFrame, **constant: str | float) -> None:
        """More links; ``constant`` are columns of one value."""
        if len(rows):
            self.rows.append(rows.assign(**constant))

    def by_site(self) -> dict[tuple[object, ...], list[tuple[str, ChainLink]]]:
        """Identity of a site (slab caches folded) → (place, link), most objects first."""
        found: dict[tuple[object, ...], list[tuple[str, ChainLink]]] = {}
        if not self.rows:
            return found
        rows = pd.concat(self.rows, ignore_index=True)
        rows["slab_cache"] = rows["slab_cache"].map(folded_cache)
        keys = [*SITE_IDENTITY, "place", "what", "name", "rule"]
        rows["weighted"] = rows["confidence"] * rows["count"]
        # Unsorted, then stably sorted: the frames of a stack keep their order.
        sums = rows.groupby(keys, sort=False)[["count", "bytes", "weighted"]].sum().reset_index()
        sums = sums.sort_values("count", ascending=False, kind="stable")
        for row in sums.to_dict("records"):
            sure = float(row["weighted"]) / max(1, int(row["count"]))
            link = ChainLink(row["what"], row["name"], row["rule"], sure, int(row["count"]), int(row["bytes"]))
            found.setdefault(tuple(_plain(row[c]) for c in SITE_IDENTITY), []).append((row["place"], link))
        return found


def with_links(chain: Chain, links: Sequence[tuple[str, ChainLink]]) -> Chain:
    """``chain`` with the links of its site. What the chain knows already by a stronger rule is left as it is."""
    own = list(chain.links)
    whats = {link.what for link in own}
    of = {place: [link for at, link in links if at == place] for place in PLACES}
    python = any(".py:" in link.name for link in own)
    front = [] if "range" in whats else of["range"][:1]
    front += [] if python else of["frame"]
    if of["call"] and "call" not in whats:
        at = next((i for i, link in enumerate(own) if link.what != "frame"), len(own))
        own[at:at] = of["call"][:1]
    return replace(chain, links=(*front, *own, *of["seen"]))


def with_kernels(chain: Chain, kernels: dict[str, ChainLink]) -> Chain:
    """``chain`` with what profilers say of the kernels that touch its bytes."""
    links: list[ChainLink] = []
    for link in chain.links:
        links.append(link)
        if link.what == "launches" and (profile := kernels.get(bare_name(link.name))):
            links.append(profile)
    return replace(chain, links=tuple(links))


def identity_of(row: pd.Series) -> tuple[object, ...]:
    """The key of :meth:`SiteLinks.by_site` for a row of sites."""
    return tuple(_plain(row[column]) for column in SITE_IDENTITY)


def by_identity(rows: pd.DataFrame, chosen: np.ndarray, *more: str) -> pd.DataFrame:
    """Of ``rows`` (allocations), those ``chosen`` by site identity and the columns ``more``: count, bytes, share (of
    all allocations of the site)."""
    identity = list(SITE_IDENTITY)
    every = rows.groupby(identity, sort=False).size().rename("all").reset_index()
    part = rows[chosen].groupby([*identity, *more], sort=True)["size_bytes"].agg(["size", "sum"]).reset_index()
    part = part.merge(every, on=identity).rename(columns={"size": "count", "sum": "bytes"})
    return part.assign(share=part["count"] / part["all"]).drop(columns="all")


def _plain(value: object) -> object:
    return int(value) if isinstance(value, np.integer) else value
