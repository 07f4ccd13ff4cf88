"""Verdicts from counters over time: what rises for good, what explains it, what is left."""
