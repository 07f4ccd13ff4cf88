"""Links of the documentation lead somewhere, its pages are reachable, the site builds, the reference is that of the
code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import Simple, documents, inline_code, name_of
from doc_commands import run
from doc_files import make_inputs
from recording import ROOT

from leakscope.cli.main import VERBS, main
from leakscope.model.words import LOSS_KINDS
from tools.reference import FOLDER
from tools.reference import pages as made_pages
from tools.reference.commands import commands
from tools.reference.json_keys import LEFT_OUT, Key
from tools.reference.json_page import documented

DOCUMENTS = documents()
pages = cache(made_pages)


def links(path: Path) -> Iterator[tuple[int, str]]:
    """(line, target) of every link and picture in running text."""
    text = re.sub(r"^\s*```.*?^\s*```", lambda found: "\n" * found[0].count("\n"), path.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    for found in re.finditer(r"\]\(([^)\s]+)\)", text):
        yield text.count("\n", 0, found.start()) + 1, found[1]


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as forges make them: lower case, without punctuation, blanks as hyphens."""
    found: set[str] = set()
    text = re.sub(r"^\s*```.*?^\s*```", "", path.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken_links(path: Path) -> list[str]:
    """Links of a document that lead to no file or heading of the repository."""
    broken = []
    for line, target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if not to.exists():
            broken.append(f"{name_of(path)}:{line}: there is no {target}")
        elif anchor and anchor not in anchors(to):
            broken.append(f"{name_of(path)}:{line}: {file or 'this page'} has no heading #{anchor}")
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_links_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What is `lost`?\n\n[a](#what-is-lost) [b](#lost) `[c](none.md)`\n[d](none.md)\n\n## What is lost\n"
    )
    assert anchors(page) == {"what-is-lost", "what-is-lost-1"}
    assert broken_links(page) == ["page.md:3: this page has no heading #lost", "page.md:4: there is no none.md"]


def test_every_page_is_linked_from_the_index_and_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages_there = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"index.md"}
    linked = {target.split("#")[0] for _, target in links(docs / "index.md")}
    assert not pages_there - linked, f"docs/index.md links to no {', '.join(sorted(pages_there - linked))}"
    navigation = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert not pages_there - navigation, f"mkdocs.yml has no {', '.join(sorted(pages_there - navigation))}"


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="NOT TESTED: no mkdocs (pip install 'leakscope[docs]')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    site = list(tmp_path.rglob("*.html"))
    assert len(site) > len(list((ROOT / "docs").rglob("*.md")))
    fetched = re.compile(r"""<(?:script|img|iframe|link)[^>]*\s(?:src|href)=["'](?:https?:)?//[^"']*""")
    assert not [f"{page.name}: {found}" for page in site for found in fetched.findall(page.read_text())]


def test_the_reference_is_that_of_the_code() -> None:
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    assert not stale, f"docs/reference/{', '.join(stale)}: not what the code says; run: make reference"


def test_the_reference_is_the_same_on_every_terminal() -> None:
    code = "import json; from tools.reference import pages; print(json.dumps(pages()))"
    other = {
        "COLUMNS": "40",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PYTHONHASHSEED": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC+5",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, **other}
    )
    assert json.loads(done.stdout) == pages()


@pytest.mark.parametrize("verb", VERBS)
def test_the_reference_has_the_options_of_help(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`--help` is made by typer, the reference by ours: they have to tell the same options."""
    monkeypatch.setenv("COLUMNS", "200")
    for command in [one for one in commands() if one.name.split()[0] == verb]:
        capsys.readouterr()
        assert main([*command.name.split(), "--help"]) == 0
        told = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
        names = {name for line in told for name in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)} - {"-h", "--help"}
        assert names == {name for option in command.options for name in option.names}, command.name


def test_every_loss_is_explained() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "losses.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(LOSS_KINDS)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What commands print as JSON, by its heading in the reference."""
    folder = tmp_path_factory.mktemp("json")
    asked = {
        "leakscope-report/1": "leakscope attribute svc.lscope --json",
        "gate": "leakscope check run.lscope.tar --baseline before.lscope --json",
        "soak": "leakscope soak --replay samples.csv --json",
        "leakscope-diff/1": "leakscope diff before.lscope svc.lscope --json",
        "leakscope-liveness/1": "leakscope liveness cache.jsonl --why block-18 --json",
    }
    found = {}
    for heading, line in asked.items():
        make_inputs(line.split(), folder)
        found[heading] = json.loads(run(Simple(tuple(line.split())), folder).out)
    return found


HEADINGS = {
    "leakscope-report/1": ("leakscope-report/1", None),
    "gate": ("gate", "gate"),
    "soak": ("soak", "soak"),
    "leakscope-diff/1": ("leakscope-diff/1", None),
    "leakscope-liveness/1": ("leakscope-liveness/1", None),
}
"""Of each object: its heading, and its key in what is printed (None: the whole)."""


@pytest.mark.parametrize("name", HEADINGS)
def test_the_reference_has_every_key_that_is_printed(name: str, printed: dict[str, Any]) -> None:
    heading, key = HEADINGS[name]
    pages_of = documented()
    value = printed[name] if key is None else printed[name][key]
    assert not list(undocumented(value, heading, pages_of))
    if name in ("leakscope-report/1", "leakscope-diff/1"):
        assert {one.name.split(".")[0] for one in pages_of[heading] if LEFT_OUT not in one.meaning} <= value.keys()


def undocumented(value: Any, heading: str, pages_of: dict[str, list[Key]]) -> Iterator[str]:
    """Keys of an object, and of those within it, that the page has not under the object's heading."""
    known = {key.name.split(".")[0]: key for key in pages_of[heading]}
    for name, inner in value.items():
        if heading == "Row" and name in ("count", "bytes", "ns"):
            continue
        if name not in known:
            yield f"{heading}: {name}"
            continue
        within = re.search(r"\[(\w+)\]\(#", known[name].kind)
        for one in inner if isinstance(inner, list) else [inner]:
            if within and isinstance(one, dict):
                yield from undocumented(one, within[1], pages_of)


def test_the_makefile_targets_that_documents_name_exist() -> None:
    rules = (ROOT / "Makefile").read_text()
    named = {
        found[1] for path in DOCUMENTS for _, text in inline_code(path) if (found := re.match(r"make ([a-z-]+)$", text))
    }
    assert named
    assert not {target for target in named if not re.search(rf"^{target}:", rules, re.MULTILINE)}
