"""Keys of a prompt cache: how requests are normalised to keys, which part makes too many of them, and how likely two
collide.

A key is the SHA-256 of all that an answer depends on (model and revision, prompts, tools, sampling, tenant), as
canonical JSON. Only what cannot change a meaning is normalised: Unicode NFC, line ends, white space at the end. White
space inside is meaning (code, YAML, few-shot layout).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leakscope.errors import BadInputError

MAX_BYTES = 512 << 20
MAX_LINE_BYTES = 16 << 20
MAX_COMPONENTS = 64
MAX_DEPTH = 32
PROMPTS = ("prompt", "messages", "input", "text", "query")
KEY_BITS = (32, 64, 128, 256)
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Component:
    """What one part of the requests does to the number of keys."""

    name: str
    values: int
    """Distinct values, normalised."""
    keys_without: int
    """Distinct keys if the part were left out."""
    factor: float
    """Keys now for each key then: 1 changes nothing."""


@dataclass(frozen=True)
class Collisions:
    """``keys`` distinct keys in ``slots`` slots, each as likely. ``slots``: 2^bits of a hash, or buckets."""

    name: str
    keys: int
    slots: int
    shares_slot: float
    """Chance that a given key shares its slot: 1 − (1 − 1/M)^(N−1)."""
    any_collision: float
    """Chance that any two share one: 1 − e^(−N(N−1)/2M)."""
    expected_pairs: float
    """N(N−1)/2M."""


@dataclass(frozen=True)
class Keys:
    """Keys of a file of requests. ``collapsed``: distinct keys if all white space in prompts were collapsed, which
    would give different prompts the same answer."""

    requests: int
    left_out: int
    keys: int
    prompts: int
    """Distinct normalised prompts; 0 where no part is a prompt."""
    prompt_parts: tuple[str, ...]
    changed_by_normalising: int
    """Requests whose text normalising changes."""
    keys_unnormalised: int
    collapsed: int
    components: tuple[Component, ...]
    """Those that make most keys first."""

    @property
    def reuse(self) -> float:
        """Share of requests whose key came before: the hit ratio of an infinite cache."""
        return 1 - self.keys / self.requests

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"reuse": self.reuse}


def normalised(value: Any, *, collapse: bool = False) -> Any:
    """``value`` with its texts in Unicode NFC, line ends as ``\\n``, without white space at the end of lines and text.

    ``collapse``: also each run of white space as one space, which can change what a prompt means.
    """
    if isinstance(value, str):
        text = unicodedata.normalize("NFC", value).replace("\r\n", "\n").replace("\r", "\n")
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n")).rstrip("\n")
        return _SPACES.sub(" ", text).strip() if collapse else text
    if isinstance(value, list):
        return [normalised(item, collapse=collapse) for item in value]
    if isinstance(value, dict):
        return {name: normalised(item, collapse=collapse) for name, item in value.items()}
    return value


def cache_key(request: dict[str, Any]) -> str:
    """The key of a request: SHA-256, in hexadecimal, of its normalised canonical JSON (names sorted, no spaces; the
    numbers 1.0 and 1 differ)."""
    return _digest(normalised(request)).hex()


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def read_requests(path: Path | str) -> tuple[list[dict[str, Any]], int]:
    """(requests of a file of JSON lines, one object each; lines left out). Raises BadInputError for a file without any,
    and for one that is too large or has more than 64 names."""
    path = Path(path)
    requests: list[dict[str, Any]] = []
    left_out = 0
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInputError(f"{path}: more than {MAX_BYTES >> 20} MiB; cut the file")
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                row = _row(line)
                if row is None:
                    left_out += 1
                else:
                    requests.append(row)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    if not requests:
        raise BadInputError(
            f"{path}: no line is a request: a JSON object of what an answer depends on (model, prompt…)"
        )
    names = {name for request in requests for name in request}
    if len(names) > MAX_COMPONENTS:
        raise BadInputError(f"{path}: requests have {len(names):,} different names, more than {MAX_COMPONENTS}")
    return requests, left_out


def _row(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES or max(line.count(b"{"), line.count(b"[")) > 10_000:
        return None
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row and _depth(row) <= MAX_DEPTH else None


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ())
            if isinstance(item, dict | list)
        ]
        if deepest > MAX_DEPTH:
            break
    return deepest


def explosion(requests: Sequence[dict[str, Any]], left_out: int = 0) -> Keys:
    """How many keys requests make, and by which part. No text is kept, digests alone."""
    names = sorted({name for request in requests for name in request})
    prompts = tuple(name for name in names if name.lower() in PROMPTS)
    values: dict[str, set[bytes]] = {name: set() for name in names}
    without: dict[str, set[bytes]] = {name: set() for name in names}
    keys, raw, collapsed, of_prompts = set[bytes](), set[bytes](), set[bytes](), set[bytes]()
    changed = 0
    for request in requests:
        parts = {name: _digest(normalised(value)) for name, value in request.items()}
        plain = {name: _digest(value) for name, value in request.items()}
        changed += parts != plain
        keys.add(_joined(parts))
        raw.add(_joined(plain))
        loose = {name: _digest(normalised(request[name], collapse=True)) for name in prompts if name in request}
        collapsed.add(_joined(parts | loose))
        if loose:
            of_prompts.add(_joined({name: parts[name] for name in loose}))
        for name in names:
            without[name].add(_joined({other: digest for other, digest in parts.items() if other != name}))
            if name in parts:
                values[name].add(parts[name])
    components = [Component(n, len(values[n]), len(without[n]), len(keys) / len(without[n])) for n in names]
    return Keys(
        requests=len(requests),
        left_out=left_out,
        keys=len(keys),
        prompts=len(of_prompts),
        prompt_parts=prompts,
        changed_by_normalising=changed,
        keys_unnormalised=len(raw),
        collapsed=len(collapsed),
        components=tuple(sorted(components, key=lambda found: (-found.factor, found.name))),
    )


def _joined(parts: dict[str, bytes]) -> bytes:
    whole = hashlib.sha256()
    for name in sorted(parts):
        encoded = name.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(8, "big") + encoded + parts[name])
    return whole.digest()


def collisions(keys: int, *, bits: Iterable[int] = KEY_BITS, buckets: int | None = None) -> list[Collisions]:
    """Chances for hashes of so many ``bits``, and for a table of ``buckets``. Exact where floats alone would give 0."""
    slots = [(f"{count} bits", 1 << count) for count in bits]
    slots += [(f"{buckets:,} buckets", buckets)] if buckets else []
    found = []
    for name, count in slots:
        pairs = keys * (keys - 1) / 2 / count
        shares = (
            1.0 if count == 1 and keys > 1 else -math.expm1((keys - 1) * math.log1p(-1 / count)) if keys > 1 else 0.0
        )
        found.append(Collisions(name, keys, count, shares, -math.expm1(-pairs), pairs))
    return found
