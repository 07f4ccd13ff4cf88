"""What the tests of the cache kit share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leakscope.cachekit import Cache


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Value:
    """A value that can be watched."""

    def __init__(self, size: int = 1) -> None:
        self.size = size


def cache_of(maxsize: float = 10, **more: Any) -> tuple[Cache[Any, Any], Clock]:
    clock = Clock()
    return Cache(maxsize, **({"ttl": 60.0, "timer": clock} | more)), clock


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
