"""What becomes of a command line of the documentation: it is run on prepared files, or parsed and told why not run."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import typer
from doc_blocks import Line, Simple
from doc_files import MAKERS, OPTIONS_OF_OUTPUT, filled_in
from recording import ROOT

from leakscope.cli import main as cli
from tools.reference.commands import exit_codes_of

WRAPPERS = {
    "sudo": "needs a user who may become root",
    "docker": "needs Docker",
    "kubectl": "needs Kubernetes",
}
"""Programs that run leakscope elsewhere, and why they are not run here. The command line in them is parsed."""
FOREIGN = {
    "apt-get": "installs packages",
    "dnf": "installs packages",
    "pip": "installs packages",
    "git": "needs a network",
    "cd": "changes the folder",
    ".": "changes the shell",
    "mount": "changes the host",
    "go": "another tool, which opens what leakscope wrote",
    "flamegraph.pl": "another tool, which opens what leakscope wrote",
    "nsys": "another tool, which needs a GPU",
    "while": "a loop of the shell",
}
"""Programs that are not ours, and why they are not run."""
OURS = re.compile(r"(.*/)?leakscope|\$\(command -v leakscope\)")
UNKNOWN = "an unknown program"
UNTIL_ENDED = frozenset({"serve"})
"""Verbs that run until somebody ends them."""
EXIT_CODES = {
    "leakscope check run.lscope.tar": 1,  # the leaking version against the base: docs/check.md
    "leakscope check leaky.lscope": 1,  # the same in docs/tutorial.md
}
"""Exit codes of commands that do not end with 0, by how they begin."""

PLANTED = frozenset({"15,466,496", "15466496", "5,046,272"})
"""Figures of consoles that are planted, so that they have to be exact; other figures differ from run to run."""


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed on both streams."""

    code: int
    out: str
    err: str


def program_of(words: Sequence[str]) -> str:
    """The name of the program of a command, without its folder."""
    return words[0].rsplit("/", 1)[-1]


def why_not_run(words: Sequence[str], missing: Collection[str] = (), *, may_record: bool = False) -> str:
    """Why a simple command is not run; '' where it is. ``missing``: what commands before it would have written."""
    program = program_of(words)
    if program in WRAPPERS:
        return WRAPPERS[program]
    if program == "make":
        return "a target of the Makefile"
    if program in FOREIGN:
        return FOREIGN[program]
    if program != "leakscope":
        return UNKNOWN
    verb = words[1] if len(words) > 1 else ""
    if verb in ("record", "soak") and "--replay" not in words:
        return "" if may_record else "records"
    if verb == "doctor":
        return "tells of this host"
    if verb in UNTIL_ENDED:
        return "runs until it is ended"
    if any(re.match(r"\w+://", word) for word in words[2:]):
        return "needs a live service"
    if any(word in missing and word not in MAKERS for word in words):
        return "reads what a command above would have written"
    return ""


def written(words: Sequence[str]) -> list[str]:
    """The files that a command is told to write."""
    return [word for before, word in pairwise(words) if before in OPTIONS_OF_OUTPUT]


def check_words(words: Sequence[str]) -> None:
    """Raise ValueError where a command that is not run could not be: an option, a value or a target that is not there.

    Of a wrapper, the command of leakscope in it is looked at; what is in the way of foreign programs is theirs.
    """
    if why_not_run(words) == UNKNOWN:
        raise ValueError(f"{words[0]}: say in tests/doc_commands.py what becomes of it")
    if program_of(words) == "make":
        _check_targets(words[1:])
    if program_of(words) in FOREIGN or program_of(words) == "make":
        return
    if program_of(words) == "kubectl":  # what runs in the pod stands behind --
        words = words[words.index("--") + 1 :] if "--" in words else ()
    ends = [at for at, word in enumerate(words) if OURS.fullmatch(word)]
    if ends:
        parse(filled_in(tuple(words[ends[0] + 1 :])))


def parse(words: Sequence[str]) -> None:
    """Parse a command line as leakscope does, without running it. Raises ValueError with the parser's own words."""
    verb, *rest = words
    if verb not in cli.VERBS:
        if verb in ("--help", "-h", "--version"):
            return
        raise ValueError(f"leakscope has no command {verb}")
    command = typer.main.get_command(cli._app(verb)).commands[verb]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        name, *rest = rest
        if name not in command.commands:
            raise ValueError(f"leakscope {verb} has no command {name}")
        command = command.commands[name]
    try:
        command.make_context(f"leakscope {verb}", list(rest))
    except (cli.USAGE_ERROR, cli.LeakscopeError) as error:
        raise ValueError(getattr(error, "format_message", error.__str__)()) from None


def run(simple: Simple, folder: Path) -> Ran:
    """Run one command of leakscope in a folder and in this process; its output goes where the line says.

    Raises ValueError where it does not end with the code that is documented.
    """
    words = filled_in(simple.words)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"  # paths of the tests are long, and a line that is broken within a word is no match
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(words[1:])
    finally:
        os.chdir(before)
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    ran = Ran(code, *(stream.buffer.getvalue().decode(errors="replace") for stream in (out, err)))  # type: ignore[attr-defined]
    if simple.into:
        (folder / simple.into).write_text(ran.out)
    check_code(simple.words, code, ran.err)
    return ran


def check_code(words: Sequence[str], code: int, err: str) -> None:
    """Raise ValueError where a command ended with another code than its page and the reference say."""
    line = " ".join(words)
    wanted = next((wanted for begin, wanted in EXIT_CODES.items() if line.startswith(begin)), 0)
    if code != wanted:
        raise ValueError(f"ended with {code}, not {wanted}: {err.strip()}")
    name = " ".join(words[1:3]) if words[1] == "cache" else words[1]
    if code not in exit_codes_of(name):
        raise ValueError(f"ended with {code}, which docs/reference/exit-codes.md does not say of {name}")


def differs(line: Line, printed: str, *, exact: bool = False) -> str:
    """How what a console shows differs from what was printed; '' where it does not.

    It has to begin as what is shown. ``…`` stands for anything, numbers for any numbers (but for planted ones, and not
    where ``exact``), runs of white space for one blank.
    """
    shown = "\n".join(line.shown or ()).strip()
    if not shown:
        return ""
    of = _exact if exact else _loose
    pattern = ".*?".join(of(part) for part in shown.split("…"))
    if re.match(pattern, " ".join(printed.split()), re.DOTALL):
        return ""
    return f"shows\n{shown}\nbut prints\n{printed.strip()}"


def _exact(text: str) -> str:
    return re.escape(" ".join(text.split()))


def _loose(text: str) -> str:
    """A pattern for a text in which numbers may differ."""
    words = re.split(r"(\d[\d,.]*)", " ".join(text.split()))
    return "".join(r"\d[\d,.]*" if at % 2 and word not in PLANTED else re.escape(word) for at, word in enumerate(words))


def _check_targets(words: Sequence[str]) -> None:
    folder, targets = ROOT, [word for word in words if "=" not in word]
    if targets[:1] == ["-C"]:
        folder, targets = ROOT / targets[1], targets[2:]
    rules = (folder / "Makefile").read_text()
    for target in targets:
        if not re.search(rf"^{re.escape(target)}:", rules, re.MULTILINE):
            raise ValueError(f"{folder / 'Makefile'} has no target {target}")
