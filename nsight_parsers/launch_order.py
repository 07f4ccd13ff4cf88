"""Whether the k-th kernel launch of a process is the k-th action of its Nsight Compute report.

ncu reports only what it profiled. The rules read the command line that the report stores (from 2022.2 on): with no
filter the two orders are one; a fixed skip shifts them; a kernel or NVTX filter needs the same filter on the side of
the launches; everything else is refused, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nsight_parsers.ncu_command import LaunchFilters

Status = Literal["usable", "shifted", "needs_kernel_filter", "needs_nvtx_range", "refused"]


@dataclass(frozen=True)
class LaunchOrder:
    """How to number the launches of a process so that they meet the actions of the report.

    Of all launches leave out the first ``skip_launches``; of the rest keep those that match ``kernel`` (on
    ``kernel_base``: function, demangled or mangled; ``regex:`` marks an expression, which comes from the file: never
    run it without a limit) and the NVTX filters; of these leave out the first ``skip_matches``. The k-th that is left
    is the k-th action; the report ends after ``limit`` actions where that is not None. A launch that ncu failed to
    profile breaks the order: compare the counts, and every pair with the creation times, before believing it.
    """

    status: Status
    reason: str
    skip_launches: int = 0
    skip_matches: int = 0
    limit: int | None = None
    kernel: str = ""
    kernel_base: str = "function"
    nvtx_include: tuple[str, ...] = ()
    nvtx_exclude: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def launch_order(filters: LaunchFilters | None, *, processes: int = 1, ids_rise: bool = True) -> LaunchOrder:
    """The launch order of a report whose stored command line gave ``filters`` (None: it stores none).

    ``processes`` is the number of PIDs in the report, ``ids_rise`` whether the API call ids rise within each.
    """
    reason = _refusal(filters, processes, ids_rise)
    if reason or filters is None:
        return LaunchOrder("refused", reason)
    cautions = []
    if filters.config_file == "searched":
        cautions.append("a config.ncu-cfg file may have added filters that the command line does not show")
    counted = filters.launch_skip or filters.launch_skip_before_match or filters.launch_count is not None
    if counted and filters.target_processes == "all":
        cautions.append("launches of a process without results may have been counted by skip and count")
    filtered = bool(filters.kernel_name or filters.nvtx_include or filters.nvtx_exclude)
    skip = filters.launch_skip + filters.launch_skip_before_match
    status, reason = _status(filters, skip)
    return LaunchOrder(
        status,
        reason,
        skip_launches=filters.launch_skip_before_match if filtered else skip,
        skip_matches=filters.launch_skip if filtered else 0,
        limit=filters.launch_count,
        kernel=filters.kernel_name,
        kernel_base=filters.kernel_name_base,
        nvtx_include=filters.nvtx_include,
        nvtx_exclude=filters.nvtx_exclude,
        cautions=tuple(cautions),
    )


def _status(filters: LaunchFilters, skip: int) -> tuple[Status, str]:
    if filters.nvtx_include or filters.nvtx_exclude:
        return "needs_nvtx_range", "only launches inside (or outside) NVTX ranges were profiled"
    if filters.kernel_name:
        return "needs_kernel_filter", "only launches of kernels that match --kernel-name were profiled"
    if skip:
        return "shifted", f"the first {skip} launches were skipped"
    return "usable", "every launch was profiled"


def _refusal(filters: LaunchFilters | None, processes: int, ids_rise: bool) -> str:
    """Why the order cannot be used; empty where it can."""
    if not ids_rise:
        return "the API call ids of the actions do not rise: they are not in the order of their launches"
    if filters is None:
        return "the report stores no command line (a tool before 2022.2, or a run started from the user interface)"
    if filters.unclear:
        return filters.unclear
    if filters.replay_mode in ("range", "app-range"):
        return f"--replay-mode {filters.replay_mode}: its results are ranges of launches"
    if filters.replay_mode != "kernel":
        return f"--replay-mode {filters.replay_mode}: the program ran several times, under several PIDs"
    if filters.mode != "launch-and-attach":
        return f"--mode {filters.mode}: the filters of the run stand in another command line"
    if not filters.profile_from_start:
        return "--profile-from-start off: profiling began at a cu(da)ProfilerStart"
    if filters.range_filter:
        return "--range-filter picks ranges by their number"
    if filters.kernel_id:
        return "--kernel-id picks launches by context, stream and invocation"
    if filters.stack_filter:
        return "launches were picked by their CPU stacks"
    if filters.devices:
        return "--devices: launches on other devices were left out"
    if filters.graph_profiling != "node":
        return f"--graph-profiling {filters.graph_profiling}: whole graphs are single actions"
    if filters.config_file == "named":
        return "--config-file-path: options stand in a file that the report does not hold"
    return _count_refusal(filters, processes)


def _count_refusal(filters: LaunchFilters, processes: int) -> str:
    skips = filters.launch_skip or filters.launch_skip_before_match
    counted = skips or filters.launch_count is not None
    if filters.filter_mode != "global" and (counted or filters.kernel_name):
        return f"--filter-mode {filters.filter_mode}: skip, count and kernel filter apply to each GPU or configuration"
    if counted and processes > 1:
        return f"skip and count were applied over {processes} processes together"
    if filters.launch_skip and filters.launch_skip_before_match:
        return "--launch-skip and --launch-skip-before-match together: how they add up is not documented"
    return ""
