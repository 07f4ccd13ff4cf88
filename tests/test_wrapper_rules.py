"""Who is the culprit: a user's own wrappers, recursion, pools taken at start, objects that outlive their process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leakscope.cli.main import main
from leakscope.cli.options import wrapper_rules
from leakscope.correlate.stacks import Frame
from leakscope.correlate.wrapper_rules import using
from leakscope.correlate.wrappers import is_plumbing
from leakscope.errors import BadInputError
from tests.event_files import EventFile


def attributed(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "leakscope", "attribute", "--json", *map(str, arguments)]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def rules(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def wrapped_leak() -> EventFile:
    """100 kept objects of handle_login, allocated through the site's own xmalloc, which others free."""
    events = EventFile()
    for number in range(100):
        events.keep(number * 0.5, 4096, "main;serve;handle_login;site_xmalloc;malloc")
    return events


@pytest.mark.parametrize("key", ["functions", "modules", "files", "culprits"])
def test_a_rule_of_each_kind_decides(tmp_path: Path, key: str) -> None:
    names = {"functions": "arena_*", "modules": "libarena.so*", "files": "*/pool.py", "culprits": "malloc"}
    frames = {
        "functions": Frame("arena_take", module="/app/server"),
        "modules": Frame("take", module="/app/libarena.so.2"),
        "files": Frame("take", "/app/pool.py", 3, kind="python"),
        "culprits": Frame("malloc", module="/app/server"),
    }
    frame, found = frames[key], wrapper_rules(rules(tmp_path / "w.toml", f'[wrappers]\n{key} = ["{names[key]}"]\n'))

    before = is_plumbing(frame)
    with using(found):
        inside = is_plumbing(frame)

    assert (before, inside) == ((True, False) if key == "culprits" else (False, True))
    assert is_plumbing(frame) == before  # and nothing is left behind


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    with using(wrapper_rules(rules(tmp_path / "w.toml", '[wrappers]\nfunctions = ["pool[int]::get"]\n'))):
        assert is_plumbing(Frame("pool[int]::get")) and not is_plumbing(Frame("pooli::get"))


def test_attribute_passes_over_wrappers_that_the_user_names(tmp_path: Path) -> None:
    path = wrapped_leak().write(tmp_path / "e.csv")
    table = rules(tmp_path / "leakscope.toml", '[layer.host]\nkept = "1MiB"\n[wrappers]\nfunctions = ["site_*"]\n')

    without, found = attributed(path), attributed(path, "--wrappers", table)

    assert without["verdict"]["culprit"]["frame"] == "site_xmalloc"
    assert found["verdict"]["culprit"]["frame"] == "handle_login"
    assert found["verdict"]["kept_bytes"] == without["verdict"]["kept_bytes"] == 409_600


def test_check_takes_them_from_the_file_of_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wrapped_leak().write(tmp_path / "e.csv")
    budgets = '[[site]]\nframes = "handle_login"\nkept = "1MiB"\n'
    table = rules(tmp_path / "leakscope.toml", "\ufeff" + budgets + '[wrappers]\nfunctions = ["site_*"]\n')

    codes, found = [], []
    for more in ([], ["--budget", str(table)]):
        codes.append(main(["check", str(path), "--json", *more]))
        found.append(json.loads(capsys.readouterr().out)["verdict"]["culprit"]["frame"])

    assert codes == [1, 0]  # the budget of the site that asks for it allows it
    assert found == ["site_xmalloc", "handle_login"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("functions = [", "not TOML"),
        ("functions = []", "no table [wrappers]"),
        ("[wrappers]\nframes = []", "has no 'frames'; known are functions, modules, files, culprits"),
        ("[wrappers]\nfunctions = 3", "functions is a list of names"),
        (f'[wrappers]\nfunctions = ["{"a" * 501}"]', "of 1 to 500 characters"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        wrapper_rules(rules(tmp_path / "w.toml", text))

    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_recursion_of_any_depth_is_one_culprit(tmp_path: Path) -> None:
    events = EventFile()
    events.churn("main;serve;request;malloc", 300, 60.0)
    for number in range(120):
        events.keep(number * 0.5, 2048, ";".join(["main", *["visit"] * (1 + number % 12), "node_new", "malloc"]))

    found = attributed(events.write(tmp_path / "e.csv"))

    assert found["verdict"]["verdict"] == "leak"
    assert found["verdict"]["culprit"]["frame"] == "node_new"
    assert found["verdict"]["kept_bytes"] == 120 * 2048 and len(found["findings"]) == 0


def test_a_pool_taken_at_the_start_is_not_ranked_above_growth(tmp_path: Path) -> None:
    events = EventFile()
    events.churn("main;serve;request;malloc", 300, 50.0)
    for number in range(64):
        events.keep(0.01 * number, 16 << 20, "main;start;pool_init;malloc")
    for number in range(100):
        events.keep(1 + number * 0.5, 1000, "main;serve;session_new;malloc")

    found = attributed(events.write(tmp_path / "e.csv"))

    assert found["verdict"]["culprit"]["frame"] == "session_new"
    assert found["verdict"]["kept_bytes"] == 100_000
    assert not any(
        (f["culprit"] or {}).get("frame") == "pool_init" for f in found["findings"] if f["verdict"] == "leak"
    )
