"""Event files of other tracers, written for tests: one line an allocation or free."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

SECOND = 1_000_000_000
HEADER = ("ts_ns", "pid", "tid", "op", "layer", "addr", "size", "stack")


@dataclass
class EventFile:
    """Rows in any order; written in time order. Times are seconds since time zero (ts_ns 1,000,000,000)."""

    layer: str = "host"
    pid: int = 77
    rows: list[tuple[object, ...]] = field(default_factory=list)
    next_address: int = 0x7F0000000000

    def keep(self, at_s: float, size: int, stack: str, address: int | None = None) -> int:
        """An allocation; its address."""
        if address is None:
            address, self.next_address = self.next_address, self.next_address + 0x1000
        self.rows.append((SECOND + int(at_s * SECOND), self.pid, 1, "alloc", self.layer, hex(address), size, stack))
        return address

    def free(self, at_s: float, address: int) -> None:
        """Its end."""
        self.rows.append((SECOND + int(at_s * SECOND), self.pid, 1, "free", self.layer, hex(address), "", ""))

    def churn(self, stack: str, count: int, span_s: float, size: int = 100, life_s: float = 0.05) -> None:
        """``count`` allocations over ``span_s``, each freed after ``life_s``."""
        for number in range(count):
            at = 0.01 + number * (span_s - life_s - 0.02) / count
            self.free(at + life_s, self.keep(at, size + number % 7, stack))

    def write(self, path: Path) -> Path:
        """As CSV, or as JSON lines where the name ends so."""
        rows = sorted(self.rows, key=lambda row: int(str(row[0])))
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(dict(zip(HEADER, row, strict=True))) + "\n" for row in rows))
            return path
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *rows])
        return path
