"""Host memory from /proc/meminfo."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leakscope.record.samplers.base import Reading, describe_error

_LINE = re.compile(rb"^([^:\n]+):\s+(\d+)( kB)?$", re.MULTILINE)


def parse_meminfo(text: bytes) -> dict[str, int]:
    """Line name as in the file → bytes; lines without a unit (HugePages_Total…) are counts and stay so."""
    return {
        name.decode("ascii", "backslashreplace"): int(value) * (1024 if unit else 1)
        for name, value, unit in _LINE.findall(text)
    }


class MeminfoSampler:
    """``meminfo_<Line>`` for every line, scope host; unchanged values are left out by the change filter."""

    name = "meminfo"
    sparse = True

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self.errors: Counter[str] = Counter()
        self._path = proc_root / "meminfo"

    def sample(self, ts_ns: int) -> Iterator[Reading]:
        """One reading a line."""
        try:
            lines = parse_meminfo(self._path.read_bytes())
        except OSError as error:
            self.errors[describe_error(error, "/proc/meminfo")] += 1
            return
        for name, value in lines.items():
            yield Reading("host", "", f"meminfo_{name}", value)

    def facts(self) -> dict[str, Any]:
        """Nothing to state."""
        return {}
