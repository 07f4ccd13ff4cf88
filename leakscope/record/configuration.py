"""What the programs of a recording are compiled or loaded with, from what it is asked to do."""

from __future__ import annotations

import mmap
from typing import Any

from leakscope.record import scope
from leakscope.record.loader.base import ProgramConfig
from leakscope.record.options import RecordOptions
from leakscope.record.probes.nvtx import records_marks
from leakscope.record.unwind.policy import unwind_policy

_CALL_RING_BYTES = 8 << 20
_LAUNCH_RING_BYTES = 16 << 20
_KERNEL_RING_BYTES = 8 << 20
_LAYOUT_ENTRIES = 8192
_DEVICE_OBJECTS, _HEAP_OBJECTS = 1 << 16, 1 << 18
"""Room for what is live of functions."""


def program_config(options: RecordOptions, limits: list[str], notes: list[str]) -> ProgramConfig:
    """The constants and sizes of a recording. Imports nothing heavy: the programs load while the rest is imported.

    :param limits: is told what the recording cannot say of a process.
    :param notes: is told what this host cannot do of what is asked for.
    """
    config = ProgramConfig(
        stacks=options.stacks,
        unwind=unwind_policy(options.unwind, notes.append),
        mem_ring_bytes=options.ring_bytes,
        call_ring_bytes=_CALL_RING_BYTES,
        live_entries=options.live_entries,
        range_entries=_HEAP_OBJECTS if options.malloc else _DEVICE_OBJECTS,
        with_functions=True,
        nvtx=records_marks(options, limits),
        **_launch_configuration(options),
        mode=options.mode,
        min_size=options.min_size,
        sample_bytes=options.sample_bytes,
    )
    if options.mode == "census":
        config.mem_ring_bytes = mmap.PAGESIZE  # nothing is sent there
    scope.configure(options, config)
    return config


def _launch_configuration(options: RecordOptions) -> dict[str, Any]:
    """The fields of ProgramConfig that launches need; {} for a recording without them."""
    if not options.launches:
        return {}
    return {
        "launch_args": options.launch_args,
        "launch_ring_bytes": _LAUNCH_RING_BYTES if options.launch_args else 4096,
        "kernel_ring_bytes": _KERNEL_RING_BYTES,
        "layout_entries": _LAYOUT_ENTRIES,
    }
