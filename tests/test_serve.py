"""`leakscope serve`: what a scrape gets of processes and captures, few labels, hostile clients, clean ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, running, series, value, values
from synthetic import PID, SyntheticCapture

from leakscope.capture import CaptureWriter
from leakscope.cli.main import main
from leakscope.errors import BadInputError
from leakscope.model.manifest import Manifest, Source
from leakscope.report.export.metrics import Metric
from leakscope.serve import endpoint, source
from leakscope.serve.captures import CaptureSource
from leakscope.serve.endpoint import Endpoint, is_loopback, listen_address
from leakscope.serve.exposition import gathered, registry_of
from leakscope.serve.labels import Names
from leakscope.serve.memory import MemoryMetrics
from leakscope.serve.processes import ProcessSource
from leakscope.serve.source import Polled, gauge

MIB = 1 << 20
HOLDER = f"""
import os, sys, time
held = bytearray(os.urandom(64)) * {64 * MIB // 64}
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds 64 MiB, and a child of it that sleeps."""
    command = f"import subprocess; child = subprocess.Popen(['sleep', '600'])\n{HOLDER}"
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def server(holder: subprocess.Popen[bytes]) -> Iterator[Running]:
    with running("-p", str(holder.pid), "--interval", "1s") as one:
        yield one
        assert one.end(signal.SIGINT) == 130


def test_processes_are_read_without_probes_and_their_children_with_them(
    holder: subprocess.Popen[bytes], server: Running
) -> None:
    found = series(server.scrape())
    # when the kernel is asked itself
    status = Path(f"/proc/{holder.pid}/status").read_text()
    rss = int(status.split("VmRSS:")[1].split()[0]) * 1024
    served = value(found, "leakscope_process_memory_bytes", process="python", counter="rss")
    assert served is not None
    assert served > 64 * MIB
    assert abs(served - rss) < MIB
    assert value(found, "leakscope_processes", process="python") == 1
    assert value(found, "leakscope_processes", process="sleep") == 1
    assert value(found, "leakscope_source_up", kind="processes") == 1
    assert value(found, "leakscope_verdict", verdict="inconclusive") == 1  # nothing can be said so soon
    assert value(found, "leakscope_verdict", verdict="leak") == 0
    assert value(found, "process_resident_memory_bytes") is not None  # its own


def test_scrapes_are_valid_in_both_formats(server: Running) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

    names = {family.name for family in open_metrics(server.scrape("application/openmetrics-text; version=1.0.0"))}
    assert {"leakscope_source_failures", "leakscope_process_memory_bytes"} <= names
    if promtool := shutil.which("promtool"):
        # process_* are those of prometheus_client, whose names promtool knows
        done = subprocess.run([promtool, "check", "metrics"], input=server.scrape(), text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_clients_that_do_their_worst_do_not_stop_the_others(server: Running) -> None:
    # given more connections than it holds: silent ones, ones that never end their request, ones that send garbage
    sockets = []
    for number in range(3 * endpoint.MOST):
        one = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sockets.append(one)
        if number % 3:
            one.sendall(b"GET /metrics HTTP/1.1\r\nX: " if number % 3 == 1 else os.urandom(2000) + b"\r\n\r\n")
    # then a scrape is answered all the same
    assert value(series(server.scrape()), "leakscope_source_up", kind="processes") == 1
    for one in sockets:
        one.close()
    for path, status in (("/", b"200"), ("/-/healthy", b"200"), ("/../etc/passwd", b"404"), ("/metrics?x=1", b"200")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one:
            one.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
            assert one.recv(100).split()[1] == status


def test_a_signal_ends_it_cleanly(holder: subprocess.Popen[bytes]) -> None:
    with running("-p", str(holder.pid)) as one:
        stuck = socket.create_connection(("127.0.0.1", one.port))  # a client that stays does not keep it
        assert one.end(signal.SIGTERM) == 130
        assert one.told == [f"serving {one.url}\n"]
        stuck.close()


STUCK = """
import signal, threading, time
from leakscope.errors import ExitCode
from leakscope.serve import service
service.FIRST_S = service.STOP_S = 0.2

class Stuck:
    name, kind, every_s = "stuck", "stub", 1.0
    def read(self, now_s): time.sleep(600)
    def close(self): ...

told = threading.Event()
def foreign():  # a thread of a library: it takes the signal that is meant for the process
    told.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=foreign, daemon=True).start()
service.serve([Stuck()], "127.0.0.1", 0, lambda url: told.set(), print)
"""


def test_it_ends_whichever_thread_gets_the_signal_and_whoever_is_stuck() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_target_that_ends_is_told_and_forgotten(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    told: list[str] = []
    polled = Polled(ProcessSource([process.pid], None, 1.0, 300.0), told.append)
    polled.read()
    assert {m.name for m in polled.state()[0]} >= {"process.memory", "verdict"}
    # when it ends
    process.kill()
    process.wait()
    polled.read()
    # then no old value is shown
    metrics, health = polled.state()
    assert (metrics, health.up, health.failures) == ([], False, 1)
    polled.read()
    assert told == [f"pid:{process.pid}: none of its processes runs"]  # once


class Stub:
    """A source that gives what it is told to."""

    kind = "stub"

    def __init__(self, name: str, every_s: float = 0.01) -> None:
        self.name, self.every_s = name, every_s
        self.blocked = threading.Event()
        self.release = threading.Event()
        self.series = 1

    def read(self, now_s: float) -> list[Metric]:
        if self.blocked.is_set():
            self.release.wait(30)
        return [gauge("stub", "1", "A value.", [((self.name, str(n)), float(n)) for n in range(self.series)], "number")]

    def close(self) -> None: ...


def test_a_source_that_hangs_is_no_longer_shown_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LEAST_PATIENCE_S", 0.3)
    hung, well = Polled(Stub("hung")), Polled(Stub("well"))
    assert isinstance(hung.source, Stub)
    for one in (hung, well):
        one.start()
    hung.source.blocked.set()
    deadline = time.monotonic() + 30
    while hung.state()[1].up and time.monotonic() < deadline:
        time.sleep(0.02)
    found = {metric.name: dict(metric.samples) for metric in gathered([hung, well])}
    assert found["stub"] == {("well", "0"): 0.0}
    assert found["source.up"] == {("hung", "stub"): 0.0, ("well", "stub"): 1.0}
    hung.source.release.set()
    for one in (hung, well):
        one.stop()
        assert one.join(30)


def test_one_scrape_holds_so_many_series_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    from leakscope.serve import exposition

    monkeypatch.setattr(exposition, "MAX_SERIES", 50)
    small, large = Stub("small"), Stub("large")
    large.series = 50
    polled = [Polled(small), Polled(large)]
    for one in polled:
        one.read()
    found = {metric.name: dict(metric.samples) for metric in gathered(polled)}
    assert list(found["stub"]) == [("small", "0")]
    assert found["series.left.out"] == {(): 50.0}


def test_names_are_few_and_what_shares_a_label_is_counted() -> None:
    names = Names(most=3)
    assert [names.of(n) for n in ("a", "b\x1b[2J", "", "d", "a", "e")] == ["a", "b\\x1b[2J", "other", "d", "a", "other"]
    assert (names.folded(), names.folded()) == (1, 0)
    # given 60 processes of different names, each of 100 bytes
    rows = [("process", str(pid), "rss", 100.0) for pid in range(60)]
    found = values(MemoryMetrics("e").of(rows, {str(pid): f"worker-{pid}" for pid in range(60)}))
    memory = found["leakscope_process_memory_bytes"]
    assert len(memory) == 51
    assert (memory["other", "rss"], memory["worker-0", "rss"]) == (1000.0, 100.0)
    assert found["leakscope_names_folded"]["process",] == 10


def growing(seconds: float = 60.0) -> SyntheticCapture:
    """600 kernel objects of 4 KiB that are never freed, and a process of 1 GiB."""
    made = SyntheticCapture(seconds)
    made.process()
    made.leak(600, 4096, cache="leaky", user=["main", "handle"], kernel=["k:alloc_thing"])
    made.churn(600, 512, cache="healthy", user=["main", "scratch"], kernel=["k:alloc_scratch"])
    for at in range(int(seconds)):
        made.sample(at, "rss", float(1 << 30) + at, "process", str(PID))
        made.sample(at, "meminfo_SUnreclaim", 5.0e6)
    made.loss("on_kfree", "ring_drop", 7)
    return made


def test_a_capture_is_followed_while_it_is_recorded(tmp_path: Path) -> None:
    made = growing()
    path = tmp_path / "run.lscope"
    recording = Source(0, "recording", "synthetic", "monotonic", start_ns=10**9, command=["./app"])
    writer = CaptureWriter.create(path, Manifest(sources=[recording]))
    events, samples = made.table("mem_events"), made.table("samples")
    half = events.num_rows // 2
    for name in ("stacks", "frames"):
        writer.write(name, made.table(name))
    writer.write("mem_events", events.slice(0, half))
    writer.write("samples", samples.slice(0, 60))
    one = CaptureSource(path, 1.0, "512MiB")
    # when half of it is there
    first = values(one.read(0.0))
    live = first["leakscope_layer_live_bytes"]["kernel",]
    assert live == _live(events.slice(0, half))
    assert first["leakscope_capture_complete"] == {(): 0.0}
    assert first["leakscope_capture_events"] == {(): half}
    assert first["leakscope_process_memory_bytes"] == {("unknown", "rss"): float(1 << 30) + 29}  # named at its end
    assert one.read(1.0) is one.read(2.0)  # nothing new: not analysed again
    # when it grows and ends
    writer.write("mem_events", events.slice(half))
    writer.write("samples", samples.slice(60))
    for name in ("processes", "losses"):
        writer.write(name, made.table(name))
    recording.end_ns = made.ns(60)
    writer.finish()
    second = values(one.read(3.0))
    assert second["leakscope_layer_live_bytes"]["kernel",] == _live(events) > live
    assert second["leakscope_capture_complete"] == {(): 1.0}
    assert second["leakscope_process_memory_bytes"] == {(f"p{PID}", "rss"): float(1 << 30) + 59}
    assert second["leakscope_host_memory_bytes"] == {("meminfo_SUnreclaim",): 5.0e6}
    assert second["leakscope_losses"]["on_kfree", "ring_drop"] == 7
    assert second["leakscope_verdict"]["leak",] == 1
    # no site, stack, frame or PID is a label
    words = {word for labels in second.values() for key in labels for word in key}
    assert not words & {"main", "handle", "alloc_thing", "leaky", str(PID)}


def _live(events: object) -> float:
    rows = events.to_pylist()  # type: ignore[attr-defined]
    return float(sum(row["size_bytes"] * (1 if row["op"] == "alloc" else -1) for row in rows))


def test_a_capture_and_a_process_share_a_scrape(
    tmp_path: Path, holder: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    path = growing().write(tmp_path / "run.lscope")
    target = tmp_path / "metrics.prom"
    assert main(["serve", "--once", str(path), "-p", str(holder.pid), "-o", str(target)]) == 0
    assert capsys.readouterr().out == ""
    found = series(target.read_text())
    assert value(found, "leakscope_layer_live_bytes", layer="kernel", evidence=str(path)) == 600 * 4096
    assert value(found, "leakscope_verdict", verdict="leak", evidence=str(path)) == 1
    assert value(found, "leakscope_verdict", verdict="leak", evidence=f"pid:{holder.pid}") == 0
    # as export names them, with the evidence as a label
    exported = tmp_path / "exported.prom"
    assert main(["export", str(path), "--to", "prometheus", "-o", str(exported)]) == 0
    assert {name for name, _ in series(exported.read_text())} - {name for name, _ in found} == {
        "leakscope_site_live_bytes", "leakscope_site_growth_bytes_per_second"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to serve"),
        (["-p", "2147483646"], "PID 2147483646: no such process"),
        (["/no/such.lscope"], "/no/such.lscope: no such capture"),
        (["--cgroup", "/no/such/group"], "no such cgroup|no cgroup"),
        (["-p", "1", "--listen", "nonsense:port"], "--listen nonsense:port: needs HOST:PORT"),
        (["-p", "1", "--listen", "127.0.0.1:70000"], "needs HOST:PORT"),
        (["-p", "1", "--listen", "192.0.2.1:0"], "no interface of this host has that address"),
        (["-p", "1", "-o", "x.prom"], "-o: is for --once"),
        (["redis://h:1/0", "redis://h:1/0"], "named twice"),
        (["-p", "1", "--trace", "/no/trace"], "cannot read /no/trace"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    told = capsys.readouterr().err
    assert any(one in told for one in said.split("|")), told
    assert told.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "-p", str(os.getpid()), "--listen", f"127.0.0.1:{port}"]) == 2
    told = capsys.readouterr().err
    assert told == f"leakscope: --listen 127.0.0.1:{port}: the port is in use; choose another one, or end who has it\n"


def test_beyond_this_host_it_warns_and_ends_after_its_duration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-p", str(os.getppid()), "--listen", "0.0.0.0:0", "-d", "100ms"]) == 0
    assert "there is no authentication" in capsys.readouterr().err
    assert main(["serve", "-p", str(os.getppid()), "--listen", "127.0.0.1:0", "-d", "100ms"]) == 0
    assert "authentication" not in capsys.readouterr().err


def test_addresses_to_listen_at() -> None:
    assert listen_address("127.0.0.1:1") == ("127.0.0.1", 1)
    assert listen_address("[::1]:9470") == ("::1", 9470)
    assert listen_address(":8000") == ("127.0.0.1", 8000)
    assert listen_address("localhost") == ("localhost", 9469)
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "node-7")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    for wrong in ("", "http://x:1", "a:b:c", "1.2.3.4:99999"):
        with pytest.raises(BadInputError):
            listen_address(wrong)


def test_a_connection_has_an_end_whatever_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LONGEST_S", 0.5)
    one = Endpoint("127.0.0.1", 0, registry_of(list))
    thread = threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    with socket.create_connection(one.server_address[:2], timeout=20) as slow:  # type: ignore[arg-type]
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        ended = False
        for _ in range(400):  # a byte now and then, so that no read times out
            try:
                slow.sendall(b"X")
                time.sleep(0.05)
            except OSError:
                ended = True
                break
        assert ended
    one.shutdown()
    one.server_close()
    thread.join(10)


AS_NOBODY = """
import os, subprocess, sys
from leakscope.cli.main import main
theirs = subprocess.Popen(["sleep", "600"], user=65534, group=65534, extra_groups=[])
try:
    main(["serve", "--once", "-p", str(theirs.pid), "-o", os.devnull])  # what it imports is root's to read
    os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
    code = main(["serve", "--once", "-p", str(theirs.pid)])
finally:
    theirs.kill()
sys.exit(code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can become another user; tests run as one then")
def test_processes_of_the_same_user_need_no_privileges() -> None:
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = series(done.stdout)
    assert value(found, "leakscope_source_up", kind="processes") == 1
    assert (value(found, "leakscope_process_memory_bytes", process="sleep", counter="rss") or 0) > 100_000
    assert (value(found, "leakscope_process_memory_bytes", process="sleep", counter="pss") or 0) > 10_000
    assert value(found, "leakscope_sampler_errors_total") == 0
