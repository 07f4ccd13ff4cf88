"""Rule 4, stack: the same code on two sides, when neither time nor order joins them.

The hash of the three innermost frames of the application: module and function across runs, where addresses are
randomised; absolute addresses within one. It joins *groups*: which code, never which event. The rule's other form, the
sequence of API calls of a thread, is :mod:`.fingerprint`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from leakscope.correlate.stacks import Frame

TOP_FRAMES = 3
CUDA_LIBRARY = re.compile(r"lib(cuda|cudart|cupti|nvperf|nvToolsExt|TreeLauncher\w*|ToolsInjection\w*)[-.\w]*")
CUDA_FUNCTION = re.compile(r"cu(da)?[A-Z]\w*|__device_stub__\w*|__cudaLaunch\w*")


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


def _of_cuda(frame: Frame) -> bool:
    module = frame.module.rsplit("/", 1)[-1]
    return CUDA_LIBRARY.fullmatch(module) is not None or CUDA_FUNCTION.fullmatch(frame.function) is not None
