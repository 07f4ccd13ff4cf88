"""Three-way calibration of resident, virtual and device memory: the source document's z-rule and a robust form.

Tables in, tables out. Neither decides a verdict: docs/calibration.md shows why.
"""

from leakscope.detect.calibration.three_way import Dimension, calibrate, dimensions

__all__ = ["Dimension", "calibrate", "dimensions"]
