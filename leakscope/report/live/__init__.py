"""The live view of a recording: from its figures to something that a terminal shows. Pure functions, as all reports."""
