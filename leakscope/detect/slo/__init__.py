"""Service-level objectives of caches: what is measured (latency, hits, hidden), and the state that a value is in."""
