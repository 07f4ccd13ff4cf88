"""Metrics of inference engines: what is held while no request runs, alone and together with KV events."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kv_publisher import Publisher, batch, recording, removed, stored

from leakscope.capture import Capture
from leakscope.capture.addition import adding_to
from leakscope.capture.ids import Numbering
from leakscope.cli.main import main
from leakscope.detect.kv_verdicts import judge_kv
from leakscope.ingest import import_files
from leakscope.ingest.files import enter
from leakscope.model.results import Verdict
from leakscope.streams import Collecting, address_of, collect
from leakscope.streams.engine_metrics import readings_of, report_of


def vllm(running: int = 0, waiting: int = 0, usage: float = 0.0, blocks: int = 600) -> str:
    """What vLLM's endpoint prints of its cache, and some of the rest."""
    labels = 'engine="0",model_name="m"'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting}.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {usage!r}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{{labels}}} 3.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}} 1.0
# TYPE python_info gauge
python_info{{version="3.12"}} 1.0
"""


def sglang(held: int) -> str:
    """What SGLang's endpoint prints, from two tensor-parallel ranks; 64-token pages, 10,000 pages."""
    lines = []
    for rank in (0, 1):
        labels = f'tp_rank="{rank}"'
        lines += [f"sglang:num_running_reqs{{{labels}}} 0", f"sglang:num_queue_reqs{{{labels}}} 0"]
        lines += [f"sglang:max_total_num_tokens{{{labels}}} 640000", f"sglang:page_size{{{labels}}} 64"]
        lines += [f"sglang:kv_available_tokens{{{labels}}} {600_000 - 64 * held}"]
        lines += [f"sglang:kv_evictable_tokens{{{labels}}} 40000"]
    return "\n".join(lines) + "\n"


@contextmanager
def serving(*texts: str, status: int = 200) -> Iterator[str]:
    """A metrics endpoint that answers with one text after the other, the last one again and again; its address."""
    answers = list(texts)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (answers.pop(0) if len(answers) > 1 else answers[0]).encode()
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def judged(capture: Path) -> list[Verdict]:
    opened = Capture.open(capture)
    with opened.connect() as con:
        return judge_kv(con, opened.manifest.sources)


def read(capture: Path, *texts: str) -> list[Verdict]:
    """What is judged of texts that were read one second after the other."""
    report = report_of([(10**18 + n * 10**9, readings_of(text, "")) for n, text in enumerate(texts)], [])
    with adding_to(capture) as (writer, existing):
        enter(writer, Numbering(existing), report, "metrics", "metrics")
    return judged(capture)


def scraped(url: str, capture: Path, seconds: float = 0.7) -> list[Verdict]:
    address = address_of(url)
    assert address is not None
    collect([address], capture, Collecting(seconds=seconds, interval_s=0.6))
    return judged(capture)


def test_counters_and_nothing_else_are_kept() -> None:
    found = readings_of(vllm(2, 1, 0.25), "")
    assert found == {
        ("num_requests_running", "0"): 2.0,
        ("num_requests_waiting", "0"): 1.0,
        ("kv_cache_usage_ratio", "0"): 0.25,
        ("num_preemptions_total", "0"): 3.0,
        ("num_kv_blocks", "0"): 600.0,
        ("num_kv_block_tokens", "0"): 16.0,
    }


def test_blocks_held_while_idle_are_a_leak(tmp_path: Path) -> None:
    # given the usage that three planted leaks left in a real vLLM: 36 of 599 blocks
    with serving(vllm(usage=36 / 599)) as url:
        (verdict,) = scraped(url, tmp_path / "c.lscope")
    assert (verdict.verdict, verdict.kind, verdict.kept_objects) == ("leak", "pinned_never_unpinned", 36)
    assert verdict.reasons[0] == "with no request running or waiting 36 of 599 blocks are held"
    assert verdict.confidence == 0.95


@pytest.mark.parametrize("running", [(1, 0), (0, 1)])
def test_usage_while_requests_run_or_wait_says_nothing(tmp_path: Path, running: tuple[int, int]) -> None:
    (verdict,) = read(tmp_path / "c.lscope", *[vllm(*running, usage=0.4)] * 3)
    assert (verdict.verdict, verdict.kind) == ("inconclusive", "missing_data")


def test_the_last_idle_moment_counts(tmp_path: Path) -> None:
    # given a usage that was not 0 at an earlier idle moment, with work in between
    (verdict,) = read(tmp_path / "c.lscope", vllm(usage=0.4), vllm(3, 0, 0.5), vllm(usage=0.0))
    assert verdict.verdict == "not_leak"


def test_one_idle_reading_is_less_certain(tmp_path: Path) -> None:
    (verdict,) = read(tmp_path / "c.lscope", vllm(3, 0, 0.5), vllm(usage=0.01))
    assert (verdict.verdict, verdict.confidence, verdict.kept_objects) == ("leak", 0.8, 6)


@pytest.mark.parametrize(("held", "said"), [(0, "not_leak"), (59, "leak")])
def test_sglang_counts_tokens(tmp_path: Path, held: int, said: str) -> None:
    (verdict,) = read(tmp_path / "c.lscope", sglang(held), sglang(held))
    assert (verdict.verdict, verdict.kept_objects) == (said, held)


def held_stream(path: Path, evictions: int) -> None:
    """Two blocks of one request, and so many others that come and go."""
    frames = [batch(100, [stored([1, 2])])]
    frames += [batch(101 + n, [stored([1000 + n]), removed(1000 + n)]) for n in range(evictions)]
    path.write_text(recording(enumerate(frames)))


@pytest.mark.parametrize(
    ("evictions", "text", "verdict", "confidence", "kept"),
    [
        (9, vllm(usage=2 / 9, blocks=10), "leak", 0.98, 2),  # both say so
        (9, vllm(usage=5 / 9, blocks=10), "leak", 0.98, 2),  # and three more that the events do not tell
        (9, vllm(usage=0.0, blocks=10), "not_leak", 0.9, 0),  # the metrics decide
        (9, vllm(1, 0, 2 / 9, blocks=10), "leak", 0.6, 2),  # never idle: the events alone
        (8, vllm(usage=2 / 9, blocks=10), "leak", 0.95, 2),  # not enough turnover: the metrics alone
        (8, vllm(usage=0.0, blocks=10), "not_leak", 0.9, 0),
        (8, vllm(1, 0, 2 / 9, blocks=10), "inconclusive", 0.5, 0),
    ],
)
def test_events_and_metrics_together(
    tmp_path: Path, evictions: int, text: str, verdict: str, confidence: float, kept: int
) -> None:
    # given a pool of 9 usable blocks, whose size the metrics alone tell
    held_stream(tmp_path / "frames", evictions)
    read(tmp_path / "c.lscope", text, text)
    import_files([tmp_path / "frames"], tmp_path / "c.lscope")
    (found,) = judged(tmp_path / "c.lscope")
    assert (found.verdict, found.confidence, found.kept_objects) == (verdict, confidence, kept)
    turnover = "not enough turnover: 0.89 of 1.0"
    assert (turnover in (*found.reasons, *found.missing)) == (evictions == 8)


def test_attribute_takes_the_address_beside_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_stream(tmp_path / "frames", 9)
    with serving(vllm(usage=2 / 9, blocks=10)) as url:
        assert main(["attribute", str(tmp_path / "frames"), url, "--duration", "0.7", "--json", "--exit-code"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["culprit"]["objects"] == [f"{1:016x}", f"{2:016x}"]
    assert [i["kind"] for i in report["inputs"]] == ["engine_metrics", "kv_events"]
    assert report["inputs"][0]["path"] == url


def test_live_events_and_metrics_of_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    # given an engine that did all its work before anybody listened, and whose metrics alone tell its pool's size
    payloads = [batch(100, [stored([1, 2])])]
    payloads += [batch(101 + n, [stored([1000 + n]), removed(1000 + n)]) for n in range(9)]
    with serving(vllm(usage=2 / 9, blocks=10)) as url, Publisher(payloads) as engine:
        engine.dropped = set(range(len(payloads)))
        events = engine.address.replace("pool=599&", "")
        assert main(["attribute", events, url, "--duration", "1.2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["confidence"] == 0.98 and report["verdict"]["kept_objects"] == 2
    assert report["inputs"][0]["facts"]["pool_blocks"] == 9 and report["verdict"]["missing"] == []


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("", 404, "answers with HTTP status 404"),
        ("", 302, "answers with HTTP status 302"),
        ("python_info 1\n", 200, "no counter of vLLM, SGLang or LMCache"),
        ("vllm:num_requests_running{ nonsense\n", 200, "no Prometheus text"),
    ],
)
def test_wrong_endpoints_are_one_line_and_keep_secrets(
    text: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(text, status=status) as url:
        secret = url.replace("//", "//user:hunter2@") + "?token=hunter2"
        assert main(["import", secret, "-o", str(tmp_path / "c.lscope")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "hunter2" not in error and url in error
    assert not (tmp_path / "c.lscope").exists()
