"""Fenced blocks and command lines of the documentation: what the tests of the documentation share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recording import ROOT

FORMS = ("sh", "console", "usage", "text", "python", "toml", "yaml", "ini", "json", "sql")
"""Forms of blocks. sh: commands; console: commands behind ``$ `` and what they print; usage: the options of a command;
text: anything that is not typed."""
PROGRAMS = ("leakscope", "make", "sudo", "docker", "kubectl", "apt-get", "dnf", "pip")
"""A block without a form is one of commands where every line begins with one of these."""
OPERATORS = frozenset({"&&", "||", ";", "|"})
LOOPS = ("while", "for")
ELIDED = "…"


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its fence."""

    path: Path
    line: int
    form: str
    text: str

    @property
    def where(self) -> str:
        """``docs/check.md:3``."""
        return f"{name_of(self.path)}:{self.line}"


@dataclass(frozen=True)
class Line:
    """One command line: its text, and, of a console, what is shown below it."""

    where: str
    text: str
    shown: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Simple:
    """One simple command of a line: words without comments, redirection target ('' = none), and whether its output goes
    into a pipe."""

    words: tuple[str, ...]
    into: str = ""
    piped: bool = False


def name_of(path: Path) -> str:
    """The name of a document in the repository."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def documents() -> list[Path]:
    """Every Markdown file of the repository that is read by users."""
    others = [ROOT / name for name in ("README.md", "CHANGELOG.md", "samples/README.md", "tests/trees/README.md")]
    return [*sorted((ROOT / "docs").rglob("*.md")), *others]


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a document, with the form of each ('?' where it cannot be told)."""
    fence, form, start, lines = "", "", 0, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        opened = re.match(r"\s*(```+|~~~+)\s*(.*)", line)
        if not fence and opened:
            fence, form, start, lines = opened[1], opened[2].strip(), number, []
        elif fence and line.strip() == fence:
            text = "\n".join(lines)
            yield Block(path, start, form_of(form, text), text)
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"{path}:{start}: the block has no end"


def form_of(said: str, text: str) -> str:
    """The form of a block: what its fence says, where that is known; of one that says nothing, by its content."""
    if said in ("", "sh") and re.search(r"^leakscope .*(\[-|\[options\])", text, re.MULTILINE):
        return "usage"
    if said:
        return said if said in FORMS else "?"
    if text.startswith("$ "):
        return "console"
    commands = [line for line in _joined(text) if line.strip() and not line.startswith("#")]
    return "sh" if commands and all(line.split()[0] in PROGRAMS for line in commands) else "?"


def lines_of(block: Block) -> Iterator[Line]:
    """The command lines of a block of form sh or console."""
    if block.form == "sh":
        for text in _joined(block.text):
            if text.strip() and not text.lstrip().startswith("#"):
                yield Line(block.where, text)
        return
    command, shown = "", []
    for text in block.text.splitlines():
        if command.endswith("\\"):
            command = f"{command[:-1].rstrip()} {text.strip()}"
        elif text.startswith("$ "):
            if command:
                yield Line(block.where, command, tuple(shown))
            command, shown = text[2:], []
        else:
            shown.append(text)
    yield Line(block.where, command, tuple(shown))


def simple_commands(line: Line) -> list[Simple]:
    """The simple commands of a line, in their order. Words that stand for something left out (…) are dropped."""
    lexer = shlex.shlex(line.text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[Simple] = []
    words: list[str] = []
    into = ""
    tokens = [*lexer, ";"]
    if tokens[0] in LOOPS:
        return [Simple(tuple(tokens))]
    for position, token in enumerate(tokens):
        if token in OPERATORS:
            if words:
                found.append(Simple(tuple(words), into, piped=token == "|"))
            words, into = [], ""
        elif token in (">", ">>"):
            into = tokens[position + 1]
        elif token != ELIDED and not (position and tokens[position - 1] in (">", ">>")):
            words.append(token)
    return found


def inline_code(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of code in running text."""
    text = path.read_text(encoding="utf-8")
    without_blocks = re.sub(
        r"^\s*(```+|~~~+).*?^\s*\1", lambda found: "\n" * found[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
    )
    for found in re.finditer(r"(`+)([^`].*?)\1(?!`)", without_blocks, re.DOTALL):
        yield without_blocks.count("\n", 0, found.start()) + 1, " ".join(found[2].split())


def _joined(text: str) -> Iterator[str]:
    """Lines with those that continue them: behind a backslash, or inside of quotes."""
    whole = ""
    for line in text.splitlines():
        whole = f"{whole}\n{line}" if whole else line
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip()
            continue
        try:
            shlex.split(whole, comments=True)
        except ValueError:
            continue
        yield whole
        whole = ""
    assert not whole, f"a quotation without an end: {whole}"
