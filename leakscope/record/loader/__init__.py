"""Turning bpf_programs into loaded programs and maps. Attaching is the same for every loader (kernel/bpf.py)."""

from __future__ import annotations

from leakscope.record.loader.base import LoadedPrograms, ProgramConfig

__all__ = ["LoadedPrograms", "ProgramConfig", "load"]


def load(config: ProgramConfig) -> LoadedPrograms:
    """Compile and load the programs; raises NotCapableError with the remedy."""
    from leakscope.record.loader.bcc import BccPrograms

    return BccPrograms(config)
