"""Page of the exit codes: what each means, which commands end with it, which error carries it."""

from __future__ import annotations

from collections.abc import Iterator

from leakscope.errors import MEANINGS, ExitCode, LeakscopeError
from tools.reference import plain, table
from tools.reference.commands import EVERYWHERE, commands, exit_codes_of


def exit_codes_page() -> str:
    """Markdown of the exit codes."""
    names = [command.name for command in commands()]
    rows = []
    for code, meaning in MEANINGS.items():
        ending = [name for name in names if code in exit_codes_of(name)]
        users = (
            "every command"
            if code in EVERYWHERE
            else ", ".join(f"[{n}](commands.md#{n.replace(' ', '-')})" for n in ending)
        )
        errors = ", ".join(f"`{error.__name__}`" for error in _errors() if error.exit_code == code)
        rows.append((str(int(code)), plain(meaning), users, errors))
    return "\n\n".join(
        [
            "# Exit codes",
            "The same for every command. 1 never means anything but a leak or a regression: a bug of ours is 2.",
            table(("code", "means", "of", "error (from Python)"), rows),
            "The exit status of a recorded command is not that of `record`: it is printed, and stored in the manifest.",
        ]
    )


def _errors() -> Iterator[type[LeakscopeError]]:
    yield from sorted(LeakscopeError.__subclasses__(), key=lambda error: error.__name__)


assert set(MEANINGS) == set(ExitCode)
