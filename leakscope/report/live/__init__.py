"""The live view of a recording: pure functions from its figures to what a terminal shows, and where it is drawn."""
