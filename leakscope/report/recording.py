"""The recorder's own text: the price before and the summary after a recording. All of it goes to stderr."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from leakscope.model.recording import Summary

QUIET_LOSSES = frozenset({"page_user_not_streamed", "address_only_free", "symbol_unresolved"})
"""Losses that are limits of the method rather than of this recording: counted, told in one line."""
ENDINGS = {
    "target": "the target ended",
    "duration": "the time was up",
    "quit": "you ended it",
    "signal": "interrupted",
}


def bytes_text(value: float) -> str:
    """Bytes for people: 1.5 MiB."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while value >= 1024 and larger:
        value, unit = value / 1024, larger.pop(0)
    return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"


def _layers(live_bytes: dict[str, int]) -> str:
    return "  ".join(f"{layer} {bytes_text(live_bytes.get(layer, 0))}" for layer in ("kernel", "host", "gpu"))


def show_price(price: str) -> None:
    """Say on stderr what the recording that begins now costs."""
    print(f"leakscope: {price}", file=sys.stderr, flush=True)


def render_summary(summary: Summary, stream: TextIO) -> None:
    """What was recorded, what is live, what was lost, and the next command to type."""
    reason = ENDINGS[summary.ended_by]
    events = summary.rows.get("mem_events", 0)
    lines = [*(f"warning: {warning}" for warning in summary.warnings)]
    what = f"{events:,} memory events"
    if sites := summary.rows.get("census_sites", 0):
        what = f"{sites:,} sites of memory ({summary.rows.get('census_totals', 0):,} changes between readouts)"
    lines.append(f"recorded {what} in {summary.seconds:.1f} s ({reason}) into {summary.output}")
    if summary.exit_status is not None:
        how = f"exit status {summary.exit_status}" if summary.exit_status >= 0 else f"signal {-summary.exit_status}"
        lines.append(f"the command ended with {how}")
    lines.append(f"live at the end: {_layers(summary.live_bytes)}")
    lines += summary.notes
    lost = [loss for loss in summary.losses if loss.what not in QUIET_LOSSES]
    if lost:
        lines.append("lost: " + "; ".join(f"{loss.count:,} {loss.what} ({loss.probe})" for loss in lost))
    else:
        lines.append("lost: nothing")
    lines.append(f"next: leakscope attribute {shlex.quote(str(summary.output))}")
    for line in lines:
        stream.write(f"leakscope: {line}\n")
    stream.flush()


def summary_json(summary: Summary) -> dict[str, Any]:
    """The summary as plain JSON types."""
    return {
        "capture": str(summary.output),
        "ended_by": summary.ended_by,
        "seconds": round(summary.seconds, 3),
        "rows": summary.rows,
        "live_bytes": summary.live_bytes,
        "exit_status": summary.exit_status,
        "losses": [vars(loss) for loss in summary.losses],
        "warnings": summary.warnings,
        "notes": summary.notes,
    }
