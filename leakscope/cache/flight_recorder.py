"""Collectives that the ranks of a job did not call alike, from PyTorch's Flight Recorder dumps.

A dump (``TORCH_FR_BUFFER_SIZE``; pickle or JSON, version 2.x, of nccl and gloo) lists a rank's last collectives in a
ring buffer: ``collective_seq_id`` within its process group, name, sizes and dtypes. Ranks are compared where their
buffers overlap. Backends need not complain of a difference: gloo and nccl add up 4 × 8 and 8 × 4 without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from leakscope.cache.inconsistency import Checked, Inconsistency
from leakscope.errors import BadInputError
from nsight_parsers.plain_pickle import PickleRefusedError, PlainPickle

MAX_BYTES = 256 << 20
MAX_RANKS = 4096
_ANY_SIZES = re.compile(r"all_?to_?all|scatter$|gather$|send|recv")
"""Collectives whose sizes may differ between ranks (of gather and scatter only the root names all)."""
_ALL_GATHER = re.compile(r"all_?gather|reduce_?scatter")
_LAST_NUMBER = re.compile(r"(\d+)(?=\D*$)")


@dataclass(frozen=True)
class Dump:
    """A rank's dump. ``rank_from``: how the rank is known, `dump`, `file name` or `order`.

    ``calls``: a row a collective, with columns group (name of the process group), sequence, name, input, output
    (shapes as text), dtypes, state; sorted by group and sequence.
    """

    path: str
    rank: int
    rank_from: str
    calls: pd.DataFrame
    members: dict[str, tuple[int, ...]]
    """Ranks of each process group."""
    left_out: int
    """Entries that are point-to-point or cannot be read."""


def is_dump(start: bytes) -> bool:
    """Whether a file that begins so may be a dump: a pickle, or a JSON object with entries."""
    return start[:1] == b"\x80" or (start.lstrip()[:1] == b"{" and b'"entries"' in start)


def read_dump(path: Path, order: int = 0) -> Dump:
    """Reads a dump; ``order`` is its rank where neither it nor its file name says one. Raises BadInputError."""
    content = _content(path)
    entries = content.get("entries") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise BadInputError(f"{path}: no Flight Recorder dump: it has no list of entries")
    rows = [row for row in map(_call, entries) if row is not None]
    columns = ["group", "sequence", "name", "input", "output", "dtypes", "state"]
    calls = pd.DataFrame(rows, columns=columns).sort_values(["group", "sequence"], kind="stable", ignore_index=True)
    number = _LAST_NUMBER.search(path.name.split(".json")[0])
    if isinstance(content.get("rank"), int):
        rank, known = int(content["rank"]), "dump"
    elif number:
        rank, known = int(number[1][:9]), "file name"
    else:
        rank, known = order, "order"
    return Dump(str(path), rank, known, calls, _members(content.get("pg_config")), len(entries) - len(rows))


def compare(dumps: Sequence[Dump]) -> Checked:
    """Every place where ranks of one process group did not call the same, the first of each kind by group.

    Raises BadInputError for fewer than two ranks, or one that is there twice.
    """
    ranks = [dump.rank for dump in dumps]
    if len(dumps) < 2:
        raise BadInputError(f"{dumps[0].path}: the dump of one rank; name those of the others too, to compare with")
    for dump in dumps:
        if ranks.count(dump.rank) > 1:
            raise BadInputError(f"{dump.path}: rank {dump.rank} is there twice (by its {dump.rank_from})")
    calls = pd.concat([dump.calls.assign(rank=dump.rank) for dump in dumps], ignore_index=True)
    found: list[Inconsistency] = []
    compared = 0
    for group, of_group in calls.groupby("group", sort=True):
        windows = of_group.groupby("rank")["sequence"].agg(["min", "max"])
        members = _of(dumps, str(group)) & set(ranks)
        first, last = int(windows["min"].max()), int(windows["max"].min())
        overlap = of_group[of_group["sequence"].between(first, last)]
        compared += overlap["sequence"].nunique()
        found += _differences(str(group), overlap, members or set(windows.index))
        found += _behind(str(group), windows, of_group)
    limits = ["collectives that left a rank's ring buffer cannot be compared"]
    if any(dump.rank_from == "order" for dump in dumps):
        limits.append("a file says no rank: files are taken in the order given")
    facts = {"ranks": len(dumps), "collectives": compared, "left out": sum(dump.left_out for dump in dumps)}
    return Checked("flight recorder", tuple(dump.path for dump in dumps), facts, tuple(found), tuple(limits))


def _differences(group: str, overlap: pd.DataFrame, members: set[int]) -> list[Inconsistency]:
    """Calls of one number that differ in name, then in dtype, then in sizes; numbers that a rank never called."""
    found = []
    named = overlap.groupby("sequence")
    counts = named["rank"].nunique()
    different = {column: named[column].nunique() > 1 for column in ("name", "dtypes", "input", "output")}
    names = named["name"].first()
    sized = ~names.str.contains(_ANY_SIZES) | names.str.contains(_ALL_GATHER)
    sizes = (different["input"] | different["output"]) & sized
    for kind, mask, column in (
        ("missing call", counts < len(members), "name"),
        ("different collective", different["name"], "name"),
        ("different dtype", different["dtypes"] & ~different["name"], "dtypes"),
        ("different shape", sizes & ~different["name"], "input"),
    ):
        at = mask.index[mask.to_numpy()]
        if not len(at):
            continue
        rows = overlap[overlap["sequence"] == at[0]].sort_values("rank")
        if column == "input" and rows["input"].nunique() == 1:
            column = "output"
        sides = {f"rank {row.rank}": f"{row.name_} {getattr(row, column)}" if column != "name" else row.name_
                 for row in rows.rename(columns={"name": "name_"}).itertuples()}  # fmt: skip
        sides |= {f"rank {rank}": "no call" for rank in sorted(members - set(rows["rank"]))}
        what = f"{rows['name'].iloc[0]} number {at[0]} of process group {group}"
        if kind == "different shape" and rows[column].map(_elements).nunique() == 1:
            what += ": as many elements on each rank, so that the backend does not notice"
        found.append(Inconsistency(kind, f"process group {group}, collective {at[0]}", what, sides, len(at)))
    return found


def _behind(group: str, windows: pd.DataFrame, calls: pd.DataFrame) -> list[Inconsistency]:
    """A rank whose last collective is before that of the others."""
    furthest = int(windows["max"].max())
    if int(windows["max"].min()) == furthest:
        return []
    last = calls.sort_values("sequence").groupby("rank").last()
    sides = {f"rank {rank}": f"{row['sequence']} ({row['name']}, {row['state']})" for rank, row in last.iterrows()}
    what = f"the last collective of process group {group} is not the same on all ranks"
    behind = int((windows["max"] < furthest).sum())
    return [Inconsistency("rank behind", f"process group {group}", what, sides, behind)]


def _of(dumps: Sequence[Dump], group: str) -> set[int]:
    for dump in dumps:
        if group in dump.members:
            return set(dump.members[group])
    return set()


def _call(entry: Any) -> tuple[str, int, str, str, str, str, str] | None:
    """A row of a dump's calls; None for point-to-point calls and what is no collective."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    sequence, name = entry.get("collective_seq_id"), entry.get("profiling_name")
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not isinstance(name, str):
        return None
    group = entry.get("process_group")
    label = str(group[0]) if isinstance(group, list | tuple) and group else str(entry.get("pg_id", "?"))
    dtypes = " → ".join(str(_names(entry.get(side))) for side in ("input_dtypes", "output_dtypes"))
    name = name.rsplit(":", 1)[-1]  # nccl:all_reduce
    return (
        label,
        sequence,
        name,
        _shapes(entry.get("input_sizes")),
        _shapes(entry.get("output_sizes")),
        dtypes,
        str(entry.get("state", "?")),
    )


def _shapes(sizes: Any) -> str:
    """[[4, 8], [2]] → `4×8, 2`."""
    if not isinstance(sizes, list | tuple):
        return "?"
    return ", ".join("×".join(map(str, size)) or "scalar" if isinstance(size, list | tuple) else "?" for size in sizes)


def _names(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list | tuple) else str(names)


def _elements(shapes: str) -> int:
    total = 0
    for shape in shapes.split(", "):
        product = 1
        for size in shape.split("×"):
            product *= int(size) if size.isdecimal() else 1
        total += product
    return total


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """Of ``pg_config``: {name: {"ranks": "[0, 1]"}}."""
    found = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        numbers = re.findall(r"\d{1,9}", ranks)[:MAX_RANKS] if isinstance(ranks, str) else ranks
        if isinstance(numbers, list):
            found[str(name)] = tuple(int(number) for number in numbers if str(number).isdecimal())
    return found


def _content(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInputError(f"{path}: more than {MAX_BYTES >> 20} MiB, which no Flight Recorder dump is")
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                file.seek(0)
                return PlainPickle(file, lambda target, items: False).load()
            file.seek(0)
            return json.load(file)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    except PickleRefusedError as error:
        raise BadInputError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: no Flight Recorder dump in JSON: {error}") from error
