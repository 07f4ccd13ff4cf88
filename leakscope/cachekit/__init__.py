"""A cache for Python services that knows who holds what, and says so in events that leakscope reads.

Needs the standard library alone. ``docs/cachekit.md`` shows how to adopt it.
"""

from leakscope.cachekit.blocks import Block, BlockReplica, BlockTable, Message, Outcome
from leakscope.cachekit.cache import Cache
from leakscope.cachekit.entries import CacheStats, Held
from leakscope.cachekit.events import EventLog
from leakscope.cachekit.generations import Fingerprint
from leakscope.cachekit.handles import ReleasedHandleError, StrongHandle, WeakHandle
from leakscope.cachekit.policies import LRFU, LRU, LRUK, DecayedCount, Policy
from leakscope.cachekit.store import CacheFullError
from leakscope.cachekit.sweeper import Sweeper
from leakscope.cachekit.tiers import (
    DirectoryTier,
    MemoryTier,
    ObjectStoreTier,
    Record,
    RedisTier,
    Tier,
    TierChain,
    TierStats,
)

__all__ = [
    "LRFU",
    "LRU",
    "LRUK",
    "Block",
    "BlockReplica",
    "BlockTable",
    "Cache",
    "CacheFullError",
    "CacheStats",
    "DecayedCount",
    "DirectoryTier",
    "EventLog",
    "Fingerprint",
    "Held",
    "MemoryTier",
    "Message",
    "ObjectStoreTier",
    "Outcome",
    "Policy",
    "Record",
    "RedisTier",
    "ReleasedHandleError",
    "StrongHandle",
    "Sweeper",
    "Tier",
    "TierChain",
    "TierStats",
    "WeakHandle",
]
