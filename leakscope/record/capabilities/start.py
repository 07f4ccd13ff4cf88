"""Checks of what a recording does first: load its programs, attach them; and of what the kernel adds to that."""

from __future__ import annotations

import time

from leakscope.errors import NotCapableError
from leakscope.model.capability import Capability
from leakscope.record.capabilities.host import Host

_FEATURES = {
    "bpf_loop": "bpf_loop (Linux 5.17): programs load ten times as fast",
    "bpf_get_kmem_cache": "bpf_get_kmem_cache (Linux 6.13): the slab cache of each kmalloc by its object",
}
"""Functions that the kernel's types name: what each is good for here."""


def check_kernel_features(host: Host) -> Capability:
    """Which of the newer kernel functions that a recording makes use of are there; none is needed."""
    from leakscope.record.kernel.btf import KernelTypes

    needed_for = "start-up in tens of milliseconds, exact names of slab caches"
    try:
        types = KernelTypes()
        there = {name: types.function_id(name) is not None for name in _FEATURES}
    except NotCapableError as error:
        return Capability("kernel features", "unknown", str(error), needed_for)
    detail = "; ".join(f"{'has' if there[name] else 'lacks'} {text}" for name, text in _FEATURES.items())
    return Capability("kernel features", "ok" if all(there.values()) else "degraded", detail, needed_for)


def check_start(host: Host) -> Capability:
    """Whether the probes load and attach with the loader that `record` takes, and how long that takes.

    They are attached with no process in scope, so nothing is recorded, and detached at once.
    """
    from leakscope.record.capabilities import trials
    from leakscope.record.loader import Loading, ProgramConfig
    from leakscope.record.probes import tracepoints

    needed_for = "every recording"
    if trials.attempt(trials.load_tracing_program) is not None:
        return Capability("start-up", "unknown", "not tried without the BPF privilege", needed_for)
    attachments = tracepoints.Attachments()
    programs = None
    try:
        loading = Loading(ProgramConfig(with_functions=True))
        programs = loading.result()
        began = time.perf_counter()
        tracepoints.attach_all(programs, attachments)
        attach_ms = (time.perf_counter() - began) * 1e3
        loader = programs.name
    except NotCapableError as error:
        return Capability("start-up", "missing", str(error), needed_for, True)
    finally:
        attachments.close()
        if programs is not None:
            programs.close()
    detail = (
        f"loader {loader}: loaded in {loading.milliseconds:.0f} ms, "
        f"attached to {len(attachments.names)} tracepoints in {attach_ms:.0f} ms"
    )
    if attachments.failed:
        refused = "; ".join(f"{name}: {reason}" for name, reason in attachments.failed)
        return Capability("start-up", "degraded", f"{detail}; not attached: {refused}", needed_for)
    return Capability("start-up", "ok", detail, needed_for)
