"""Whether the k-th launch is the k-th action: every rule, and the command lines that cannot be read for sure."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from nsight_parsers.launch_order import LaunchOrder, launch_order
from nsight_parsers.ncu_command import parse_command_line

NCU = "/opt/nvidia/nsight-compute/2025.2.1/target/linux-desktop-glibc_2_11_3-x64/ncu"


def order_of(options: str, program: str = "./app --fast", **facts: object) -> LaunchOrder:
    return launch_order(parse_command_line(f"{NCU} {options} {program} "), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "status", "fields"),
    [
        ("-f -o out", "usable", {}),
        ("--set full --nvtx --call-stack -o out", "usable", {}),
        ("-o out -c 5", "usable", {"limit": 5}),
        ("--launch-skip 29 --launch-count 5 -o out", "shifted", {"skip_launches": 29, "limit": 5}),
        ("-s 3", "shifted", {"skip_launches": 3}),
        ("-s3", "shifted", {"skip_launches": 3}),
        ("--launch-skip=3", "shifted", {"skip_launches": 3}),
        ("--launch-skip-before-match 7", "shifted", {"skip_launches": 7}),
        ("-k gemm", "needs_kernel_filter", {"kernel": "gemm"}),
        (
            "--kernel-name-base demangled -k regex:[Bb]ench -s 2 -c 1",
            "needs_kernel_filter",
            {"kernel": "regex:[Bb]ench", "kernel_base": "demangled", "skip_matches": 2, "limit": 1},
        ),
        (
            "-k gemm --launch-skip-before-match 20 -c 10",
            "needs_kernel_filter",
            {"kernel": "gemm", "skip_launches": 20, "limit": 10},
        ),
        ("--kernel-regex gemm", "needs_kernel_filter", {"kernel": "regex:gemm"}),
        ("--nvtx --nvtx-include step/ --nvtx-include a@b/", "needs_nvtx_range", {"nvtx_include": ("step/", "a@b/")}),
        ("--nvtx --nvtx-exclude warm/ -k gemm", "needs_nvtx_range", {"nvtx_exclude": ("warm/",), "kernel": "gemm"}),
        ("--filter-mode per-gpu", "usable", {}),
        ("--profile-from-start on", "usable", {}),
        ("--replay-mode kernel --graph-profiling node", "usable", {}),
        ("--target-processes all", "usable", {}),
        ("--target-processes all --target-processes-filter regex:py", "usable", {}),
    ],
)
def test_orders_that_can_be_used(options: str, status: str, fields: dict[str, object]) -> None:
    order = order_of(options)

    assert (order.status, order.reason != "") == (status, True)
    blank = asdict(LaunchOrder("usable", ""))
    differing = {k: v for k, v in asdict(order).items() if v != blank[k] and k not in ("status", "reason", "cautions")}
    assert differing == fields


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--replay-mode application", "the program ran several times, under several PIDs"),
        ("--replay-mode range", "its results are ranges of launches"),
        ("--replay-mode app-range", "its results are ranges of launches"),
        ("--mode attach", "the filters of the run stand in another command line"),
        ("--profile-from-start off", "profiling began at a cu(da)ProfilerStart"),
        ("--profile-from-start no", "profiling began at a cu(da)ProfilerStart"),
        ("--profile-from-start 0", "profiling began at a cu(da)ProfilerStart"),
        ("--range-filter :[1-3]:", "--range-filter picks ranges by their number"),
        ("--kernel-id ::gemm:2", "--kernel-id picks launches by context, stream and invocation"),
        ("--native-include m@f@g", "launches were picked by their CPU stacks"),
        ("--python-exclude f@g", "launches were picked by their CPU stacks"),
        ("--devices 1", "launches on other devices were left out"),
        ("--device 1", "launches on other devices were left out"),
        ("--graph-profiling graph", "whole graphs are single actions"),
        ("--config-file-path /x/y", "options stand in a file that the report does not hold"),
        ("--filter-mode per-gpu -s 1", "apply to each GPU or configuration"),
        ("--filter-mode per-launch-config -k gemm", "apply to each GPU or configuration"),
        ("-s 1 --launch-skip-before-match 2", "how they add up is not documented"),
        ("-c many", "--launch-count is no number"),
        ("--brand-new-option x", "not known to this reader"),
        ("--lau 3", "not known to this reader"),
        ("-z", "not known to this reader"),
        ("--nvtx-include step one --nvtx-exclude warm/", "--nvtx-exclude stands behind what looks like the program"),
        ("@options.txt", "response file"),
        ("-o", "ends after --export"),
    ],
)
def test_orders_that_are_refused(options: str, reason: str) -> None:
    order = order_of(options, program="" if options == "-o" else "./app --fast")

    assert order.status == "refused"
    assert reason in order.reason


def test_no_command_line_is_refused() -> None:
    assert launch_order(None).status == "refused"
    assert "2022.2" in launch_order(None).reason


@pytest.mark.parametrize("text", ["", "python app.py", "./ncu-wrapper -k x ./app", "x " * 200_000, "ncu -k \x1b[2J a"])
def test_a_command_line_that_is_not_ncus_is_refused(text: str) -> None:
    order = launch_order(parse_command_line(text))

    assert order.status == "refused" and order.reason.startswith("the stored command line")


def test_skip_and_count_over_several_processes_are_refused() -> None:
    assert order_of("-s 2", processes=2).status == "refused"
    assert order_of("-c 2", processes=2).status == "refused"
    assert order_of("", processes=2).status == "usable"
    assert order_of("-k gemm", processes=2).status == "needs_kernel_filter"


def test_ids_that_do_not_rise_refuse_whatever_the_options_say() -> None:
    assert "do not rise" in order_of("", ids_rise=False).reason


def test_cautions_name_what_the_command_line_cannot_show() -> None:
    assert any("config.ncu-cfg" in caution for caution in order_of("").cautions)
    assert order_of("--config-file off").cautions == ()
    assert any("counted by skip" in caution for caution in order_of("-s 1 --target-processes all").cautions)


def test_only_the_filters_and_the_programs_name_are_kept() -> None:
    line = f'{NCU} -o /home/u/out --log-file /home/u/log "/home/u/bin/serve" --token hf_secret --key=sk_secret -k x'

    filters = parse_command_line(line)

    assert filters.program == "serve" and filters.kernel_name == ""
    assert not [part for part in ("secret", "/home", "log") if part in repr(filters)]


def test_windows_paths_and_options_of_the_program_are_told_apart() -> None:
    filters = parse_command_line(r'"C:\Program Files\NVIDIA\ncu.exe" -k gemm C:\app\run.exe -c 5 -s 7')

    assert (filters.program, filters.kernel_name, filters.launch_count, filters.launch_skip) == (
        "run.exe",
        "gemm",
        None,
        0,
    )
