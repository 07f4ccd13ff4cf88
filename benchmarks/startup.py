"""How long ``leakscope --help`` takes, beside an empty Python, and how long ``leakscope record`` to record."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.recorders import Recording, leakscope
from benchmarks.results import ROOT, Bar, Options, Result, Spread, Table

_COMMANDS = {
    "leakscope --help": [sys.executable, "-m", "leakscope", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
_RECORDED_S = 1.5
_FIGURES = ("start_s", "load_ms", "attach_ms", "load_and_attach_ms", "stop_s", "alone_ms", "alone_cpu_ms")

_ALONE = """
import json, resource, sys, time
from pathlib import Path
from leakscope.record.configuration import program_config
from leakscope.record.loader import load
from leakscope.record.options import RecordOptions
from leakscope.record.probes import tracepoints

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

config = program_config(RecordOptions(Path("x.lscope")), [], [])
load(config, sys.argv[1]).close()  # reads type information and libraries
began, cpu_began = time.perf_counter(), cpu_s()
programs, attachments = load(config, sys.argv[1]), tracepoints.Attachments()
tracepoints.attach_all(programs, attachments)
took, cpu_took = time.perf_counter() - began, cpu_s() - cpu_began
attachments.close()
print(json.dumps({"alone_ms": took * 1e3, "alone_cpu_ms": cpu_took * 1e3}))
"""
"""Loading and attaching as `record` of the whole host does, with nothing else to do for the process."""


def run(options: Options) -> Result:
    """Rounds of all commands in turn; seconds of wall time of the whole process."""
    seconds: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    for number in range(2 if options.quick else 2 * options.rounds + 1):
        for name, command in _COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            if number:  # the first fills the page cache and writes byte code
                seconds[name].append(time.perf_counter() - began)
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    table = Table("Start-up", ["command", "seconds"], [[name, spread.text()] for name, spread in spreads.items()])
    bars = [Bar("leakscope --help", spreads["leakscope --help"].median, 0.3, unit="s")]
    result = Result("startup", "Start-up", [table], bars, {"seconds": seconds})
    recordings = _recordings(options)
    result.figures["recordings"] = recordings
    if recordings:
        _tell_recordings(result, recordings)
    return result


def _recordings(options: Options) -> dict[str, dict[str, list[float]]]:
    """Loader → figure → its values; of the loaders that this host and user have."""
    from leakscope.errors import NotCapableError
    from leakscope.record.capabilities import require_capable
    from leakscope.record.loader import ProgramConfig, load

    loaders = []
    for loader in ("core", "bcc"):
        try:
            require_capable(loader)
            load(ProgramConfig(), loader).close()
        except NotCapableError:
            continue
        loaders.append(loader)
    found: dict[str, dict[str, list[float]]] = {loader: {name: [] for name in _FIGURES} for loader in loaders}
    for _ in range(1 if options.quick else options.rounds):
        for loader in loaders:
            for name, value in {**_record(loader), **_alone(loader)}.items():
                found[loader][name].append(value)
    return found


def _record(loader: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(leakscope(loader, "--loader", loader), Path(folder))
        manifest = json.loads((recording.capture / "manifest.json").read_text())
        facts: dict[str, Any] = manifest["sources"][0]["facts"]
        time.sleep(_RECORDED_S)
        recording.stop()
    load_ms, attach_ms = float(facts["load_ms"]), float(facts["attach_ms"])
    return {
        "start_s": recording.start_s,
        "load_ms": load_ms,
        "attach_ms": attach_ms,
        "load_and_attach_ms": load_ms + attach_ms,
        "stop_s": recording.stop_s,
    }


def _alone(loader: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, loader], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def _tell_recordings(result: Result, recordings: dict[str, dict[str, list[float]]]) -> None:
    headers = [
        "loader", "start to attached, s", "of it loading, ms", "attaching, ms", "end to prompt, s",
        "load and attach alone, ms", "their CPU time, ms",
    ]  # fmt: skip
    shown = (
        ("start_s", 2), ("load_ms", 0), ("attach_ms", 0), ("stop_s", 2), ("alone_ms", 0), ("alone_cpu_ms", 0),
    )  # fmt: skip
    spreads = {
        loader: {name: Spread.of(values) for name, values in figures.items()} for loader, figures in recordings.items()
    }
    rows = [[loader, *(figures[name].text(digits) for name, digits in shown)] for loader, figures in spreads.items()]
    result.tables.append(Table("leakscope record of the whole host", headers, rows))
    if "core" in spreads:
        core = spreads["core"]
        result.bars.append(Bar("record: load and attach alone, core", core["alone_ms"].median, 100, unit="ms"))
        result.bars.append(Bar("record: start to attached, core", core["start_s"].median, 1.0, unit="s"))
    result.notes.append(
        "Within a start loading goes on beside the imports of Python, which take their share of the processors; alone "
        "it has the machine for itself. Nearly all of its CPU time is the kernel's, for clearing some 215 MiB of maps "
        "and for verifying the programs, both on two threads."
    )
