"""The GPU sampler against a stand-in NVML that is built here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

NVML_STAND_IN = r"""
#include <string.h>

typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
enum { OK = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, FIRST = 1 };
static int is_first(Device device) { return device == (Device)FIRST; }
static int text(char *out, unsigned size, const char *value) { strncpy(out, value, size); return OK; }

int nvmlInitWithFlags(unsigned flags) { return INIT_RESULT; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Other"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(out, size, "580.1.2"); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *d) { *d = (Device)(index + 1L); return OK; }
int nvmlDeviceGetUUID(Device d, char *out, unsigned n) {
  return text(out, n, is_first(d) ? "GPU-aaaa" : "GPU-bbbb");
}
int nvmlDeviceGetName(Device d, char *out, unsigned n) { return text(out, n, "Stand-In 9000"); }
int nvmlDeviceGetMemoryInfo(Device d, Memory *m) { *m = (Memory){80000, 100, 79900}; return OK; }

static int give(const Process *all, unsigned n, unsigned *count, Process *out) {
  unsigned room = *count;
  *count = n;
  if (n && (!out || room < n)) return INSUFFICIENT_SIZE;
  if (n) memcpy(out, all, n * sizeof *all);
  return OK;
}

/* 41: two instances on the first device, and the second device; 42: both kinds; 43: figure unknown */
static int compute(Device d, unsigned *count, Process *out) {
  static const Process first[] = {{41, 1000, 1, 0}, {41, 200, 2, 0}, {42, 7000, -1, -1}, {43, -1ULL, -1, -1}};
  static const Process second[] = {{41, 30, -1, -1}};
  return is_first(d) ? give(first, 4, count, out) : give(second, 1, count, out);
}

static int graphics(Device d, unsigned *count, Process *out) {
  static const Process first[] = {{42, 7000, -1, -1}};
  return is_first(d) ? give(first, 1, count, out) : NOT_SUPPORTED;
}

#ifdef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v2(Device d, unsigned *n, Process *p) { return compute(d, n, p); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(Device d, unsigned *n, Process *p) { return graphics(d, n, p); }
#else
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *n, Process *p) { return compute(d, n, p); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *n, Process *p) { return graphics(d, n, p); }
int nvmlDeviceGetMemoryInfo_v2(Device d, MemoryV2 *m) {
  m->total = 80000; m->reserved = 700; m->free = 1; m->used = is_first(d) ? 12345 : 23456;
  return OK;
}
#endif
"""

SAMPLE_GPU = """
import json
from leakscope.record.samplers import SamplerSet
from leakscope.record.samplers.gpu import GpuSampler
samplers = SamplerSet(lambda: [], samplers=[GpuSampler()])
facts = samplers.facts()
rows = [[r["scope"], r["scope_id"], r["counter"], r["value"]] for r in samplers.read(9).to_pylist()]
print(json.dumps({"rows": rows, "facts": facts, "losses": samplers.losses()}))
"""


@pytest.fixture
def sample_gpu(tmp_path: Path) -> Callable[..., dict]:
    """Run the GPU sampler in a process that loads the stand-in, compiled with the given macros."""

    def run(*macros: str, library: bool = True) -> dict:
        environment = dict(os.environ)
        if library:
            compiler = shutil.which("cc") or shutil.which("gcc")
            if not compiler:
                pytest.skip("no C compiler")
            (tmp_path / "nvml.c").write_text(NVML_STAND_IN)
            macro_options = [f"-D{macro}" for macro in ("INIT_RESULT=0", *macros)]
            output = ["-o", tmp_path / "libnvidia-ml.so.1"]
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-Wall", *macro_options, tmp_path / "nvml.c", *output],
                check=True,
            )
            environment["LD_LIBRARY_PATH"] = str(tmp_path)
        out = subprocess.run(
            [sys.executable, "-c", SAMPLE_GPU], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(out.stdout)

    return run


def test_gpu_memory_by_device_and_process(sample_gpu: Callable[..., dict]) -> None:
    result = sample_gpu()
    assert result["rows"] == [
        ["device", "GPU-aaaa", "gpu_used", 12345],
        ["device", "GPU-aaaa", "gpu_total", 80000],
        ["device", "GPU-bbbb", "gpu_used", 23456],
        ["device", "GPU-bbbb", "gpu_total", 80000],
        ["process", "41", "gpu_process_used", 1230],
        ["process", "42", "gpu_process_used", 7000],
    ]
    assert result["facts"] == {
        "nvml": {"available": True, "reason": "", "driver": "580.1.2", "gpu_used_includes_reserved": False},
        "gpus": [
            {"index": 0, "uuid": "GPU-aaaa", "name": "Stand-In 9000", "total_bytes": 80000},
            {"index": 1, "uuid": "GPU-bbbb", "name": "Stand-In 9000", "total_bytes": 80000},
        ],
    }
    assert result["losses"] == []


def test_older_drivers_lack_the_newer_calls(sample_gpu: Callable[..., dict]) -> None:
    result = sample_gpu("OLD_DRIVER")
    assert [row[3] for row in result["rows"]] == [79900, 80000, 79900, 80000, 1230, 7000]
    assert result["facts"]["nvml"]["gpu_used_includes_reserved"] is True
    assert result["losses"] == []


def test_no_driver_is_a_fact_and_not_a_loss(sample_gpu: Callable[..., dict]) -> None:
    result = sample_gpu("INIT_RESULT=9")
    assert result["rows"] == result["losses"] == result["facts"]["gpus"] == []
    assert result["facts"]["nvml"] == {
        "available": False, "reason": "Driver Not Loaded", "driver": "", "gpu_used_includes_reserved": False,
    }  # fmt: skip


def test_no_library_is_a_fact_and_not_a_loss(sample_gpu: Callable[..., dict]) -> None:
    if subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.count("libnvidia-ml.so.1"):
        pytest.skip("NVML is installed here")
    result = sample_gpu(library=False)
    assert result["rows"] == result["losses"] == []
    assert result["facts"]["nvml"]["reason"] == "NVML Shared Library Not Found"
