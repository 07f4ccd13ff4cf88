"""What a recording is going to cost what it records, in one line, from documented or measured figures."""

from __future__ import annotations

from leakscope.record.options import RecordOptions

# Added to the caller, in microseconds: medians of "Cost of one hit" and "Slow-down" in docs/performance.md.
KERNEL_EVENT_US = 0.3
KERNEL_STACK_US = 3.0
MAP_CALL_US = 3.0
FUNCTION_CALL_US = 3.0
"""A probed function: breakpoints at its entry and return 1.2 µs, the programs with the user stack the rest."""
_EMULATED_HIT_US = 0.7
BREAKPOINTS_US = 1.2
"""Those two alone, which others pay too where a library is probed by its file."""

STACK_PRICES = {
    "none": "no stacks",
    "sampled": "{us:.0f} µs more where a stack is taken (at most 954/s a call site and CPU, 1 in 64 above)",
    "all": "{us:.0f} µs more for the stack of each allocation",
}


def price(options: RecordOptions, functions: int, *, heap_by_process: bool = False) -> str:
    """One line: what each kind of event adds to whoever causes it, and where the figures are from.

    :param functions: how many functions of CUDA and libc are probed so far.
    :param heap_by_process: whether malloc is probed in the recorded processes alone.
    """
    parts = [
        f"{KERNEL_EVENT_US} µs a kernel allocation or free",
        STACK_PRICES[options.stacks].format(us=KERNEL_STACK_US),
        f"{MAP_CALL_US:.0f} µs an mmap, munmap, mremap or change of brk",
    ]
    what = "CUDA allocation, free or kernel launch" if options.launches else "CUDA allocation or free"
    parts.append(f"{FUNCTION_CALL_US:.0f} µs a {what}{'' if functions else ' (no CUDA library found so far)'}")
    if options.malloc:
        parts.append(_malloc_price())
        if not heap_by_process:
            parts.append(f"{BREAKPOINTS_US} µs a call for every other process of the host that maps the same libc")
    return f"price: about {', '.join(parts)} (docs/performance.md)"


def _malloc_price() -> str:
    """What --malloc adds to each call, from the price of a hit on this host: entries of libc may be single-stepped."""
    from leakscope.record.probes.uprobe_price import hit_ns

    emulated, stepped = hit_ns("push"), hit_ns("xor")
    if emulated is None or stepped is None:
        return f"{FUNCTION_CALL_US:.0f}-20 µs a call of malloc's family"
    usual = FUNCTION_CALL_US - _EMULATED_HIT_US
    low, high = usual + emulated / 1e3, usual + stepped / 1e3
    return f"{low:.1f} µs a call of malloc's family, {high:.1f} µs where its entry is single-stepped (measured here)"
