"""The wheel records by itself: installed in a fresh environment, on a host without bcc and without a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from recording import ROOT, Recording, hiding, sample

import bpf_programs
from leakscope.errors import ExitCode
from leakscope.record import bcc_location

KEPT = 31


@pytest.fixture(scope="module")
def wheel(core: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make build` makes, of a copy of the sources: setuptools leaves files behind."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "sources"
    copy.mkdir()
    for name in ("leakscope", "bpf_programs", "nsight_parsers"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), str(copy)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = place.glob("leakscope-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The command, installed from the wheel. The libraries that it needs come from the environment of the tests."""
    place = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--python", f"{place}/bin/python", "install", "--no-deps", str(wheel)],
        check=True,
    )
    (packages,) = (place / "lib").glob("python3.*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return place / "bin" / "leakscope"


def test_the_wheel_holds_the_built_programs_and_what_bcc_compiles(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("bpf_programs/leakscope.bpf.o") == bpf_programs.OBJECT.read_bytes()
    sources = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.c", "*.h", "shim/**/*.h")
        for path in bpf_programs.DIRECTORY.glob(pattern)
    }
    assert len(sources) > 20 and sources <= set(names)
    assert "leakscope/py.typed" in names
    assets = {path.relative_to(ROOT).as_posix() for path in (ROOT / "leakscope/report/html/assets").iterdir()}
    assert len(assets) >= 4 and assets <= set(names)  # of HTML reports


@pytest.mark.bpf
def test_an_installed_wheel_records_without_bcc_and_clang(can_record: None, installed: Path, tmp_path: Path) -> None:
    # given a host on which there is neither
    clang = shutil.which("clang")
    hidden = [Path(path).resolve() for path in (bcc_location.find_bcc(), clang) if path]
    path = tmp_path / "x.lscope"
    command = [
        *hiding(*hidden),
        str(installed),
        "record",
        "-o",
        str(path),
        "--",
        *sample("leak_eventfd", "--count", KEPT),
    ]
    environment = {"PATH": f"{installed.parent}:/usr/bin:/bin:/usr/sbin:/sbin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # then its own programs are loaded, and every object is there with its site
    assert done.returncode == ExitCode.DONE, done.stderr
    recording = Recording(path, done.returncode)
    assert recording.capture.manifest.sources[0].loader == "core"
    live = recording.live("slab_cache", "list_contains(functions, 'subscribe_and_forget') AND slab_cache LIKE '%filp'")
    assert [objects for objects, _ in live.values()] == [KEPT]
    # and it is the wheel that ran
    ran = subprocess.run(
        [str(installed.parent / "python"), "-c", "import leakscope; print(leakscope.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(installed.parent.parent) in ran.stdout
