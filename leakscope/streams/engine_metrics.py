"""Counters of an inference engine's metrics endpoint (Prometheus text): vLLM, SGLang, LMCache.

Only the counters of :data:`COUNTERS` are kept, under names of our own; labels other than the engine's number are not.
Of several readings of one counter in one scrape (a tensor-parallel rank each) the greatest counts.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import math
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import unquote, urlunsplit

from leakscope.errors import BadInputError
from leakscope.streams.address import Address
from leakscope.streams.clock import Deadline, utc_ns
from nsight_parsers import ParsedReport
from nsight_parsers.arrow import build_table
from nsight_parsers.kv_decode import EXTRA

COUNTERS = {
    "vllm:num_requests_running": "num_requests_running",
    "vllm:num_requests_waiting": "num_requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage_ratio",  # its name up to vLLM 0.10
    "vllm:num_preemptions_total": "num_preemptions_total",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_total",
    "sglang:num_running_reqs": "num_requests_running",
    "sglang:num_queue_reqs": "num_requests_waiting",
    "sglang:max_total_num_tokens": "num_kv_tokens",
    "sglang:kv_available_tokens": "num_kv_tokens_available",
    "sglang:kv_evictable_tokens": "num_kv_tokens_evictable",
    "sglang:page_size": "num_kv_page_tokens",
    "lmcache:pinned_memory_objs_count": "lmcache_pinned_count",
    "lmcache:active_memory_objs_count": "lmcache_active_count",
    "lmcache:forced_unpin_count_total": "lmcache_forced_unpins_total",
    "lmcache:forced_unpin_count": "lmcache_forced_unpins_total",
}
CACHE_CONFIG = "vllm:cache_config_info"
CONFIG_LABELS = {"num_gpu_blocks": "num_kv_blocks", "block_size": "num_kv_block_tokens"}
ENGINE_LABELS = ("engine", "dp_rank")
TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
LIMITS = ["the endpoint tells how many blocks are held, not which, nor by whom"]

Reading = dict[tuple[str, str], float]
"""(counter, engine) → value."""


class EngineMetrics:
    """One metrics endpoint, read each ``interval_s``."""

    def __init__(self, address: Address, interval_s: float) -> None:
        self.address = address
        self.interval_s = interval_s

    def check(self) -> None:
        """Raises BadInputError where the endpoint does not answer, or knows none of the counters."""
        if not self.read():
            raise BadInputError(
                f"{self.address.shown}: answers, but with no counter of vLLM, SGLang or LMCache; "
                "is this the address of /metrics?"
            )

    def read(self) -> Reading:
        """One scrape. Raises BadInputError where it fails."""
        return readings_of(self.text(), self.address.shown)

    def collect(self, deadline: Deadline) -> ParsedReport:
        """Readings until the deadline, two at least."""
        readings: list[tuple[int, Reading]] = []
        scrapes = 0
        while True:
            now_ns = utc_ns()
            with contextlib.suppress(BadInputError):
                readings.append((now_ns, self.read()))
            scrapes += 1
            if deadline.wait(self.interval_s) and scrapes >= 2:
                break
        if not any(reading for _, reading in readings):
            raise BadInputError(f"{self.address.shown}: answered no more")
        failed = scrapes - len(readings)
        return report_of(readings, [f"{failed:,} of {scrapes:,} readings failed"] if failed else [])

    def text(self) -> str:
        """The answer to one scrape. Raises BadInputError where there is none."""
        url = self.address.url
        host = self.address.host
        authority = (f"[{host}]" if ":" in host else host) + (f":{url.port}" if url.port else "")
        request = urllib.request.Request(urlunsplit((url.scheme, authority, url.path or "/metrics", url.query, "")))
        if url.username is not None:
            secret = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
            request.add_header("Authorization", f"Basic {base64.b64encode(secret).decode()}")
        try:
            with urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({})).open(
                request, timeout=TIMEOUT_S
            ) as answer:
                content: bytes = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise BadInputError(f"{self.address.shown}: answers with HTTP status {error.code}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
            raise BadInputError(f"{self.address.shown}: cannot be reached: {text}") from None
        if len(content) > MAX_BYTES:
            raise BadInputError(f"{self.address.shown}: answers with more than {MAX_BYTES >> 20} MiB")
        return content.decode("utf-8", "replace")


def report_of(readings: list[tuple[int, Reading]], findings: list[str]) -> ParsedReport:
    """The source that ``readings``, (time in ns, counters) each, are."""
    rows = [(ts, engine, name, value) for ts, reading in readings for (name, engine), value in reading.items()]
    ts_ns, engines, names, values = (list(column) for column in zip(*rows, strict=True))
    samples = build_table(
        "samples", len(rows), ts_ns=ts_ns, scope="service", scope_id=engines, counter=names, value=values
    )
    blocks = [int(value) - 1 for name, _, value in zip(names, engines, values, strict=True) if name == "num_kv_blocks"]
    return ParsedReport(
        {"samples": samples},
        findings,
        "engine metrics",
        kind="engine_metrics",
        facts={"readings": len(readings)} | ({"pool_blocks": max(blocks)} if blocks and len(set(engines)) == 1 else {}),
        limits=list(LIMITS),
        clock="utc",
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Credentials and questions go to the address that the user gave, nowhere else."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the answer is an error."""
        return


def readings_of(text: str, shown: str) -> Reading:
    """The counters in a text of Prometheus's exposition format. Raises BadInputError for what is none."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise BadInputError(f"{shown}: metrics need prometheus-client: {EXTRA}") from None
    found: Reading = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                engine = next((sample.labels[label] for label in ENGINE_LABELS if label in sample.labels), "")[:16]
                if sample.name == CACHE_CONFIG:
                    given = {name: sample.labels.get(label, "") for label, name in CONFIG_LABELS.items()}
                    values = {name: float(text) for name, text in given.items() if text.isdecimal()}
                elif sample.name in COUNTERS and math.isfinite(sample.value):
                    values = {COUNTERS[sample.name]: float(sample.value)}
                else:
                    continue
                for name, value in values.items():
                    found[name, engine] = max(value, found.get((name, engine), value))
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        raise BadInputError(f"{shown}: its answer is no Prometheus text") from None
    return found
