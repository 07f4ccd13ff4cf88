"""The CI gate: budgets, suppressions, baseline files, and the decision. Results in, results out; the command line reads
and writes the files."""
