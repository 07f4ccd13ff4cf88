"""The output of ``ncu --csv``: real files by what is known about each, hand-made ones for what no public file shows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from ncu_files import ACCESSIBLE, DETAILS, RAW_IDENTITY, details_row

from leakscope.model.tables import TABLES
from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.ncu_csv import parse_ncu_csv, parse_nvtx_cell
from nsight_parsers.numbers import decide, evidence, parse_number
from nsight_parsers.recognise import parse, recognise

DATA = "LEAKSCOPE_TEST_DATA"
NVTX_COLUMNS = (
    '"thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
    '"Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
)


def real(name: str) -> ParsedReport:
    root = os.environ.get(DATA)
    if not root:
        pytest.skip(f"NOT TESTED: {DATA} names no folder of real reports")
    return parse(Path(root) / "ncu_csv" / name)


def column(report: ParsedReport, name: str) -> list[Any]:
    return report.tables["kernel_profiles"].column(name).to_pylist()


def metrics(report: ParsedReport) -> list[tuple[int, str, str, float, str]]:
    rows = report.tables["kernel_metrics"].to_pylist()
    return [(r["profile_id"], r["metric"], r["unit"], r["value"], r["text"]) for r in rows]


def write(folder: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path = folder / "out.log"
    path.write_bytes("\n".join([*lines, ""]).encode(encoding))
    return path


def test_details_page_with_rules_and_thousands() -> None:
    report = real("details-with-rules_thousands.csv")

    assert (report.facts["data_rows"], report.facts["rule_rows"]) == (83, 11)
    assert report.tables["kernel_metrics"].num_rows == 72
    assert column(report, "pid") == [6153] and column(report, "grid") == [[1024, 1, 1]]
    assert (1, "DRAM Frequency", "hz", 4963609951.19, "") in metrics(report)
    units = {unit for _, name, unit, _, _ in metrics(report) if name == "Memory Throughput"}
    assert units == {"%", "byte/s"}
    assert report.findings == []


def test_2020_layout_behind_the_programs_own_output() -> None:
    report = real("details-2020_kerneltime_app-output-mixed.log")

    assert column(report, "kernel") == ["calculate_temp"] and column(report, "pid") == [36493]
    assert column(report, "created_s") == [1587394734]  # 2020-04-20 14:58:54 read as UTC
    assert (1, "Duration", "nsecond", 51360.0, "") in metrics(report)


def test_a_hundred_launches_in_the_2020_layout() -> None:
    report = real("details-2020_kerneltime_many-launches.log")

    assert report.facts["data_rows"] == 2600 and len(column(report, "kernel")) == 100
    assert set(column(report, "pid")) == {10914}
    seconds = column(report, "created_s")
    assert len(set(seconds)) == 32 and max(seconds) - min(seconds) == 31
    assert report.tables["processes"].column("name").to_pylist() == ["cfd_000"]


def test_columns_that_a_user_trimmed() -> None:
    report = real("handmade_reduced-columns.ncu-csv")

    assert column(report, "kernel") == ["add_kernel", "matmul_kernel"]
    assert [row[3] for row in metrics(report) if row[1] == "gpu__time_duration.sum"] == [5000.0, 20000.0]
    assert report.findings == ["no Process ID column: the kernels cannot be joined by PID"]


def raw_page(*values: str, unit: str = "byte") -> list[str]:
    header = f'{RAW_IDENTITY},"{ACCESSIBLE}","gpu__time_duration.sum","launch__func_cache_config"'
    units = ",".join(['""'] * 12) + f',"{unit}","ns",""'
    details = ":none" * 6
    nvtx = f'71  ""<default domain>:request{details}""  ""server:decode{details}"" '
    launch = '"k<(int)8>(float *, int)","1","7","(32, 1, 1)","(2, 3, 4)","0","8.0"'
    return [
        header,
        units,
        *(
            f'"{i}","71","python3","127.0.0.1","{nvtx}",{launch},"{value}","1,184.00","CachePreferNone"'
            for i, value in enumerate(values)
        ),
    ]


def test_hand_made_raw_page(tmp_path: Path) -> None:
    path = write(
        tmp_path, "==PROF== Connected to process 71 (/usr/bin/python3)", *raw_page("1,048,576", "3,145,728"), "bye"
    )

    report = parse(path)

    assert report.kind == "ncu_csv"
    assert column(report, "writable_bytes") == [1048576.0, 3145728.0]
    assert [one["step_bytes"] for one in report.facts["growth"]] == [(2097152,)]
    assert column(report, "tid") == [71, 71] and column(report, "ranges") == [["request", "server@decode"]] * 2
    assert column(report, "grid") == [[2, 3, 4]] * 2 and column(report, "kernel") == ["k<(int)8>(float *, int)"] * 2
    assert metrics(report)[:2] == [
        (1, ACCESSIBLE, "byte", 1048576.0, ""), (1, "gpu__time_duration.sum", "ns", 1184.0, ""),
    ]  # fmt: skip
    assert metrics(report)[2][4] == "CachePreferNone" and math.isnan(metrics(report)[2][3])
    for name, table in report.tables.items():
        assert table.schema == TABLES[name], name


def test_writable_bytes_in_a_scaled_unit_are_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, *raw_page("2.50", unit="Mbyte"))

    assert column(parse_ncu_csv(path), "writable_bytes") == [2_500_000.0]


def test_hand_made_decimal_commas(tmp_path: Path) -> None:
    rows = [
        details_row(0, "gpu__time_duration.sum", "ns", "117.344"),
        details_row(0, "dram__bytes.sum", "byte", "27.595.520"),
        details_row(0, "sm__throughput.avg.pct", "%", "65,77"),
    ]
    path = write(tmp_path, DETAILS, *rows)

    report = parse(path)

    assert [row[3] for row in metrics(report)] == [117344.0, 27595520.0, 65.77]
    assert report.facts["number_formats"] == ["comma"]


def test_a_number_that_nothing_decides_is_refused_until_the_user_says(tmp_path: Path) -> None:
    path = write(tmp_path, DETAILS, details_row(0, "gpu__time_duration.sum", "ns", "117.344"))

    with pytest.raises(ReportError, match=r"'117\.344' may be a thousand times more or less.*--number-format"):
        parse(path)

    assert metrics(parse(path, number_format="point"))[0][3] == 117.344
    assert metrics(parse(path, number_format="comma"))[0][3] == 117344.0


def test_a_number_format_that_the_values_contradict_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, DETAILS, details_row(0, "x", "%", "65,77"))

    with pytest.raises(ReportError, match="'65,77' is no number of the format point"):
        parse(path, number_format="point")
    with pytest.raises(ReportError, match="choose one of auto, point, comma"):
        parse(path, number_format="english")


def test_mixed_formats_in_one_table_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, DETAILS, details_row(0, "x", "%", "65,77"), details_row(0, "y", "%", "65.7"))

    with pytest.raises(ReportError, match="mixes decimal points and decimal commas"):
        parse(path)


def test_an_undecided_table_takes_the_format_of_the_other(tmp_path: Path) -> None:
    one, two = details_row(0, "x", "ns", "1.024"), details_row(0, "x", "%", "6,5")
    path = write(tmp_path, DETAILS, one, "==PROF== Report: /x", DETAILS, two)

    report = parse(path)

    assert [row[3] for row in metrics(report)] == [1024.0, 6.5]
    assert len(column(report, "kernel")) == 2  # the same ID in another table is another launch
    assert "2 tables in one file: they may be of several runs" in report.findings


def test_not_available_is_never_zero(tmp_path: Path) -> None:
    values = ["n/a", "nan", "inf", "-inf", "0", "(!) n/a"]
    path = write(tmp_path, DETAILS, *(details_row(0, f"m{i}", "", value) for i, value in enumerate(values)))

    rows = metrics(parse(path))

    assert [row[4] for row in rows] == ["n/a", "nan", "inf", "-inf", "", "(!) n/a"]
    assert [repr(row[3]) for row in rows] == ["nan", "nan", "inf", "-inf", "0.0", "nan"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_encodings_of_windows_shells(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "Größe 12", DETAILS, details_row(0, "Größe", "byte", "12"), encoding=encoding)

    assert recognise(path) == "ncu_csv"
    assert metrics(parse(path)) == [(1, "Größe", "byte", 12.0, "")]


def test_program_output_and_open_quotes_do_not_swallow_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'he said "go',
        DETAILS,
        details_row(0, "a", "", "1"),
        'and "then',
        '"12","an unfinished row of the program"',
        '"13","an open quote of the program',
        *["x"] * 300,
        details_row(1, "b", "", "2", kernel='k<""a"">'),
        "42, the answer",
    )

    report = parse(path)

    assert [row[1] for row in metrics(report)] == ["a", "b"]
    assert column(report, "kernel") == ["k(int, int)", 'k<"a">']
    assert report.findings == ["2 rows that end before their metric's value were left out"]


def test_a_row_whose_quoted_text_breaks_the_line_is_one_row(tmp_path: Path) -> None:
    kernel = 'a kernel\nwith a ""name"", and\nmore'
    path = write(tmp_path, DETAILS, details_row(0, "a", "", "1", kernel=kernel), details_row(1, "b", "", "2"))

    report = parse(path)

    assert column(report, "kernel") == ['a kernel\nwith a "name", and\nmore', "k(int, int)"]
    assert report.findings == []


def test_duplicate_labels_of_a_launch_are_kept_and_said(tmp_path: Path) -> None:
    path = write(
        tmp_path, DETAILS, details_row(0, "a", "%", "1"), details_row(0, "a", "s", "2"), details_row(0, "a", "%", "3")
    )

    report = parse(path)

    assert [row[3] for row in metrics(report)] == [1.0, 2.0, 3.0]
    assert report.findings == ["1 values repeat a section, metric and unit of the same launch and differ"]


def test_two_processes_have_launches_of_their_own(tmp_path: Path) -> None:
    rows = [
        details_row(0, "a", "", "1", pid=7),
        details_row(0, "a", "", "2", pid=8),
        details_row(0, "b", "", "3", pid=7),
    ]

    report = parse(write(tmp_path, DETAILS, *rows))

    assert column(report, "pid") == [7, 8] and report.facts["pids"] == [7, 8]
    assert [(row[0], row[3]) for row in metrics(report)] == [(1, 1.0), (2, 2.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"], "NVreg_RestrictProfilingToAdminUsers=0"),
        (["==ERROR== Failed to open /home/u/app --key=hf_secret"], "ncu profiled nothing: Failed to open …"),
        (["==PROF== Connected to process 7", "==PROF== Disconnected from process 7"], "ncu ran and printed no table"),
        (
            [
                "==PROF== x",
                '"Process ID","Process Name","Kernel Name","Invocations","Metric Name"',
                '"7","p","k","2","m"',
            ],
            "holds summaries",
        ),
    ],
)
def test_output_without_a_table_says_why(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ReportError) as caught:
        parse(write(tmp_path, *lines))

    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_a_header_without_rows_is_said(tmp_path: Path) -> None:
    report = parse(write(tmp_path, DETAILS))

    assert column(report, "kernel") == []
    assert report.findings == ["the table has no rows: no kernel was profiled"]


def test_the_nvtx_columns_of_the_details_page(tmp_path: Path) -> None:
    # The cell of a launch outside of any range is a space.
    header = DETAILS.replace('"Kernel Name"', NVTX_COLUMNS + '"Kernel Name"')
    row = details_row(0, "a", "", "1").replace('"k(int, int)"', '" ","","k(int, int)"')

    report = parse(write(tmp_path, header, row))

    assert column(report, "ranges") == [[]] and column(report, "kernel") == ["k(int, int)"]


def test_a_header_far_behind_the_programs_output_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, *["step"] * 50_000, DETAILS, details_row(0, "a", "", "1"))

    assert recognise(path) == "ncu_csv"
    assert recognise(write(tmp_path, *["step"] * 50_000)) is None


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("", (0, [])),
        ("  ", (0, [])),
        ('9 "<default domain>:a:b:none:none:none:none:none:none"', (9, ["a:b"])),
        ('9  "dom:r:none:none:none:none:none:none"  "dom:s:none:none:none:none:none:none" ', (9, ["dom@r", "dom@s"])),
        ("something else", (0, ["something else"])),
    ],
)
def test_nvtx_cells(cell: str, expected: tuple[int, list[str]]) -> None:
    assert parse_nvtx_cell(cell) == expected


@pytest.mark.parametrize(
    ("text", "proof"),
    [
        ("12", "plain"), ("-12", "plain"), ("1e9", "plain"), ("4,963,609,951.19", "point"), ("27.595.520", "comma"),
        ("27,595,520", "point"), ("65,77", "comma"), ("65.77", "point"), ("117.344", "ambiguous"),
        ("117,344", "ambiguous"), ("1117.344", "point"), ("0.344", "point"), ("0,344", "comma"), ("1.5e+09", "point"),
        ("1.500e3", "point"), ("12 345,5", "comma"), ("1'234.5", "point"), ("1.2.3", "none"), ("1,2,3", "none"),
        ("1.234,567.8", "none"), ("abc", "none"), ("(256, 1, 1)", "none"), ("", "none"), (".5", "point"),
        ("5.", "point"), ("1" * 65, "none"),
    ],
)  # fmt: skip
def test_what_a_value_proves(text: str, proof: str) -> None:
    assert evidence(text) == proof


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        (["1", "2"], "plain"), (["1.024", "2"], "ambiguous"), (["1.024", "2.5"], "point"), (["1.024", "2,5"], "comma"),
        (["2.5", "2,5"], "mixed"), ([], "plain"),
    ],
)  # fmt: skip
def test_what_values_prove_together(texts: list[str], verdict: str) -> None:
    assert decide(texts) == verdict


def test_numbers_in_both_formats() -> None:
    assert parse_number("1,234.5", "point") == 1234.5 and parse_number("1,234.5", "comma") is None
    assert parse_number("1.234,5", "comma") == 1234.5 and parse_number("1.234,5", "point") is None
    assert parse_number("12 345,5", "comma") == 12345.5 and parse_number("text", "point") is None
    assert math.isnan(parse_number("n/a", "point") or 0) and parse_number("-inf", "comma") == -math.inf
