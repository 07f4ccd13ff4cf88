"""Files that the command lines of the documentation name, made where a command is about to read them."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ncu_files
from kv_publisher import batch, recording, removed, stored
from nsys_files import leaky_export
from recording import SAMPLES
from synthetic import PID, SyntheticCapture

from leakscope.capture import Capture
from leakscope.capture.pack import pack

CI = SAMPLES / "ci"
OPTIONS_OF_OUTPUT = frozenset(
    {"-o", "--output", "--report", "--junit", "--sarif", "--summary", "--chains", "--graphml", "--dot"}
)


def _service(path: Path, *, leaks: bool) -> Path:
    """A service of 200 requests in 20 s, each with memory of all layers; if it leaks, that of every fourth is kept."""
    made = SyntheticCapture(seconds=20.0)
    made.process()
    work = (
        ("open_session", 256, {"layer": "kernel", "kind": "slab", "api": "kmem_cache_alloc", "cache": "filp"}),
        ("map_buffer", 65_536, {"layer": "host", "kind": "mmap_anon", "api": "mmap"}),
        ("keep_block", 262_144, {"layer": "gpu", "kind": "device", "api": "cudaMalloc"}),
    )
    for function, size, where in work:
        frames = ["py:main@app.py:9", f"py:{function}@app.py:4"]
        made.churn(150, size, python=frames, **where)
        (made.leak if leaks else made.churn)(50, size, python=frames, **where)
    for second in range(20):
        made.sample(second, "requests_total", 10.0 * second, "service", "app")
        made.sample(second, "rss", (64 << 20) + (second * (160 << 10) if leaks else 0), "process", str(PID))
    made.loss("frees", "address_only_free", 12)
    return made.write(path)


def _packed(path: Path, *, leaks: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pack(Capture.open(_service(Path(folder) / "run.lscope", leaks=leaks)), path)


def _copied(file: Path) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(file, path)


def _written(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _counters() -> str:
    """A service that grows by 1 MiB a minute for two hours, read every 30 s."""
    rows = (f"{t},{(512 << 20) + (t << 20) // 60},{(2 << 30) + (t << 20) // 60}" for t in range(0, 7_200, 30))
    return "\n".join(["t_s,rss_bytes,vss_bytes", *rows]) + "\n"


def _ncu(path: Path) -> None:
    kernels = [ncu_files.result("scale", api=number) for number in range(1, 4)]
    path.write_bytes(ncu_files.report(ncu_files.block(results=kernels)))


def _torch(path: Path) -> None:
    block = {"address": 0x1000, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 0x1000, "total_size": 512, "stream": 0, "segment_type": "small"}
    path.write_bytes(pickle.dumps({"segments": [segment | {"blocks": [block]}], "device_traces": [[]]}))


def _kv(path: Path) -> None:
    batches = [batch(float(n), [stored([n]), *([removed(n - 5)] if n > 5 else [])]) for n in range(1, 40)]
    path.write_bytes(gzip.compress(recording(enumerate(batches)).encode()))


def _cache_trace() -> str:
    return "\n".join(json.dumps({"t_s": n, "object": f"o{n * n % 17}"}) for n in range(200)) + "\n"


def _cache_log() -> str:
    """Objects of which every third one is pinned by ``lookup`` and never let go."""
    lines = []
    for n in range(60):
        at = 1_000_000_000 + n * 1_000_000_000
        lines.append({"ts_ns": at, "op": "insert", "obj": f"block-{n}", "size": 4096, "owner": "prefill"})
        lines.append({"ts_ns": at + 1, "op": "pin", "obj": f"block-{n}", "owner": "lookup"})
        if n % 3:
            lines.append({"ts_ns": at + 1_000, "op": "unpin", "obj": f"block-{n}", "owner": "lookup"})
    return "".join(json.dumps(line) + "\n" for line in lines)


MAKERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(
        ("svc.lscope", "run.lscope", "after.lscope", "incident.lscope", "service.lscope", "capture.lscope"),
        partial(_service, leaks=True),
    ),
    **dict.fromkeys(("before.lscope", "main.lscope"), partial(_service, leaks=False)),
    "run.lscope.tar": partial(_packed, leaks=True),
    "main.lscope.tar": partial(_packed, leaks=False),
    "leakscope.toml": _copied(CI / "leakscope.toml"),
    "suppressions.txt": _copied(CI / "suppressions.txt"),
    **dict.fromkeys(("nsys.sqlite", "run.sqlite"), leaky_export),
    "report.ncu-rep": _ncu,
    "snapshot.pickle": _torch,
    "recorded.jsonl.gz": _kv,
    "samples.csv": _written(_counters()),
    "trace.jsonl": _written(_cache_trace()),
    "cache.jsonl": _written(_cache_log()),
    "artefacts": lambda path: (path / "release-812").mkdir(parents=True),
    "samples": lambda path: path.symlink_to(SAMPLES),
}
"""What makes each file, by its name."""

PLACEHOLDERS = {
    **dict.fromkeys(("CAPTURE", "EVIDENCE…", "EVIDENCE", "B"), "svc.lscope"),
    "A": "before.lscope",
    "PID": "1",
    "FILE": "nsys.sqlite",
    "DIR": ".",
    "OBJECT": "block-17",
}
"""Words that stand for something of the reader's, and what is taken for them."""


def filled_in(words: tuple[str, ...]) -> list[str]:
    """The words with something for each placeholder."""
    return [PLACEHOLDERS.get(word, word) for word in words]


def make_inputs(words: list[str], folder: Path) -> None:
    """Make the files that a command reads and that are not there yet; what it writes is not made."""
    for before, word in zip(["", *words], words, strict=False):
        name = word.partition("/")[0]
        if name in MAKERS and before not in OPTIONS_OF_OUTPUT and not (folder / name).exists():
            MAKERS[name](folder / name)
