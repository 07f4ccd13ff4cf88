"""Allocations and frees as CSV or JSON lines: ``ts_ns,pid,tid,op,layer,addr,size,stack``, and what was lost of them.

A free is matched to its allocation by (layer, process, address), in the kernel by the address alone. An address that
is handed out twice without a free in between was freed without being seen: an implicit free is put there (cause
``reuse``). Failed allocations (address 0 or all ones) are counted and left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from nsight_parsers import ParsedReport, ReportError
from nsight_parsers.arrow import Coded, Interned, build_table, not_empty
from nsight_parsers.delimited import read_csv, read_json_lines
from nsight_parsers.interning import Frame, StackInterner
from nsight_parsers.sniffing import EVENT_COLUMNS

FIELDS = ("ts_ns", "pid", "tid", "op", "layer", "addr", "size", "stack")
LAYERS = ("kernel", "host", "gpu")
KIND_OF_LAYER = ("kmalloc", "heap", "device")
MAX_STACKS = 2_000_000
MAX_META_BYTES = 16 << 20
MAX_LOSSES = 100_000
FAILED = (1 << 64) - 4096
"""Addresses from here on are error numbers (IS_ERR_VALUE of the kernel, MAP_FAILED)."""
FAILED_32 = 0xFFFFFFFF
KMALLOC_CACHES = (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
_KMALLOC = re.compile(r"_*k[mz]alloc\w*")
_FRAME = re.compile(r"(?s)(?P<function>.*?)(?: \((?P<file>[^()]*?)(?::(?P<line>[0-9]{1,9}))?\))?")
_OFFSET = re.compile(r"\+0x[0-9a-f]+(/0x[0-9a-f]+)?$")
UNNAMED = frozenset({"", "[unknown]", "[unknown", "??", "<unknown>", "unknown", "[truncated]"})

LIMITS = ["times start at the file's own zero; a process's end is seen only where its frees are"]


def parse_memory_events(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads events as ``mem_events``, ``stacks`` and ``frames``. Raises ReportError for a file without any."""
    path = Path(path)
    with path.open("rb") as file:
        lines = file.read(256).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{")
    table, torn = read_json_lines(path, FIELDS) if lines else read_csv(path)
    missing = sorted(EVENT_COLUMNS - set(table.column_names))
    if missing:
        raise ReportError(f"{path}: events without the column {missing[0]}")
    events = _cleaned(table)
    torn += table.num_rows - len(events)
    if not len(events):
        raise ReportError(f"{path}: no event in it that can be read")
    failed = events["failed"].to_numpy(bool)
    failed_bytes = int(events.loc[failed, "size"].sum())
    events = _matched(events[~failed].reset_index(drop=True))
    stacks, unnamed = _stacks(events)
    report = ParsedReport(
        not_empty({"mem_events": _table(events, stacks), "losses": _losses(int(failed.sum()), failed_bytes)})
        | stacks.interner.tables(),
        tool="events",
        clock="relative",
        limits=list(LIMITS),
    )
    frees = (events["op"] == 1).to_numpy()
    reused = int((frees & events["reuse"].to_numpy(bool)).sum())
    unknown = int((frees & (events["alloc_ts_ns"] == 0).to_numpy()).sum())
    report.facts = {"implicit_frees": reused, "unknown_frees": unknown, "failed_allocations": int(failed.sum())}
    if failed.any():
        report.findings.append(f"{int(failed.sum()):,} failed allocations ({failed_bytes:,} bytes) left out")
    if reused:
        report.findings.append(f"{reused:,} addresses were handed out again without a free: those frees were missed")
    if unknown:
        report.findings.append(f"{unknown:,} frees of memory that was allocated before the events begin")
    if unnamed:
        report.findings.append(f"{unnamed:,} frames have no name")
    if torn:
        report.findings.append(f"{torn:,} rows cannot be read and are left out")
    return report


def _cleaned(table: pa.Table) -> pd.DataFrame:
    """Typed columns in time order, rows without a time, an op or an address left out."""
    text = {name: table[name].to_pandas() if name in table.column_names else None for name in FIELDS}
    count = table.num_rows

    def integers(name: str) -> npt.NDArray[np.int64]:
        column = text[name]
        if column is None:
            return np.zeros(count, np.int64)
        numbers = pd.to_numeric(column, errors="coerce")
        if numbers.dtype == np.int64:
            return numbers.to_numpy()
        plain = numbers.to_numpy(np.float64)
        return np.where(np.isfinite(plain) & (np.abs(plain) < 2**62), plain, -1.0).astype(np.int64)

    op = text["op"]
    assert op is not None
    codes = op.fillna("").str.strip().str.lower().map({"alloc": 0, "free": 1}).fillna(-1).to_numpy(np.int64)
    layers = np.full(count, LAYERS.index("host"))
    if text["layer"] is not None:
        named = text["layer"].fillna("").str.strip().str.lower()
        codes_of = {name: code for code, name in enumerate(LAYERS)}
        layers = named.map(codes_of).fillna(LAYERS.index("host")).to_numpy(np.int64)
    addresses, known = _addresses(text["addr"], count)
    times = integers("ts_ns")
    sizes = integers("size")
    stack = text["stack"]
    events = pd.DataFrame(
        {
            "ts_ns": times,
            "pid": np.clip(integers("pid"), 0, 2**31 - 1),
            "tid": np.clip(integers("tid"), 0, 2**31 - 1),
            "op": codes,
            "layer": layers,
            "addr": addresses,
            "size": np.maximum(sizes, 0),
            "stack": stack.fillna("").astype(object) if stack is not None else "",
        }
    )
    events["failed"] = (codes == 0) & ((addresses == 0) | (addresses >= np.uint64(FAILED)) | (addresses == FAILED_32))
    usable = known & (codes >= 0) & (times > 0) & ~((codes == 1) & (addresses == 0)) & ~((codes == 0) & (sizes < 0))
    return events[usable].sort_values("ts_ns", kind="stable").reset_index(drop=True)


def _addresses(column: pd.Series | None, count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """(addresses, which cells are one): hexadecimal with 0x, or decimal."""
    assert column is not None
    codes, words = pd.factorize(column)
    values = np.zeros(len(words) + 1, np.uint64)
    known = np.zeros(len(words) + 1, bool)
    for index, word in enumerate(words):
        try:
            value = int(str(word)[:66], 0)
        except ValueError:
            continue
        known[index] = -(1 << 63) <= value < 1 << 64
        values[index] = value % (1 << 64)
    return values[codes], known[codes]


def _matched(events: pd.DataFrame) -> pd.DataFrame:
    """Adds alloc_ts_ns, source row and reuse: frees with the size and stack of their allocation, implicit frees."""
    owner = np.where(events["layer"] == 0, -1, events["pid"])
    order = np.lexsort((np.arange(len(events)), events["addr"], owner, events["layer"]))
    layer, pid, addr, op = (
        events["layer"].to_numpy()[order],
        owner[order],
        events["addr"].to_numpy()[order],
        events["op"].to_numpy()[order],
    )
    same = np.zeros(len(order), bool)
    same[1:] = (layer[1:] == layer[:-1]) & (pid[1:] == pid[:-1]) & (addr[1:] == addr[:-1])
    after_alloc = np.zeros(len(order), bool)
    after_alloc[1:] = same[1:] & (op[:-1] == 0)
    before = np.full(len(order), -1)
    before[1:] = order[:-1]
    origin = np.full(len(events), -1)
    frees = (op == 1) & after_alloc
    origin[order[frees]] = before[frees]
    events = events.assign(origin=origin, reuse=False)
    again = (op == 0) & after_alloc
    implicit = events.iloc[before[again]].assign(op=1, reuse=True)
    implicit["origin"] = before[again]
    implicit["ts_ns"] = events["ts_ns"].to_numpy()[order[again]]
    implicit["tid"] = 0
    owned = events["origin"].to_numpy() >= 0
    for column in ("size", "stack", "pid"):
        values = events[column].to_numpy().copy()
        values[owned] = values[events["origin"].to_numpy()[owned]]
        events[column] = values
    times = events["ts_ns"].to_numpy()
    both = pd.concat([implicit.assign(first=0), events.assign(first=1)], ignore_index=True)
    both["alloc_ts_ns"] = np.where(both["origin"] >= 0, times[np.maximum(both["origin"], 0)], 0)
    return both.sort_values(["ts_ns", "first"], kind="stable").reset_index(drop=True)


class _Stacks:
    """Stack ids by (is kernel, text), and the innermost function of each."""

    def __init__(self) -> None:
        self.interner = StackInterner()
        self.ids: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.kmalloc: npt.NDArray[np.bool_] = np.empty(0, bool)


def _stacks(events: pd.DataFrame) -> tuple[_Stacks, int]:
    stacks = _Stacks()
    codes, texts = pd.factorize(events["stack"])
    if len(texts) > MAX_STACKS:
        raise ReportError(f"more than {MAX_STACKS:,} different stacks; split the file")
    unnamed = 0
    ids = np.zeros((2, len(texts) + 1), np.int64)
    kmalloc = np.zeros(len(texts) + 1, bool)
    kernel = (events["layer"] == 0).to_numpy()
    used = [set(codes[~kernel].tolist()), set(codes[kernel].tolist())]
    for number, text in enumerate(texts):
        names = [name.strip() for name in str(text).split(";")] if str(text).strip() else []
        kmalloc[number] = bool(names) and bool(_KMALLOC.fullmatch(_OFFSET.sub("", names[-1])))
        for is_kernel in (0, 1):
            if number in used[is_kernel]:
                frames = list(named_frames(names, "kernel" if is_kernel else "native"))
                unnamed += sum(not frame.function for frame in frames)
                ids[is_kernel, number] = stacks.interner.add(frames)
    stacks.ids = ids[kernel.astype(int), codes]
    stacks.kmalloc = kmalloc[codes]
    return stacks, unnamed


def named_frames(names: list[str], kind: str) -> Iterator[Frame]:
    """Frames of texts such as ``function (file:line)`` or ``function+0x1f``."""
    for name in names:
        if name.lower() in UNNAMED:
            yield Frame("", kind=kind)
            continue
        match = _FRAME.fullmatch(_OFFSET.sub("", name[:2000]))
        assert match is not None
        yield Frame(match["function"], match["file"] or "", int(match["line"] or 0), kind=kind)


def _table(events: pd.DataFrame, stacks: _Stacks) -> pa.Table:
    kernel = (events["layer"] == 0).to_numpy()
    frees = (events["op"] == 1).to_numpy()
    caches = Interned("")
    sizes = events["size"].to_numpy(np.int64)
    of_size = np.searchsorted(KMALLOC_CACHES, np.maximum(sizes, 1))
    names = [f"kmalloc-{size if size < 1024 else f'{size // 1024}k'}" for size in KMALLOC_CACHES]
    codes = np.array([caches.code(name) for name in names] + [0])[of_size]
    return build_table(
        "mem_events",
        len(events),
        ts_ns=events["ts_ns"].to_numpy(np.int64),
        pid=events["pid"].to_numpy(np.int64),
        tid=events["tid"].to_numpy(np.int64),
        op=Coded(events["op"].to_numpy(), ["alloc", "free"]),
        cause=Coded(events["reuse"].to_numpy(np.int64), ["call", "reuse"]),
        layer=Coded(events["layer"].to_numpy(), LAYERS),
        kind=Coded(events["layer"].to_numpy(), KIND_OF_LAYER),
        slab_cache=Coded(np.where(kernel & stacks.kmalloc, codes, 0), caches.words),
        addr=events["addr"].to_numpy(np.uint64),
        size_bytes=sizes,
        requested_bytes=sizes,
        kernel_stack=np.where(kernel, stacks.ids, 0),
        user_stack=np.where(kernel, 0, stacks.ids),
        weight=1,
        alloc_ts_ns=np.where(frees, events["alloc_ts_ns"].to_numpy(np.int64), 0),
    )


def _losses(failed: int, failed_bytes: int) -> pa.Table:
    return build_table(
        "losses",
        1 if failed else 0,
        probe="events",
        what="failed_allocation",
        count=failed,
        detail=f"{failed_bytes:,} bytes asked for",
    )


def parse_events_meta(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> ParsedReport:
    """Reads what was lost of events (``attach``, ``stack_map_full``, ``lost``) as ``losses``."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_META_BYTES:
            raise ReportError(f"{path}: more than {MAX_META_BYTES >> 20} MiB for what was lost of events")
        value = json.loads(path.read_text(encoding="utf-8-sig", errors="replace"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{path}: no JSON object")
    rows: list[tuple[int, str, int, str]] = []
    if value.get("attach") == "mid-run":
        rows.append((0, "attached_mid_run", 1, "what was allocated before is not seen"))
    if value.get("stack_map_full") is True:
        rows.append((0, "stack_map_full", 1, "later stacks are missing"))
    lost = value.get("lost")
    lost = lost if isinstance(lost, list) else []
    entries = [entry for entry in lost[:MAX_LOSSES] if isinstance(entry, dict)]
    stretches = [(entry, stretch) for entry in entries if (stretch := _stretch(entry)) is not None]
    for _, (since, until, count) in stretches:
        rows.append((since, "events_lost", count, f"in {max(0, until - since) / 1e9:.3f} s"))
    losses = build_table(
        "losses",
        len(rows),
        ts_ns=np.array([r[0] for r in rows], np.int64),
        probe="events",
        what=pa.array([r[1] for r in rows], pa.string()),
        count=np.array([r[2] for r in rows], np.int64),
        detail=pa.array([r[3] for r in rows], pa.string()),
    )
    report = ParsedReport(not_empty({"losses": losses}), tool="events", clock="none")
    report.facts = {
        "attach": value.get("attach") if value.get("attach") in ("start", "mid-run") else None,
        "stack_map_full": value.get("stack_map_full") is True,
        "lost": [list(stretch) for entry, stretch in stretches if "from_ns" in entry and "to_ns" in entry][:1000],
    }
    return report


def _stretch(entry: dict[str, object]) -> tuple[int, int, int] | None:
    """(from_ns, to_ns, count) of a stretch of lost events, 0 for what it does not say; None if that is no number."""
    values = []
    for name in ("from_ns", "to_ns", "count"):
        value = entry.get(name, 0)
        if not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
            return None
        values.append(min(max(0, int(value)), 1 << 62))
    return values[0], values[1], values[2]
