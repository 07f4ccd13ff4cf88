"""Collecting live sources into a capture: all at the same time, each a source of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering
from leakscope.errors import BadInputError
from leakscope.ingest.files import Imported, enter
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline
from nsight_parsers import ParsedReport, ReportError

DEFAULT_S = 10.0
POLL_S = 0.02


@dataclass(frozen=True)
class Collecting:
    """How to collect. ``seconds``: None is ten of streams and of counters, and of Redis as long as its audit takes."""

    seconds: float | None = None
    interval_s: float = 1.0
    max_keys: int = 200_000
    busy_share: float = 0.5  # of the time with a request to Redis under way; about a tenth of it is the server


class LiveSource(Protocol):
    """One live source."""

    def check(self) -> None:
        """Raises BadInputError, one line, where it cannot be reached or used."""

    def collect(self, deadline: Deadline) -> ParsedReport | Sequence[ParsedReport]:
        """What it says until the deadline. Raises BadInputError where it breaks off before it said anything."""


def collect(addresses: Sequence[Address], capture: Path, how: Collecting | None = None) -> list[Imported]:
    """Collect ``addresses`` into ``capture``, which is made when it does not exist.

    Nothing is begun unless all can be reached; an interruption by the user ends the collection early and keeps it.
    Raises BadInputError, OutputIncompleteError; the capture is then as it was.
    """
    how = how or Collecting()
    sources = [_source(address, how) for address in addresses]
    for source in sources:
        source.check()
    deadline = Deadline(DEFAULT_S if how.seconds is None else how.seconds)
    found = _at_once([partial(source.collect, deadline) for source in sources], deadline)
    _tell_pool(found)
    imported = []
    with adding_to(capture) as (writer, existing):
        numbering = Numbering(existing)
        for address, reports in zip(addresses, found, strict=True):
            for report in [reports] if isinstance(reports, ParsedReport) else reports:
                if deadline.stopped:
                    report.findings.append("ended early by the user")
                imported.append(enter(writer, numbering, report, address.shown, address.shown))
    return imported


def _tell_pool(found: Sequence[Found]) -> None:
    """The size of the pool from an engine's metrics, where one engine's events and metrics are collected together."""
    reports = [report for report in found if isinstance(report, ParsedReport)]
    events = [report for report in reports if report.kind == "kv_events"]
    metrics = [report for report in reports if report.kind == "engine_metrics"]
    if len(events) == len(metrics) == 1 and "pool_blocks" in metrics[0].facts:
        events[0].facts.setdefault("pool_blocks", metrics[0].facts["pool_blocks"])


Found = ParsedReport | Sequence[ParsedReport]


def _at_once(jobs: Sequence[Callable[[], Found]], deadline: Deadline) -> list[Found]:
    """Results of ``jobs`` in their order, each run in a thread. The first that fails ends all."""
    results: list[Found | None] = [None] * len(jobs)
    errors: list[BaseException] = []
    done = [False] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)
            deadline.stop()
        finally:
            done[number] = True

    for number in range(len(jobs)):
        threading.Thread(target=run, args=(number,), daemon=True, name=f"collect-{number}").start()
    _wait(done, deadline)
    if errors:
        if isinstance(errors[0], ReportError):
            raise BadInputError(str(errors[0])) from None
        raise errors[0]
    return [result for result in results if result is not None]


def _wait(done: list[bool], deadline: Deadline) -> None:
    """Until all is done; an interruption ends the collection, a second one the waiting.

    Not by Thread.join: interrupted, CPython 3.11 takes the thread for ended.
    """
    while True:
        try:
            while not all(done):
                time.sleep(POLL_S)
            return
        except KeyboardInterrupt:
            if deadline.stopped:
                raise
            deadline.stop()


def _source(address: Address, how: Collecting) -> LiveSource:
    if address.kind == "kv_events":
        from leakscope.streams.kv_subscriber import KvSubscriber

        return KvSubscriber(address)
    if address.kind == "engine_metrics":
        from leakscope.streams.engine_metrics import EngineMetrics

        return EngineMetrics(address, how.interval_s)
    if address.kind == "redis":
        from leakscope.streams.redis_audit import RedisAudit

        return RedisAudit(address, how)
    from leakscope.streams.memcached import MemcachedAudit

    return MemcachedAudit(address, how)
