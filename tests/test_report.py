"""A report in words and as JSON."""

from __future__ import annotations

import json

from terminal_reports import full_report

from leakscope.detect.sentence import sentence
from leakscope.model.results import Verdict
from leakscope.quantities import counted, exact, interval, rate, size
from leakscope.report.json import report_json
from leakscope.report.text import printable


def test_verdicts_in_words() -> None:
    healthy = Verdict("not_leak", "cache_warmup", reasons=("what grew has levelled off",))
    assert sentence(healthy) == "what grew has levelled off (cache_warmup)"
    assert sentence(full_report().findings[1]) == (
        "buffer_map may leak: it keeps 65,536 B (64.0 KiB) of host memory in 16 objects, growing by 10 B/s "
        "(partial_data)"
    )


def test_json_is_plain_and_complete() -> None:
    report = report_json(full_report())
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["verdict"]["class"] == "per_call"
    assert report["verdict"]["culprit"] == {"frame": "kv_block_alloc", "stack": ["main", "kv_block_alloc"]}
    assert report["findings"][0]["consequences"] == ["k-00000009"]
    assert report["losses"] == [
        {"source": "on_kmem_cache_free", "what": "recursion_miss", "count": 37, "detail": "nested"}
    ]
    assert report["reconciliation"][2] == {"source": "slabinfo", "what": "unexplained", "bytes": 18_000}
    assert report["reconciliation"][3]["bytes"] is None
    assert (report["sites"][4]["added_to_layer"], report["sites"][3]["frees_visible"]) == (False, False)


def test_sizes_in_words() -> None:
    assert [size(v) for v in (0, 1023, 1024, 1536, -26_214_400, 1023.99 * 1024)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "-25.0 MiB", "1.0 MiB",
    ]  # fmt: skip
    assert (size(float("nan")), rate(2048.0), exact(100), exact(4096)) == (
        "?",
        "2.0 KiB/s",
        "100 B",
        "4,096 B (4.0 KiB)",
    )
    assert (interval(1_800_000, 2_097_152), interval(600_000, 1_500_000)) == ("1.7 … 2.0 MiB", "585.9 KiB … 1.4 MiB")
    assert (counted(1, "object"), counted(3000, "object"), printable("a\tb")) == ("1 object", "3,000 objects", "a\\tb")
