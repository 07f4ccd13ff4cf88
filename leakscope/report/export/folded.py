"""Folded stacks: ``frame;frame;frame value``, a line a stack, as flamegraph.pl, inferno and speedscope read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from leakscope.report.export.stacks import StackValue
from leakscope.report.text import printable


def folded(values: Iterable[StackValue], of: str) -> Iterator[bytes]:
    """One line for each distinct stack, sorted; the outermost frame is the layer, before it the evidence where there
    are several. Stacks whose value is 0 are left out."""
    values = list(values)
    several = len({value.source for value in values}) > 1
    sums: dict[str, int] = {}
    for value in values:
        if amount := value.value(of):
            roots = (value.source, value.layer) if several else (value.layer,)
            stack = ";".join(folded_frame(frame) for frame in (*roots, *value.frames))
            sums[stack] = sums.get(stack, 0) + amount
    for stack in sorted(sums):
        yield f"{stack} {sums[stack]}\n".encode(errors="backslashreplace")


def folded_frame(text: str) -> str:
    """A frame that cannot be taken for several: ``;`` (in ``[u8; 4]``) becomes ``:``, control characters escapes."""
    return printable(text).replace(";", ":")
