"""What an operation of the cache kit costs: ``python -m benchmarks.cachekit``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from leakscope.cachekit import LRFU, LRU, LRUK, Cache, DecayedCount, EventLog, Policy

ROUNDS = 20_000
KEYS = 1_000


def microseconds(call: Callable[[int], object]) -> float:
    """CPU time of one call, the best of seven runs."""
    best = float("inf")
    for _ in range(7):
        start = time.thread_time()
        for number in range(ROUNDS):
            call(number % KEYS)
        best = min(best, time.thread_time() - start)
    return best / ROUNDS * 1e6


def costs(policy: Callable[[], Policy], log: EventLog | None) -> list[float]:
    """Hit, replacement, insertion that evicts, strong handle and its release."""
    cache: Cache[int, int] = Cache(KEYS, ttl=3_600, policy=policy, events=log)
    for key in range(KEYS):
        cache[key] = key
    hit = microseconds(cache.get)
    replaced = microseconds(lambda key: cache.put(key, key))
    handle = microseconds(lambda key: cache.strong(key, owner="benchmark").release())
    fresh = iter(range(10**6, 10**9))
    evicting = microseconds(lambda key: cache.put(next(fresh), key))
    return [hit, replaced, evicting, handle]


def main() -> None:
    """Prints a table in Markdown."""
    print("| policy | events | hit | replace | insert and evict | handle and release |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for policy in (LRU, LRUK, DecayedCount, LRFU):
            for events in (False, True):
                log = EventLog(Path(place) / "events.jsonl") if events else None
                figures = " | ".join(f"{cost:.1f}" for cost in costs(policy, log))
                print(f"| `{policy.__name__}` | {'yes' if events else 'no'} | {figures} |")
                if log is not None:
                    log.close()


if __name__ == "__main__":
    main()
