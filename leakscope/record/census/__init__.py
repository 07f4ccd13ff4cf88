"""Census recordings: what is live, counted by site at each readout, in place of every event."""

from leakscope.record.census.census import Census
from leakscope.record.census.reader import CensusReader, Counts, Live
from leakscope.record.census.readouts import Readouts
from leakscope.record.census.schedule import Schedule

__all__ = ["Census", "CensusReader", "Counts", "Live", "Readouts", "Schedule"]
