"""The table of calibration on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from leakscope.model.calibration import Calibrated
from leakscope.quantities import size
from leakscope.report.text import printable


def calibration_table(calibrated: Sequence[Calibrated]) -> Table:
    """Mean deviation before and after calibration, a line a dimension."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, justify in (
        *(("calibration", "left"), ("against", "left"), ("deviation before", "right"), ("z-rule", "right")),
        *(("robust", "right"), ("z-rule swallowed", "right"), ("robust logged", "right")),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in calibrated:
        table.add_row(
            printable(one.dimension),
            printable(one.reference or "its own level"),
            f"{one.before:.2%}",
            f"{one.after_z:.2%}",
            f"{one.after_robust:.2%}",
            f"{size(one.z_swallowed_bytes)} in {len(one.z_rebaselines):,}",
            f"{size(one.diverged_bytes)} in {len(one.divergences):,}" + ("" if one.settled else ", never stood still"),
        )
    return table
