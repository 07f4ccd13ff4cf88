"""Thin, typed access to what the kernel offers the recorder: bpf(2), perf_event_open(2), BTF, kallsyms."""
