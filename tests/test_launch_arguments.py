"""Launch arguments recorded by uprobes, exact against the program's own log of which launch got which buffers.

The program (samples/cuda/cuda_launches.c) launches the kernels of a hand-made image in every form of the stand-in
libraries. It first launches each once, and goes on when the recorder knows them.
"""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_images import cubin, info
from recording import Recorder, Recording, sample, waiting

from leakscope.capture import Capture
from leakscope.errors import BadInputError
from leakscope.record import records
from leakscope.record.gpu.arguments import LaunchArguments
from leakscope.record.gpu.cubin import Parameter
from leakscope.record.gpu.images import Image, Images
from leakscope.record.gpu.kernels import Kernels, Layout
from leakscope.record.probes import functions

ROUNDS = 44
FORMS, PACKED_FORMS, KERNELS = 11, 2, 4
LEARNING = FORMS * KERNELS
NESTED_IN_LEARNING = 4 * KERNELS  # of the runtime's four forms
FILL, SCALE, GATHER, TICK = (
    "fill_block(float*, int, int)",
    "scale_into(float*, float const*, float)",
    "gather(view)",
    "tick(int)",
)
READABLE = {
    "_Z10fill_blockPfii": FILL, "_Z10scale_intoPfPKff": SCALE, "_Z6gather4view": GATHER, "_Z4ticki": TICK, "": "",
}  # fmt: skip
"""Kernels that the sample launches, by the names that it logs."""


@dataclass
class Launched:
    """A recording of cuda_launches, its report and its log."""

    recording: Recording
    report: dict[str, Any]
    log: list[dict[str, Any]]

    @cached_property
    def outermost(self) -> list[dict[str, Any]]:
        """Rows of `launches` in order, those that the runtime makes inside its own left out."""
        names = ("id", "ts_ns", "api", "function", "grid", "block", "stream", "result", "context", "kernel")
        rows = self.recording.rows(
            f"SELECT {', '.join(names)} FROM launches WHERE pid = ? AND parent_id = 0 ORDER BY ts_ns",
            self.report["pid"],
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    @cached_property
    def arguments(self) -> dict[int, list[tuple[int, int, int]]]:
        """(position, value, approximate) of each launch, by its id."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for launch, *argument in self.recording.rows(
            "SELECT launch_id, position, value, approximate FROM launch_arguments ORDER BY ALL"
        ):
            found.setdefault(launch, []).append(tuple(argument))
        return found


@contextmanager
def settling(path: Path, go: Path) -> Iterator[None]:
    """Afterwards the program may go on: the recorder has written its first launches, and knows their kernels."""
    yield
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            if Capture.open(path).rows("launches") >= LEARNING + NESTED_IN_LEARNING:
                break
        except BadInputError:
            pass
        time.sleep(0.05)
    go.touch()


def run(place: Path, *options: object) -> Launched:
    """Record the program from its start."""
    go, log, path = place / "go", place / "log.jsonl", place / "launches.lscope"
    command = sample("cuda_launches", "--count", ROUNDS, "--pause-us", 0, "--log", log, "--settle", go)
    with Recorder(path, "--launches", "--flush", 0.05, *options, "--", *command) as recorder:
        with settling(path, go):
            pass
        recording = recorder.result()
    assert recording.code == 0, recording.stderr
    return Launched(recording, recording.reports["cuda_launches"], read_log(log))


def read_log(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**line, "kernel": READABLE[line["kernel"]]} for line in lines]


@pytest.fixture(scope="module")
def launched(bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return run(tmp_path_factory.mktemp("launches"))


def expected(line: dict[str, Any]) -> list[tuple[int, int, int]]:
    """What of a launch is to be found in `launch_arguments`."""
    first, second = line["buffers"]
    packed = line["form"].endswith("extra")
    if line["kernel"] == FILL:
        return [(0, first, 0)]
    if line["kernel"] == SCALE:
        return [(0, first, 0), (1, second, 0)]
    if line["kernel"] == GATHER:  # a structure: until the kernel is known only the first word of a slot is read
        if line["known"] or packed:
            return sorted([(0, first, 0), (0, second, 0)])
        return [(-1, 0, 0), (0, first, 0)]
    if line["kernel"] == "":  # nobody knows its parameters: the word may be none
        return [(-1, 0, 1), (0, first, 1)]
    return []


@pytest.mark.bpf
def test_each_launch_is_there_with_its_kernel_and_shape(launched: Launched) -> None:
    log = launched.log
    assert len(log) == launched.report["launches"] == LEARNING + 6 * ROUNDS + 2
    found = launched.outermost
    for line, row in zip(log, found, strict=True):
        assert line["from_ns"] <= row["ts_ns"] <= line["to_ns"]
        assert (row["api"], row["kernel"], row["result"]) == (line["form"].split()[0], line["kernel"], 0)
        assert (row["grid"], row["block"], row["stream"]) == (line["grid"], line["block"], line["stream"])
    # all in the one context
    contexts = {row["context"] for row in found}
    assert len(contexts) == 1 and contexts != {0}
    # and the driver's launches inside the runtime's name the same kernel
    pairs = launched.recording.rows(
        "SELECT count(*), bool_and(c.kernel = p.kernel AND c.grid = p.grid AND c.stream = p.stream) "
        "FROM launches c JOIN launches p ON p.id = c.parent_id"
    )
    assert pairs == [(sum(line["form"].startswith("cuda") for line in log), True)]


@pytest.mark.bpf
def test_arguments_are_exact_in_every_form(launched: Launched) -> None:
    for line, row in zip(launched.log, launched.outermost, strict=True):
        assert launched.arguments.get(row["id"], []) == expected(line), line
    # given that each form has launched each kernel, known and not yet known
    assert set(Counter((line["form"], line["kernel"], line["known"]) for line in launched.log if line["kernel"])) == {
        (line["form"], kernel, known)
        for line in launched.log[:LEARNING]
        for kernel in (FILL, SCALE, GATHER, TICK)
        for known in (0, 1)
    }
    # then what could not be known is counted, and nothing was lost
    assert launched.recording.losses("arguments_approximate") == 1
    assert launched.recording.losses("arguments_partial") == FORMS - PACKED_FORMS
    assert launched.recording.losses("arguments_lost") == launched.recording.losses("kernel_names_lost") == 0


@pytest.mark.bpf
def test_attribute_tells_stale_memory_from_memory_in_use(launched: Launched) -> None:
    from leakscope.detect.attribution import Options, attribute

    capture = launched.recording.capture
    with capture.connect() as connection:
        report = attribute(connection, capture.manifest, Options())
    touches = {site.culprit_frame.split(" ")[0]: site.touches for site in report.sites if site.touches}
    # given the buffers that the log names, of the launches that show them
    base, size = launched.recording.rows(
        "SELECT addr, size_bytes FROM events WHERE op = 'alloc' AND layer = 'gpu' AND functions[-2] = 'keep_in_use'"
    )[0]
    using = [
        number
        for number, line in enumerate(launched.log)
        if any(base <= value < base + size for position, value, _ in expected(line) if position >= 0)
    ]
    # then a block that one launch filled was touched by it, and the address of a freed block by nobody
    stale, recycled, used = (touches[name] for name in ("keep_stale_block", "keep_recycled_block", "keep_in_use"))
    assert (stale.launches, stale.last_kernel, stale.touched_bytes) == (ROUNDS, FILL, ROUNDS * 100_000)
    assert (recycled.launches, recycled.last_touch_ns, recycled.live_bytes) == (0, 0, ROUNDS * 50_000)
    assert (used.launches, used.touched_bytes) == (len(using), size)
    last = launched.log[using[-1]]
    assert (used.last_kernel, last["from_ns"] <= used.last_touch_ns <= last["to_ns"]) == (last["kernel"], True)
    # memory of cuMemCreate through its mapping
    mapped = touches["keep_mapped"]
    assert (mapped.launches, mapped.last_kernel, mapped.touched_bytes) == (ROUNDS, FILL, 2 << 20)
    # pinned memory of the host counts as well
    assert touches["keep_pinned"].last_kernel == GATHER
    # launches of graphs show nothing, so that idleness before them is no certainty
    assert stale.approximate and recycled.approximate and not used.approximate
    graphs = {row.what: row.value for row in report.losses if "graph" in row.what}
    assert list(graphs.values()) == [launched.report["graph_launches"]] == [9]


@pytest.mark.bpf
def test_stubs_of_a_program_that_runs_already_are_named_by_their_symbols(bpf: None, tmp_path: Path) -> None:
    # given a program that registered its kernels before it is recorded
    go, log, path = tmp_path / "go", tmp_path / "log.jsonl", tmp_path / "attached.lscope"
    options = ("--count", ROUNDS, "--pause-us", 0, "--log", log, "--settle", go)
    with (
        waiting("cuda_launches", *options) as program,
        Recorder(path, "-p", program.pid, "--launches", "--flush", 0.05) as recorder,
    ):
        recorder.wait_ready()
        assert program.process.stdin and program.process.stdout
        program.process.stdin.write("\n")
        program.process.stdin.flush()
        with settling(path, go):
            pass
        report = json.loads(program.process.stdout.readline())
        recording = recorder.stop()
    # then their names and parameters are had from the program's file
    attached = Launched(recording, report, read_log(log))
    for line, row in zip(attached.log, attached.outermost, strict=True):
        assert row["kernel"] == line["kernel"]
        assert attached.arguments.get(row["id"], []) == expected(line), line


@pytest.mark.bpf
def test_without_arguments_launches_have_names_still(bpf: None, tmp_path: Path) -> None:
    command = sample("cuda_launches", "--count", 5, "--pause-us", 0)
    with Recorder(tmp_path / "names.lscope", "--launches", "--launch-args", 0, "--", *command) as recorder:
        recording = recorder.result()
    assert recording.code == 0, recording.stderr
    named = dict(recording.rows("SELECT kernel, count(*) FROM launches WHERE parent_id = 0 GROUP BY 1"))
    assert named == {FILL: 21, SCALE: 22, GATHER: 16, TICK: 16, "": 1}
    assert recording.rows("SELECT count(*) FROM launch_arguments") == [(0,)]
    assert recording.losses("arguments_approximate") == recording.losses("arguments_partial") == 0


# What the registry makes of records, without probes.

PID = 4242
COPY = ((0, 8), (8, 8), (16, 4))
PARAMETERS = tuple(Parameter(*p) for p in COPY)


def told(role: int, ts_ns: int, handle: int, container: int = 0, name: str = "", **more: int) -> np.ndarray:
    """One KERNEL_RECORD."""
    row = np.zeros(1, records.KERNEL_RECORD)
    row["role"], row["ts_ns"], row["handle"], row["container"], row["pid"] = role, ts_ns, handle, container, PID
    raw = name.encode()[: records.KERNEL_NAME_BYTES - 1]
    row["name"], row["name_bytes"] = raw, len(raw) + 1 if name else 0
    for field, value in more.items():
        row[field] = value
    return row


def image(**kernels: tuple[tuple[int, int], ...]) -> Image:
    data = cubin({name: info(parameters) for name, parameters in kernels.items()})
    return Image(lambda: data)


def test_a_handle_means_what_it_was_last_named() -> None:
    # given a handle that two modules gave out, one after the other
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_LOAD, 10, 0xA), [image(copy=COPY)])
    kernels.follow(told(functions.KERNEL_GET, 20, 0xF, 0xA, "copy"), [None])
    kernels.follow(told(functions.IMAGE_LOAD, 30, 0xA), [image(view=((0, 24),))])
    kernels.follow(told(functions.KERNEL_GET, 40, 0xF, 0xA, "view"), [None])
    # then each launch has the kernel of its time
    for ts_ns, name, parameters in ((25, "copy", PARAMETERS), (45, "view", (Parameter(0, 24),))):
        kernel = kernels.of(PID, 0xF, ts_ns)
        assert kernel and (kernel.name, kernel.parameters) == (name, parameters)
    assert kernels.changes(PID, 0xF) == [20, 40]
    # a failed look-up names nothing
    kernels.follow(told(functions.KERNEL_GET, 50, 0xE, 0xA, "gone", result=500), [None])
    unknown = kernels.of(PID, 0xE, 60)
    assert unknown and (unknown.name, unknown.parameters) == ("", None)


def test_a_child_inherits_handles_and_a_new_program_does_not() -> None:
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_REGISTER, 10, 0xB), [image(copy=COPY)])
    kernels.follow(told(functions.KERNEL_REGISTER, 11, 0x5, 0xB, "copy"), [None])
    kernels.forked(PID, 77)
    kernels.forget(PID)
    child = kernels.of(77, 0x5, 100)
    assert child and (child.name, child.parameters) == ("copy", PARAMETERS)
    kernels.forget(77)
    replaced = kernels.of(77, 0x5, 100)
    assert replaced and replaced.name == ""


def test_aliases_lead_to_the_kernel_and_never_in_circles() -> None:
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_LOAD, 1, 0xA), [image(copy=COPY)])
    kernels.follow(told(functions.KERNEL_GET, 2, 0xC, 0xA, "copy"), [None])
    kernels.follow(told(functions.KERNEL_ALIAS, 3, 0xF, 0xC), [None])
    kernels.follow(told(functions.KERNEL_ALIAS, 4, 0xD, 0xD), [None])
    assert (kernel := kernels.of(PID, 0xF, 9)) and (kernel.name, kernel.parameters) == ("copy", PARAMETERS)
    assert (circle := kernels.of(PID, 0xD, 9)) and (circle.name, circle.parameters) == ("", None)


@pytest.mark.parametrize("whole", [True, False])
def test_parameters_that_the_program_asked_for(whole: bool) -> None:
    kernels = Kernels(None, 16)
    for index, (offset, size) in enumerate(COPY):
        kernels.follow(told(functions.KERNEL_PARAMETER, 5, 0xF, index, address=offset, size_bytes=size), [None])
    if whole:  # until it was told that there are no more
        kernels.follow(told(functions.KERNEL_PARAMETER, 6, 0xF, 3, result=1), [None])
    kernel = kernels.of(PID, 0xF, 9)
    assert kernel and kernel.parameters == (PARAMETERS if whole else None)


def test_only_words_that_can_be_pointers_are_read() -> None:
    # given a scalar, a structure of 20 bytes, a pointer, a packed one that is not aligned
    layout = Layout.of((Parameter(0, 4), Parameter(8, 20), Parameter(32, 8), Parameter(44, 8)), 16)
    assert [layout.slots.tolist(), layout.offsets.tolist(), layout.buffer_offsets.tolist()] == [
        [1, 1, 2], [0, 8, 0], [8, 16, 32],
    ]  # fmt: skip
    assert layout.whole
    # and with room for two words it says that one is missing
    cut = Layout.of((Parameter(0, 4), Parameter(8, 20), Parameter(32, 8)), 2)
    assert (cut.slots.tolist(), cut.whole) == ([1, 1], False)
    packed = np.frombuffer(cut.packed(7), records.LAUNCH_LAYOUT)[0]
    assert (packed["id"], packed["words"], packed["word"]["offset"][:3].tolist()) == (7, 2, [0, 8, 0])


def record(launch: int, values: list[int], *, layout: int = 0, packed: bool = False, first: int = 0) -> np.ndarray:
    row = np.zeros(1, records.LAUNCH_RECORD)
    row["launch_id"], row["ts_ns"], row["function"], row["pid"] = launch, launch, 0xF, PID
    row["layout"], row["first"], row["count"] = layout, first, len(values)
    row["flags"] = records.LAUNCH_BUFFER if packed else 0
    row["values"][0, : len(values)] = values
    return row


def rows_of(arguments: LaunchArguments, *launches: np.ndarray) -> list[tuple[int, int, int, int]]:
    arguments._ranges.add(*(np.array([value], np.uint64) for value in (PID, 0x1000, 0x1000, 1)))
    table = arguments.table(list(launches), [], np.empty(0, records.CALL_RECORD))
    columns = ("launch_id", "position", "value", "approximate")
    return sorted(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


def test_values_outside_of_known_memory_are_dropped() -> None:
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_LOAD, 1, 0xA), [image(copy=COPY)])
    kernels.follow(told(functions.KERNEL_GET, 1, 0xF, 0xA, "copy"), [None])
    arguments = LaunchArguments(kernels, 0)
    # given slots that are read behind the three parameters, values next to the range [0x1000, 0x2000), and garbage
    found = rows_of(arguments, record(5, [0x1000, 0x1FFF, 0x1234, 0x1100]), record(6, [0xFFF, 0x2000, 1 << 63]))
    assert found == [(5, 0, 0x1000, 0), (5, 1, 0x1FFF, 0)]
    # a launch without parameters that are known keeps all, marked
    kernels.follow(told(functions.KERNEL_GET, 7, 0xF, 0xB, "other"), [None])
    found = rows_of(arguments, record(8, [7, 0x1001]))
    assert found == [(8, -1, 0, 1), (8, 1, 0x1001, 1)]
    assert (arguments.counts.approximate, arguments.counts.partial) == (1, 0)


def test_words_read_by_the_layout_of_another_kernel_are_marked() -> None:
    # given a handle whose kernel was replaced, while the probes still read by the old one's layout
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_LOAD, 1, 0xA), [image(copy=COPY, view=((0, 24),))])
    kernels.follow(told(functions.KERNEL_GET, 1, 0xF, 0xA, "copy"), [None])
    old = kernels.of(PID, 0xF, 1)
    kernels.follow(told(functions.KERNEL_GET, 10, 0xF, 0xA, "view"), [None])
    assert old
    arguments = LaunchArguments(kernels, 0)
    found = rows_of(
        arguments, record(5, [0x1000, 0x1008], layout=old.layout_id), record(20, [0x1000, 0x1008], layout=old.layout_id)
    )
    assert found == [(5, 0, 0x1000, 0), (5, 1, 0x1008, 0), (20, -1, 0, 1), (20, 0, 0x1000, 1), (20, 1, 0x1008, 1)]


def test_a_kernel_with_more_words_than_are_read_is_partial() -> None:
    kernels = Kernels(None, 16)
    kernels.follow(told(functions.IMAGE_LOAD, 1, 0xA), [image(big=tuple((8 * i, 8) for i in range(20)))])
    kernels.follow(told(functions.KERNEL_GET, 1, 0xF, 0xA, "big"), [None])
    arguments = LaunchArguments(kernels, 0)
    for packed in (False, True):
        assert rows_of(arguments, record(5, [0x1000] * 16, packed=packed)) == [(5, -1, 0, 0)] + [
            (5, slot, 0x1000, 0) for slot in range(16)
        ]
    assert arguments.counts.partial == 2


def test_names_longer_than_a_record_are_read_whole_from_the_process() -> None:
    import ctypes
    import os

    # given a name of 3,000 letters in this process, of which one record holds the beginning and one nothing
    name = "_Z" + "k" * 3000
    text = ctypes.create_string_buffer(name.encode())
    cut = told(functions.KERNEL_REGISTER, 1, 0x5, 0xB, name, address=ctypes.addressof(text), pid=os.getpid())
    cut["name_bytes"] = records.KERNEL_NAME_BYTES
    missing = told(functions.KERNEL_GET, 1, 0x6, 0xB, address=ctypes.addressof(text), pid=os.getpid())
    gone = told(functions.KERNEL_GET, 1, 0x6, 0xB, address=8, pid=os.getpid())
    assert Images().take(np.concatenate([cut, missing, gone])) == [name, name, None]


def test_images_are_taken_from_memory_and_no_other_file(tmp_path: Path) -> None:
    import ctypes
    import os

    # given a cubin on the heap, and the names of things that are no image
    data = cubin({"copy": info(COPY)})
    buffer = ctypes.create_string_buffer(data + bytes(64))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wrapper = ctypes.create_string_buffer(struct.pack("<IIQ", 0x466243B1, 1, ctypes.addressof(buffer)))
    images = Images()
    rows = [
        told(functions.IMAGE_LOAD, 1, 0xA, address=ctypes.addressof(buffer), pid=os.getpid()),
        told(functions.IMAGE_LOAD, 1, 0xA, address=ctypes.addressof(wrapper), pid=os.getpid()),
        told(functions.IMAGE_LOAD, 1, 0xA, address=16, pid=os.getpid()),
        told(functions.IMAGE_LOAD, 1, 0xA, address=(1 << 64) - 16, pid=os.getpid()),
        told(functions.IMAGE_FILE, 1, 0xA, name=str(pipe), pid=os.getpid()),
        told(functions.IMAGE_FILE, 1, 0xA, name="/dev/zero", pid=os.getpid()),
    ]
    heap, wrapped, *others = images.take(np.concatenate(rows))
    images.close()
    assert isinstance(heap, Image) and heap.parameters("copy") == PARAMETERS
    assert isinstance(wrapped, Image) and wrapped.parameters("copy") == PARAMETERS
    assert others == [None] * 4
    assert images.unreadable == 4
