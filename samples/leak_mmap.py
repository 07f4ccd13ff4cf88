"""Leaks anonymous maps of 64 KiB from Python, beside maps that are closed."""

from __future__ import annotations

import mmap

from python_common import Site, finish, options, rounds

MAP_BYTES = 64 * 1024
forgotten: list[mmap.mmap] = []


def touched_map() -> mmap.mmap:
    memory = mmap.mmap(-1, MAP_BYTES)
    for offset in range(0, MAP_BYTES, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def map_and_forget() -> None:
    forgotten.append(touched_map())


def map_and_close() -> None:
    touched_map().close()


def main() -> None:
    arguments = options(__doc__ or "", count=500, pause_us=2000, churn=2).parse_args()
    for _ in rounds(arguments):
        map_and_forget()
        for _ in range(arguments.churn):
            map_and_close()
    n = arguments.count
    site = Site("map_and_forget", "host", "mmap_anon", "mmap", n, n * MAP_BYTES)
    finish("leak_mmap.py", [site], n * arguments.churn, arguments.hold)


if __name__ == "__main__":
    main()
