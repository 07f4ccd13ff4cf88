"""Suppressions in the syntax of LeakSanitizer: ``leak:PATTERN`` a line, and a reason for each.

A pattern is searched in the names of a stack's functions, files and modules (and in the name of its slab cache);
``*`` stands for any text, ``^`` at its begin and ``$`` at its end anchor it, as in LeakSanitizer
(https://clang.llvm.org/docs/AddressSanitizer.html, "Suppressing memory leaks"). Beyond it, a reason is required: in
comment lines right above (for all lines up to the next blank one), or after `` # `` on the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leakscope.errors import BadInputError
from leakscope.model.frames import parsed_frame
from leakscope.model.results import Site, Verdict

MAX_BYTES = 1 << 20
MAX_LINES = 10_000
MAX_PATTERN = 1000
_LINE = re.compile(r"([A-Za-z_]+):(.*?)(?:\s+#\s*(.*))?")


@dataclass(frozen=True)
class Suppression:
    """One line of a file of suppressions."""

    pattern: str
    reason: str
    path: str
    line: int

    def matches(self, names: Iterable[str]) -> bool:
        """Whether the pattern is found in one of ``names``."""
        return any(found_in(self.pattern, name) for name in names)


def parse_suppressions(text: str, path: str) -> list[Suppression]:
    """The suppressions of a file's text. Raises BadInputError, which names the line, for anything else in it."""
    if len(text) > MAX_BYTES:
        raise BadInputError(f"{path}: longer than {MAX_BYTES:,} characters; no file of suppressions is")
    found: list[Suppression] = []
    comment: list[str] = []
    open_block = False  # the comment above still stands for the lines that follow
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped:
            comment, open_block = [], False
        elif stripped.startswith("#"):
            comment = [*(comment if not open_block else []), stripped.lstrip("#").strip()]
            open_block = False
        else:
            found.append(_parsed(stripped, " ".join(filter(None, comment)), path, number))
            open_block = True
        if len(found) > MAX_LINES:
            raise BadInputError(f"{path}: more than {MAX_LINES:,} suppressions")
    return found


def _parsed(line: str, above: str, path: str, number: int) -> Suppression:
    match = _LINE.fullmatch(line)
    if match is None:
        raise BadInputError(f"{path}:{number}: not a suppression; write leak:PATTERN")
    kind, pattern, reason = match[1], match[2].strip(), (match[3] or above).strip()
    if kind != "leak":
        raise BadInputError(f"{path}:{number}: {kind}: is of another sanitizer; only leak: is known here")
    if not pattern.strip("*^$"):
        raise BadInputError(f"{path}:{number}: the pattern {pattern or '(none)'} would suppress everything")
    if len(pattern) > MAX_PATTERN:
        raise BadInputError(f"{path}:{number}: the pattern is longer than {MAX_PATTERN:,} characters")
    if not reason:
        raise BadInputError(
            f"{path}:{number}: leak:{pattern} has no reason; say why in a comment above it, or after ' # '"
        )
    return Suppression(pattern, reason, path, number)


def found_in(pattern: str, name: str) -> bool:
    """Whether ``pattern`` is found in ``name``. Each piece between stars is looked for once, so the time is linear."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$")
    pieces = re.split(r"\*+", pattern[begins : len(pattern) - ends])
    at, until = 0, len(name)
    if begins:
        first = pieces.pop(0)
        if not name.startswith(first):
            return False
        at = len(first)
    if ends:
        if not pieces:  # ^whole$
            return at == until
        last = pieces.pop()
        if not name.endswith(last) or until - len(last) < at:
            return False
        until -= len(last)
    for piece in pieces:
        at = name.find(piece, at, until)
        if at < 0:
            return False
        at += len(piece)
    return True


def names_of(stack: Sequence[str], *more: str) -> tuple[str, ...]:
    """What a pattern is searched in: the whole text of each frame, its function and its file, and ``more``."""
    names: list[str] = []
    for text in stack:
        function, file, _ = parsed_frame(text)
        names += [text, function, file]
    return tuple(dict.fromkeys(name for name in (*names, *more) if name))


def suppressing(site: Site, suppressions: Sequence[Suppression]) -> Suppression | None:
    """The first suppression that matches a site."""
    names = names_of([*site.stack, site.culprit_frame], site.slab_cache)
    return next((s for s in suppressions if s.matches(names)), None)


def suppressing_verdict(verdict: Verdict, suppressions: Sequence[Suppression]) -> Suppression | None:
    """The first suppression that matches a finding without sites, by what it names."""
    culprit = verdict.culprit
    if culprit is None:
        return None
    names = names_of([*culprit.stack, culprit.frame], culprit.slab_cache, culprit.counter, culprit.owner)
    return next((s for s in suppressions if s.matches(names)), None)
