"""Hash functions that caches use for keys, measured: how many keys share a bucket, and how fast they are here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
BUCKETS = 1 << 20
KEYS = 100_000
SPEED_KEYS = 20_000


@dataclass(frozen=True)
class HashMeasure:
    """One function over ``keys`` keys into ``buckets`` buckets (its low bits)."""

    name: str
    bits: int
    keys: int
    buckets: int
    sharing: float
    """Share of keys that share their bucket, measured."""
    expected: float
    """The same for ideal hashes: 1 − (1 − 1/M)^(N−1)."""
    equal_hashes: int
    """Keys whose whole hash an earlier key has."""
    per_second: float
    """Keys hashed a second on this machine, in this implementation."""
    where: str


def fnv1a_64(data: bytes) -> int:
    """FNV-1a of 64 bits (draft-eastlake-fnv: offset basis 14695981039346656037, prime 1099511628211)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & _MASK_64
    return value


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 (Appleby, public domain)."""
    value = seed & _MASK_32
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        value ^= _mixed(int.from_bytes(data[at : at + 4], "little"))
        value = ((value << 13 | value >> 19) & _MASK_32) * 5 + 0xE6546B64 & _MASK_32
    if whole < len(data):
        value ^= _mixed(int.from_bytes(data[whole:], "little"))
    value ^= len(data)
    value = (value ^ value >> 16) * 0x85EBCA6B & _MASK_32
    value = (value ^ value >> 13) * 0xC2B2AE35 & _MASK_32
    return value ^ value >> 16


def _mixed(block: int) -> int:
    block = block * 0xCC9E2D51 & _MASK_32
    return ((block << 15 | block >> 17) & _MASK_32) * 0x1B873593 & _MASK_32


def sha256_64(data: bytes) -> int:
    """The first 64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def blake2b_128(data: bytes) -> int:
    """BLAKE2b of 128 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=16).digest(), "big")


FUNCTIONS: tuple[tuple[str, int, Callable[[bytes], int], str], ...] = (
    ("murmur3", 32, murmur3_32, "Python"),
    ("FNV-1a", 64, fnv1a_64, "Python"),
    ("SHA-256 cut to 64 bits", 64, sha256_64, "OpenSSL"),
    ("BLAKE2b of 128 bits", 128, blake2b_128, "C"),
)


def made_keys(count: int = KEYS) -> list[bytes]:
    """The same keys everywhere, such as a service makes them."""
    return [b"prompt:%d:user:%d" % (number, number * 7_919 % 10_007) for number in range(count)]


def measure(keys: list[bytes], buckets: int = BUCKETS) -> list[HashMeasure]:
    """All functions over ``keys``, which must be distinct. ``buckets``: a power of two."""
    expected = -float(np.expm1((len(keys) - 1) * np.log1p(-1 / buckets)))
    found = []
    for name, bits, function, where in FUNCTIONS:
        hashes = [function(key) for key in keys]
        slots: npt.NDArray[np.int64] = np.array([value & (buckets - 1) for value in hashes], np.int64)
        taken = np.bincount(slots, minlength=buckets)
        sharing = float((taken[slots] > 1).mean())
        equal = len(hashes) - len(set(hashes))
        found.append(
            HashMeasure(name, bits, len(keys), buckets, sharing, expected, equal, _speed(function, keys), where)
        )
    return found


def _speed(function: Callable[[bytes], int], keys: list[bytes]) -> float:
    some = keys[:SPEED_KEYS]
    start = time.perf_counter()
    for key in some:
        function(key)
    return len(some) / max(time.perf_counter() - start, 1e-9)
