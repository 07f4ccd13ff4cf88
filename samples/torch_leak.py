"""A PyTorch program that keeps some tensors and frees others; --snapshot FILE saves the allocator's snapshot.

Prints one line of JSON: how many tensors of how many bytes it keeps, and what the allocator says. Needs torch and a
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys

TENSOR_BYTES = 8 << 20


def keep_activation(kept: list) -> None:
    """The leak: one tensor a round is kept."""
    import torch

    kept.append(torch.empty(TENSOR_BYTES, dtype=torch.uint8, device="cuda").fill_(1))


def use_and_drop() -> None:
    """Healthy: the tensors die with the call."""
    import torch

    torch.mm(torch.rand(256, 256, device="cuda"), torch.rand(256, 256, device="cuda"))


def main() -> int:
    """0, or 4 where there is no torch or no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--snapshot", default="")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("torch_leak: there is no torch here", file=sys.stderr)
        return 4
    if not torch.cuda.is_available():
        print("torch_leak: torch sees no GPU", file=sys.stderr)
        return 4
    if options.snapshot:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    kept: list = []
    for number in range(options.rounds):
        torch.cuda.nvtx.range_push(f"round {number % 4}")
        use_and_drop()
        keep_activation(kept)
        torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()
    if options.snapshot:
        with open(options.snapshot, "wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
    report = {
        "sample": "torch_leak", "pid": os.getpid(), "kept": len(kept), "kept_bytes": len(kept) * TENSOR_BYTES,
        "reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated(),
    }  # fmt: skip
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
