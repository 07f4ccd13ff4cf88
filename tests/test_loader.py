"""Both ways of loading the probes give the same counts, and a missing loader says what to install."""
