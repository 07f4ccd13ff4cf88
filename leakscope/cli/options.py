"""Options that several verbs take, each defined once: which memory to look at, and how much of it to use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.errors import BadInputError
from leakscope.model.words import LAYERS

if TYPE_CHECKING:
    from leakscope.correlate.wrapper_rules import WrapperRules

DEFAULT_MEMORY = "2GiB"


def _known_layer(layer: str | None) -> str | None:
    if layer is not None and layer not in LAYERS:
        raise BadInputError(f"--layer {layer}: no such layer; the layers are {', '.join(LAYERS)}")
    return layer


LayerOption = Annotated[
    str | None, typer.Option("--layer", callback=_known_layer, help=f"Only this layer: {', '.join(LAYERS)}.")
]
PidOption = Annotated[int | None, typer.Option("--pid", "-p", min=0, help="Only memory of this process.")]
WarmupOption = Annotated[
    float | None,
    typer.Option(
        "--warmup", min=0, metavar="SECONDS", help="Seconds of each process's life to leave out; default a fifth of it."
    ),
]
WrappersOption = Annotated[
    Path | None,
    typer.Option(
        "--wrappers", metavar="FILE", help="TOML file whose [wrappers] name frames that are never the culprit."
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Write a page too: one file of HTML that needs no network."),
]
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Memory for sums over events; beyond it they go to disk.")
]


def wrapper_rules(named: Path | None, budget: Path | None = None) -> WrapperRules:
    """The rules of the file that was named, else of the file of budgets where that has some.

    Raises BadInputError for a named file without any, and for one that cannot be read.
    """
    from leakscope.cli.outputs import read_text
    from leakscope.correlate.wrapper_rules import KEYS, MAX_BYTES, NO_RULES, TABLE, parse_rules

    path = named or budget
    if path is None:
        return NO_RULES
    rules = parse_rules(read_text(path, MAX_BYTES, "table of wrappers"), str(path))
    if rules is None and named is not None:
        raise BadInputError(f"{path}: no table [{TABLE}]; write [{TABLE}] and below it {', '.join(KEYS)}")
    return rules or NO_RULES
