"""Healthy programs that tempt a leak finder, recorded with real probes: nothing of theirs is called a leak."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from recording import LEAKSCOPE, ROOT, Recording, record, sample

pytestmark = [pytest.mark.bpf, pytest.mark.usefixtures("bpf")]

SAMPLES = {  # name: rounds, microseconds between them; each lives for about three seconds
    "churn_epoll": (3001, 700),
    "churn_timerfd": (3001, 700),
    "churn_posix_timer": (3001, 700),
    "churn_tcp": (2003, 1000),
    "churn_fork": (307, 5000),
    "churn_cache": (3001, 700),
}
UNTRACEABLE = {  # name: the libc function below which the kernel makes objects that kfree_rcu frees
    "churn_epoll": "epoll_create1",
    "churn_timerfd": "timerfd_create",
}


@pytest.fixture(scope="module")
def churn(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """All of them at once, as children of one command: each has the whole recording for itself."""
    commands = [
        " ".join(sample(name, "--count", rounds, "--pause-us", pause)) for name, (rounds, pause) in SAMPLES.items()
    ]
    path = tmp_path_factory.mktemp("churn") / "churn.lscope"
    recording = record(path, ["/bin/sh", "-c", " & ".join(commands) + " & wait"])
    assert recording.code == 0, recording.stderr
    assert recording.reports.keys() == SAMPLES.keys()
    return recording


@pytest.fixture(scope="module")
def attribution(churn: Recording) -> Any:
    """The report of `leakscope attribute` on all of it."""
    return attribute(churn)


def attribute(recording: Recording, *options: object) -> Any:
    done = subprocess.run(
        [*LEAKSCOPE, "attribute", str(recording.path), "--json", *map(str, options)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def described(finding: Any) -> tuple[str, str, str]:
    return finding["verdict"], finding["class"], (finding["culprit"] or {}).get("frame", "")


def test_the_churn_was_recorded(churn: Recording) -> None:
    for name, (rounds, _) in SAMPLES.items():
        report = churn.reports[name]
        assert report["churned"] == rounds
        events = churn.rows("SELECT count(*) FROM mem_events WHERE op = 'alloc' AND pid = ?", report["pid"])[0][0]
        assert events >= rounds, name


def test_no_healthy_program_is_called_a_leak(attribution: Any) -> None:
    findings = [described(finding) for finding in [attribution["verdict"], *attribution["findings"]]]
    assert [finding for finding in findings if finding[0] == "leak"] == []
    assert attribution["verdict"]["verdict"] in ("not_leak", "inconclusive")


@pytest.mark.parametrize("name", ["churn_cache", "churn_tcp"])
def test_nor_alone(churn: Recording, name: str) -> None:
    alone = attribute(churn, "--pid", churn.reports[name]["pid"])
    findings = [described(finding) for finding in [alone["verdict"], *alone["findings"]]]
    assert [finding for finding in findings if finding[0] == "leak"] == []


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_sites_whose_frees_cannot_be_seen_are_named(churn: Recording, attribution: Any, name: str) -> None:
    # given objects of the system call that end by the reuse of their addresses alone
    pid = churn.reports[name]["pid"]
    sites_of = """SELECT f.function, count(*) FILTER (e.cause = 'reuse') AS reused,
                         count(*) FILTER (e.op = 'free' AND e.cause = 'call') AS freed
                  FROM events e JOIN frames f ON f.id = e.call_site
                  WHERE e.pid = ? AND e.kind = 'kmalloc' GROUP BY 1 HAVING reused > 100 AND freed <= reused / 20"""
    ((function, _, _),) = churn.rows(sites_of, pid)
    assert churn.rows(
        "SELECT DISTINCT functions[-1] FROM events WHERE pid = ? AND list_contains(kernel_functions, ?) "
        "AND len(functions) > 0",
        pid, function,
    ) == [(UNTRACEABLE[name],)]  # fmt: skip
    # then the report says so of their sites, and counts nothing of them as live
    sites = [s for s in attribution["sites"] if s["kind"] == "kmalloc" and function in s["stack"]]
    assert sites and not any(site["frees_visible"] for site in sites)
    layer = next(layer for layer in attribution["layers"] if layer["layer"] == "kernel")
    assert layer["frees_not_visible_bytes"] >= sum(site["live_bytes"] for site in sites) > 0


def test_the_cache_is_held_in_full(churn: Recording) -> None:
    cached = churn.reports["churn_cache"]["cached"]
    pid = churn.reports["churn_cache"]["pid"]
    live = churn.live("kind", "pid = ? AND list_contains(functions, ?)", pid, cached["function"])
    assert live["mmap_anon"] == (cached["objects"], cached["host_bytes"])
