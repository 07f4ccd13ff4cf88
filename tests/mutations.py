"""Damaged copies of files, and a harness that parses many of them in one process of bounded memory and time.

``fuzz`` starts this module as a program: it damages the seeds in turn, parses each copy, and stops at the first outcome
that is neither a result nor the documented error: another exception, more than ``LIMIT_BYTES`` of memory, or more than
``LIMIT_S`` seconds. Every copy is a function of (name of the parser, seed, round): a failure names them and repeats.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_BYTES = 1 << 30
LIMIT_S = 10
ROUNDS = int(os.environ.get("LEAKSCOPE_FUZZ_ROUNDS", "300"))
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
NUMBERS = (b"0", b"-1", b"1e999", b"99999999999999999999", b"nan", b"", b"1.2.3", b"\xff")


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite_length(data: bytes, rng: random.Random) -> bytes:
    """An extreme number of one to eight bytes over whatever stood there."""
    at = rng.randrange(len(data) + 1)
    number = struct.pack("<Q", rng.choice(EXTREMES) * rng.choice((1, 1, 1 << 32)) & (1 << 64) - 1)[
        : rng.choice((1, 2, 4, 8))
    ]
    return data[:at] + number + data[at + len(number) :]


def overwrite_run(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 16, 256, 4096))
    filler = rng.choice((b"\0", b"\xff", b"\x80", b"\n", b'"', b"(", b","))
    return data[:at] + filler * length + data[at + length :]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((1, 4, 64, 1024))
    return data[:start] + data[start + length :]


def repeat_part(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data) + 1), rng.choice((4, 64, 1024, 16384))
    return data[: start + length] + data[start : start + length] * rng.choice((1, 3, 30)) + data[start + length :]


def move_part(data: bytes, rng: random.Random) -> bytes:
    start, length, to = rng.randrange(len(data) + 1), rng.choice((4, 64, 1024)), rng.randrange(len(data) + 1)
    rest = data[:start] + data[start + length :]
    return rest[:to] + data[start : start + length] + rest[to:]


def nest(data: bytes, rng: random.Random) -> bytes:
    """Deep nesting at some place: protobuf messages in messages, or brackets of text and pickles."""
    depth = rng.choice((100, 1000, 20_000))
    nested = b""
    if rng.random() < 0.5:
        for _ in range(min(depth, 2000)):
            length, prefix = len(nested), bytearray()
            while length > 0x7F:
                prefix.append(length & 0x7F | 0x80)
                length >>= 7
            nested = bytes([rng.choice((0x0A, 0x12, 0x1A, 0x6A))]) + bytes([*prefix, length]) + nested
    else:
        nested = rng.choice((b"(", b"[", b"{", b"]", b'"', b"(\x85")) * depth
    at = rng.randrange(len(data) + 1)
    return data[:at] + nested + data[at:]


def odd_number(data: bytes, rng: random.Random) -> bytes:
    """Another number in the place of a run of digits."""
    starts = [i for i in range(len(data)) if data[i : i + 1].isdigit()][:100_000]
    if not starts:
        return flip_bits(data, rng)
    at = rng.choice(starts)
    end = at
    while end < len(data) and data[end : end + 1].isdigit():
        end += 1
    return data[:at] + rng.choice(NUMBERS) + data[end:]


def bomb(data: bytes, rng: random.Random) -> bytes:
    """A zstd frame: of the seed and much of one byte, or a whole frame that is damaged."""
    import pyarrow as pa

    padded = data + bytes([rng.choice((0, 0x0A, 0x6A, 0x80, 0xFF))]) * rng.choice((0, 1 << 16, 1 << 23, 1 << 26))
    frame = pa.compress(padded, codec="zstd", asbytes=True)
    return frame if rng.random() < 0.5 else flip_bits(frame, rng)


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate, flip_bits, flip_bits, overwrite_length, overwrite_length, overwrite_run, cut_out, repeat_part, move_part,
    nest, odd_number,
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A damaged copy of ``data``: one to three of the mutations above, and now and then a zstd bomb."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    return bomb(data, rng) if rng.random() < 0.02 else data


def fuzz(
    parser: str, error: str, seeds: Sequence[Path], rounds: int = ROUNDS, limit_s: float = LIMIT_S
) -> dict[str, int]:
    """Parses ``rounds`` damaged copies of ``seeds`` with ``module:function``; ``error`` is the documented exception.

    Returns the number of copies that were read and refused. Raises AssertionError with the first bad outcome.
    """
    with tempfile.NamedTemporaryFile("r") as progress:
        program = [sys.executable, __file__, parser, error, str(rounds), str(limit_s), progress.name, *map(str, seeds)]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False
        )
        said = f"{parser}, round {progress.read() or 0}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def _imported(name: str) -> object:
    module, attribute = name.split(":")
    return getattr(importlib.import_module(module), attribute)


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(parser: str, error: str, rounds: int, limit_s: float, progress: str, seeds: list[Path]) -> int:
    """The child of :func:`fuzz`: prints the counts as JSON and returns 0, or says what went wrong and returns 1.

    The number of the round goes to the file ``progress``: whatever ends the process, it can be told.
    """
    parse, documented = _imported(parser), _imported(error)
    contents = [seed.read_bytes() for seed in seeds]
    counts = {"read": 0, "refused": 0}
    for seed in seeds:
        parse(seed)  # type: ignore[operator]
    _bound_memory()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path, round_file = Path(folder) / "damaged", os.open(progress, os.O_WRONLY)
        for number in range(rounds):
            which = number % len(seeds)
            os.pwrite(round_file, str(number).encode(), 0)
            path.write_bytes(mutate(contents[which], random.Random(f"{parser} {which} {number}")))
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                parse(path)  # type: ignore[operator]
                counts["read"] += 1
            except documented as refusal:  # type: ignore[misc]
                counts["refused"] += 1
                if "\n" in str(refusal) or not str(refusal):
                    print(f"{seeds[which]}: a refusal that is not one line: {refusal!r}")
                    return 1
            except BaseException:
                print(f"{seeds[which]}:\n{traceback.format_exc()[-3000:]}")
                return 1
            finally:
                faulthandler.cancel_dump_traceback_later()
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    _, called, documented_error, count, limit, progress_file, *names = sys.argv
    sys.exit(main(called, documented_error, int(count), float(limit), progress_file, [Path(name) for name in names]))
