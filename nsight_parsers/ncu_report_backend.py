"""Reads a report through NVIDIA's own ``ncu_report`` package, as a check of our reader or for what it does not know.

The package is optional (``pip install leakscope[ncu]``), under NVIDIA's proprietary licence and meant for systems with
NVIDIA GPUs; it is imported here and nowhere else, when a function is called. It gives kernels, metrics and NVTX names
and neither PID, TID, process, time, API call order nor CPU stack: those columns stay empty.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.ncu_container import Walk, walk_blocks
from nsight_parsers.profile_tables import WRITABLE_BYTES, ProfileTables, in_range

REMEDY = "install NVIDIA's package on a system with NVIDIA GPUs: pip install 'leakscope[ncu]'"
LIMITS = (
    "ncu_report gives no PID, TID, process, creation time, API call id and CPU stack",
    "units of metrics are those that ncu_report gives",
)


def is_available() -> bool:
    """Whether ``ncu_report`` can be imported here."""
    return importlib.util.find_spec("ncu_report") is not None


def parse_with_ncu_report(path: Path | str) -> ParsedReport:
    """``kernel_profiles`` and ``kernel_metrics`` of the report at ``path``, as ``ncu_report`` gives them.

    The package reads a truncated file without a word: the blocks are walked first, and what is not whole is a finding.
    Raises :class:`nsight_parsers.ReportError` without the package, and for a file that is no report.
    """
    path = Path(path)
    walk = Walk()
    announced = sum(block.results_announced for block in walk_blocks(path, walk))
    try:
        ncu_report = importlib.import_module("ncu_report")
    except ImportError as error:
        raise ReportError(f"{path}: ncu_report cannot be imported ({error}): {REMEDY}") from error
    context = ncu_report.load_report(str(path))
    rows = ProfileTables()
    for range_index in range(context.num_ranges()):
        profiled = context.range_by_idx(range_index)
        for action_index in range(profiled.num_actions()):
            _add_action(rows, profiled.action_by_idx(action_index))
    report = ParsedReport(rows.tables(), tool="Nsight Compute", kind="ncu_rep", limits=list(LIMITS))
    if walk.stopped:
        report.findings.append(f"{walk.stopped}: ncu_report gave {len(rows.profiles)} of at least {announced} results")
    elif len(rows.profiles) != announced:
        report.findings.append(f"ncu_report gave {len(rows.profiles)} results where the file announces {announced}")
    return report


def _add_action(rows: ProfileTables, action: Any) -> None:
    values = {name: _value(action.metric_by_name(name)) for name in action.metric_names()}

    def number(name: str) -> float:
        value = values.get(name, (math.nan, "", ""))[0]
        return value if math.isfinite(value) else 0

    writable = values.get(f"{WRITABLE_BYTES}.avg")
    profile_id = rows.add_profile(
        device=in_range(int(number("launch__device_id")), 32),
        context=int(number("launch__context_id")),
        stream=int(number("launch__stream_id")),
        kernel=action.name(action.NameBase_DEMANGLED) or action.name() or "",
        mangled=action.name(action.NameBase_MANGLED) or "",
        grid=[int(number(f"launch__grid_dim_{axis}")) for axis in "xyz"],
        block=[int(number(f"launch__block_dim_{axis}")) for axis in "xyz"],
        ranges=_ranges(action.nvtx_state()),
        writable_bytes=writable[0] if writable else math.nan,
    )
    for name, (value, text, unit) in values.items():
        if text or math.isfinite(value):
            rows.add_metric(profile_id, "", name, unit, value, text)


def _value(metric: Any) -> tuple[float, str, str]:
    """Number (NaN where there is none), text and unit of a metric; its values changed their type in 2024."""
    if metric is None or (hasattr(metric, "has_value") and not metric.has_value()):
        return math.nan, "", ""
    value, unit = metric.value(), metric.unit() or ""
    return (math.nan, value, unit) if isinstance(value, str) else (math.nan if value is None else value, "", unit)


def _ranges(state: Any) -> list[str]:
    if state is None:
        return []
    found: list[str] = []
    for number in state.domains():
        domain = state.domain_by_id(number)
        prefix = "" if domain.name() in ("", "<default domain>") else f"{domain.name()}@"
        found.extend(prefix + name for name in domain.push_pop_ranges())
    return found
