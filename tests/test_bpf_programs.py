"""Joining the C sources for a loader."""

from __future__ import annotations

import re

import pytest

import bpf_programs


def test_joining_takes_each_of_our_headers_once_and_leaves_the_systems() -> None:
    text = bpf_programs.joined_source()
    assert '#include "' not in text and "#pragma once" not in text
    assert text.count("struct mem_record {") == text.count("struct call_record {") == 1
    assert "#include <uapi/linux/ptrace.h>" in text


def test_every_program_and_map_is_in_the_joined_source() -> None:
    text = bpf_programs.joined_source()
    for program in ("on_kmalloc", "on_kfree", "on_process_exit", "on_exit_map_call", "on_function_entry"):
        assert len(re.findall(rf"^int {program}\(", text, re.MULTILINE)) == 1
    for name in ("live", "sites", "live_ranges", "functions", "counters", "targets"):
        assert len(re.findall(rf"^(?:\w*HASH|\w*ARRAY)\({name},", text, re.MULTILINE)) == 1


def test_bcc_gets_methods_in_place_of_helpers() -> None:
    theirs, ours = bpf_programs.source_for_bcc(), bpf_programs.joined_source()
    for helper, method in (
        ("bpf_map_lookup_elem(&live_spilled, &addr)", "live_spilled.lookup(&addr)"),
        ("bpf_map_delete_elem(&live_spilled, &addr)", "live_spilled.delete(&addr)"),
        ("bpf_ringbuf_reserve(&mem_ring, sizeof(*record), 0)", "mem_ring.ringbuf_reserve(sizeof(*record))"),
        (
            "bpf_ringbuf_output(&stack_ring, record, bytes, BPF_RB_NO_WAKEUP)",
            "stack_ring.ringbuf_output(record, bytes, BPF_RB_NO_WAKEUP)",
        ),
    ):
        assert helper in ours and method not in ours, helper
        assert method in theirs and helper not in theirs, helper
    # flags choose the method: only a missing key may be inserted
    assert ours.count("BPF_NOEXIST)") == len(re.findall(r"\w\.insert\(", theirs)) > 0
    assert not re.search(r"bpf_map_\w+_elem\(", theirs)


def test_a_helper_that_bcc_would_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bpf_programs.joined_source() + "\nstatic void f(u64 a) { bpf_map_push_elem(&live, &a, 0); }\n"
    monkeypatch.setattr(bpf_programs, "joined_source", lambda: text)
    with pytest.raises(ValueError, match="bpf_map_push_elem"):
        bpf_programs.source_for_bcc()


def test_the_id_of_the_sources_follows_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bpf_programs.sources_id()
    assert before == bpf_programs.sources_id() and 0 < before < 1 << 64
    text = bpf_programs.joined_source()
    monkeypatch.setattr(bpf_programs, "joined_source", lambda: text + " ")
    assert bpf_programs.sources_id() != before


def test_the_shim_has_no_kernel_headers_beyond_those_it_names() -> None:
    shim = [str(path.relative_to(bpf_programs.SHIM_DIRECTORY)) for path in bpf_programs.SHIM_DIRECTORY.rglob("*.h")]
    assert len(shim) == 9 and all(name.startswith("include/") for name in shim)
