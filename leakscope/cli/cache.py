"""``leakscope cache``: forensics of caches, one command a question.

The commands parse, call a service of :mod:`leakscope.cache` and render; what they need is imported when they run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakscope.cli.live import DurationOption
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
    from leakscope.quantities import seconds

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
    from leakscope.report.console import ReportConsole
    from leakscope.report.simulate import print_replays

    print_replays(ReportConsole(), str(trace), requests, replays, options.by_bytes)


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
    from leakscope.report.console import ReportConsole
    from leakscope.report.keys import print_keys

    print_keys(ReportConsole(), str(requests or ""), found, chances, hashes)


@cache.command()
def ttl(
    evidence: Annotated[
        list[str],
        typer.Argument(
            metavar="EVIDENCE…",
            help="Captures, cache event logs, and live stores (redis://…, memcached://…).",
            show_default=False,
        ),
    ],
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print how to clean objects without a TTL that are idle for 7 days; never done."),
    ] = False,
    duration: DurationOption = None,
    as_json: JSON = False,
) -> None:
    """Tell what has no TTL and is kept, and what is past its TTL and still there."""
    from leakscope.cache.ttl import cleaning, lifetimes
    from leakscope.cli.evidence import opened_evidence

    with opened_evidence(evidence, "1GiB", duration) as (captures, _):
        found = lifetimes(captures)
    if not found:
        raise BadInputError(f"{', '.join(evidence)}: no cache objects in it")
    lines = [line for of in found for line in cleaning(of)] if plan else []
    if as_json:
        body: dict[str, object] = {"sources": [of.to_json() for of in found]}
        json.dump(body | ({"plan": lines} if plan else {}), sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from leakscope.report.console import ReportConsole
    from leakscope.report.lifetimes import print_lifetimes
    from leakscope.report.text import printable

    print_lifetimes(ReportConsole(), found)
    if plan:
        print("\n# nothing of this was done" if lines else "\n# nothing to clean")
        for line in lines:
            print(printable(line))


@cache.command()
def consistency(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Dumps and logs.", show_default=False)],
    as_json: JSON = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 when something is inconsistent.")] = False,
) -> None:
    """Compare what ranks, streams and replicas did: collectives, versions, reads of blocks that were given away.

    Reads Flight Recorder dumps of PyTorch (one a rank; pickle or JSON) and JSON lines: op_id, rank, cache_version;
    ts_ns, op, block, stream; ts_ns, node, op, incarnation, seq, block, version.
    """
    from leakscope.cache.consistency import check_consistency
    from leakscope.errors import ExitCode

    checks = check_consistency(files)
    if as_json:
        json.dump({"checks": [check.to_json() for check in checks]}, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        from leakscope.report.consistency import print_checks
        from leakscope.report.console import ReportConsole

        print_checks(ReportConsole(), checks)
    if exit_code and any(check.found for check in checks):
        raise typer.Exit(ExitCode.LEAK_FOUND)


@cache.command()
def graphs(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Launches of CUDA graphs.", show_default=False)],
    as_json: JSON = False,
) -> None:
    """Tell whether CUDA-graph launches get slower with bound buffers or page tables.

    Reads CSV or JSON lines in the order of launches: latency_us (or _ns, _ms) beside bind_count, page_table_bytes or
    page_table_entries.
    """
    from leakscope.cache.graphs import graph_launches

    found = graph_launches(trace)
    if as_json:
        json.dump(found.to_json(), sys.stdout, indent=1, allow_nan=False)
        print()
        return
    from leakscope.report.consistency import print_graphs
    from leakscope.report.console import ReportConsole

    print_graphs(ReportConsole(), found)


def _capacities(text: str, trace: Trace, by_bytes: bool) -> list[float]:
    """Capacities of a list. Raises BadInputError, which names the option."""
    from leakscope.quantities import size_bytes

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
