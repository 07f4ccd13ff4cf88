"""Values of labels that come from outside, kept few."""

from __future__ import annotations

from leakscope.report.text import printable

OTHER = "other"
MAX_NAMES = 50
MAX_LENGTH = 100


class Names:
    """The first names that come keep their own label; all later ones share :data:`OTHER`. So the number of series stays
    bounded however long a server runs and whatever names processes give themselves."""

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._folded: set[str] = set()

    def of(self, name: str) -> str:
        """The label for ``name``."""
        label = printable(name)[:MAX_LENGTH] or OTHER
        if label != OTHER and label not in self._known:
            if len(self._known) >= self._most:
                self._folded.add(label)
                return OTHER
            self._known.add(label)
        return label

    def folded(self) -> int:
        """How many names have shared :data:`OTHER` since this was asked last."""
        count = len(self._folded)
        self._folded.clear()
        return count
