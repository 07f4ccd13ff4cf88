"""The classes of objects, total: each object is in exactly one; and the rules of the classic scheme, as they are.

The classic scheme scans each 500 ms, looks at objects whose TTL has not ended and whose reference count is above 0, and
calls strong what has 2 references or more and was used within 1 s, weak what has one and less than 10 s of TTL left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leakscope.model.liveness import CLASSES, DocumentRules

SCAN_NS = 500_000_000
STRONG_REFERENCES = 2
STRONG_AGE_NS = 1_000_000_000
WEAK_REFERENCES = 1
WEAK_TTL_NS = 10_000_000_000

(STRONG, WEAK, NORMAL, HELD_STALE, IMMORTAL, ZOMBIE, IDLE_CACHED, UNKNOWN_REF) = range(len(CLASSES))


@dataclass(frozen=True)
class Facts:
    """What is known of objects at one time; equally long arrays.

    ``refcount``: float64, NaN where the source does not give it. ``held``: bool, somebody holds it, though it may not
    be known how many do. ``age_ns``: float64, since the last use, NaN where uses are not seen. ``stale``: bool, held
    for longer than holds last, by somebody who has not used it since. ``ttl_left_ns``: float64, NaN where not known,
    inf for no TTL, 0 or less once it has ended (so too for a generation that was invalidated, and for memory that was
    freed and waits for a stream).
    """

    refcount: npt.NDArray[np.float64]
    held: npt.NDArray[np.bool_]
    age_ns: npt.NDArray[np.float64]
    stale: npt.NDArray[np.bool_]
    ttl_left_ns: npt.NDArray[np.float64]


def classify(of: Facts) -> npt.NDArray[np.int8]:
    """int8[n]: the class of each object, an index into :data:`CLASSES`.

    The first rule that applies: past its TTL (zombie); held and stale (held-stale); two references or more and used
    within 1 s (strong); one reference and less than 10 s of TTL left (weak); held (normal); no TTL (immortal); no
    references (idle-cached); nothing of this is known (unknown-ref).
    """
    refs, ttl = of.refcount, of.ttl_left_ns
    held = of.held | (refs > 0)
    with np.errstate(invalid="ignore"):
        rules = [
            ttl <= 0,
            held & of.stale,
            (refs >= STRONG_REFERENCES) & (of.age_ns <= STRONG_AGE_NS),
            (refs == WEAK_REFERENCES) & (ttl < WEAK_TTL_NS),
            held,
            np.isposinf(ttl),
            refs == 0,
        ]
    classes = [ZOMBIE, HELD_STALE, STRONG, WEAK, NORMAL, IMMORTAL, IDLE_CACHED]
    return np.select(rules, classes, UNKNOWN_REF).astype(np.int8)


def document_rules(of: Facts, sizes: npt.NDArray[np.int64]) -> DocumentRules:
    """What the classic scheme says of the same objects, at the same time, and what it leaves out."""
    with np.errstate(invalid="ignore"):
        expired = of.ttl_left_ns <= 0
        looked_at = ~expired & (of.refcount > 0)
        strong = looked_at & (of.refcount >= STRONG_REFERENCES) & (of.age_ns <= STRONG_AGE_NS)
        weak = looked_at & (of.refcount == WEAK_REFERENCES) & (of.ttl_left_ns < WEAK_TTL_NS)
    rest = looked_at & ~strong & ~weak
    return DocumentRules(
        objects=len(sizes),
        looked_at=int(looked_at.sum()),
        strong=int(strong.sum()),
        weak=int(weak.sum()),
        without_class=int(rest.sum()),
        expired=int(expired.sum()),
        unreferenced=int((~expired & (of.refcount == 0)).sum()),
        unknown=int((~expired & np.isnan(of.refcount)).sum()),
        hidden_bytes=int(sizes[~looked_at].sum()),
        without_class_bytes=int(sizes[rest].sum()),
    )
