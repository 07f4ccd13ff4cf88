"""Packing and unpacking: the same capture comes back, and a pack that was tampered with makes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from capture_rows import manifest, rows, small_capture
from small_disk import small_disk

from leakscope.capture import Capture, CaptureWriter, pack, unpack
from leakscope.cli.main import main
from leakscope.errors import BadInputError, OutputIncompleteError
from leakscope.model.tables import SCHEMA_VERSION

MEM_PART = "mem_events/part-000001.parquet"


def contents(capture: Path) -> dict[str, bytes]:
    return {str(path.relative_to(capture)): path.read_bytes() for path in capture.rglob("*") if path.is_file()}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(Capture.open(small_capture(tmp_path / "a.lscope")), tmp_path / "a.lscope.tar")


# --- there and back


def test_a_capture_comes_back_as_it_was(tmp_path: Path, packed: Path) -> None:
    back = unpack(packed, tmp_path / "b.lscope")

    capture = Capture.open(back)
    assert capture.problems == []
    assert capture.rows("mem_events") == 7
    assert capture.manifest.sources == manifest().sources
    before, after = contents(tmp_path / "a.lscope"), contents(back)
    assert before.keys() == after.keys() == {"manifest.json", MEM_PART, "losses/part-000001.parquet"}
    assert before[MEM_PART] == after[MEM_PART]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.lscope", "a.lscope.tar", "b.lscope"]
    assert back.stat().st_mode == (tmp_path / "a.lscope").stat().st_mode


def test_the_pack_is_the_same_bytes_whenever_and_by_whomever_it_is_made(tmp_path: Path, packed: Path) -> None:
    os.utime(tmp_path / "a.lscope" / MEM_PART, (1, 1))
    (tmp_path / "a.lscope" / MEM_PART).chmod(0o600)
    again = pack(Capture.open(tmp_path / "a.lscope"), tmp_path / "again.tar")
    of_unpacked = pack(Capture.open(unpack(packed, tmp_path / "b.lscope")), tmp_path / "third.tar")

    assert packed.read_bytes() == again.read_bytes() == of_unpacked.read_bytes()
    with tarfile.open(packed) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == ["manifest.json", "losses/part-000001.parquet", MEM_PART]
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode, m.type) for m in members} == {
        (0, 0, "", "", 0, 0o644, tarfile.REGTYPE)
    }


def test_a_packed_capture_opens_like_a_directory(packed: Path) -> None:
    capture = Capture.open(packed)

    assert capture.problems == []
    assert capture.table("mem_events", ["size_bytes"])["size_bytes"].to_pylist() == [11 * n for n in range(1, 8)]
    assert capture.connect().execute("SELECT sum(size_bytes) FROM mem_events").fetchall() == [(308,)]


def test_an_incomplete_capture_is_packed_with_its_unlisted_parts(tmp_path: Path) -> None:
    writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
    writer.write("mem_events", rows("mem_events", 3, ts_ns=[1, 2, 3]))

    back = Capture.open(pack(Capture.open(tmp_path / "a.lscope"), tmp_path / "a.tar"))

    assert back.rows("mem_events") == 3
    assert [part.path for part in back.manifest.parts] == [MEM_PART]
    assert back.problems == ["the capture is incomplete: its writer was stopped before it could finish"]


def test_damaged_parts_stay_out_of_the_pack_and_are_named(tmp_path: Path) -> None:
    path = small_capture(tmp_path / "a.lscope")
    (path / MEM_PART).write_bytes(b"PAR1")

    back = Capture.open(pack(Capture.open(path), tmp_path / "a.tar"))

    assert back.rows("mem_events") == 0
    assert back.table("losses")["count"].to_pylist() == [3, 5]
    assert back.problems == [
        "the capture is incomplete: left out when it was packed: "
        f"{MEM_PART}: left out: damaged (its checksum is not the manifest's)"
    ]


# --- outputs that exist, and disks that are full


def test_outputs_that_exist_are_replaced_only_with_force(tmp_path: Path, packed: Path) -> None:
    capture = Capture.open(tmp_path / "a.lscope")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    for target, force in ((packed, False), (tmp_path / "folder", False), (tmp_path / "folder", True)):
        with pytest.raises(BadInputError, match=f"{target.name}: "):
            pack(capture, target, force=force)
    with pytest.raises(BadInputError, match="exists already"):
        unpack(packed, tmp_path / "a.lscope")
    with pytest.raises(BadInputError, match="mine"):
        unpack(packed, tmp_path / "folder", force=True)

    other = small_capture(tmp_path / "other.lscope", count=3)
    pack(Capture.open(other), packed, force=True)
    unpack(packed, tmp_path / "a.lscope", force=True)

    assert Capture.open(tmp_path / "a.lscope").rows("mem_events") == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "a.lscope",
        "a.lscope.tar",
        "folder",
        "other.lscope",
    ]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        # given a capture larger than the disk
        noise = random.Random(7)
        writer = CaptureWriter.create(tmp_path / "a.lscope", manifest())
        writer.write("mem_events", rows("mem_events", 20_000, addr=[noise.getrandbits(64) for _ in range(20_000)]))
        writer.finish()
        packed = pack(Capture.open(tmp_path / "a.lscope"), tmp_path / "a.tar")
        # when it is packed or unpacked there, then one line says so and the disk is as before
        with pytest.raises(OutputIncompleteError, match=r"b\.tar: could not be completed: No space left on device"):
            pack(Capture.open(tmp_path / "a.lscope"), disk / "b.tar")
        with pytest.raises(OutputIncompleteError, match=r"b\.lscope: could not be completed: No space left on device"):
            unpack(packed, disk / "b.lscope")
        assert list(disk.iterdir()) == []


def test_paths_that_cannot_be_used_are_said(tmp_path: Path, packed: Path) -> None:
    with pytest.raises(BadInputError, match=r"nowhere\.tar: No such file or directory"):
        unpack(tmp_path / "nowhere.tar", tmp_path / "b.lscope")
    with pytest.raises(BadInputError, match=r"b\.lscope: cannot be made: No such file or directory"):
        unpack(packed, tmp_path / "none" / "b.lscope")
    with pytest.raises(BadInputError, match=r"b\.tar: cannot be made: No such file or directory"):
        pack(Capture.open(tmp_path / "a.lscope"), tmp_path / "none" / "b.tar")


# --- hostile packs

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def write_tar(path: Path, members: list[Member], form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))


def part(name: str, content: bytes) -> dict[str, object]:
    return {
        "table": name.split("/")[0],
        "path": name,
        "rows": 7,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def with_manifest(members: list[Member], listed: list[dict[str, object]], **fields: object) -> list[Member]:
    content = {
        "format": "leakscope-capture",
        "schema_version": 1,
        "complete": True,
        "sources": [],
        "parts": listed,
    }
    return [member("manifest.json", json.dumps(content | fields).encode()), *members]


X = b"x" * 700
GOOD = "losses/part-000001.parquet"
SPARSE = member(GOOD, X)
SPARSE[0].pax_headers = {"GNU.sparse.map": "0,1,1000000000000,1", "GNU.sparse.size": "1000000000001"}
LONG = member("losses/" + "a" * 300 + ".parquet", X)

HOSTILE: dict[str, Callable[[], tuple[list[Member], int]]] = {
    "path with ..": lambda: (with_manifest([member("../evil", X)], []), tarfile.USTAR_FORMAT),
    "absolute path": lambda: (with_manifest([member("/tmp/evil", X)], []), tarfile.USTAR_FORMAT),
    ".. in the manifest": lambda: (
        with_manifest([member("losses/../../evil", X)], [part("losses/../../evil", X)]),
        tarfile.USTAR_FORMAT,
    ),
    "symbolic link": lambda: (
        with_manifest([member(GOOD, kind=tarfile.SYMTYPE, link="/etc/passwd")], [part(GOOD, b"")]),
        tarfile.USTAR_FORMAT,
    ),
    "hard link": lambda: (
        with_manifest([member(GOOD, kind=tarfile.LNKTYPE, link="/etc/passwd")], [part(GOOD, b"")]),
        tarfile.USTAR_FORMAT,
    ),
    "device": lambda: (
        with_manifest([member(GOOD, kind=tarfile.CHRTYPE)], [part(GOOD, b"")]),
        tarfile.USTAR_FORMAT,
    ),
    "fifo": lambda: (
        with_manifest([member(GOOD, kind=tarfile.FIFOTYPE)], [part(GOOD, b"")]),
        tarfile.USTAR_FORMAT,
    ),
    "directory": lambda: (with_manifest([member("losses", kind=tarfile.DIRTYPE)], []), tarfile.USTAR_FORMAT),
    "sparse file": lambda: (with_manifest([SPARSE], [part(GOOD, X)]), tarfile.PAX_FORMAT),
    "long name": lambda: (with_manifest([LONG], []), tarfile.GNU_FORMAT),
    "unlisted part": lambda: (with_manifest([member(GOOD, X)], []), tarfile.USTAR_FORMAT),
    "part that comes twice": lambda: (
        with_manifest([member(GOOD, X), member(GOOD, X)], [part(GOOD, X)]),
        tarfile.USTAR_FORMAT,
    ),
    "second manifest": lambda: (with_manifest(with_manifest([], []), []), tarfile.USTAR_FORMAT),
    "part without its checksum": lambda: (
        with_manifest([member(GOOD, X)], [part(GOOD, X) | {"sha256": ""}]),
        tarfile.USTAR_FORMAT,
    ),
    "changed part": lambda: (with_manifest([member(GOOD, X)], [part(GOOD, X[1:])]), tarfile.USTAR_FORMAT),
    "missing part": lambda: (with_manifest([], [part(GOOD, X)]), tarfile.USTAR_FORMAT),
    "no manifest": lambda: ([member(GOOD, X)], tarfile.USTAR_FORMAT),
    "manifest last": lambda: ([member(GOOD, X), *with_manifest([], [part(GOOD, X)])], tarfile.USTAR_FORMAT),
    "newer schema": lambda: (with_manifest([], [], schema_version=SCHEMA_VERSION + 1), tarfile.USTAR_FORMAT),
    "nothing": lambda: ([], tarfile.USTAR_FORMAT),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pack_is_refused_and_makes_nothing(tmp_path: Path, name: str) -> None:
    members, form = HOSTILE[name]()
    write_tar(tmp_path / "bad.tar", members, form)

    with pytest.raises(BadInputError, match=r"bad\.tar: ") as refused:
        unpack(tmp_path / "bad.tar", tmp_path / "out.lscope")

    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.tar"]


def test_the_same_members_without_the_fault_are_taken(tmp_path: Path) -> None:
    """The check of the checks above: their pack unpacks when nothing is wrong with it."""
    write_tar(tmp_path / "good.tar", with_manifest([member(GOOD, X)], [part(GOOD, X)]))

    assert contents(unpack(tmp_path / "good.tar", tmp_path / "out.lscope"))[GOOD] == X


def test_a_pack_cut_short_anywhere_or_flipped_is_refused(tmp_path: Path, packed: Path) -> None:
    whole = packed.read_bytes()
    used = len(whole.rstrip(b"\0"))
    places = random.Random(11)
    for _ in range(60):
        cut = whole[: places.randrange(used)]
        flipped = bytearray(whole)
        flipped[places.randrange(used)] ^= 1 << places.randrange(8)
        for content in (cut, flipped):
            (tmp_path / "bad.tar").write_bytes(content)
            try:
                unpack(tmp_path / "bad.tar", tmp_path / "out.lscope")
            except BadInputError:
                assert not (tmp_path / "out.lscope").exists()
            else:  # a flip in padding, or in words of the manifest, changes no evidence
                assert content is flipped
                assert contents(tmp_path / "out.lscope")[MEM_PART] == contents(tmp_path / "a.lscope")[MEM_PART]
                shutil.rmtree(tmp_path / "out.lscope")


def test_a_header_with_a_huge_or_negative_size_allocates_nothing(tmp_path: Path, packed: Path) -> None:
    whole = bytearray(packed.read_bytes())
    for size in (8 * 2**30 - 1, 2**62, -512):
        info = tarfile.TarInfo("manifest.json")
        info.size = size
        header = info.tobuf(tarfile.GNU_FORMAT)
        (tmp_path / "bad.tar").write_bytes(header[-512:] + whole[512:])
        with pytest.raises(BadInputError, match=r"manifest is too large|not a regular file"):
            unpack(tmp_path / "bad.tar", tmp_path / "out.lscope")


def test_max_bytes_bounds_what_is_unpacked(tmp_path: Path, packed: Path) -> None:
    with tarfile.open(packed) as tar:
        total = sum(info.size for info in tar)

    with pytest.raises(BadInputError, match=f"holds more than {total - 1} bytes; --max-bytes"):
        unpack(packed, tmp_path / "b.lscope", max_bytes=total - 1)
    with pytest.raises(BadInputError, match="manifest is too large"):
        unpack(packed, tmp_path / "b.lscope", max_bytes=10)
    assert not (tmp_path / "b.lscope").exists()
    unpack(packed, tmp_path / "b.lscope", max_bytes=total)


# --- the verbs


def test_the_verbs_name_their_outputs_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leakscope(folder: Path, *args: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        return (main(list(args)), *capsys.readouterr())

    (tmp_path / "in").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    small_capture(tmp_path / "in" / "a.lscope")

    assert leakscope(out, "pack", "../in/a.lscope/") == (0, "a.lscope.tar\n", "")
    assert leakscope(out, "unpack", "a.lscope.tar") == (0, "a.lscope\n", "")
    assert leakscope(out / "a.lscope", "pack", ".", "-o", "../b.tar") == (0, "../b.tar\n", "")
    assert (out / "b.tar").read_bytes() == (out / "a.lscope.tar").read_bytes()
    assert Capture.open(out / "a.lscope").rows("mem_events") == 7


def test_the_verbs_refuse_in_one_line(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line, says in (
        ("pack a.lscope", "a.lscope.tar: exists already; choose another name, or --force to replace a file"),
        ("pack a.lscope.tar", "a.lscope.tar: is one file already"),
        ("unpack a.lscope.tar", "a.lscope: exists already; choose another name, or --force to replace it"),
        ("unpack a.lscope", "a.lscope: name the capture directory to make with -o"),
        ("unpack none.tar", "none.tar: No such file or directory"),
        ("unpack a.lscope.tar -o b --max-bytes 3", "a.lscope.tar: not unpacked: its manifest is too large"),
    ):
        assert main(line.split()) == 2
        assert capsys.readouterr() == ("", f"leakscope: {says}\n")
    assert main(["unpack", "a.lscope.tar", "--force"]) == 0
    assert main(["pack", "a.lscope", "--force"]) == 0
    assert capsys.readouterr() == ("a.lscope\na.lscope.tar\n", "")
