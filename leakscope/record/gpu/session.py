"""The part of a recording that is about kernel launches: its rings, its images, its losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from leakscope.model.recording import Loss
from leakscope.record import records
from leakscope.record.gpu.arguments import LaunchArguments
from leakscope.record.gpu.fatbin import fatbin_section
from leakscope.record.gpu.images import Image, Images
from leakscope.record.gpu.kernels import Kernels
from leakscope.record.loader import LoadedPrograms
from leakscope.record.options import RecordOptions
from leakscope.record.ring import Ring
from leakscope.record.symbols.address_space import AddressSpaces, Module

_LAUNCH_RING_BYTES = 16 << 20
_KERNEL_RING_BYTES = 8 << 20
_LAYOUT_ENTRIES = 8192


def launch_configuration(options: RecordOptions) -> dict[str, Any]:
    """The fields of ProgramConfig that launches need; {} for a recording without them."""
    if not options.launches:
        return {}
    return {
        "launch_args": options.launch_args,
        "launch_ring_bytes": _LAUNCH_RING_BYTES if options.launch_args else 4096,
        "kernel_ring_bytes": _KERNEL_RING_BYTES,
        "layout_entries": _LAYOUT_ENTRIES,
    }


class LaunchRecording:
    """Reads what the probes tell of kernels and launches; :attr:`arguments` makes tables of it in the sink's thread."""

    def __init__(self, options: RecordOptions, programs: LoadedPrograms, spaces: AddressSpaces, source_id: int) -> None:
        launch_ring, kernel_ring = programs.map("launch_ring"), programs.map("kernel_ring")
        self._launches = Ring(launch_ring.fd, launch_ring.entries, records.LAUNCH_RECORD)
        self._kernels = Ring(kernel_ring.fd, kernel_ring.entries, records.KERNEL_RECORD)
        self._images = Images()
        self._spaces = spaces
        self._sections: dict[Module, Image | None] = {}
        layouts = programs.map("launch_layouts") if options.launch_args else None
        self.arguments = LaunchArguments(Kernels(layouts, options.launch_args, self._symbol), source_id)

    def read_launches(self) -> list[np.ndarray]:
        """Records of launches since the last time. To be read before calls: memory is allocated before it is used."""
        launches = self._launches.read()
        return [launches] if len(launches) else []

    def read_kernels(self) -> list[tuple[np.ndarray, list[Image | str | None]]]:
        """Records of kernels with their images. To be read after launches and calls: a kernel is named before."""
        kernels = self._kernels.read()
        return [(kernels, self._images.take(kernels))] if len(kernels) else []

    def _symbol(self, pid: int, address: int, ts_ns: int) -> tuple[str, Image | None]:
        """A launch stub has the mangled name of its kernel, whose code is in `.nv_fatbin` of the same file."""
        mapping = self._spaces.at(pid, ts_ns).find(address)
        if mapping is None:
            return "", None
        module = mapping.module
        name = module.symbol_at(address - mapping.start + mapping.file_offset)
        if name and module not in self._sections:
            self._sections[module] = self._section(module)
        return name, self._sections.get(module)

    @staticmethod
    def _section(module: Module) -> Image | None:
        data = module.data
        return Image(lambda: fatbin_section(data)) if data is not None else None

    def close(self) -> None:
        """Close what was opened."""
        self._images.close()

    def losses(self) -> list[Loss]:
        """Launches whose arguments are not, or not all, known."""
        counts = self.arguments.counts
        unknown = (
            f"parameter lists not known: words that may be no arguments; images not read: {self._images.unreadable}"
        )
        unread = "more words of parameters than were read, or structures before their kernel was known"
        rows = [
            Loss("launch arguments", "arguments_approximate", counts.approximate, unknown),
            Loss("launch arguments", "arguments_partial", counts.partial, unread),
        ]
        return [loss for loss in rows if loss.count]
