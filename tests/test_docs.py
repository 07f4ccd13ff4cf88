"""Every command line of the documentation runs on prepared files; what needs a host that is not here is parsed by the
real command line, and its reason is in the name of its test. No block is left out without a word."""

from __future__ import annotations

import ast
import os
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import Line, Simple, blocks, documents, form_of, inline_code, name_of
from doc_commands import check_words, differs, parse, run
from doc_files import filled_in, make_inputs
from doc_run import RECORDED, plan, problems_of
from recording import ROOT
from reports_once import reports_once

from leakscope.cli.main import VERBS
from tools.reference.commands import commands

DOCUMENTS = documents()
FOREIGN_OPTIONS = frozenset(
    """--csv --nvtx --call-stack --metrics --set --launch-count --launch-skip --launch-skip-before-match --kernel-name
    --nvtx-include --nvtx-exclude --mode --profile-from-start --range-filter --kernel-id --devices --graph-profiling
    --config-file-path --filter-mode --print-summary --cudabacktrace --cuda-memory-usage --kv-events-config --cgroupns
    --pid --gpus --security-opt --only-keep-debug --perf-basic-prof --help""".split()  # noqa: SIM905
)
"""Options of other tools (ncu, nsys, vLLM, docker, objcopy, node) that running text names."""
OTHER_COMMANDS = ("samples", "benchmarks", "tools", "leakscope/pytest_plugin.py")
"""Where the options of programs that come with leakscope stand."""


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_options_in_running_text_exist(path: Path) -> None:
    known = {name for command in commands() for option in command.options for name in option.names} | FOREIGN_OPTIONS
    problems = []
    for line, text in inline_code(path):
        words = [word for word in shlex.split(text) if word != "…"] if text.startswith("leakscope ") else []
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
    for function, file, line in re.findall(r"([\w.]+)\s+\((?:samples/|…)(service\.py):(\d+)\)", path.read_text()):
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(ast.parse((ROOT / "samples" / file).read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == function.split(".")[-1]
        ]
        if not any(first <= int(line) <= last for first, last in spans):
            problems.append(f"{name_of(path)}: samples/{file}:{line} is no line of {function}")
    assert not problems, "\n".join(problems)


@pytest.mark.skipif("LEAKSCOPE_CASES" not in os.environ, reason="NOT TESTED: LEAKSCOPE_CASES is not set")
def test_the_example_of_liveness_is_what_is_printed() -> None:
    (example,) = [block for block in blocks(ROOT / "docs" / "liveness.md") if block.text.startswith("lmcache_objs")]
    ran = run(Simple(("leakscope", "liveness", "lmcache_objs.jsonl")), Path(os.environ["LEAKSCOPE_CASES"]))
    assert not differs(Line(example.where, "", tuple(example.text.splitlines())), ran.out, exact=True)


@pytest.mark.parametrize(
    "form, text, told",
    [
        ("sh", "leakscope attribute svc.lscope --jason", "No such option: --jason"),
        ("sh", "leakscope attribute nowhere.lscope", "ended with 2, not 0: leakscope: nowhere.lscope"),
        ("sh", "leakscope check run.lscope.tar", "ended with 0, not 1"),
        ("console", "$ leakscope attribute before.lscope\nLEAK  …", "shows\nLEAK"),
        ("console", "$ leakscope attribute svc.lscope\nLEAK … keeps 15,466,496 B", "but prints\nLEAK"),
        ("python", "from leakscope.capture import Recapture", "ImportError"),
        ("sql", "SELECT nothing FROM mem_events", "Referenced column"),
        ("toml", "[layer.gpu]\nkept = 'much'", "kept"),
        ("toml", "[wrappers]\nnames = ['x']", "names"),
        ("json", "{'a': 1}", "JSONDecodeError"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, text: str, told: str
) -> None:
    # given a document with a mistake in the block of line 3
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{form}\n{text}\n```\n")
    monkeypatch.chdir(tmp_path)
    if "run.lscope.tar" in text:  # one that keeps nothing, where the documentation says that it fails
        make_inputs(["main.lscope.tar"], tmp_path)
        (tmp_path / "main.lscope.tar").rename(tmp_path / "run.lscope.tar")
    # when it runs
    (problem,) = problems_of(page, tmp_path)
    # then the mistake is told, and where it is
    assert problem.startswith("page.md:3: ") and told in problem


@pytest.mark.parametrize(
    "words, told",
    [
        ("sudo leakscope record --pit 1", "No such option: --pit"),
        ("kubectl exec leakscope -- leakscope record -p many", "'-p'"),
        ("docker run IMAGE leakscope record -d 0", "'-d'"),
        ("leakscope watch", "no command watch"),
        ("make demmo", "no target demmo"),
        ("sysctl -w kernel.lockdown=none", "say in tests/doc_commands.py"),
    ],
)
def test_what_is_wrong_in_a_command_that_is_not_run(words: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        check_words(words.split())


@pytest.mark.parametrize(
    "said, text, form",
    [
        ("", "leakscope attribute svc.lscope", "sh"),
        ("", "$ make demo\nLEAK …", "console"),
        ("", "leakscope diff A B [--json]", "usage"),
        ("", "LEAK  by nobody", "?"),
        ("bash", "leakscope attribute svc.lscope", "?"),
        ("text", "leakscope attribute svc.lscope", "text"),
    ],
)
def test_forms_of_blocks(said: str, text: str, form: str) -> None:
    assert form_of(said, text) == form
