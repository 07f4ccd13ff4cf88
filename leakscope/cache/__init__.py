"""Services behind ``leakscope cache``: tables or traces in, results out; no printing."""
