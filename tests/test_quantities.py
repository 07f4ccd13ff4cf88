"""Sizes, times and rates as people type them."""

from __future__ import annotations

import pytest

from leakscope.errors import BadInputError
from leakscope.quantities import amount, rate_per_s, seconds, size_bytes

WORDS = ["", "-1", "64 kb", "1e9", "9" * 19, "\x1b[1m", "KiB", "1.5.5MiB"]


def test_sizes_and_times_as_they_are_typed() -> None:
    texts = ("0", "65536", "64KiB", "1 MiB", "2G", "1.5KiB", "3kB")
    assert [size_bytes(t, "--ring") for t in texts] == [0, 65536, 65536, 1 << 20, 2 << 30, 1536, 3000]
    assert [seconds(t, "--interval") for t in ("10s", "500ms", "1m", "2.5", "72h")] == [10, 0.5, 60, 2.5, 259_200]


def test_amounts_and_rates_of_files() -> None:
    assert [amount(v, "f:1") for v in (65536, 0.5, "64KiB", "1.5 GiB", "2MB")] == [65536, 0.5, 65536, 1.5 * 2**30, 2e6]
    rates = [rate_per_s(v, "f:1") for v in (7, "64KiB/s", "36MiB/h", "60kB/min", "86400 /d")]
    assert rates == [7, 65536, 36 * 2**20 / 3600, 1000, 1]


@pytest.mark.parametrize("text", [*WORDS, "0.3KiB"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(BadInputError, match=r"^--min-size [^\n]*: needs a size"):
        size_bytes(text, "--min-size")


@pytest.mark.parametrize("text", ["", "-1s", "10ms", "10 days", "nan", "1e9", "0"])
def test_what_is_no_time_is_told(text: str) -> None:
    with pytest.raises(BadInputError, match=r"^--interval "):
        seconds(text, "--interval")


@pytest.mark.parametrize("value", [*WORDS, -1, True, None, float("nan"), [1], "1MiB/w", "1MiB/", "/h"])
def test_what_is_no_rate_is_told(value: object) -> None:
    with pytest.raises(BadInputError, match=r"^f:1: .* is no rate"):
        rate_per_s(value, "f:1")
