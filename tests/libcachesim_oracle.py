"""Misses by libCacheSim, in a Python of its own: it is GPL and no dependency of ours.

Arguments: a file of int64 (objects, then as many sizes), and specifications ``lru:CAPACITY`` or ``lru-K:CAPACITY``.
Prints the misses of each as a JSON array.
"""

import array
import json
import sys

import libcachesim  # type: ignore[import-not-found]


def misses(specification: str, objects: "array.array[int]", sizes: "array.array[int]") -> int:
    name, _, capacity = specification.partition(":")
    k = name.removeprefix("lru").removeprefix("-")
    common = {"cache_size": int(capacity), "hashpower": 18}  # the default table takes longer to make than to use
    cache = libcachesim.LRUK(**common, k=int(k)) if k else libcachesim.LRU(**common)
    request, missed = libcachesim.Request(), 0
    for number, (key, size) in enumerate(zip(objects, sizes, strict=True)):
        request.obj_id, request.obj_size, request.clock_time = key, size, number
        missed += not cache.get(request)
    return missed


content = array.array("q")
with open(sys.argv[1], "rb") as file:
    content.frombytes(file.read())
half = len(content) // 2
print(json.dumps([misses(given, content[:half], content[half:]) for given in sys.argv[2:]]))
