"""Result types of ``leakscope liveness``: who keeps memory alive, in the shape that every report renders.

Field names are those of the JSON report, schema ``leakscope-liveness/1``. Times ``_ns`` are on the clock of their
source, ages ``_s`` seconds before the time that is looked at, sizes bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "leakscope-liveness/1"

CLASSES = ("strong", "weak", "normal", "held-stale", "immortal", "zombie", "idle-cached", "unknown-ref")
"""Each object is in exactly one (leakscope.liveness.classes)."""

NODE_KINDS = ("root", "holder", "cache", "site", "object", "segment", "block", "kernel")
"""What nodes stand for. ``holder``: who holds (component, request, session, process); ``cache``: what merely keeps it
resident (a cache, an allocator's pool); ``site``: allocations of one stack and class; ``kernel``: a GPU kernel."""

EDGE_KINDS = (
    *("roots", "holds", "caches", "view-of", "parent-block", "occupies", "contains"),
    *("allocated-by", "touched-by", "evicted-by"),
)
"""Read ``tail kind head``. Those of the first line keep their head alive; the others only tell."""

KEEPING = EDGE_KINDS[:7]

FAULTS = (
    "an age of 1 s, told by scans 500 ms apart, is known to half of itself",
    "what has expired and is still there, and what nobody references, is not looked at: both are leaks that matter",
    "two references or more and used longer than 1 s ago has no class; nor has one reference with a long TTL or none",
    "access order as edges is a total order, n(n-1)/2 of them; it is a rank here",
)
"""Known faults of the classic scheme; the classes of :data:`CLASSES` have none of them."""


@dataclass(frozen=True)
class ClassTotal:
    """Objects and bytes of one class; ``share`` of all objects."""

    name: str
    objects: int
    bytes: int
    share: float


@dataclass(frozen=True)
class DocumentRules:
    """The classic scheme on the same objects: of all ``objects`` it looks at ``looked_at`` (TTL not ended, count above
    0) and names some of them strong or weak. The others it has no word for, or does not see."""

    objects: int
    looked_at: int
    strong: int
    weak: int
    without_class: int
    expired: int
    unreferenced: int
    unknown: int  # their count is not given
    hidden_bytes: int  # of what it does not look at
    without_class_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the share of each."""
        of = max(1, self.objects)
        values: dict[str, Any] = asdict(self)
        values["strong_share"] = round(self.strong / of, 6)
        values["weak_share"] = round(self.weak / of, 6)
        return values | {"scan_ms": 500, "faults": list(FAULTS)}


@dataclass(frozen=True)
class Keeper:
    """A holder or cache: what it holds by itself, and what would go if it alone let go (``retained_bytes``)."""

    node: int
    kind: str
    name: str
    source: str
    objects: int  # it has an edge to
    bytes: int
    retained_bytes: int
    stale_objects: int
    stale_bytes: int
    oldest_s: float | None  # of its holds
    stack: tuple[str, ...] = ()  # of the most holds, outermost first


@dataclass(frozen=True)
class Stale:
    """What has been allocated or held and not been used for ``age_s``; ranked by bytes times age.

    ``evidence``: what tells its last use. ``approximate``: a later use may not have been seen.
    """

    node: int
    kind: str
    name: str
    source: str
    cls: str
    layer: str
    objects: int
    bytes: int
    age_s: float
    byte_seconds: float
    evidence: str
    approximate: bool
    holder: str = ""
    stack: tuple[str, ...] = ()
    cohorts: tuple[tuple[float, int, int], ...] = ()  # (at least so many seconds old, objects, bytes)


@dataclass(frozen=True)
class Window:
    """Bytes and objects of each class at a time, in the order of :data:`CLASSES`."""

    t_s: float
    bytes: tuple[int, ...]
    objects: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A node on a path, and the edge that leads to it."""

    kind: str
    name: str
    edge: str = ""
    count: int = 1
    held_s: float | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Why:
    """Why an object is alive: the shortest path from a root through each of those that keep it directly."""

    node: int
    name: str
    cls: str
    bytes: int
    retained_bytes: int
    dominator: str  # who alone could let it go; '' = several ways lead to it
    keepers: int
    paths: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Pool:
    """A device of an allocator's snapshot: what is reserved, and what its free pieces could do."""

    source: str
    device: int
    pool: str
    segments: int
    blocks: int
    reserved_bytes: int
    active_bytes: int
    pending_bytes: int  # freed, waits for work on a stream
    free_bytes: int
    free_split_bytes: int  # in segments that are partly in use
    largest_free_bytes: int

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes: 0 where one request could take all that is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


@dataclass(frozen=True)
class SourceLiveness:
    """What one source says."""

    source: str
    kind: str
    at_ns: int
    stale_after_s: float
    stale_because: str
    classes: tuple[ClassTotal, ...]
    rules: DocumentRules | None = None
    windows: tuple[Window, ...] = ()
    pools: tuple[Pool, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or was lost


@dataclass
class Liveness:
    """Everything that ``liveness`` says about its inputs."""

    sources: list[SourceLiveness] = field(default_factory=list)
    keepers: list[Keeper] = field(default_factory=list)  # most retained bytes first
    stale: list[Stale] = field(default_factory=list)  # most bytes × age first
    whys: list[Why] = field(default_factory=list)  # those that were asked for
    suspects: list[Why] = field(default_factory=list)  # why the leading stale ones are alive
    nodes: dict[str, int] = field(default_factory=dict)  # by kind
    edges: dict[str, int] = field(default_factory=dict)  # by kind
    inputs: list[dict[str, Any]] = field(default_factory=list)
    ends_ns: tuple[int, ...] = ()  # of each source by its number in the graph, 0 = not known
