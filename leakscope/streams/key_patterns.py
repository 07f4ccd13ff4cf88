"""Keys to patterns: what changes from key to key becomes a placeholder, so that no name, token or id is stored."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence

SEPARATORS = re.compile(r"([:/|])")
DOTS = re.compile(r"((?<=[A-Za-z])\.)")
MAX_SEGMENTS = 8
MAX_WORDS = 32
"""More different words than this in one place of a pattern are values, not names."""
MAX_KEY_BYTES = 512
LIKE = ("{number}", "{hex}", "{id}")
"""Values of which one kind may look like the next: in one place of a pattern all take the last that occurs."""
_WORD = re.compile(r"[A-Za-z][A-Za-z_-]{0,30}")
_KINDS = (
    (re.compile(r"v\d{1,3}"), None),
    (re.compile(r"-?\d+(\.\d+)?"), "{number}"),
    (re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"), "{uuid}"),
    (re.compile(r"(?=[^0-9]*[0-9])[0-9a-fA-F]{8,}"), "{hex}"),
    (re.compile(r"[^@\s]+@[^@\s]+"), "{email}"),
    (re.compile(r"[\w=+-]*", re.ASCII), "{id}"),
)


class KeyPatterns:
    """The patterns of the keys of one store; names of single keys are digests that no other audit shares."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def segments(self, key: bytes) -> tuple[str, ...]:
        """The parts of one key and what separates them, values already as placeholders."""
        whole = SEPARATORS.split(key[:MAX_KEY_BYTES].decode("utf-8", "replace"))
        parts = [piece for part in whole for piece in ([part] if "@" in part else DOTS.split(part))]
        kept = [part if number % 2 else _segment(part) for number, part in enumerate(parts[: 2 * MAX_SEGMENTS - 1])]
        return tuple(kept) + (("…",) if len(parts) >= 2 * MAX_SEGMENTS else ())

    def digest(self, key: bytes) -> str:
        """12 hexadecimal digits that tell this key from others."""
        return hashlib.blake2b(key, digest_size=6, key=self._salt).hexdigest()


def patterns(segmented: Sequence[tuple[str, ...]]) -> list[str]:
    """The pattern of each key: words in a place that takes more than ``MAX_WORDS`` of them are values too."""
    done: list[tuple[str, ...]] = [()] * len(segmented)
    for level in range(0, max(map(len, segmented), default=0), 2):
        words: dict[tuple[str, ...], set[str]] = {}
        values: dict[tuple[str, ...], set[str]] = {}
        for before, parts in zip(done, segmented, strict=True):
            if level < len(parts) and not parts[level].startswith("{"):
                words.setdefault(before, set()).add(parts[level])
            if level < len(parts) and parts[level] in LIKE:
                values.setdefault(before, set()).add(parts[level])
        many = {before for before, found in words.items() if len(found) > MAX_WORDS}
        widest = {before: max(found, key=LIKE.index) for before, found in values.items()}
        for number, parts in enumerate(segmented):
            if level >= len(parts):
                continue
            before, part = done[number], parts[level]
            part = widest.get(before, part) if part in LIKE else part
            part = "{word}" if before in many and not part.startswith("{") else part
            done[number] = (*before, part, *parts[level + 1 : level + 2])
    return ["".join(parts) for parts in done]


def _segment(part: str) -> str:
    bare = part.strip("{}")
    if not bare or _WORD.fullmatch(bare):
        return bare
    for pattern, placeholder in _KINDS:
        if pattern.fullmatch(bare):
            return bare if placeholder is None else placeholder
    return "{text}"
