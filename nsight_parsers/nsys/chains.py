"""Call chains of an export: CUDA_CALLCHAINS, and the tables of the same shape for samples and OS runtime calls."""

from __future__ import annotations

import re

import numpy as np

from nsight_parsers.interning import Frame, StackInterner
from nsight_parsers.nsys.database import Export, Ints

MAX_DEPTH_MARK = "[Max depth]"
_ADDRESS = re.compile(r"(0x)?[0-9a-fA-F]{5,16}")


def read_chains(export: Export, table: str, wanted: Ints, stacks: StackInterner) -> dict[int, int]:
    """Chain id → id of its stack in ``stacks``, for the chain ids in ``wanted``.

    Depth 0 is the innermost frame. ``offset`` of a frame is its absolute address (``originalIP``); a frame without a
    symbol has no function. The mark for a chain that was cut off is no frame.
    """
    if not export.has(table, "id", "symbol", "stackDepth"):
        return {}
    names = ("id", "stackDepth", "symbol", "module", "unresolved", "originalIP", "kernelMode")
    column = export.ints(table, *names)
    keep = np.flatnonzero(np.isin(column["id"], wanted) & (column["id"] > 0))
    keep = keep[np.lexsort((-column["stackDepth"][keep], column["id"][keep]))]
    if not len(keep):
        return {}
    of_frame = np.stack([column[name][keep] for name in names[2:]])
    unique, frame_of_row = np.unique(of_frame, axis=1, return_inverse=True)
    text = export.strings(np.unique(unique[:2]))
    ids = []
    for symbol, module, unresolved, address, kernel in unique.T.tolist():
        name = text.get(symbol, "")
        if name == MAX_DEPTH_MARK:
            ids.append(0)
            continue
        function = "" if unresolved or _ADDRESS.fullmatch(name) else name
        kind = "kernel" if kernel else "native"
        ids.append(
            stacks.frame_id(
                Frame(function, module=text.get(module, ""), offset=address & 0xFFFF_FFFF_FFFF_FFFF, kind=kind)
            )
        )
    frames = np.array(ids, np.int64)[np.ravel(frame_of_row)]
    chain = column["id"][keep]
    bounds = np.flatnonzero(np.diff(chain)) + 1
    pieces = np.split(frames, bounds)
    first = chain[np.concatenate([[0], bounds])]
    return {
        key: stacks.add_ids([frame for frame in piece.tolist() if frame])
        for key, piece in zip(first.tolist(), pieces, strict=True)
    }


def stack_ids(chains: dict[int, int], chain_of_row: Ints) -> Ints:
    """Stack ids of rows by their chain ids; 0 for none."""
    unique, position = np.unique(chain_of_row, return_inverse=True)
    return np.array([chains.get(key, 0) for key in unique.tolist()], np.int64)[np.ravel(position)]
