"""All samplers of a recording behind one ``read``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakscope.record.samplers.base import ChangeFilter, Sampler, TimedReading, describe_error
from leakscope.record.samplers.cgroup import CgroupSampler
from leakscope.record.samplers.gpu import GpuSampler
from leakscope.record.samplers.meminfo import MeminfoSampler
from leakscope.record.samplers.process import ProcessSampler
from leakscope.record.samplers.slabinfo import SlabinfoSampler

if TYPE_CHECKING:
    import pyarrow as pa


class SamplerSet:
    """Reads every sampler and gives rows of ``model.tables.SAMPLES``.

    ``pids`` and ``cgroups`` are called at each reading, so that the set follows a changing scope; cgroups of
    the PIDs are always included. ``samplers`` replaces the standard set.
    """

    def __init__(
        self,
        pids: Callable[[], Sequence[int]],
        cgroups: Callable[[], Sequence[str | Path]] = lambda: (),
        *,
        source_id: int = 0,
        proc_root: Path = Path("/proc"),
        maps: bool = False,
        samplers: Sequence[Sampler] | None = None,
    ) -> None:
        self._source_id = source_id
        self._gpu = GpuSampler()
        self.samplers: Sequence[Sampler] = (
            samplers
            if samplers is not None
            else (
                ProcessSampler(pids, proc_root, maps=maps),
                CgroupSampler(pids, cgroups, proc_root),
                SlabinfoSampler(proc_root),
                MeminfoSampler(proc_root),
                self._gpu,
            )
        )
        self._filter = ChangeFilter()
        self._errors: dict[str, Counter[str]] = {sampler.name: Counter() for sampler in self.samplers}

    def read(self, ts_ns: int, *, everything: bool = False) -> pa.Table:
        """One reading of all counters, as rows sorted by time.

        :param ts_ns: time of the reading on the recording's clock, not before that of the last one. Rows may
            carry the time of the reading before: the last unchanged value of a counter that changed now.
        :param everything: also emit unchanged values of sparse samplers; meant for the last reading.
        A sampler that fails is counted in :meth:`losses`; the others still give their rows.
        """
        rows: list[TimedReading] = []
        for sampler in self.samplers:
            try:
                readings = list(sampler.sample(ts_ns))
            except Exception as error:
                # The recording must outlive a fault in one counter; the fault is reported as a loss.
                self._errors[sampler.name][describe_error(error, sampler.name)] += 1
                continue
            if sampler.sparse:
                rows += self._filter.pass_changed(ts_ns, readings, everything=everything)
            else:
                rows += (TimedReading(ts_ns, reading) for reading in readings)
        rows.sort(key=lambda row: row.ts_ns)
        return self._table(rows)

    def losses(self) -> list[tuple[str, str, int, str]]:
        """Readings that failed since the start: (sampler, ``sampler_error``, count, reason)."""
        return [
            (f"sampler {sampler.name}", "sampler_error", count, reason)
            for sampler in self.samplers
            for reason, count in sorted((self._errors[sampler.name] + sampler.errors).items())
        ]

    def facts(self) -> dict[str, Any]:
        """Facts of all samplers for the manifest: cgroup versions and mount, NVML state, GPUs. Opens NVML."""
        return {key: value for sampler in self.samplers for key, value in sampler.facts().items()}

    def close(self) -> None:
        """Give back what samplers hold (NVML)."""
        self._gpu.close()

    def _table(self, rows: Sequence[TimedReading]) -> pa.Table:
        import pyarrow as pa

        from leakscope.model.tables import SAMPLES

        columns = {
            "source_id": [self._source_id] * len(rows),
            "ts_ns": [row.ts_ns for row in rows],
            "scope": [row.reading.scope for row in rows],
            "scope_id": [row.reading.scope_id for row in rows],
            "counter": [row.reading.counter for row in rows],
            "value": [float(row.reading.value) for row in rows],
        }
        return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SAMPLES}, schema=SAMPLES)
