"""A Prometheus endpoint over captures, live caches and processes: sources are read by threads of their own, scrapes get
what was read last."""
