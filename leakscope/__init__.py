"""leakscope: which layer of memory grows, who caused it, and whether it is a leak at all."""

__version__ = "0.1.0"
