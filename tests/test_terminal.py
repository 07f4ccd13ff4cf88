"""How a report looks on a terminal: pinned at two widths, one screen first, harmless whatever its names are."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from rich.cells import cell_len
from rich.console import Console
from snapshots_on_disk import matches
from terminal_reports import (
    ENDLESS,
    EVIL,
    WIDE,
    broken_down,
    cannot_tell,
    full_report,
    hostile,
    imported,
    no_leak,
    sampled,
    three_layers,
)

from leakscope.model.breakdown import BY
from leakscope.model.results import Report, Row
from leakscope.report.cells import Column, bare_frame, cut, in_columns, packed, short_frame, wrapped
from leakscope.report.console import PIPE_WIDTH, ReportConsole
from leakscope.report.terminal import SCREEN_LINES, plain_lines, print_report

WIDTHS = (80, 140)
REPORTS: dict[str, Callable[[], Report]] = {
    "every_part": full_report,
    "three_layers": three_layers,
    "no_leak": no_leak,
    "cannot_tell": cannot_tell,
    "sampled": sampled,
    "hostile": hostile,
    "imported": imported,
    **{f"by_{by}": partial(broken_down, by) for by in BY},
}


def body(lines: list[str]) -> list[str]:
    """Lines but the commands to copy, which are never cut."""
    return [line for line in lines if not line.startswith("next:")]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_a_screen_looks_as_pinned(name: str, width: int) -> None:
    lines = list(plain_lines(REPORTS[name](), width))
    matches(f"terminal/{name}_{width}", lines)
    assert max(cell_len(line) for line in body(lines)) <= width
    assert len(lines) <= SCREEN_LINES or name.startswith("by_")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["three_layers", "hostile"])
def test_all_of_it_looks_as_pinned(name: str, width: int) -> None:
    lines = list(plain_lines(REPORTS[name](), width, top=20))
    matches(f"terminal/{name}_whole_{width}", lines)
    assert max(cell_len(line) for line in body(lines)) <= width


def test_a_screen_says_what_it_has_no_room_for_and_top_shows_it() -> None:
    screen = "\n".join(plain_lines(three_layers(), 80))
    assert "\nmore with --top 20: " in screen
    assert "1. gpu: " in screen and "2. host: " in screen and "3. kernel: " in screen
    assert "4. kernel: second_socket_user" not in screen and "… and 1 more finding: second_socket_user" in screen
    whole = "\n".join(plain_lines(three_layers(), 80, top=20))
    assert "more with --top" not in whole
    assert "4. kernel: second_socket_user" in whole and "reconciliation" in whole and "cache_14.fill" in whole


@pytest.mark.parametrize("width", WIDTHS)
def test_a_screen_stays_a_screen_whatever_there_is_to_say(width: int) -> None:
    report = three_layers()
    said = tuple(f"reason number {n} of a great many that somebody thought of" for n in range(500))
    report.layers = [replace(layer, source=source) for source in range(40) for layer in report.layers]
    report.inputs = [{"path": f"capture_{n}.lscope", "problems": ["it is incomplete"]} for n in range(40)]
    report.findings = [
        replace(finding, verdict="inconclusive", reasons=said, missing=said) for finding in report.findings
    ]
    report.losses = [Row(f"probe {n}", f"kind {n} of a long name", n, "count") for n in range(500)]
    lines = list(plain_lines(report, width))
    assert len(lines) <= SCREEN_LINES
    assert [line[:3] for line in lines if line[:2] in ("1.", "2.", "3.")] == ["1. ", "2. ", "3. "]
    assert any("more lines with --top 20" in line for line in lines) and lines[-1].startswith("next: ")
    assert max(cell_len(line) for line in body(lines)) <= width


def test_top_limits_the_other_sites() -> None:
    assert not any("cache_fill" in line for line in plain_lines(full_report(), 80, top=0))
    assert any("cache_fill" in line for line in plain_lines(full_report(), 80, top=1))


@pytest.mark.parametrize("top", [None, 20])
@pytest.mark.parametrize("width", [20, 80, 140])
def test_control_characters_of_a_capture_never_reach_the_terminal(width: int, top: int | None) -> None:
    for report in (hostile(), *(broken_down(by) for by in BY)):
        if report.breakdown:
            report.breakdown.groups = [g.__class__(**(vars(g) | {"name": EVIL})) for g in report.breakdown.groups]
        text = "\n".join(plain_lines(report, width, top))
        assert not {"\x1b", "\r", "\u202e"} & set(text)
        assert not any(line.startswith("LEAK") for line in text.split("\n")[1:])
        assert width == 20 or r"evil\x1b[2J" in text


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(**options: object) -> str:
        out = io.StringIO()
        print_report(Console(file=out, width=100, highlight=False, **options), full_report())  # type: ignore[arg-type]
        return out.getvalue()

    assert "\x1b[" not in printed()
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31mLEAK" in printed(force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in printed(force_terminal=True)


def test_a_pipe_gets_lines_that_grep_can_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_report(ReportConsole(), three_layers())
    lines = capsys.readouterr().out.splitlines()
    assert PIPE_WIDTH == 200 and max(map(len, body(lines))) > 140
    (chain,) = [line for line in lines if "→" in line]
    assert "range request → range kv_block → Service.handle (…/app.py:120) → Service.kv_block_alloc" in chain
    assert not {"\x1b", "│", "─", "┃", "━"} & set("".join(lines))
    monkeypatch.setenv("COLUMNS", "80")
    print_report(ReportConsole(), three_layers())
    assert max(map(len, body(capsys.readouterr().out.splitlines()))) <= 80


def test_a_stream_without_utf_8_gets_all_that_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console = ReportConsole()
    print_report(console, three_layers())
    console.file.flush()
    text = raw.getvalue().decode()
    assert text.startswith("LEAK  Service.kv_block_alloc (?/blocks.py:79) keeps") and text.count("\nnext: ") == 3


def test_a_breakdown_shows_so_many_groups_a_layer_and_the_sum_of_the_rest() -> None:
    rows = [line.split() for line in plain_lines(broken_down("cache"), 140, top=3) if line.startswith("kernel ")]
    shown = rows[1:]  # the first is the layer's
    assert [row[1] for row in shown] == ["small_0", "small_1", "small_2", "…"]
    assert shown[1][2] == "~4.0"  # a part of it is known by sampled stacks
    rest = sum(4096 - n for n in range(3, 20))
    assert shown[3][1:6] == ["…", "18", "more", f"{rest / 1024:.1f}", "KiB"]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("short", 10, "short"),
        ("a_very_long_name", 9, "a_ve…name"),
        ("a_very_long_name", 2, "…"),
        ("模型服务分配显存", 9, "模型…显存"),
        ("模型服务分配显存", 8, "模型…存"),
        ("a\x1bb", 10, "a\\x1bb"),
        ("z" + "\u0301" * 999, 10, "z\u0301\u0301\u0301"),
    ],
)
def test_text_is_cut_in_its_middle(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown
    assert cell_len(shown) <= width


@pytest.mark.parametrize(
    ("frame", "width", "shown"),
    [
        ("f (a.py:1)", None, "f (a.py:1)"),
        ("f (/srv/inference/releases/2026-11-30/blocks.py:79)", None, "f (…/blocks.py:79)"),
        ("f (/srv/app/blocks.py:79)", 20, "f (…/blocks.py:79)"),
        ("Service.response_buffer_map (/srv/app/blocks.py:79)", 30, "Service…fer_map (blocks.py:79)"),
        ("no_place_but_quite_long", 11, "no_pl…_long"),
        ("f (a b (c).py)", 30, "f (a b (c).py)"),
    ],
)
def test_frames_keep_their_line_longest(frame: str, width: int | None, shown: str) -> None:
    assert short_frame(frame, width) == shown


def test_frames_without_folders() -> None:
    assert bare_frame("f (/srv/app/blocks.py:79)") == "f (blocks.py:79)"
    assert bare_frame("kfree") == "kfree"
    assert len(short_frame(ENDLESS, 60)) <= 60 and short_frame(ENDLESS, 60).endswith("(x.py:1)")


def test_lines_break_between_words_and_behind_joints() -> None:
    assert wrapped("it keeps 1.8 MiB of 模型服务分配", 12) == ["it keeps", "1.8 MiB of", "模型服务分配"]
    assert wrapped("abcdefgh", 3) == ["abc", "def", "gh"]
    assert packed(["aa", "bb", "cc"], 7, " → ") == ["aa →", "bb →", "cc"]
    assert packed(["aa", "bb", "cc"], 9, " → ") == ["aa → bb →", "cc"]
    assert packed([], 9, "; ") == []


def test_columns_are_cut_to_the_width_and_numbers_never_are() -> None:
    columns = [Column("name", least=8), Column("of", optional=1), Column("bytes", True)]
    rows = [[WIDE, "gpu", "1,234,567"], ["b", "kernel", "8"]]
    wide = [line.plain for line in in_columns(columns, rows, 200)]
    assert wide[2].split() == ["b", "kernel", "8"] and WIDE in wide[1]
    narrow = [line.plain for line in in_columns(columns, rows, 20)]
    assert max(map(cell_len, narrow)) <= 20
    assert (
        narrow[0].split() == ["name", "bytes"] and narrow[1].endswith(" 1,234,567") and narrow[2].split() == ["b", "8"]
    )
