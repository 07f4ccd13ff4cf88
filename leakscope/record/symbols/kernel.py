"""The running kernel's symbols, from /proc/kallsyms."""

from __future__ import annotations

import threading

import numpy as np

_SAMPLE_BYTES = 1 << 16
_ADDRESS_DIGITS = 16
_KIND_AT = _ADDRESS_DIGITS + 1
_NAME_AT = _KIND_AT + 2
_LARGEST_FUNCTION_BYTES = 1 << 16
"""An address that far behind a function is not in it."""


class KernelSymbols:
    """Functions by address. `available` is False where kptr_restrict or a missing privilege hides addresses.

    The file, some MiB that the kernel takes 0.1 s to print, is read by a thread of its own; a look-up waits for it. It
    is read again when an address of no known function is asked for and other modules are loaded than when it was read.
    """

    def __init__(self, path: str = "/proc/kallsyms", modules: str = "/proc/modules") -> None:
        self._path = path
        self._modules_path = modules
        self._modules = b""
        with open(path, "rb") as file:
            sample = file.read(_SAMPLE_BYTES)
        addresses, _, _ = _functions(sample)
        self.available = bool(addresses.any())
        self._reader = threading.Thread(target=self._read, name="leakscope-kallsyms", daemon=True)
        if self.available:
            self._reader.start()

    def _read(self) -> None:
        self._modules = self._loaded_modules()
        with open(self._path, "rb") as file:
            text = file.read()
        addresses, starts, ends = _functions(text)
        order = np.argsort(addresses, kind="stable")
        self._addresses, self._starts, self._ends, self._text = addresses[order], starts[order], ends[order], text

    def lookup(self, address: int) -> tuple[str, str, int]:
        """(function, module, address of its start) for an address; ('', '', 0) when unknown."""
        if not self.available:
            return "", "", 0
        self._reader.join()
        found = self._find(address)
        in_kernel = not found[1] and address - found[2] <= _LARGEST_FUNCTION_BYTES
        if in_kernel or self._loaded_modules() == self._modules:
            return found
        self._read()
        return self._find(address)

    def _loaded_modules(self) -> bytes:
        """Names and addresses of the modules of now, one a line; nothing where there are none."""
        try:
            with open(self._modules_path, "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            return b""
        # Name, size, uses, users, state, address: what is in use changes all the time.
        return b"\n".join(b" ".join(fields[:2] + fields[5:6]) for fields in map(bytes.split, lines))

    def _find(self, address: int) -> tuple[str, str, int]:
        index = int(np.searchsorted(self._addresses, np.uint64(address), "right")) - 1
        if index < 0:
            return "", "", 0
        line = self._text[self._starts[index] : self._ends[index]].decode("ascii", "replace")
        name, _, module = line.partition("\t")
        return name, module.strip("[]"), int(self._addresses[index])


def _functions(text: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Addresses, and where name and module of each begin and end, of the functions in whole lines of kallsyms.

    A line is ``ffffffff81000000 T name\\t[module]`` (s_show in kernel/kallsyms.c); functions are of kind t or w.
    """
    characters = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    long_enough = ends - starts > _NAME_AT
    starts, ends = starts[long_enough], ends[long_enough]
    kept = np.isin(characters[starts + _KIND_AT] if len(starts) else characters[:0], np.frombuffer(b"tTwW", np.uint8))
    starts, ends = starts[kept], ends[kept]
    addresses = np.zeros(len(starts), np.uint64)
    for place in range(_ADDRESS_DIGITS):
        digits = characters[starts + place]
        # ASCII: the low four bits of 0-9 are the digit, those of a-f are one to six.
        values = (digits & 15) + np.where(digits >= ord("A"), 9, 0).astype(np.uint8)
        addresses = (addresses << np.uint64(4)) | values.astype(np.uint64)
    return addresses, starts + _NAME_AT, ends
