"""Native stacks out of stack dumps, unwound by the tables of the mapped files (libdw)."""
