"""What a recording tells of itself while it runs: running sums by site, read by a view in a thread of its own."""

from leakscope.record.live.readings import LiveReadings, Observer

__all__ = ["LiveReadings", "Observer"]
