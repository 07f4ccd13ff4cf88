"""What ``leakscope cache keys`` prints: which part makes the keys, chances of collisions, hash functions measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leakscope.cache.hashes import HashMeasure
from leakscope.cache.keys import Collisions, Keys
from leakscope.quantities import counted
from leakscope.report.text import printable

EXPLODES = 1.5
"""From this many keys for each key without a part, the part is named."""


def print_keys(
    console: Console, path: str, keys: Keys | None, chances: Sequence[Collisions], hashes: Sequence[HashMeasure]
) -> None:
    """The parts of the requests of ``path`` if there is a file, the chances, and what was measured."""
    if keys is not None:
        _requests(console, path, keys)
        console.print()
    table = _table(f"of {chances[0].keys:,} keys", ">shares its slot", ">any two collide", ">expected pairs")
    for row in chances:
        table.add_row(row.name, *(f"{value:.2g}" for value in (row.shares_slot, row.any_collision, row.expected_pairs)))
    console.print(table)
    console.print(
        Text("for chance alone: fewer than 128 bits can also be made to collide on purpose", "dim"), soft_wrap=True
    )
    if hashes:
        console.print()
        table = _table("hash", ">bits", ">share a bucket", ">ideal", ">equal hashes", ">keys/s here", "in")
        for hash_ in hashes:
            figures = (
                f"{hash_.sharing:.4f}",
                f"{hash_.expected:.4f}",
                f"{hash_.equal_hashes:,}",
                f"{hash_.per_second:,.0f}",
            )
            table.add_row(hash_.name, str(hash_.bits), *figures, hash_.where)
        console.print(table)
        what = f"{hashes[0].keys:,} keys in {hashes[0].buckets:,} buckets"
        console.print(Text(f"{what}: sharing says how full the table is, not how good the hash", "dim"), soft_wrap=True)


def _requests(console: Console, path: str, keys: Keys) -> None:
    made = f"{counted(keys.requests, 'request')} make {counted(keys.keys, 'key')} ({keys.reuse:.1%} could be hits)"
    console.print(Text(printable(f"{path}: {made}")), soft_wrap=True)
    lines = []
    if keys.left_out:
        lines.append(f"{keys.left_out:,} lines are no requests and are left out")
    if keys.prompt_parts:
        lines.append(f"{keys.keys / keys.prompts:.2f} keys for each of {counted(keys.prompts, 'different prompt')}")
    if saved := keys.keys_unnormalised - keys.keys:
        lines.append(f"normalising changes {counted(keys.changed_by_normalising, 'request')} and saves {saved:,} keys")
    if merged := keys.keys - keys.collapsed:
        lines.append(f"collapsing white space would merge {merged:,} more, which may differ in meaning: not done")
    lines += [
        f"{component.name}: {counted(component.values, 'value')} make {component.factor:.1f} keys out of each: "
        "leave it out of the key unless answers depend on it"
        for component in keys.components
        if component.factor >= EXPLODES and component.name not in keys.prompt_parts
    ]
    for line in lines:
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    table = _table("part", ">values", ">keys without it", ">factor")
    for component in keys.components:
        row = f"{component.values:,}", f"{component.keys_without:,}", f"{component.factor:.2f}"
        table.add_row(printable(component.name), *row)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table
