"""Growth of writable memory over the launches of a report: series, shapes and what is said about them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from nsight_parsers.ncu_memory import describe, growth_series, growth_table


def series_of(values: list[float], kernels: list[str] | None = None) -> Any:
    rows = [
        {"pid": 1, "context": 1, "id": i + 1, "writable_bytes": v, "kernel": kernels[i] if kernels else "k"}
        for i, v in enumerate(values)
    ]
    (series,) = growth_series(pa.Table.from_pylist(rows))
    return series


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([float("nan")] * 3, "unknown"),
        ([5.0], "unknown"),
        ([5.0] * 20, "flat"),
        ([5.0] * 5 + [9.0] * 15, "one step"),
        ([9.0, 5.0, 5.0], "falling"),
        ([5.0, 9.0, 5.0], "uneven"),
        ([float(i) for i in range(11)], "rising"),
        ([float(i) for i in range(12)], "steady"),
        ([1.0, 2.0, 3.0, 4.0] + [5.0] * 20, "rising"),
    ],
)
def test_the_shape_of_growth(values: list[float], shape: str) -> None:
    assert series_of(values).shape == shape


def test_rises_between_different_kernels_are_no_steady_rise() -> None:
    values = [float(i) for i in range(24)]

    assert series_of(values, [f"k{i % 4}" for i in range(24)]).shape == "rising"
    assert series_of(values, [f"k{i % 2}" for i in range(24)]).shape == "steady"


def test_growth_as_a_table_skips_launches_without_a_value() -> None:
    series = series_of([10.0, float("nan"), 14.0])

    assert series.missing == 1 and series.growth_bytes == 4
    assert growth_table([series]).select(["profile_id", "step_bytes"]).to_pylist() == [
        {"profile_id": 1, "step_bytes": 0}, {"profile_id": 3, "step_bytes": 4},
    ]  # fmt: skip


def test_what_is_said_names_the_steps_and_the_allocator_they_look_like() -> None:
    said = describe(series_of([8.0, 8.0 + (20 << 20), 8.0 + (40 << 20)]))

    assert "changed by +41943040 bytes in 2 steps (+20971520 before launch 2, +20971520 before launch 3)" in said
    assert "PyTorch" in said and "still setting up" in said
    assert "a leak looks like this" in describe(series_of([float(i) for i in range(12)]))
