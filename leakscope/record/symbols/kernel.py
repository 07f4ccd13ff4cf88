"""The running kernel's symbols, from /proc/kallsyms."""

from __future__ import annotations

import numpy as np


class KernelSymbols:
    """Functions by address. `available` is False where kptr_restrict or a missing privilege hides addresses."""

    def __init__(self, path: str = "/proc/kallsyms") -> None:
        addresses: list[int] = []
        names: list[str] = []
        with open(path) as file:
            for line in file:
                address, kind, rest = line.split(" ", 2)
                if kind in "tTwW":
                    addresses.append(int(address, 16))
                    names.append(rest.rstrip("\n"))
        values = np.array(addresses, np.uint64)
        order = np.argsort(values, kind="stable")
        self._addresses = values[order]
        self._names = [names[i] for i in order]
        self.available = bool(len(values)) and bool(values.max() > 0)

    def lookup(self, address: int) -> tuple[str, str, int]:
        """(function, module, address of its start) for an address; ('', '', 0) when unknown."""
        if not self.available:
            return "", "", 0
        index = int(np.searchsorted(self._addresses, np.uint64(address), "right")) - 1
        if index < 0:
            return "", "", 0
        name, _, module = self._names[index].partition("\t")
        return name, module.strip("[]"), int(self._addresses[index])
