"""Words, table schemas and result types. Imports nothing else of leakscope."""
