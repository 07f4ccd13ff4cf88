"""Results in the formats of other tools: one module a format, each a pure function of result tables to bytes."""
