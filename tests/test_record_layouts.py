"""numpy's mirrors of the C structures and numbers, against what the C compiler says."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bpf_structures import WITHOUT_BPF, definitions

import bpf_programs
from leakscope.model.words import CAUSES, OPS
from leakscope.record import records
from leakscope.record.loader.base import (
    LIVE_WAYS,
    SCOPE_CGROUP,
    SCOPE_HOST,
    SCOPE_PROCESSES,
    STACK_POLICIES,
    STACK_WAYS,
    UNWIND_POLICIES,
)
from leakscope.record.probes import functions
from leakscope.record.probes.functions import FunctionProbe

STACK_RECORD = np.dtype(
    [
        ("ts_ns", "<u8"), ("caller", "<u8"), ("number", "<u4"), ("pid", "<u4"), ("kind", "<u4"), ("depth", "<u4"),
        ("addresses", "<u8", (128,)),
    ]
)  # fmt: skip
"""As STACK_HEADER and what follows it."""

STRUCTURES = {
    "mem_record": records.MEM_RECORD,
    "call_record": records.CALL_RECORD,
    "site_key": records.SITE_KEY,
    "site_info": records.SITE_INFO,
    "python_record": records.PYTHON_RECORD,
    "mark_record": records.MARK_RECORD,
    "dump_record": records.DUMP_RECORD,
    "path_key": records.PATH_KEY,
    "unwound_path": records.UNWOUND_PATH,
    "range_key": records.RANGE_KEY,
    "live_range": records.LIVE_RANGE,
    "launch_record": records.LAUNCH_RECORD,
    "kernel_record": records.KERNEL_RECORD,
    "launch_key": records.LAUNCH_KEY,
    "launch_layout": records.LAUNCH_LAYOUT,
    "live_object": records.LIVE_OBJECT,
    "live_slot": records.LIVE_SLOT,
    "live_bucket": records.LIVE_BUCKET,
    "identity_key": records.IDENTITY_KEY,
    "identity_count": records.IDENTITY_COUNT,
    "rss_peaks": records.RSS_PEAKS,
    "stack_record": STACK_RECORD,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, int]]]:
    """Sizes and offsets of structures ("mem_record": {"": size, "ts_ns": offset, …}) and of enumerators ("": …)."""
    place = tmp_path_factory.mktemp("layouts")
    text = definitions()
    bodies = ",".join(re.findall(r"enum \w+ \{([^}]*)\}", text))
    enumerators = [name for word in bodies.split(",") if (name := word.split("=")[0].strip())]
    lines = ['printf("{\\"\\":{\\"\\":0");']
    lines += [f'printf(",\\"{name}\\":%lld", (long long){name});' for name in enumerators]
    for name, dtype in STRUCTURES.items():
        lines.append(f'printf("}},\\"{name}\\":{{\\"\\":%zu", sizeof(struct {name}));')
        lines += [f'printf(",\\"{field}\\":%zu", offsetof(struct {name}, {field}));' for field in dtype.names or ()]
    lines.append('printf("},\\"function_spec\\":{\\"\\":%zu}}\\n", sizeof(struct function_spec));')
    (place / "layouts.c").write_text(WITHOUT_BPF + text + "\nint main(void) {\n" + "\n".join(lines) + "\n}\n")
    subprocess.run(["gcc", "-o", place / "layouts", place / "layouts.c"], check=True)
    yield json.loads(subprocess.run([place / "layouts"], capture_output=True, check=True).stdout)


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_structure_has_the_compilers_layout(compiled: dict[str, dict[str, int]], name: str) -> None:
    dtype = STRUCTURES[name]
    assert dtype.fields is not None
    ours = {"": dtype.itemsize, **{field: int(dtype.fields[field][1]) for field in dtype.names or ()}}
    assert ours == compiled[name]


def test_records_have_the_sizes_that_the_header_promises(compiled: dict[str, dict[str, int]]) -> None:
    assert (compiled["mem_record"][""], compiled["call_record"][""]) == (64, 128)
    assert records.STACK_HEADER.size == compiled["stack_record"]["addresses"]
    assert compiled["live_slot"][""] == 64  # a cache line
    assert compiled[""]["LIVE_WAYS"] == LIVE_WAYS == records.LIVE_WAYS
    assert compiled[""]["STACK_WAYS"] == STACK_WAYS
    for name in ("KERNEL", "USER", "BESIDE_DUMP", "DUMP_BIT", "GENERATION_SHIFT"):
        assert compiled[""][f"STACK_{name}"] == getattr(records, f"STACK_{name}"), name


def numbers(compiled: dict[str, dict[str, int]], prefix: str) -> dict[str, int]:
    return {name: value for name, value in compiled[""].items() if name.startswith(prefix)}


@pytest.mark.parametrize("prefix", ["OP_", "CAUSE_", "SITE_", "CALL_", "MAP_", "SPACE_", "DUMP_", "PATH_"])
def test_each_number_of_the_records_is_mirrored(compiled: dict[str, dict[str, int]], prefix: str) -> None:
    theirs = numbers(compiled, prefix)
    assert len(theirs) >= 2
    assert {name: getattr(records, name) for name in theirs} == theirs


def test_words_have_the_numbers_that_the_programs_send(compiled: dict[str, dict[str, int]]) -> None:
    sent = compiled[""]
    assert (OPS[sent["OP_ALLOC"]], OPS[sent["OP_FREE"]]) == ("alloc", "free")
    for name in ("CALL", "REUSE", "CONTEXT", "EXIT", "EXEC"):
        assert CAUSES[getattr(records, f"CAUSE_{name}")] == name.lower()


def test_counters_are_named_in_the_order_of_the_programs(compiled: dict[str, dict[str, int]]) -> None:
    theirs = numbers(compiled, "COUNT_")
    assert {f"COUNT_{name.upper()}": index for index, name in enumerate(records.COUNTERS)} == theirs
    assert compiled[""]["COUNTERS"] == len(records.COUNTERS)


@pytest.mark.parametrize("prefix", ["ROLE_", "SIZE_", "ADDR_", "SUCCESS_"])
def test_what_functions_do_has_the_numbers_of_the_programs(compiled: dict[str, dict[str, int]], prefix: str) -> None:
    theirs = numbers(compiled, prefix)
    assert len(theirs) >= 3
    ours = {name: getattr(functions, name.removeprefix("ROLE_") if prefix == "ROLE_" else name) for name in theirs}
    assert ours == theirs


def test_scopes_and_stack_policies_have_the_numbers_of_the_programs(compiled: dict[str, dict[str, int]]) -> None:
    ours = {"SCOPE_HOST": SCOPE_HOST, "SCOPE_PROCESSES": SCOPE_PROCESSES, "SCOPE_CGROUP": SCOPE_CGROUP}
    assert ours == numbers(compiled, "SCOPE_")
    assert {f"STACKS_{name.upper()}": value for name, value in STACK_POLICIES.items()} == numbers(compiled, "STACKS_")
    assert {f"UNWIND_{name.upper()}": value for name, value in UNWIND_POLICIES.items()} == numbers(compiled, "UNWIND_")


def test_a_functions_row_is_packed_in_the_order_of_its_fields(compiled: dict[str, dict[str, int]]) -> None:
    probe = FunctionProbe(
        "f", "libc", role=11, size_how=12, size_arg=13, size_arg2=14, addr_how=15, addr_arg=16, success=17, space=18,
        group="heap",
    )  # fmt: skip
    fields = re.search(r"struct function_spec \{(.*?)\};", definitions(), re.DOTALL)
    assert fields is not None
    names = re.findall(r"u8 (\w+);", fields[1])
    row = probe.spec(enabled=True)
    assert len(row) == compiled["function_spec"][""]
    sent = dict(zip(names, row, strict=False))
    assert sent == {
        "role": 11, "size_how": 12, "size_arg": 13, "size_arg2": 14, "addr_how": 15, "addr_arg": 16, "success": 17,
        "space": 18, "enabled": 1, "log_call": 0,
    }  # fmt: skip
    assert FunctionProbe("f", "cuda", role=1).spec(enabled=False)[8:10] == bytes([0, 1])


def test_every_function_fits_the_map_and_is_listed_once() -> None:
    apis = [(probe.library, probe.api) for probe in functions.FUNCTIONS]
    assert len(set(apis)) == len(apis) <= 256
    assert np.iinfo(np.uint8).max >= max(probe.role for probe in functions.FUNCTIONS)


def test_headers_are_where_the_programs_say() -> None:
    assert Path(bpf_programs.DIRECTORY / bpf_programs.MAIN_SOURCE).is_file()
