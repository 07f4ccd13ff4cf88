"""Keeping a library that another one imports of its own accord out of a process that has no use for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _LeftOut(MetaPathFinder):
    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for the one module, as if it were not installed; None for all others."""
        if fullname == self._name:
            raise ModuleNotFoundError(f"{fullname} is left out of this process", name=fullname)
        return None


def leave_out(name: str) -> None:
    """Make a module that was not imported so far look as if it were not installed, for the rest of the process."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _LeftOut(name))
