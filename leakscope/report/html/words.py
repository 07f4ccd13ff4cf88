"""Sentences of pages: a verdict with its culprit as code, facts, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from leakscope.detect.sentence import culprit_of, sentence
from leakscope.model.results import Report, Verdict
from leakscope.quantities import counted, exact, rate, size
from leakscope.report.cells import bare_frame
from leakscope.report.forecast import forecast_line
from leakscope.report.html.units import duration_text, interval_text

_CHECK = {
    "per_call": "every call keeps one object: find the free that belongs to it, and the path that leaves it out",
    "undrained_container": "a container on this path only grows: find who should drain or bound it",
    "per_request_reference": "something keeps a reference for each request: drop it when the request ends",
    "pinned_never_unpinned": "what is pinned here is never unpinned: pair each pin with an unpin, on error paths too",
    "mapping_outside_heap": "maps are made and never unmapped: pair each with munmap (or close what owns it)",
    "kernel_object_per_event": "each call leaves a kernel object behind: close, reap or receive what it stands for",
    "error_path_without_free": "one path frees and another does not: compare the error path with the good one",
    "not_destroyed_on_teardown": "each re-creation leaves the old one behind: destroy it before making the new one",
    "unbounded_send_queue": "a queue grows faster than it is read: bound it, or drop slow readers",
    "view_retains_backing_store": "a small view keeps a large buffer: copy the view, or drop it",
    "keys_without_ttl": "keys are written without an expiry: give them a TTL, or an eviction policy",
    "unjoined_thread_stacks": "threads end and are not joined: join or detach them",
    "descriptor_leak": "descriptors are opened and never closed: close them on every path (`ls -l /proc/PID/fd`)",
    "evicted_but_not_released": "what is evicted is not given back: find who still holds it after the eviction",
    "refcount": "a reference count is not brought down: pair each increment with a decrement",
}


def as_code(name: str) -> str:
    """``name`` between backquotes, for page.prose; those of its own become apostrophes."""
    return f"`{name.replace('`', chr(39))}`"


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, its culprit short and as code."""
    said = sentence(verdict).replace("`", "'")
    who = culprit_of(verdict).replace("`", "'")
    if said.startswith((f"{who} ", f"{who}:")):
        return as_code(bare_frame(who)) + said[len(who) :]
    return said


def facts_of(verdict: Verdict) -> list[tuple[str, str]]:
    """Rate, start, culprit and how sure: what stands under the sentence."""
    facts = []
    if growth := verdict.growth:
        facts.append(("Rate", f"{rate(growth.bytes_per_s)} ({interval_text(growth)}, 95 %)"))
        if growth.per_unit:
            facts.append((f"Per {growth.per_unit[0]}", size(growth.per_unit[1])))
    if verdict.leak_start_s is not None:
        facts.append(("Growing since", f"{duration_text(verdict.leak_start_s)} after time zero"))
    if verdict.kept_bytes:
        objects = f" in {counted(verdict.kept_objects, 'object')}" if verdict.kept_objects else ""
        facts.append(("Kept" if verdict.kept_objects else "Gained", f"{exact(verdict.kept_bytes)}{objects}"))
    if verdict.layer:
        facts.append(("Layer", verdict.layer))
    facts.append(("Class", verdict.kind))
    facts.append(("Confidence", f"{verdict.confidence:.2f}"))
    if culprit := verdict.culprit:
        named = (("Culprit", culprit.frame), ("Owner", culprit.owner), ("Object", culprit.object))
        facts += [(name, value) for name, value in named if value]
    if verdict.forecast:
        facts.append(("Forecast", forecast_line(verdict.forecast)))
    elif verdict.smallest_provable_bytes_per_s is not None and verdict.verdict != "leak":
        facts.append(("A leak would show from", rate(verdict.smallest_provable_bytes_per_s)))
    return facts


def next_steps(report: Report) -> list[str]:
    """What to do, the most useful first; commands in backquotes."""
    verdict = report.verdict
    paths = [str(input_.get("path", "")) for input_ in report.inputs]
    evidence = " ".join(map(shlex.quote, paths)).replace("`", "'") or "CAPTURE"
    capture = _capture_of(report)
    steps: list[str] = []
    if verdict.verdict == "leak":
        culprit = verdict.culprit
        check = _CHECK.get(verdict.kind, "find who should free what it allocates")
        if where := (culprit and (culprit.frame or culprit.owner)):
            steps.append(f"Look at {as_code(where)}: {check}.")
        else:
            steps.append(
                f"{as_code(culprit_of(verdict))} shows that memory is kept, not by whom. Record the process while it "
                "grows: `leakscope record -p PID -o run.lscope`, then `leakscope attribute run.lscope`."
            )
            if verdict.kind in _CHECK:
                steps.append(f"Meanwhile: {check}.")
        if capture:
            steps.append(f"See who holds it: {as_code(f'leakscope liveness {shlex.quote(capture)}')}")
        steps.append(
            f"After the fix, record again and compare: {as_code(f'leakscope diff {shlex.quote(capture)} AFTER.lscope')}"
            if capture
            else f"Every number of this page: {as_code(f'leakscope attribute {evidence} --json')}"
        )
    elif verdict.verdict == "inconclusive":
        steps += [f"Missing: {missing}." for missing in verdict.missing[:3]]
        if verdict.kind != "missing_data":
            steps.append("Record longer, under load; with a larger buffer where events were lost (see Losses).")
        steps.append(f"Every number of this page: {as_code(f'leakscope attribute {evidence} --json')}")
    else:
        if verdict.smallest_provable_bytes_per_s is not None:
            shown = rate(verdict.smallest_provable_bytes_per_s)
            steps.append(f"Growth below {shown} would not have shown: record longer where that matters.")
        steps.append(f"Keep this as a baseline: {as_code(f'leakscope baseline update {evidence}')}")
    return steps


def _capture_of(report: Report) -> str:
    """Path of the capture that the verdict is about, '' where it is about files of other tools."""
    captures = [str(one.get("path", "")) for one in report.inputs if "limits" not in one]
    number = report.verdict.sites[0].partition(":")[0] if report.verdict.sites else ""
    if number.isdigit() and len(captures) > 1:
        return captures[int(number)] if int(number) < len(captures) else ""
    return captures[0] if captures else ""


def headline_sentences(verdicts: Sequence[Verdict], most: int) -> list[Verdict]:
    """The further verdicts of the first screen: leaks first, then what stays open and names something."""
    leaks = [v for v in verdicts if v.verdict == "leak"]
    open_ = [v for v in verdicts if v.verdict == "inconclusive" and v.culprit is not None]
    return [*leaks, *open_][:most]
