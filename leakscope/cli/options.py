"""Options that several verbs take, each defined once: which memory to look at, and how much of it to use."""

from __future__ import annotations

from typing import Annotated

import typer

from leakscope.errors import BadInputError
from leakscope.model.words import LAYERS

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
MemoryOption = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Memory for sums over events; beyond it they go to disk.")
]
