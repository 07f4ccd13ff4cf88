"""Live recording: probes, ring reader, samplers, and what this host can record."""
