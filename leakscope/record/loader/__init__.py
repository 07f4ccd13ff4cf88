"""Turning bpf_programs into loaded programs and maps. Attaching is the same for every loader (kernel/bpf.py)."""

from __future__ import annotations

import sys
import threading
import time

import bpf_programs
from leakscope.errors import BadInputError, NotCapableError
from leakscope.record.bcc_location import import_bcc
from leakscope.record.kernel.syscalls import own_working_directory
from leakscope.record.loader.base import LoadedPrograms, ProgramConfig

__all__ = ["LOADERS", "LoadedPrograms", "Loading", "ProgramConfig", "choose", "choose_why", "load"]

LOADERS = ("auto", "bcc", "core")


def choose(loader: str = "auto") -> str:
    """bcc or core: see :func:`choose_why`."""
    return choose_why(loader)[0]


def choose_why(loader: str = "auto") -> tuple[str, str]:
    """(bcc or core, the reason). `auto` takes the object that was built beforehand where it is of these sources and
    libbpf loads, as it starts in a tenth of a second; else bcc, which compiles for seconds.

    Raises BadInputError for another name and NotCapableError where neither is there.
    """
    if loader not in LOADERS:
        raise BadInputError(f"--loader {loader}: choose {', '.join(LOADERS)}")
    if loader != "auto":
        return loader, "asked for"
    problem = _core_problem()
    if not problem:
        return "core", f"{bpf_programs.OBJECT} is there: nothing needs to be compiled"
    try:
        import_bcc()
    except NotCapableError as error:
        raise NotCapableError(f"{error}; nor can the loader core be taken: {problem}") from error
    return "bcc", f"bcc is installed; not core: {problem}"


def _core_problem() -> str:
    """Why the loader core cannot be taken, '' when it can."""
    try:
        text = bpf_programs.OBJECT.read_bytes()
    except OSError:
        return f"{bpf_programs.OBJECT} is not there (make build)"
    if bpf_programs.sources_id().to_bytes(8, sys.byteorder) not in text:
        return f"{bpf_programs.OBJECT} was built from other sources (make build)"
    if not bpf_programs.is_sealed(text):
        return f"{bpf_programs.OBJECT} is damaged (make build)"
    from leakscope.record.loader.libbpf import libbpf

    try:
        libbpf()
    except NotCapableError as error:
        return str(error)
    return ""


def load(config: ProgramConfig, loader: str = "auto") -> LoadedPrograms:
    """Load the programs; raises NotCapableError with the remedy."""
    if choose(loader) == "core":
        from leakscope.record.loader.core import CorePrograms

        return CorePrograms(config)
    from leakscope.record.loader.bcc import BccPrograms

    return BccPrograms(config)


class Loading:
    """Programs that a thread of their own loads from now on, while the caller does other things.

    Compiling, clearing the memory of maps and the kernel's verifier all run outside of Python's lock. libbcc changes
    the working directory while it compiles: only of that thread, or, where that cannot have one of its own, before the
    caller goes on.
    """

    def __init__(self, config: ProgramConfig, loader: str = "auto") -> None:
        self.config = config
        self.milliseconds = 0.0
        """How long loading took, compilation included; 0 until it has ended."""
        self._loader = loader
        self._programs: LoadedPrograms | None = None
        self._error: BaseException | None = None
        self._apart = False
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leakscope-loader", daemon=True)
        self._thread.start()
        self._began.wait()
        if not self._apart:
            self._thread.join()

    def _run(self) -> None:
        began = time.perf_counter()
        self._apart = own_working_directory()
        self._began.set()
        try:
            self._programs = load(self.config, self._loader)
        except BaseException as error:
            self._error = error
        self.milliseconds = (time.perf_counter() - began) * 1e3

    def result(self) -> LoadedPrograms:
        """The loaded programs, once they are; raises what :func:`load` raised. They are the caller's to close."""
        self._thread.join()
        programs, self._programs = self._programs, None
        if programs is None:
            raise self._error or RuntimeError("the programs were taken before")
        return programs

    def close(self) -> None:
        """Wait for the end of loading and unload what nobody took."""
        self._thread.join()
        if self._programs is not None:
            self._programs.close()
            self._programs = None
