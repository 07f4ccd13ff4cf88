"""``leakscope cache``: forensics of caches, one command a question.

The commands parse, call a service of :mod:`leakscope.cache` and render; what they need is imported when they run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.errors import BadInputError

if TYPE_CHECKING:
    from leakscope.cache.traces import Trace

cache = typer.Typer(
    help="Forensics of caches: replay a trace under eviction policies, check keys, lifetimes and consistency.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

JSON = Annotated[bool, typer.Option("--json", help="Print one object instead of text.")]
POLICIES = "lru,lru-2,lru-2-history,decayed,lrfu,s3fifo,belady,infinite"


@cache.callback()
def _cache() -> None:
    pass


@cache.command()
def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests to a cache.", show_default=False)],
    capacity: Annotated[
        str,
        typer.Option(metavar="LIST", help="Objects, or sizes such as 64MiB, or shares of all objects such as 10%."),
    ] = "1%,10%",
    policy: Annotated[
        str, typer.Option(metavar="LIST", help="lru, lru-K, lru-K-history, decayed, lrfu, s3fifo, belady, infinite.")
    ] = POLICIES,
    ttl: Annotated[str | None, typer.Option(metavar="TIME", help="Time to live of every object, e.g. 5m.")] = None,
    half_life: Annotated[str, typer.Option(metavar="TIME", help="Half-life of a use under lrfu.")] = "415.888s",
    decay: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Decay a minute under decayed.")] = 0.1,
    as_json: JSON = False,
) -> None:
    """Replay a trace under eviction policies: what each would have missed at each capacity.

    Reads traces of Mooncake and Bailian (hash_ids), libCacheSim's oracleGeneral, Twitter's, and CSV or JSON lines with
    a time and an object; gzip too. Belady's is the bound for objects of one size.
    """
    from leakscope.cache.simulate import INFINITE, Options, policy_of, replay
    from leakscope.cache.traces import read_trace
    from leakscope.cli.quantities import seconds

    options = Options(
        by_bytes=any(item.strip()[-1:].isalpha() for item in capacity.split(",")),
        ttl_s=None if ttl is None else seconds(ttl, "--ttl"),
        half_life_s=seconds(half_life, "--half-life"),
        decay_per_minute=decay,
    )
    names = [name.strip() for name in policy.split(",") if name.strip()]
    for name in names:
        policy_of(name, options, 1, {})  # an unknown one is said before the work
    requests = read_trace(trace)
    capacities = _capacities(capacity, requests, options.by_bytes)
    limited = [replay(requests, name, at, options) for at in capacities for name in names if name != INFINITE]
    replays = limited + [replay(requests, name, 1, options) for name in names if name == INFINITE][:1]
    if as_json:
        facts = {"path": str(trace), "form": requests.form, "references": len(requests.objects)}
        facts |= {"objects": requests.distinct, "bytes": int(requests.sizes.sum()), "left_out": requests.left_out}
        unit = "bytes" if options.by_bytes else "objects"
        body = {"trace": facts, "unit": unit, "replays": [found.to_json() for found in replays]}
        json.dump(body, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from rich.console import Console

    from leakscope.report.simulate import print_replays

    print_replays(Console(highlight=False), str(trace), requests, replays, options.by_bytes)


@cache.command()
def keys(
    requests: Annotated[
        Path | None, typer.Argument(metavar="[REQUESTS]", help="JSON lines, a request each.", show_default=False)
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=10**15, help="Keys for the chances [default: those of the file, else 10⁸].")
    ] = None,
    buckets: Annotated[int | None, typer.Option(min=1, max=2**62, help="Also the chances for such a table.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure hash functions: sharing and speed.")] = False,
    as_json: JSON = False,
) -> None:
    """Say which part of requests makes too many cache keys, and how likely keys collide.

    A request is a JSON object of all that its answer depends on. Its key is the SHA-256 of its canonical JSON after
    normalising (Unicode NFC, line ends, white space at ends). Only counts are printed, never a key or a prompt.
    """
    from leakscope.cache.hashes import made_keys
    from leakscope.cache.hashes import measure as measured
    from leakscope.cache.keys import collisions, explosion, read_requests

    found = None if requests is None else explosion(*read_requests(requests))
    number = count or (100_000_000 if found is None else found.keys)
    chances = collisions(number, buckets=buckets)
    hashes = measured(made_keys()) if measure else []
    if as_json:
        body = {
            "requests": found.to_json() if found else None,
            "collisions": [vars(row) for row in chances],
            "hashes": [vars(row) for row in hashes],
        }
        json.dump(body, sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from rich.console import Console

    from leakscope.report.keys import print_keys

    print_keys(Console(highlight=False), str(requests or ""), found, chances, hashes)


def _capacities(text: str, trace: Trace, by_bytes: bool) -> list[float]:
    """Capacities of a list. Raises BadInputError, which names the option."""
    from leakscope.cli.quantities import size_bytes

    whole = trace.distinct_bytes if by_bytes else trace.distinct
    found: list[float] = []
    for item in (part.strip() for part in text.split(",")):
        number = item.removesuffix("%").strip()
        if item.endswith("%") and number.replace(".", "", 1).isdecimal():
            found.append(max(1, round(whole * float(number) / 100)))
        elif by_bytes and not item.isdecimal():
            found.append(size_bytes(item, "--capacity"))
        elif not by_bytes and item.isdecimal() and len(item) <= 15:
            found.append(int(item))
        else:
            raise BadInputError(
                f"--capacity {text}: needs objects (5000), sizes (64MiB) or shares (10%); objects and sizes do not mix"
            )
        if found[-1] < 1:
            raise BadInputError(f"--capacity {item}: must be above 0")
    return found
