"""The cgroup sampler against the controller's own files and against trees of files."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from step_child import StepChild

from leakscope.errors import BadInputError
from leakscope.record.samplers import MemoryHierarchy, Reading
from leakscope.record.samplers.cgroup import CgroupSampler, cgroup_versions, read_v1, read_v2

MIB = 1 << 20


@pytest.fixture
def child() -> Iterator[StepChild]:
    step_child = StepChild()
    yield step_child
    if step_child.process.poll() is None:
        step_child.end()


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    hierarchy = MemoryHierarchy.find()
    mine = hierarchy and hierarchy.of_pid(os.getpid())
    folder = mine and mine.directory / f"leakscope-test-{os.getpid()}"
    try:
        assert folder
        folder.mkdir()
    except (AssertionError, OSError) as error:
        pytest.skip(f"no memory cgroup can be created here: {error}")
    yield folder
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.02)


def test_kernel_memory_of_a_cgroup(own_cgroup: Path, child: StepChild) -> None:
    # given a child alone in its cgroup, when it holds 200 sockets with 3,000 unread bytes each (4 KiB slabs)
    (own_cgroup / "cgroup.procs").write_text(str(child.pid))
    sampler = CgroupSampler(lambda: [child.pid])
    child.do("import socket; pairs = [socket.socketpair()]")
    before = {r.counter: r.value for r in sampler.sample(0)}
    child.do("pairs += [socket.socketpair() for _ in range(200)]")
    child.do("[a.send(b'x' * 3000) for a, b in pairs[1:]]")
    readings = list(sampler.sample(1))
    after = {r.counter: r.value for r in readings}
    # then the growth holds at least the buffers, and the figures are those of the controller's own files
    grown = after["cgroup_kernel"] - before["cgroup_kernel"]
    assert 200 * 4096 <= grown <= 200 * 4096 * 4
    assert {r.scope for r in readings} == {"cgroup"}
    assert {r.scope_id.rsplit("/", 1)[1] for r in readings} == {own_cgroup.name}
    if (own_cgroup / "memory.kmem.usage_in_bytes").exists():
        assert after["cgroup_kernel"] == int((own_cgroup / "memory.kmem.usage_in_bytes").read_text())
        assert after["cgroup"] == int((own_cgroup / "memory.usage_in_bytes").read_text())
    assert "cgroup_limit" not in after


def test_limit_and_named_cgroup(own_cgroup: Path) -> None:
    hierarchy = MemoryHierarchy.find()
    assert hierarchy
    limit_file = "memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max"
    (own_cgroup / limit_file).write_text(str(48 * MIB))
    by_folder = hierarchy.of_path(own_cgroup)
    by_name = hierarchy.of_path(by_folder.path)
    assert by_folder == by_name
    counters = {r.counter: r.value for r in CgroupSampler(list, lambda: [own_cgroup]).sample(0)}
    assert counters["cgroup_limit"] == 48 * MIB
    with pytest.raises(BadInputError, match="no cgroup nosuch"):
        hierarchy.of_path("nosuch")


def test_a_removed_cgroup_is_no_loss(own_cgroup: Path) -> None:
    sampler = CgroupSampler(list, lambda: [own_cgroup])
    assert list(sampler.sample(0))
    own_cgroup.rmdir()
    assert list(sampler.sample(1)) == []
    assert sampler.errors == Counter()


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_v2_files(tmp_path: Path) -> None:
    stat = "anon 11\nfile 22\nkernel 33\nshmem 5\nslab_reclaimable 6\nslab_unreclaimable 7\nsock 8\nslab 13\n"
    group = write(
        tmp_path / "new",
        memory__stat=stat,
        memory__current="99\n",
        memory__max="1000\n",
        memory__swap__current="3\n",
    )
    assert read_v2(group) == {
        "cgroup_anon": 11, "cgroup_file": 22, "cgroup_shmem": 5, "cgroup_kernel": 33, "cgroup_sock": 8,
        "cgroup_slab_reclaimable": 6, "cgroup_slab_unreclaimable": 7,
        "cgroup": 99, "cgroup_limit": 1000, "cgroup_swap": 3,
    }  # fmt: skip
    # kernels before 5.18 have the parts only; "max" is no limit
    stat = "anon 1\nfile 2\nkernel_stack 16\npagetables 32\npercpu 64\nslab 128\n"
    group = write(tmp_path / "old", memory__stat=stat, memory__max="max\n")
    assert read_v2(group) == {"cgroup_anon": 1, "cgroup_file": 2, "cgroup_kernel": 240}


def test_v1_files(tmp_path: Path) -> None:
    stat = "rss 1\ncache 2\ntotal_rss 10\ntotal_cache 20\ntotal_swap 4\n"
    stat += "hierarchical_memory_limit 9223372036854771712\n"
    group = write(tmp_path / "g", memory__stat=stat, memory__usage_in_bytes="50\n", memory__kmem__usage_in_bytes="7\n")
    expected = {"cgroup_anon": 10, "cgroup_file": 20, "cgroup_swap": 4, "cgroup": 50, "cgroup_kernel": 7}
    assert read_v1(group) == expected
    write(group, memory__stat=stat.replace("9223372036854771712", "4096"))
    assert read_v1(group) == {**expected, "cgroup_limit": 4096}


def fake_host(tmp_path: Path, mountinfo: str, cgroup_of_7: str) -> Path:
    proc = tmp_path / "proc"
    write(proc / "self", mountinfo=mountinfo)
    write(proc / "7", cgroup=cgroup_of_7)
    return proc


def test_v2_only_host_and_container_view(tmp_path: Path) -> None:
    mount = tmp_path / "a b"
    write(mount, cgroup__controllers="cpu memory pids\n")
    write(mount / "x.slice" / "y", cgroup__procs="7\n", memory__stat="anon 5\nfile 6\nkernel 7\n")
    escaped = str(mount).replace(" ", "\\040")
    proc = fake_host(tmp_path, f"30 1 0:26 / {escaped} rw - cgroup2 cgroup2 rw\n", "0::/x.slice/y\n")
    sampler = CgroupSampler(lambda: [7], proc_root=proc)
    assert sampler.facts() == {
        "cgroup_versions": [2],
        "cgroup_memory": {"version": 2, "mount": str(mount), "root": "/"},
    }
    assert list(sampler.sample(0)) == [
        Reading("cgroup", "/x.slice/y", "cgroup_anon", 5),
        Reading("cgroup", "/x.slice/y", "cgroup_file", 6),
        Reading("cgroup", "/x.slice/y", "cgroup_kernel", 7),
    ]
    # in a container only its own part is mounted: the path of the process holds the mount's root
    proc = fake_host(tmp_path, f"30 1 0:26 /x.slice {escaped}/x.slice rw - cgroup2 cgroup2 rw\n", "0::/x.slice/y\n")
    write(mount / "x.slice", cgroup__controllers="memory\n")
    assert [r.scope_id for r in CgroupSampler(lambda: [7], proc_root=proc).sample(0)] == ["/x.slice/y"] * 3
    # a process outside the reader's cgroup namespace cannot be read, and that is no error
    proc = fake_host(tmp_path, f"30 1 0:26 / {escaped} rw - cgroup2 cgroup2 rw\n", "0::/../other\n")
    sampler = CgroupSampler(lambda: [7], proc_root=proc)
    assert (list(sampler.sample(0)), sampler.errors) == ([], Counter())


def test_hybrid_host_uses_the_hierarchy_that_has_the_memory_controller(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "memory", tmp_path / "unified"
    write(v2, cgroup__controllers="hugetlb\n")
    write(v1 / "job", memory__stat="total_rss 4\n", memory__usage_in_bytes="9\n")
    mounts = (
        f"30 1 0:26 / {v2} rw - cgroup2 cgroup2 rw\n"
        f"31 1 0:27 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
        f"32 1 0:28 / {v1} rw shared:3 - cgroup cgroup rw,memory\n"
    )
    proc = fake_host(tmp_path, mounts, "9:name=systemd:/z\n4:memory:/job\n0::/elsewhere\n")
    assert cgroup_versions(proc) == [1, 2]
    assert [(r.counter, r.value) for r in CgroupSampler(lambda: [7], proc_root=proc).sample(0)] == [
        ("cgroup_anon", 4),
        ("cgroup", 9),
    ]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    sampler = CgroupSampler(lambda: [7], proc_root=fake_host(tmp_path, "", ""))
    assert list(sampler.sample(0)) == []
    assert sampler.facts() == {
        "cgroup_versions": [],
        "cgroup_memory": None,
        "cgroup_memory_absent": "memory of cgroups is not read: no memory controller here (no cgroup is mounted)",
    }


def test_a_host_without_the_memory_controller_says_so_once(tmp_path: Path) -> None:
    # given a v2 hierarchy that has other controllers only
    write(tmp_path / "unified", cgroup__controllers="cpu pids\n")
    proc = fake_host(tmp_path, f"30 1 0:26 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n", "0::/x\n")
    sampler = CgroupSampler(lambda: [7], proc_root=proc)
    # then nothing is read and no reading counts as failed; one line of the facts says why
    assert [list(sampler.sample(at)) for at in range(3)] == [[], [], []] and sampler.errors == Counter()
    assert sampler.facts()["cgroup_memory_absent"] == (
        "memory of cgroups is not read: no memory controller here (cgroup v2 without it is mounted)"
    )


def test_a_v2_tree_as_the_kernel_shows_it(tmp_path: Path) -> None:
    # given the hierarchy of trees/, a process in a service with a limit, and another service that is named
    tree = Path(__file__).parent / "trees" / "cgroup_v2"
    proc = fake_host(
        tmp_path, f"30 1 0:26 / {tree} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n", "0::/system.slice/llm.service\n"
    )
    sampler = CgroupSampler(lambda: [7], lambda: [tree / "system.slice" / "idle.service"], proc)
    found: dict[str, dict[str, float]] = {}
    for reading in sampler.sample(0):
        found.setdefault(reading.scope_id, {})[reading.counter] = reading.value
    # then both are read: memory.current, the parts of memory.stat, and the limit where there is one
    assert found == {
        "/system.slice/llm.service": {
            "cgroup": 7_986_053_120, "cgroup_anon": 6_442_450_944, "cgroup_file": 1_342_177_280,
            "cgroup_kernel": 201_326_592, "cgroup_shmem": 268_435_456, "cgroup_slab_reclaimable": 92_274_688,
            "cgroup_slab_unreclaimable": 44_040_192, "cgroup_sock": 98_304, "cgroup_limit": 17_179_869_184,
            "cgroup_swap": 0,
        },
        "/system.slice/idle.service": {
            "cgroup": 16_384, "cgroup_anon": 4096, "cgroup_file": 0, "cgroup_kernel": 8192, "cgroup_shmem": 0,
            "cgroup_slab_reclaimable": 0, "cgroup_slab_unreclaimable": 512, "cgroup_sock": 0,
        },
    }  # fmt: skip
