"""The samples that leak or churn in the kernel and on the host do what their reports say, checked against /proc."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from recording import BIN
from sample_runs import KIB, command, descriptors, held, mapped_bytes

pytestmark = pytest.mark.usefixtures("samples")


@pytest.mark.parametrize("name", ["leak_socketpair", "leak_socketpair.py"])
def test_socketpair_leaker_holds_two_sockets_a_pair(name: str) -> None:
    with held(name, "--count", 7, "--churn", 3) as report:
        assert report["leaked"] == {"kernel": {"objects": 7, "bytes": 7 * 3000}}
        assert report["sites"][0]["function"] == "open_session_and_forget"
        assert report["churned"] == 21
        assert descriptors(report["pid"], r"socket:") == 14


@pytest.mark.parametrize(
    ("name", "target", "function", "size_bytes"),
    [
        ("leak_eventfd", r"anon_inode:\[eventfd\]", "subscribe_and_forget", 0),
        ("leak_bpf_map", r"anon_inode:bpf-map", "load_policy_map_and_forget", 4096),
    ],
)
def test_descriptor_leakers_hold_what_they_report(name: str, target: str, function: str, size_bytes: int) -> None:
    if name == "leak_bpf_map" and os.geteuid():
        pytest.skip("bpf(2) needs root")
    with held(name, "--count", 11) as report:
        assert report["leaked"] == {"kernel": {"objects": 11, "bytes": 11 * size_bytes}}
        assert report["sites"][0]["function"] == function
        assert descriptors(report["pid"], target) == 11


def test_sysv_queues_outlive_the_leaker_until_cleaned() -> None:
    # Given an IPC namespace of our own, when the leaker has run twice and exited, and then cleans up
    script = f"{BIN}/leak_sysv_msg --count 3; {BIN}/leak_sysv_msg --count 2; cat /proc/sysvipc/msg; echo END; "
    script += f"{BIN}/leak_sysv_msg --clean 1; cat /proc/sysvipc/msg"
    unshare = ["unshare", "--ipc"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--ipc"]
    done = subprocess.run([*unshare, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    before, after = (part.splitlines() for part in done.stdout.split("END\n"))

    # Then five queues of four messages of 2,000 bytes are left in between, and none at the end
    assert json.loads(before[0])["leaked"] == {"kernel": {"objects": 12, "bytes": 24_000}}
    assert json.loads(before[0])["queues"] == 3
    queues = [line.split() for line in before[3:]]
    assert [(fields[3], fields[4]) for fields in queues] == [("8000", "4")] * 5
    assert json.loads(after[0])["removed"] == 5
    assert after[2:] == []


def test_mmap_leaker_keeps_exactly_the_bytes_it_reports() -> None:
    with held("leak_mmap", "--count", 0) as empty, held("leak_mmap", "--count", 5) as report:
        sites = {site["function"]: site["bytes"] for site in report["sites"]}
        assert sites == {
            "map_whole_and_forget": 5 * 64 * KIB,
            "map_grow_and_forget": 5 * 48 * KIB,
            "map_trim_and_forget": 5 * 80 * KIB,
        }
        assert report["leaked"] == {"host": {"objects": 15, "bytes": 5 * 192 * KIB}}
        assert mapped_bytes(report["pid"]) - mapped_bytes(empty["pid"]) == 5 * 192 * KIB


def test_brk_leaker_extends_the_heap_by_exactly_what_it_reports() -> None:
    with held("leak_brk", "--count", 5) as report:
        assert report["leaked"] == {"host": {"objects": 5, "bytes": 5 * 64 * KIB}}
        assert mapped_bytes(report["pid"], "[heap]") == 5 * 64 * KIB


def test_heap_leaker_grows_heap_and_maps() -> None:
    with held("leak_heap", "--count", 0) as empty, held("leak_heap", "--count", 320) as report:
        assert {s["function"]: (s["objects"], s["bytes"]) for s in report["sites"]} == {
            "parse_record_and_forget": (320, 320_000),
            "load_document_and_forget": (20, 6_000_000),
        }
        # glibc maps each block of 300,000 bytes with a header of 16, in whole pages
        assert mapped_bytes(report["pid"]) - mapped_bytes(empty["pid"]) == 20 * 303_104
        assert 320_000 < mapped_bytes(report["pid"], "[heap]") < 640_000


def test_python_mmap_leaker_holds_its_maps() -> None:
    with held("leak_mmap.py", "--count", 0) as empty, held("leak_mmap.py", "--count", 160) as report:
        assert report["leaked"] == {"host": {"objects": 160, "bytes": 160 * 64 * KIB}}
        # mmap.mmap shares anonymous memory: the kernel shows it as /dev/zero
        growth = [mapped_bytes_of_python_maps(r["pid"]) for r in (empty, report)]
        assert growth == [0, 160 * 64 * KIB]


def mapped_bytes_of_python_maps(pid: int) -> int:
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("/dev/zero (deleted)"):
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            total += end - start
    return total


@pytest.mark.parametrize("name", ["churn_epoll", "churn_timerfd", "churn_posix_timer", "churn_tcp", "churn_fork"])
def test_churn_leaves_nothing_behind(name: str) -> None:
    with held(name, "--count", 0) as idle, held(name, "--count", 50) as report:
        assert (report["leaked"], report["sites"], report["churned"]) == ({}, [], 50)
        assert descriptors(report["pid"], "") == descriptors(idle["pid"], "")
        assert mapped_bytes(report["pid"]) == mapped_bytes(idle["pid"])
        children = Path(f"/proc/{report['pid']}/task/{report['pid']}/children")
        assert not children.exists() or children.read_text() == ""


def test_cache_churn_stops_at_a_fifth() -> None:
    with held("churn_cache", "--count", 100) as report:
        assert report["leaked"] == {}
        assert report["cached"] == {"function": "cache_insert", "objects": 20, "host_bytes": 20 * 64 * KIB}
        assert descriptors(report["pid"], r"socket:") == 40


def test_wait_holds_a_sample_until_told() -> None:
    with subprocess.Popen(
        command("leak_eventfd", "--count", 3, "--wait"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert descriptors(process.pid, r"anon_inode:\[eventfd\]") == 0
        output, _ = process.communicate("go\n", timeout=60)
    assert json.loads(output)["leaked"]["kernel"]["objects"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--frobnicate", "1"], "leak_mmap: unknown option '--frobnicate'; see --help\n"),
        (["--count"], "leak_mmap: a value is missing after '--count'; see --help\n"),
        (["--count", "-1"], "leak_mmap: not a whole number >= 0: '-1'; see --help\n"),
        (["7"], "leak_mmap: unexpected argument '7'; see --help\n"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str) -> None:
    done = subprocess.run([BIN / "leak_mmap", *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
