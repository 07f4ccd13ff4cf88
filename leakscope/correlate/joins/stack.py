"""Rule 4, stack: the same code on two sides, when neither time nor order joins them.

Two forms. The hash of the three innermost frames of the application: module and function across runs, where addresses
are randomised; absolute addresses within one. And the fingerprint of a thread's last CUDA API calls, for calls without
stacks. Both join *groups*: which code, never which event.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from leakscope.correlate.joins.timeline import Ints, combined
from leakscope.correlate.stacks import Frame

TOP_FRAMES = 3
FINGERPRINT_CALLS = 8
CUDA_LIBRARY = re.compile(r"lib(cuda|cudart|cupti|nvperf|nvToolsExt|TreeLauncher\w*|ToolsInjection\w*)[-.\w]*")
CUDA_FUNCTION = re.compile(r"cu(da)?[A-Z]\w*|__device_stub__\w*|__cudaLaunch\w*")
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")


def top_hash(frames: Sequence[Frame], absolute: bool = False, count: int = TOP_FRAMES) -> int:
    """64 bits of the innermost ``count`` frames outside the CUDA libraries and the tools; 0 where there are none.

    ``absolute`` compares addresses (``offset``), else module name and function. A frame that has neither function nor,
    with ``absolute``, an address makes the stack unusable: guessing it would join unrelated code.
    """
    own = list(frames)
    while own and _of_cuda(own[-1]):
        own.pop()
    texts = []
    for frame in own[-count:]:
        if absolute:
            if not frame.offset:
                return 0
            texts.append(f"{frame.offset:x}")
        elif frame.function:
            texts.append(f"{frame.module.rsplit('/', 1)[-1]}\0{frame.function}")
        else:
            return 0
    if not texts:
        return 0
    digest = hashlib.blake2b("\1".join(texts).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def hash_groups(left: Mapping[int, int], right: Mapping[int, int]) -> pd.DataFrame:
    """``left`` and ``right``: row → hash. One row a hash that both have: hash, left and right (lists of rows)."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for side, rows in enumerate((left, right)):
        for row, value in rows.items():
            if value:
                groups.setdefault(value, ([], []))[side].append(row)
    both = [(value, a, b) for value, (a, b) in sorted(groups.items()) if a and b]
    return pd.DataFrame(both, columns=["hash", "left", "right"])


def plain_api(name: str) -> str:
    """The API's name without version and per-thread suffixes: ``cuMemAlloc_v2`` → ``cuMemAlloc``."""
    return _VERSION.sub("", name)


def api_fingerprints(thread: Ints, enter_ns: Ints, api: npt.NDArray[np.int64], calls: int = FINGERPRINT_CALLS) -> Ints:
    """int64[n]: a hash of the last ``calls`` API calls of the thread up to and with each; 0 for the first ones.

    ``api`` must be numbers that mean the same on both sides (:func:`api_numbers`).
    """
    order = np.lexsort((enter_ns, thread))
    sorted_api, sorted_thread = api[order], thread[order]
    count = len(order)
    result = np.zeros(count, np.int64)
    if count < calls:
        return result
    last = np.arange(calls - 1, count)
    value = combined(*(sorted_api[last - back] for back in range(calls)))
    whole = sorted_thread[last - (calls - 1)] == sorted_thread[last]
    result[order[last]] = np.where(whole, np.where(value == 0, 1, value), 0)
    return result


def api_numbers(names: Sequence[str]) -> Ints:
    """int64[n]: 63 bits of each name, without its version suffix."""
    return np.array(
        [int.from_bytes(hashlib.blake2b(plain_api(n).encode(), digest_size=8).digest(), "little") >> 1 for n in names],
        np.int64,
    )


def unique_on_both(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Pairs of rows whose fingerprint occurs once on each side."""
    sides = []
    for values in (left, right):
        unique, first, count = np.unique(values, return_index=True, return_counts=True)
        keep = (count == 1) & (unique != 0)
        sides.append((unique[keep], first[keep]))
    _, a, b = np.intersect1d(sides[0][0], sides[1][0], assume_unique=True, return_indices=True)
    return sides[0][1][a].astype(np.int64), sides[1][1][b].astype(np.int64)


def _of_cuda(frame: Frame) -> bool:
    module = frame.module.rsplit("/", 1)[-1]
    return CUDA_LIBRARY.fullmatch(module) is not None or CUDA_FUNCTION.fullmatch(frame.function) is not None
