"""Leak tests: code that is run again and again in this process while it is recorded, and judged by iteration."""
