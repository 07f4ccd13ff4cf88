"""Every command line of the documentation runs on prepared files; what needs a host that is not here is parsed by the
real command line, and its reason is in the name of its test. No block is left out without a word."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from capture_rows import manifest, rows
from doc_blocks import Block, Line, Simple, blocks, documents, inline_code, lines_of, simple_commands
from doc_commands import check_code, check_words, differs, parse, run, why_not_run, written
from doc_files import filled_in, make_inputs
from recording import ROOT
from reports_once import reports_once

from leakscope.capture import Capture
from leakscope.cli.main import VERBS
from leakscope.correlate.wrapper_rules import parse_rules
from leakscope.gate.budgets import parse_budgets
from leakscope.ingest import import_files
from tools.reference.commands import commands

DOCUMENTS = documents()
RECORDED = ("docs/tutorial.md", "samples/README.md")
"""Documents whose recordings are short: they are made."""
ONLY_COMPILED = {
    "docs/pytest.md": "a test for pytest to run: tests/test_pytest_plugin.py",
    "docs/torch.md": "needs torch",
}
"""Documents whose Python is not run, and why."""
FOREIGN_OPTIONS = frozenset(
    """--csv --nvtx --call-stack --metrics --set --launch-count --launch-skip --launch-skip-before-match --kernel-name
    --nvtx-include --nvtx-exclude --mode --profile-from-start --range-filter --kernel-id --devices --graph-profiling
    --config-file-path --filter-mode --print-summary --cudabacktrace --cuda-memory-usage --kv-events-config --cgroupns
    --pid --gpus --security-opt --only-keep-debug --perf-basic-prof --help""".split()  # noqa: SIM905
)
"""Options of other tools (ncu, nsys, vLLM, docker, objcopy, node) that running text names."""
OTHER_COMMANDS = ("samples", "benchmarks", "tools", "leakscope/pytest_plugin.py")
"""Where the options of programs that come with leakscope stand."""
ONLY_BEGINNING = ("leakscope symbolize incident.lscope",)
"""Commands of consoles whose output is an example of another capture: it has to begin so."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def plan(path: Path) -> Iterator[tuple[Line, list[tuple[Simple, str]]]]:
    """The command lines of a document with, for each simple command, why it is not run ('' where it is)."""
    document, missing = name_of(path), set[str]()
    for block in blocks(path):
        for line in lines_of(block) if block.form in ("sh", "console") else ():
            decided = []
            for simple in simple_commands(line):
                why = why_not_run(simple.words, missing, may_record=document in RECORDED)
                missing |= set(written(simple.words)) if why else set()
                decided.append((simple, why))
            yield line, decided


NOT_RUN = [
    pytest.param(simple.words, id=f"{line.where} {why}: {' '.join(simple.words)[:60]}")
    for path in DOCUMENTS
    for line, decided in plan(path)
    for simple, why in decided
    if why
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_block_is_of_a_known_form(path: Path) -> None:
    unknown = [block.where for block in blocks(path) if block.form == "?"]
    assert not unknown, f"say after ``` what these are (text where nothing is typed): {', '.join(unknown)}"


@pytest.mark.parametrize("words", NOT_RUN)
def test_a_command_that_is_not_run_is_at_least_right(words: tuple[str, ...]) -> None:
    check_words(words)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if name_of(path) not in RECORDED], ids=name_of)
def test_a_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with reports_once():
        problems = problems_of(path, tmp_path)
    assert not problems, "\n\n".join(problems)


@pytest.mark.bpf
@pytest.mark.parametrize("name", RECORDED)
def test_a_document_that_records_runs(
    name: str, can_record: None, core: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = problems_of(ROOT / name, tmp_path)
    assert not problems, "\n\n".join(problems)


def problems_of(path: Path, folder: Path) -> list[str]:
    """What is wrong with a document, having run its commands and code in their order where that can be."""
    problems = []
    lines = {(line.where, line.text): decided for line, decided in plan(path)}
    for block in blocks(path):
        if block.form in ("sh", "console"):
            for line in lines_of(block):
                try:
                    run_line(line, lines[line.where, line.text], folder)
                except ValueError as error:
                    problems.append(f"{line.where}: {line.text}\n{error}")
        else:
            try:
                read_block(block, folder)
            except Exception as error:
                problems.append(f"{block.where}: {type(error).__name__}: {error}")
    return problems


def run_line(line: Line, decided: list[tuple[Simple, str]], folder: Path) -> None:
    """Raises ValueError where a command of the line does not do what its document says."""
    printed = ""
    for simple, why in decided:
        if why:
            continue
        make_inputs(list(simple.words), folder)
        if simple.words[1] == "record":
            printed += recorded(simple.words, folder)
        else:
            ran = run(simple, folder)
            printed += "" if simple.into or simple.piped else ran.out + ran.err
    if any(why for _, why in decided):
        return
    if line.shown and line.text.startswith(ONLY_BEGINNING):
        line = replace(line, shown=line.shown[:1])
    if difference := differs(line, printed):
        raise ValueError(difference)


def recorded(words: Sequence[str], folder: Path) -> str:
    """Run a recording by itself, as a user does; `python` is that of the tests."""
    command = [sys.executable, "-m", *({"python": sys.executable}.get(word, word) for word in words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    check_code(words, done.returncode, done.stderr)
    return done.stdout + done.stderr


def read_block(block: Block, folder: Path) -> None:
    """Raises what the reader of the block's language raises: Python is run, SQL asked, a file read by who reads it."""
    where = name_of(block.path)
    if where == "docs/tutorial.md" and block.form == "python":
        assert block.text in (ROOT / "samples" / "service.py").read_text()
    elif block.form == "python":
        code = compile(block.text, block.where, "exec")
        if where not in ONLY_COMPILED:
            exec(code, given_names(block, folder))
    elif block.form == "sql":
        make_inputs(["svc.lscope"], folder)
        with Capture.open(folder / "svc.lscope").connect() as con:
            con.execute(block.text).fetchall()
    elif block.form == "toml":
        found = tomllib.loads(block.text)
        if found.keys() & {"layer", "site", "counter"}:
            assert parse_budgets(block.text, block.where)
        if "wrappers" in found:
            assert parse_rules(block.text, block.where)
    elif block.form == "json":
        json.loads(block.text)
    elif block.form == "ini":
        configparser.ConfigParser(strict=False).read_string(block.text)
    elif block.form == "yaml":
        yaml = pytest.importorskip("yaml")
        assert all(yaml.safe_load_all(block.text))


def given_names(block: Block, folder: Path) -> dict[str, object]:
    """Names that a block of Python takes as given, and the files that it names."""
    if "CaptureWriter.create" in block.text:
        shutil.rmtree(folder / "run.lscope", ignore_errors=True)
        return {"Path": Path, "manifest": manifest(), "table": rows("samples", 3)}
    make_inputs(["", *re.findall(r'"([\w.-]+)"', block.text)], folder)
    if "Capture.open(path)" in block.text:
        make_inputs(["cache.jsonl"], folder)
        import_files([folder / "cache.jsonl"], folder / "cache.lscope")
    return {"path": folder / "cache.lscope", "node": 0}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_options_in_running_text_exist(path: Path) -> None:
    known = {name for command in commands() for option in command.options for name in option.names} | FOREIGN_OPTIONS
    problems = []
    for line, text in inline_code(path):
        words = [word for word in text.split() if word != "…"]
        if len(words) > 2 and words[0] == "leakscope" and words[1] in VERBS and "COMMAND" not in words:
            try:
                parse(filled_in(tuple(words[1:])))
            except ValueError as error:
                if "Missing" not in str(error):  # a mention of an option, without what the command needs
                    problems.append(f"{name_of(path)}:{line}: {text}: {error}")
        elif (found := re.match(r"--[a-z][a-z-]+", text)) and found[0] not in known | own_options():
            problems.append(f"{name_of(path)}:{line}: no command has {found[0]}")
    assert not problems, "\n".join(problems)


@cache
def own_options() -> frozenset[str]:
    """Options of the samples, benchmarks and tools, and of the plugin of pytest."""
    places = [ROOT / name for name in OTHER_COMMANDS]
    files = [file for place in places for file in (place.rglob("*.*") if place.is_dir() else [place])]
    sources = [file.read_text() for file in files if file.suffix in (".py", ".c", ".h")]
    return frozenset(f"--{name}" for source in sources for name in re.findall(r'"(?:--)?([a-z][a-z-]+)"', source))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_usage_names_options_that_exist(path: Path) -> None:
    by_name = {command.name: command for command in commands()}
    problems = []
    for block in blocks(path):
        if block.form != "usage":
            continue
        for text in re.split(r"^(?=leakscope )", block.text, flags=re.MULTILINE)[1:]:
            words = text.split("#")[0].split()
            command = by_name.get(" ".join(words[1:3])) or by_name.get(words[1])
            if command is None:
                problems.append(f"{block.where}: leakscope has no command {words[1]}")
                continue
            options = {name for option in command.options for name in option.names}
            for name in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text.split("#")[0]):
                if name not in options:
                    problems.append(f"{block.where}: leakscope {command.name} has no {name}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lines_of_the_samples_are_where_documents_say(path: Path) -> None:
    """`Service.f (samples/service.py:79)` has to be a line of that function."""
    problems = []
    for function, file, line in re.findall(r"([\w.]+)\s+\((samples/\w+\.py):(\d+)\)", path.read_text()):
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == function.split(".")[-1]
        ]
        if not any(first <= int(line) <= last for first, last in spans):
            problems.append(f"{name_of(path)}: {file}:{line} is no line of {function}")
    assert not problems, "\n".join(problems)
