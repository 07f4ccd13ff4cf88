"""The table of calibration on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from leakscope.model.calibration import Calibrated
from leakscope.quantities import size
from leakscope.report.cells import Column, in_columns

_COLUMNS = [
    Column("calibration"), Column("against", least=8), Column("deviation before", True), Column("z-rule", True),
    Column("robust", True), Column("z-rule swallowed", True, optional=1), Column("robust logged", True, optional=2),
]  # fmt: skip


def calibration_lines(calibrated: Sequence[Calibrated], width: int) -> Iterator[Text]:
    """Mean deviation before and after calibration, a line a dimension."""
    if calibrated:
        yield from in_columns(_COLUMNS, [_row(one) for one in calibrated], width)


def _row(one: Calibrated) -> list[str]:
    logged = f"{size(one.diverged_bytes)} in {len(one.divergences):,}"
    return [
        one.dimension,
        one.reference or "its own level",
        f"{one.before:.2%}",
        f"{one.after_z:.2%}",
        f"{one.after_robust:.2%}",
        f"{size(one.z_swallowed_bytes)} in {len(one.z_rebaselines):,}",
        logged + ("" if one.settled else ", never stood still"),
    ]
