"""The bcc loader: compiles the joined source with our header shim, so no kernel headers are needed."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bpf_programs
from leakscope.errors import NotCapableError
from leakscope.record.bcc_location import import_bcc
from leakscope.record.kernel.bpf import BPF_TRACE_UPROBE_MULTI, Map, map_facts
from leakscope.record.loader.base import ProgramConfig
from leakscope.record.loader.libbpf import one_line, verifier_reason

_PROGRAM_TYPES = {"uprobe": 2, "uprobe_perf": 2, "tracepoint": 5, "raw_tracepoint": 17}
_PER_CPU_MAPS = frozenset({"counters", "stack_budget", "identity_counts", "byte_countdowns"})


class BccPrograms:
    """Compiles on construction; programs are loaded when asked for. See :class:`LoadedPrograms`."""

    name = "bcc"

    def __init__(self, config: ProgramConfig) -> None:
        bcc = import_bcc()
        constants = config.constants()
        flags = [f"-DCONFIG_{name}={value}{'ULL' if value > 0x7FFFFFFF else ''}" for name, value in constants.items()]
        architecture = "arm64" if platform.machine() == "aarch64" else "x86"
        flags += ["-DLEAKSCOPE_BCC", f"-D__TARGET_ARCH_{architecture}", "-Wno-unused-function", "-Wno-macro-redefined"]
        os.environ["BCC_KERNEL_SOURCE"] = str(bpf_programs.SHIM_DIRECTORY)
        with _compiler_messages() as messages:
            try:
                # The text as bytes: bcc warns of anything else, the whole source in the warning.
                self._bpf: Any = bcc.BPF(text=bpf_programs.source_for_bcc().encode(), cflags=flags)
            except Exception as error:
                raise NotCapableError(
                    f"bcc cannot compile the probes: {error}: {one_line(messages().splitlines())}"
                ) from error
        self._library = bcc.libbcc.lib
        self._refused: dict[str, NotCapableError] = {}
        # Side by side: the verifier takes up to 0.1 s for one.
        with _compiler_messages() as messages, ThreadPoolExecutor(os.cpu_count()) as pool:
            for function, kind in bpf_programs.programs():
                pool.submit(self._load, function, kind, messages)

    def _load(self, function: str, kind: str, messages: Callable[[], str]) -> None:
        # Programs for uprobes are loaded so that uprobe_multi links accept them.
        attach_type = BPF_TRACE_UPROBE_MULTI if kind == "uprobe" else -1
        try:
            self._bpf.load_func(function.encode(), _PROGRAM_TYPES[kind], attach_type=attach_type)
        except Exception as error:  # bcc raises no type of its own
            last = " | ".join(verifier_reason(messages()))
            self._refused[function] = NotCapableError(f"the kernel refused program {function}: {error}: {last}")

    def program(self, function: str, kind: str) -> int:
        """See :class:`LoadedPrograms`."""
        name = function.encode()
        if kind == "uprobe_perf":  # the same program loaded once more, for perf events
            self._bpf.funcs.pop(name, None)
            with _compiler_messages() as messages:
                self._load(function, kind, messages)
        if function in self._refused:
            raise self._refused[function]
        return int(self._bpf.funcs[name].fd)

    def map(self, name: str) -> Map:
        """A map by name; raises KeyError when the programs have no such map."""
        fd = self._library.bpf_table_fd(self._bpf.module, name.encode())
        if fd < 0:
            raise KeyError(name)
        facts = map_facts(fd)
        return Map(fd, facts["key_size"], facts["value_size"], facts["max_entries"], per_cpu=name in _PER_CPU_MAPS)

    def close(self) -> None:
        """Close programs and maps."""
        self._bpf.cleanup()


@contextlib.contextmanager
def _compiler_messages() -> Iterator[Any]:
    """Collect what libbcc writes to descriptor 2, so that a refusal can be told in one line."""
    with tempfile.TemporaryFile() as sink:
        saved = os.dup(2)
        os.dup2(sink.fileno(), 2)

        def text() -> str:
            os.lseek(sink.fileno(), 0, os.SEEK_SET)
            return os.read(sink.fileno(), 16 << 20).decode(errors="replace")

        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
