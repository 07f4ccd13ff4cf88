"""Runs the blocks of a document in their order: commands, Python, SQL; files are parsed by who reads them."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from capture_rows import manifest, rows
from doc_blocks import Block, Line, Simple, blocks, lines_of, name_of, simple_commands
from doc_commands import check_code, differs, run, why_not_run, written
from doc_files import filled_in, make_inputs
from recording import ROOT

from leakscope.capture import Capture
from leakscope.correlate.wrapper_rules import parse_rules
from leakscope.gate.budgets import parse_budgets
from leakscope.ingest import import_files

RECORDED = ("docs/tutorial.md", "samples/README.md")
"""Documents whose recordings are short: they are made."""
ONLY_COMPILED = {
    "docs/pytest.md": "a test for pytest to run: tests/test_pytest_plugin.py",
    "docs/torch.md": "needs torch",
}
"""Documents whose Python is not run, and why."""
ONLY_BEGINNING = ("leakscope symbolize incident.lscope",)
"""Commands of consoles whose output is an example of another capture: it has to begin so."""


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
        make_inputs(filled_in(simple.words), folder)
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
