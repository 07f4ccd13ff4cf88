"""The joins on a terminal: what was joined by which rule, what was refused and why, how well clocks agree."""

from __future__ import annotations

from collections.abc import Iterator

from leakscope.model.results import ChainLink, Report
from leakscope.report.text import printable

MAX_REASONS = 3


def join_lines(report: Report) -> Iterator[str]:
    """Lines of plain text, safe for a terminal; none where nothing was joined."""
    for row in report.clocks:
        value = "" if row.value is None else f" {row.value:,} ns"
        yield printable(f"{row.source}: {row.what}{value} ({row.detail})")
    for join in report.joins:
        counts = [f"{join.matched:,} matched"]
        counts += [f"{join.ambiguous:,} ambiguous"] if join.ambiguous else []
        counts += [f"{join.refused:,} refused"] if join.refused else []
        sure = "" if join.confidence is None else f", confidence {join.confidence:.2f}"
        yield printable(f"{join.rule}: {join.left} with {join.right}: {', '.join(counts)}{sure}")
        for reason in join.reasons[:MAX_REASONS]:
            yield printable(f"  {reason}")


def evidence_of_link(link: ChainLink) -> str:
    """``[rule 0.95 ×12]``: how a link of another source is known."""
    return f"[{link.rule} {link.confidence:.2f} ×{link.count:,}]"
