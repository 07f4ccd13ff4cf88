"""What to probe: tracepoints, and the functions of CUDA libraries and libc with what each does."""
