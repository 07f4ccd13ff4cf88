"""``leakscope baseline``: files that stand for a run in later comparisons."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from leakscope.cli.options import DEFAULT_MEMORY, LayerOption, MemoryOption, PidOption
from leakscope.errors import BadInputError
from leakscope.quantities import counted
from leakscope.report.text import printable

DEFAULT_FILE = Path("leakscope-baseline.json")


class Action(StrEnum):
    """What to do with a baseline file."""

    UPDATE = "update"


def baseline(
    action: Annotated[Action, typer.Argument(help="update: write the file anew.", show_default=False)],
    evidence: Annotated[
        list[str],
        typer.Argument(metavar="EVIDENCE…", help="What 'leakscope check' takes.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write; one that exists is replaced.")
    ] = DEFAULT_FILE,
    layer: LayerOption = None,
    pid: PidOption = None,
    memory: MemoryOption = DEFAULT_MEMORY,
) -> None:
    """Write what a run keeps into a small file that 'leakscope check --baseline' compares with.

    It is JSON with a line a site, to be committed and read in a diff. The same evidence gives the same bytes.
    """
    from leakscope.cli.check import judged
    from leakscope.cli.outputs import read_text, require_place, write_whole
    from leakscope.detect.attribution import Options
    from leakscope.detect.profile import profile_of
    from leakscope.gate.baseline import MAX_BYTES, baseline_text, is_told, looks_like_baseline

    assert action is Action.UPDATE
    require_place(output)
    if output.exists() and not looks_like_baseline(read_text(output, MAX_BYTES, "baseline file").encode()):
        raise BadInputError(f"{output}: exists and is no baseline file; it is not replaced")
    profile = profile_of(judged(evidence, Options(layer=layer, pid=pid), memory))
    if not profile.sides and not profile.run.counters:
        raise BadInputError(f"{' '.join(evidence)}: no allocations and no counters: nothing to compare with")
    write_whole(output, baseline_text(profile))
    sites = sum(is_told(side) for side in profile.sides.values())
    print(printable(f"{output}  ({counted(sites, 'site')}, {counted(len(profile.leaks), 'known leak')})"))
