"""Slab caches from /proc/slabinfo (version 2.x, readable by root or with CAP_DAC_READ_SEARCH).

The columns are given by the file's own header: ``<active_objs> <num_objs> <objsize>``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leakscope.record.samplers.base import Reading, describe_error

# Names hold no blanks; the two header lines have no number in second place.
_CACHE = re.compile(rb"^(\S+)\s+(\d+)\s+(\d+)\s+(\d+)\s", re.MULTILINE)


def parse_slabinfo(text: bytes) -> dict[str, tuple[int, int]]:
    """Cache name → (bytes in allocated objects, bytes in all object slots). Caches of one name are summed."""
    caches: dict[str, tuple[int, int]] = {}
    for raw_name, active, total, size in _CACHE.findall(text):
        name = raw_name.decode("ascii", "backslashreplace")
        object_bytes = int(size)
        active_bytes, total_bytes = caches.get(name, (0, 0))
        caches[name] = (active_bytes + int(active) * object_bytes, total_bytes + int(total) * object_bytes)
    return caches


class SlabinfoSampler:
    """``slab_<cache>`` = active_objs × objsize and ``slab_<cache>_num`` = num_objs × objsize, in bytes.

    active_objs counts objects cached per CPU as allocated: it lags behind frees by some slabs a CPU. A cache
    is emitted from the moment when it first has an object; unchanged values are left out by the change
    filter, so that one reading a second of some 230 caches adds tens of rows, not hundreds.
    """

    name = "slabinfo"
    sparse = True

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self.errors: Counter[str] = Counter()
        self._path = proc_root / "slabinfo"
        self._seen: set[str] = set()

    def sample(self, ts_ns: int) -> Iterator[Reading]:
        """Readings of scope host; none (and an error counted) where the file is not readable."""
        try:
            caches = parse_slabinfo(self._path.read_bytes())
        except OSError as error:
            self.errors[describe_error(error, "/proc/slabinfo")] += 1
            return
        for name, (active_bytes, total_bytes) in caches.items():
            if not total_bytes and name not in self._seen:
                continue
            self._seen.add(name)
            yield Reading("host", "", f"slab_{name}", active_bytes)
            yield Reading("host", "", f"slab_{name}_num", total_bytes)

    def facts(self) -> dict[str, Any]:
        """Nothing to state."""
        return {}
