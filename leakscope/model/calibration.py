"""Result types of the calibration of memory figures: how far they stray, and what re-baselining swallowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rebaseline:
    """One change of a baseline: when, and by how many bytes it moved (what it swallowed, with its sign)."""

    t_s: float
    bytes: float


@dataclass(frozen=True)
class Calibrated:
    """One dimension (rss, vss, gpu_used) against its reference.

    ``before``, ``after_z`` and ``after_robust`` are mean absolute deviations from the reference, as shares of it: as
    read, less the baseline of the z-rule, less the offset of the robust form. ``reference`` is '' where there is none
    and the dimension's own calibrated level stands in. ``z_alarms``: readings with |z| above the limit.
    ``calibrated_from_s`` and ``until_s``: the readings that the robust offset was taken from; ``settled``: whether
    they stood still. ``mad_bytes``: the median absolute deviation there.
    """

    dimension: str
    reference: str
    readings: int
    before: float
    after_z: float
    after_robust: float
    z_alarms: int
    z_rebaselines: tuple[Rebaseline, ...]
    offset_bytes: float
    mad_bytes: float
    calibrated_from_s: float
    calibrated_until_s: float
    settled: bool
    divergences: tuple[Rebaseline, ...]

    @property
    def z_swallowed_bytes(self) -> float:
        """By how much the baseline of the z-rule moved in all."""
        return sum(one.bytes for one in self.z_rebaselines)

    @property
    def diverged_bytes(self) -> float:
        """By how much the dimension moved away from its reference in all, as the robust form logged it."""
        return sum(one.bytes for one in self.divergences)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "dimension": self.dimension,
            "reference": self.reference or None,
            "readings": self.readings,
            "mean_deviation": {
                "before": round(self.before, 6),
                "after_z_rule": round(self.after_z, 6),
                "after_robust": round(self.after_robust, 6),
            },
            "z_rule": {
                "alarms": self.z_alarms,
                "rebaselines": len(self.z_rebaselines),
                "swallowed_bytes": round(self.z_swallowed_bytes),
                "log": _log(self.z_rebaselines),
            },
            "robust": {
                "offset_bytes": round(self.offset_bytes),
                "mad_bytes": round(self.mad_bytes),
                "calibrated_from_s": round(self.calibrated_from_s, 3),
                "calibrated_until_s": round(self.calibrated_until_s, 3),
                "settled": self.settled,
                "rebaselines": len(self.divergences),
                "swallowed_bytes": round(self.diverged_bytes),
                "log": _log(self.divergences),
            },
        }


MAX_LOGGED = 200
"""Re-baselines that a report lists; their number and sum are of all."""


def _log(rebaselines: tuple[Rebaseline, ...]) -> list[dict[str, float]]:
    return [{"t_s": round(one.t_s, 3), "bytes": round(one.bytes)} for one in rebaselines[:MAX_LOGGED]]
