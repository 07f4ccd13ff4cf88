"""Parameters of kernels from code images: hand-made ones (tests/gpu_images.py), NVIDIA's own, and damaged ones."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections import defaultdict
from pathlib import Path

import pytest
from gpu_images import cubin, entry, fatbin, info
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leakscope.record.gpu import fatbin as reader
from leakscope.record.gpu.cubin import MAX_PARAMETERS_BYTES, Parameter, cubin_kernels, ptx_kernels, sections
from leakscope.record.gpu.images import Image

COPY = [(0, 8), (8, 8), (16, 4)]
VIEW = [(0, 24), (24, 1), (32, 8)]
BOTH = {"copy": tuple(Parameter(*p) for p in COPY), "view": tuple(Parameter(*p) for p in VIEW)}


def image(**versions: int) -> bytes:
    return cubin({"copy": info(COPY, **versions), "view": info(VIEW, **versions)})


@pytest.mark.parametrize("version", [1, 2])
def test_parameters_are_listed_in_their_order(version: int) -> None:
    assert cubin_kernels(image(version=version)) == BOTH


def test_a_kernel_without_parameters_has_none() -> None:
    # given one with an empty list, and one that says it takes 8 bytes but does not say how
    found = cubin_kernels(cubin({"tick": info([]), "untold": info([], total=8)}))
    # then only the first is known
    assert found == {"tick": ()}


def test_attributes_that_are_not_known_are_passed_over() -> None:
    others = (
        struct.pack("<BBHII", 4, 0x1C, 8, 0x80, 0x90)
        + struct.pack("<BBH", 1, 0x2A, 0)
        + struct.pack("<BBH", 2, 0x4C, 1)
    )
    assert cubin_kernels(cubin({"copy": info(COPY, before=others)})) == {"copy": BOTH["copy"]}


@pytest.mark.parametrize(
    "parameters",
    [[(0, 8), (0xFFF8, 16)], [(0, MAX_PARAMETERS_BYTES + 1)]],
    ids=["beyond the end", "too large"],
)
def test_lists_that_cannot_be_are_not_believed(parameters: list[tuple[int, int]]) -> None:
    assert cubin_kernels(cubin({"copy": info(COPY), "odd": info(parameters, total=16, version=2)})) == {
        "copy": BOTH["copy"]
    }


def test_a_list_with_a_gap_is_not_believed() -> None:
    # given that the record of parameter 1 is missing
    whole = info(COPY)
    records = [whole[4 + 16 * i : 20 + 16 * i] for i in range(3)]
    assert cubin_kernels(cubin({"copy": whole[:4] + records[0] + records[2]})) == {}


def test_other_files_are_refused() -> None:
    for data in (b"", b"\x7fELF", cubin({"copy": info(COPY)}, machine=62), b"MZ" + bytes(100)):
        with pytest.raises(ValueError):
            cubin_kernels(data)


PTX = """
.version 8.0
.target sm_90
.visible .entry copy(
    .param .u64 .ptr .global .align 4 copy_param_0,
    .param .u64 copy_param_1,
    .param .f32 copy_param_2
)
.maxntid 128
{ ret; }
.visible .entry view(.param .align 8 .b8 view_param_0[24], .param .u8 view_param_1, .param .u64 view_param_2) { ret; }
.visible .entry tick() { ret; }
.visible .entry strange(.param .v4 .f32 p) { ret; }
"""


def test_ptx_tells_the_same_as_a_cubin() -> None:
    assert ptx_kernels(PTX) == {**BOTH, "tick": ()}


@pytest.mark.parametrize("how", ["", "lz4", "zstd"])
@pytest.mark.parametrize("kind", [1, 2], ids=["ptx", "elf"])
def test_a_fat_binary_is_read_however_it_is_packed(how: str, kind: int) -> None:
    code = image() if kind == 2 else PTX.encode() + b"\0"
    container = fatbin(entry(b"\0" * 64, kind=64), entry(code, kind=kind, how=how))
    assert reader.container_bytes(container) == len(container)
    found = Image(lambda: container)
    assert [found.parameters(name) for name in ("view", "copy", "absent")] == [BOTH["view"], BOTH["copy"], None]
    assert found.parameters("copy") == BOTH["copy"]


def test_a_section_of_containers_is_searched_one_architecture_at_a_time() -> None:
    # given two programs of two architectures each, padded as the linker does
    first = fatbin(entry(cubin({"a": info(COPY)}), arch=80), entry(cubin({"a": info(COPY)}), arch=90))
    second = fatbin(entry(cubin({"b": info(VIEW)}), arch=80), entry(cubin({"b": info(VIEW)}), arch=90))
    section = first + bytes(24) + second
    assert [len(c) for c in reader.containers(section)] == [len(first), len(second)]
    # then both kernels are found in the first two of four pieces
    pieces = list(reader.image_kernels(section))
    assert [list(piece) for piece in pieces] == [["a"], ["b"], ["a"], ["b"]]
    assert Image(lambda: section).parameters("b") == BOTH["view"]


def test_a_library_has_its_section(tmp_path: Path) -> None:
    assert bytes(reader.fatbin_section(Path("/proc/self/exe").read_bytes())) == b""
    with pytest.raises(ValueError):
        reader.fatbin_section(b"no file")


def test_a_damaged_entry_hides_no_other() -> None:
    good = entry(image(), how="zstd")
    broken = entry(image(), how="zstd")[:100] + b"\xff" * (len(good) - 100)
    container = fatbin(broken, good)
    assert Image(lambda: container).parameters("copy") == BOTH["copy"]


def test_an_entry_that_would_unpack_to_much_is_left_packed() -> None:
    # given entries that claim sizes which they do not have
    claims = bytearray(entry(image(), how="zstd"))
    for size in (reader.MAX_ENTRY_BYTES + 1, 1 << 40, 8):
        claims[56:64] = struct.pack("<Q", size)
        container = fatbin(bytes(claims))
        tracemalloc.start()
        assert Image(lambda container=container: container).parameters("copy") is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()


MUTATED = [
    image(), image(version=2), fatbin(entry(image(), how="lz4"), entry(image(), how="zstd"), entry(image())),
    PTX.encode(),
]  # fmt: skip


@pytest.mark.parametrize("number", range(300))
def test_random_damage_is_an_error_or_nothing(number: int) -> None:
    chance = random.Random(number)
    data = bytearray(chance.choice(MUTATED))
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(data))
        data[at] = chance.choice([0, 0xFF, 0x80, chance.randrange(256)])
    if chance.random() < 0.4:
        del data[chance.randrange(len(data)) :]
    found = Image(lambda: bytes(data))
    for name in ("copy", "view", "absent"):
        parameters = found.parameters(name)
        assert parameters is None or all(p.offset_bytes + p.size_bytes <= 1 << 16 for p in parameters)


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hypothesis_any_bytes_are_an_error_or_nothing(data: bytes) -> None:
    assert Image(lambda: data).parameters("copy") is None
    assert Image(lambda: b"\x7fELF\x02\x01" + data).parameters("copy") is None
    assert Image(lambda: struct.pack("<I", 0xBA55ED50) + data).parameters("copy") is None


LIBRARIES = "LEAKSCOPE_TEST_CUDA_LIBRARIES"
# Of the wheels nvidia-nvjpeg-cu12 12.4.0.76 (uncompressed and LZ4 entries) and nvidia-nvjpeg 13.3.2.43 (zstd):
# containers, entries that are no PTX, kernels of all of them, distinct kernels.
KNOWN = {"libnvjpeg.so.12": (11, 165, 3720, 248), "libnvjpeg.so.13": (10, 100, 2490, 249)}


@pytest.mark.parametrize("name", KNOWN)
def test_images_of_nvidias_own_libraries(name: str) -> None:
    # given a library of a wheel (pip download nvidia-nvjpeg-cu12 nvidia-nvjpeg)
    place = os.environ.get(LIBRARIES, "")
    files = sorted(Path(place).rglob(name)) if place else []
    if not files:
        pytest.skip(f"NOT TESTED: no {name} below {LIBRARIES}={place!r}; point it at unpacked wheels of nvidia-nvjpeg")
    section = reader.fatbin_section(files[0].read_bytes())
    by_kernel: dict[str, set[tuple[Parameter, ...]]] = defaultdict(set)
    entries = [e for container in reader.containers(section) for e in reader.entries(container)]
    kernels = texts = 0
    for found in entries:
        code = bytes(found.code())
        if found.kind == reader.KIND_ELF:
            listed = cubin_kernels(code)
            kernels += len(listed)
            # then each function that is code has its list
            texts += sum(s.name.startswith(".text.") for s in sections(code))
        else:
            listed = ptx_kernels(code.decode())
        for kernel, parameters in listed.items():
            by_kernel[kernel].add(parameters)
    assert kernels == texts
    # and cubins of all architectures and the PTX agree on every kernel
    assert {kernel: lists for kernel, lists in by_kernel.items() if len(lists) > 1} == {}
    elves = sum(e.kind == reader.KIND_ELF for e in entries)
    assert (len(list(reader.containers(section))), elves, kernels, len(by_kernel)) == KNOWN[name]
