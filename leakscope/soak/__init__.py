"""Watching a service for days: recording it through restarts, interim verdicts, and a final report."""
