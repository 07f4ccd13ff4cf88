"""A verdict in words."""

from __future__ import annotations

from leakscope.model.results import Verdict
from leakscope.quantities import counted, exact, rate


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    frame = culprit_of(verdict)
    if verdict.verdict == "not_leak" or not verdict.growth:
        said = verdict.reasons[:1] if verdict.verdict == "leak" else verdict.reasons  # the rest stands below
        return f"{'; '.join(said) or verdict.kind} ({verdict.kind})"
    if not verdict.kept_objects:  # counters count no objects
        return f"{frame}: {verdict.layer or 'memory'} grows by {rate(verdict.growth.bytes_per_s)} ({verdict.kind})"
    what = "keeps" if verdict.verdict == "leak" else "may leak: it keeps"
    return (
        f"{frame} {what} {exact(verdict.kept_bytes)} of {verdict.layer} memory in "
        f"{counted(verdict.kept_objects, 'object')}, growing by {rate(verdict.growth.bytes_per_s)} ({verdict.kind})"
    )


def culprit_of(verdict: Verdict) -> str:
    """The frame, else the counter or the object that shows the cause."""
    culprit = verdict.culprit
    return (culprit and (culprit.frame or culprit.counter or culprit.object)) or "unknown code"
