"""What every verb that takes EVIDENCE says about live sources: options, telling them from files, collecting them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from leakscope.ingest import Imported
    from leakscope.streams import Address

DurationOption = Annotated[
    float | None,
    typer.Option(
        "--duration",
        min=0.1,
        max=7 * 86_400.0,
        metavar="SECONDS",
        help="How long to collect live sources [default: 10; Redis and memcached: as long as one audit takes].",
    ),
]
PoolOption = Annotated[
    int | None,
    typer.Option(
        "--pool-blocks", min=1, metavar="N", help="Usable blocks of the engine's pool, for recorded KV events."
    ),
]


def split_evidence(evidence: Sequence[str | Path]) -> tuple[list[Address], list[Path]]:
    """(live sources, paths). Raises BadInputError for an address that is wrong."""
    from leakscope.streams.address import address_of

    parsed = [(text, address_of(text)) for text in evidence]
    return [a for _, a in parsed if a is not None], [Path(text) for text, a in parsed if a is None]


def collect_sources(addresses: Sequence[Address], capture: Path, seconds: float | None) -> list[Imported]:
    """Collect live sources into ``capture``, saying so on a terminal; [] for none of them."""
    if not addresses:
        return []
    from leakscope.streams import Collecting, collect

    if sys.stderr.isatty():
        names = ", ".join(address.shown for address in addresses)
        print(f"collecting from {names}; Ctrl-C ends it early and keeps what there is", file=sys.stderr)
    return collect(addresses, capture, Collecting(seconds))


def name_of(address: Address) -> str:
    """A file name for what is collected from ``address``."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", address.shown).strip("-.") or "live"
