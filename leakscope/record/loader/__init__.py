"""Turning bpf_programs into loaded programs and maps. Attaching is the same for every loader (kernel/bpf.py)."""

from __future__ import annotations

import bpf_programs
from leakscope.errors import BadInputError, NotCapableError
from leakscope.record.bcc_location import import_bcc
from leakscope.record.loader.base import LoadedPrograms, ProgramConfig

__all__ = ["LOADERS", "LoadedPrograms", "ProgramConfig", "choose", "load"]

LOADERS = ("auto", "bcc", "core")


def choose(loader: str = "auto") -> str:
    """bcc or core. `auto` takes bcc where it is installed and loads, else the object that was built beforehand.

    Raises BadInputError for another name and NotCapableError where neither is there.
    """
    if loader not in LOADERS:
        raise BadInputError(f"--loader {loader}: choose {', '.join(LOADERS)}")
    if loader != "auto":
        return loader
    try:
        import_bcc()
    except NotCapableError as error:
        if bpf_programs.OBJECT.exists():
            return "core"
        raise NotCapableError(f"{error}; nor are there programs built beforehand ({bpf_programs.OBJECT})") from error
    return "bcc"


def load(config: ProgramConfig, loader: str = "auto") -> LoadedPrograms:
    """Load the programs; raises NotCapableError with the remedy."""
    if choose(loader) == "core":
        from leakscope.record.loader.core import CorePrograms

        return CorePrograms(config)
    from leakscope.record.loader.bcc import BccPrograms

    return BccPrograms(config)
